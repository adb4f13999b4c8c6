"""Samples as an evaluation makes them, from the real schedule and a coin in place of target and drafter."""

import random
from collections.abc import Sequence
from typing import Any

from spd_lightning.inference.evaluation.sample import TOKEN_CLASSES, Sample
from spd_lightning.inference.evaluation.summary import make_summary
from spd_lightning.inference.schedule import PipelineSchedule, Verdict

PROMPT_TOKENS = 5


def sample(**changes: Any) -> Sample:
    """An answer of plain decoding, or what `changes` make of it."""
    values: dict[str, Any] = dict(
        task="gsm8k", question_id="1", category="math", turn=0, method="ar", drafter=None, temperature=0.0, seed=None,
        num_stages=None, num_layers=30, num_spec_layers=None, schedule=None, prompt_tokens=PROMPT_TOKENS,
        token_ids=(7, 8), text="ab", finish_reason="length", num_committed=1, num_cycles=0, judgements=(),
        token_classes=(), prefill_seconds=0.1, decode_seconds=0.5, identical_to_ar=None, first_difference=None,
        is_correct=None,
    )  # fmt: skip
    return Sample(**(values | changes))


def drafted(verdicts: Sequence[bool], num_stages: int = 4, **changes: Any) -> Sample:
    """The answer whose drafts were judged so, in cycles of the real schedule."""
    schedule = PipelineSchedule(num_stages, [0] * PROMPT_TOKENS, 0)
    fills: dict[int, int] = {}
    judgements = []
    while len(judgements) < len(verdicts):
        plan = schedule.plan()
        fills[plan.drafted] = plan.fill
        if plan.judged is None:
            schedule.advance(0, None)
        else:
            accepted = verdicts[len(judgements)]
            fill = fills[plan.judged]
            schedule.advance(0, Verdict(accepted, 0 if accepted else 1))
            judgements.append((plan.judged, fill, accepted))
    made = dict(
        method="spd", drafter="n4", num_stages=num_stages, num_spec_layers=2, schedule="pre_step",
        num_committed=len(verdicts), num_cycles=schedule.num_cycles, judgements=tuple(judgements),
        token_classes=tuple(TOKEN_CLASSES[position % 5] for position, _, _ in judgements), identical_to_ar=True,
    )  # fmt: skip
    return sample(**(made | changes))


def evaluation(num_prompts: int = 20, num_tokens: int = 127) -> tuple[dict[str, Any], list[Sample]]:
    """Three tasks, two drafters, plain decoding and `generate`, at temperature 0 and 1: the summary and its samples."""
    draw = random.Random(0)
    samples = []
    for task, ease in (("mt_bench", -0.05), ("gsm8k", 0.1), ("humaneval", 0.15)):
        for number in range(num_prompts):
            for temperature in (0.0, 1.0):
                length = draw.choice((num_tokens, num_tokens, draw.randint(0, num_tokens)))
                common = dict(task=task, question_id=str(number), temperature=temperature, num_committed=length)
                common["is_correct"] = None if task == "mt_bench" else draw.random() < 0.3
                for method, speed in (("ar", 31.0), ("generate", 24.0)):
                    seconds = length / speed * draw.uniform(0.95, 1.05)
                    samples.append(sample(method=method, decode_seconds=seconds, **common))
                for drafter, schedule, accuracy in (("smollm2-n6-exact", "pre_step", 0.5), ("post", "post_step", 0.55)):
                    chance = accuracy + ease - 0.06 * temperature
                    verdicts = [draw.random() < chance + 0.05 * (index > 3) for index in range(length)]
                    made = drafted(verdicts, 6, drafter=drafter, schedule=schedule, **common)
                    changes: dict[str, Any] = {"decode_seconds": made.num_cycles * 0.034 * draw.uniform(0.95, 1.05)}
                    if temperature:
                        changes["identical_to_ar"] = None
                    elif (task, number, drafter) == ("humaneval", 3, "post"):
                        changes["identical_to_ar"] = False
                        changes["first_difference"] = dict(position=61, token=314, ar_token=15, margin=0.000031)
                    samples.append(Sample(**(vars(made) | changes)))
    rates = [0.457, 0.501, 0.506, 0.509, 0.510, 0.509]
    parts = {"PDM": 6.1, **{f"stage {number}": 4.4 + 0.1 * number for number in range(1, 7)}, "verification": 1.9}
    fills = [
        {"fill": fill, "num_cycles": 100 * fill, "parts_ms": parts | {"communication": 0.2}} for fill in range(1, 7)
    ]
    facts = {
        "command": "spd-infer eval --drafter runs/smollm2-n6-exact/drafter runs/post/drafter --tasks mt_bench gsm8k "
        "humaneval --task_dir data --num_prompts 20 --max_new_tokens 128 --temperature 0 1 --methods ar generate spd "
        "--out runs/eval",
        "settings": {"max_new_tokens": 128, "top_k": 50, "runtime": "local"},
        "machine": {"cpu": "AMD EPYC 9B14 96-Core Processor", "cores": 2, "threads": 1},
        "versions": {"spd-lightning": "0.1.0", "torch": "2.13.0+cpu"},
        "predicted": [
            {"method": "spd", "drafter": "smollm2-n6-exact", "temperature": 0.0, "by_fill": rates, "p": 0.4796}
        ],
        "profiles": [{"title": "smollm2-n6-exact", "note": "One process, one thread, float32.", "fills": fills}],
        "skipped": [{"task": "mt_bench", "question_id": "131", "error": "a prompt of <4,100> tokens & no room"}],
    }
    return make_summary(samples, **facts), samples
