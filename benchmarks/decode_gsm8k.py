"""Greedy decoding of GSM8K questions in float32, in one process: `decode_gsm8k.py --out FILE.json ... NAME=DRAFTER ...`.

Records, for each drafter:
- how many answers have the tokens, and the bits of the logits, of plain decoding by the same stages;
- `N`, `K`, acceptance (pooled and by fill), tokens per cycle and `S0`, and the identity of `N` and `K` (design §5);
- every judged draft against that of the training layout at the fill at which it was made;
- acceptance as validation implied it (data set's text, every position, every fill), as the training layout has it on
  the decoded text (every position, every fill), and as measured (the positions and fills that were judged);
- `generate` of Transformers as a second opinion, and the speed of all three.

Fails if the identity does not hold or an answer is not that of plain decoding.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any

import torch
from profile_cycle import drafter_facts, machine, read_questions
from torch import Tensor
from tqdm import tqdm

from spd_lightning.inference.decoder import PipelineDecoder
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.stats import DecodeStats, Judgement
from spd_lightning.modules.drafter import PipelineDraftModule
from spd_lightning.modules.metrics import implied_figures
from spd_lightning.modules.target import FrozenTarget
from spd_lightning.modules.tokenizer import render_prompt, token_ids


class Recorder:
    """Keeps what a decoder computes: the last draft made for each position, and the target's logits for it."""

    def __init__(self, decoder: PipelineDecoder) -> None:
        self.drafts: dict[int, tuple[int, Tensor]] = {}  # fill and draft logits
        self.logits: dict[int, Tensor] = {}
        runtime: Any = decoder.runtime
        session, stage = runtime.session, runtime.stages[-1]
        self._draft_logits, session.draft_logits = session.draft_logits, self._draft
        self._run, stage.run = stage.run, self._last_stage

    def _draft(self, plan: Any, *rest: Any) -> Tensor:
        logits = self._draft_logits(plan, *rest)
        self.drafts[plan.drafted] = plan.fill, logits
        return logits

    def _last_stage(self, entering: Tensor, position: int) -> Any:
        output = self._run(entering, position)
        self.logits[position + entering.shape[1]] = output.logits
        return output


@dataclass(frozen=True)
class ComparedDraft:
    """A judged draft beside that of the training layout for the same position, at the fill at which it was made."""

    fill: int
    is_same: bool
    mean_difference: float  # of the logits
    max_difference: float
    training_margin: float  # between the two best logits of the training layout
    training_accepted: bool


@dataclass(frozen=True)
class Answer:
    """One question's decodes: what goes into the file, counts, drafts, and (right, all) of `own_text` per fill."""

    record: dict[str, Any]
    stats: DecodeStats
    drafts: list[ComparedDraft]
    own_text: list[tuple[int, int]]


def margin(logits: Tensor) -> float:
    """Of the best logit before the second."""
    first, second = logits.topk(2).values.tolist()
    return first - second


@torch.no_grad()
def training_logits(target: FrozenTarget, drafter: PipelineDraftModule, ids: Sequence[int], start: int) -> Tensor:
    """Draft logits `fills positions draft_vocab` of the training layout at the positions from `start` on."""
    tokens, positions = torch.tensor([list(ids)]), torch.arange(len(ids))[None]
    anchors = drafter.layout.anchors[: drafter.features.num_anchors]
    states = target.forward(tokens, torch.ones_like(tokens), anchors).anchors
    table = torch.tensor(drafter.layout.visibility_table())
    return torch.stack([drafter.lm_head(drafter(states, positions, visible[None])[0, start:]) for visible in table])


def compare_draft(judgement: Judgement, made: tuple[int, Tensor], expected: Tensor, is_right: Tensor) -> ComparedDraft:
    """One judged draft: `made` in decoding, `expected` of the training layout; `is_right` says which drafts would be.

    What was in flight before a judged draft was verified later, so both stand behind the same committed tokens.
    """
    fill, logits = made
    assert fill == judgement.fill and bool(is_right[logits.argmax()]) == judgement.accepted
    difference, best = (logits - expected).abs(), expected.argmax()
    mean, largest, is_same = float(difference.mean()), float(difference.max()), bool(logits.argmax() == best)
    return ComparedDraft(fill, is_same, mean, largest, margin(expected), bool(is_right[best]))


def answer(decoder: PipelineDecoder, recorder: Recorder, target: FrozenTarget, question: str, limit: int) -> Answer:
    """Decodes one question in three ways and compares."""
    params, drafter, clock = SamplingParams(limit), decoder.drafter.module, list[float]()
    prompt = token_ids(decoder.tokenizer, render_prompt(decoder.tokenizer, [{"role": "user", "content": question}]))
    result = decoder.start(prompt, params).result()
    drafts, logits, recorder.logits = recorder.drafts, recorder.logits, {}
    plain = decoder.start_autoregressive(prompt, params).result()
    plain_logits, recorder.drafts, recorder.logits = recorder.logits, {}, {}
    given = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.long)}
    ending = {"eos_token_id": list(decoder.eos_ids), "pad_token_id": decoder.eos_ids[0], "max_new_tokens": limit}
    streamer: Any = SimpleNamespace(put=lambda _: clock.append(time.perf_counter()), end=lambda: None)
    generated: Any = target.model.generate(**given, **ending, do_sample=False, streamer=streamer)
    second, generate_seconds = generated[0, len(prompt) :].tolist(), clock[-1] - clock[1]  # clock[0]: the prompt
    ids, stats, start, end = result.token_ids, result.stats, len(prompt), len(prompt) + len(result.token_ids)
    assert stats is not None
    record: dict[str, Any] = {
        "prompt_tokens": start,
        "new_tokens": len(ids),
        "finish_reason": result.finish_reason,
        "identical_to_ar": ids == plain.token_ids,
        "logits_have_ar_bits": all(torch.equal(logits[i], plain_logits[i]) for i in range(start, end)),
        "judged_fill_and_verdict": " ".join(f"{j.fill}{'+' if j.accepted else '-'}" for j in stats.judgements),
        "num_cycles": stats.num_cycles,
        "identical_to_generate": plain.token_ids == second,
        "seconds": {"ar": plain.seconds, "spd": result.seconds, "generate": generate_seconds},
        "decode_tokens": {"ar": len(plain.token_ids) - 1, "spd": len(ids) - 1, "generate": len(second) - 1},
    }
    if plain.token_ids != second:
        at = next(i for i, (a, b) in enumerate(zip(plain.token_ids, second, strict=False)) if a != b)
        record["generate_differs"] = {"at": at, "ar_top2_margin": margin(plain_logits[start + at])}
    training, compared, own_text = training_logits(target, drafter, prompt + ids, start), [], []
    for judgement in stats.judgements:
        expected = training[judgement.fill - 1, judgement.position - 1 - start]
        is_right = drafter.draft_token_ids == ids[judgement.position - start]
        compared.append(compare_draft(judgement, drafts[judgement.position], expected, is_right))
    for fill, of_fill in enumerate(training, start=1):  # the first token in flight is the prefill's, at `start`
        right = drafter.draft_token_ids[of_fill[fill - 1 : -1].argmax(dim=-1)] == torch.tensor(ids[fill:])
        own_text.append((int(right.sum()), len(right)))
    return Answer(record, stats, compared, own_text)


def check_identity(answers: Sequence[Answer]) -> dict[str, Any]:
    """`N = judged` and `K = N + (n-1) * (prompts with N > 0 + rejections that are not a prompt's last token)`."""
    sides = []
    for stats in (one.stats for one in answers):
        fillings = (stats.num_committed > 0) + sum(not judgement.accepted for judgement in stats.judgements[:-1])
        right = stats.num_committed + (stats.num_stages - 1) * fillings
        sides.append((stats.num_committed, stats.num_judged, stats.num_cycles, right))
    holds = all(committed == judged and cycles == right for committed, judged, cycles, right in sides)
    sums = [sum(column) for column in zip(*sides, strict=True)]
    return {"holds_for_every_prompt": holds} | dict(zip(("N", "judged", "K", "K_by_identity"), sums, strict=True))


def acceptance_figures(answers: Sequence[Answer], stats: DecodeStats, folder: Path) -> dict[str, Any]:
    """Measured acceptance beside what validation and the training layout on the decoded text imply."""
    validation = json.loads((folder / "config.json").read_text(encoding="utf-8"))["provenance"]["metrics"]
    fills, counts = range(1, stats.num_stages + 1), zip(*(one.own_text for one in answers), strict=True)
    own = [sum(right for right, _ in of_fill) / sum(total for _, total in of_fill) for of_fill in counts]
    p, measured = stats.acceptance or 0.0, stats.acceptance_by_fill()
    deviations = [one.stats.num_accepted - p * one.stats.num_judged for one in answers]
    by_validation = {fill: validation[f"val/p_fill_{fill}"] for fill in fills}
    return {
        "validation": {"p": validation["val/p"], "by_fill": by_validation},
        "training_layout_on_decoded_text": {
            "p": implied_figures(own).acceptance,
            "by_fill": dict(zip(fills, own, strict=True)),
        },
        "measured": {
            "p": p,
            "standard_error_over_prompts": math.hypot(*deviations) / stats.num_judged,
            "by_fill": {fill: right / judged for fill, (right, judged) in measured.items()},
            "judged_by_fill": {fill: judged for fill, (_, judged) in measured.items()},
        },
        "measured_minus_validation": p - validation["val/p"],
    }


def report(answers: Sequence[Answer], folder: Path) -> dict[str, Any]:
    """Everything pooled over the prompts."""
    stats, records = DecodeStats.pooled(one.stats for one in answers), [one.record for one in answers]
    drafts = [draft for one in answers for draft in one.drafts]

    def total(*keys: str) -> float:
        return sum(record[keys[0]][keys[1]] if keys[1:] else record[keys[0]] for record in records)

    speed = {way: total("decode_tokens", way) / total("seconds", way) for way in ("ar", "spd", "generate")}
    return {
        "drafter": drafter_facts(folder),
        "num_prompts": len(answers),
        **{name: total(name) for name in ("identical_to_ar", "logits_have_ar_bits", "identical_to_generate")},
        "identity": check_identity(answers),
        "alpha": stats.alpha,
        "s0": stats.speedup,
        "acceptance": acceptance_figures(answers, stats, folder),
        "against_the_training_layout": {
            "judged": len(drafts),
            "other_draft_token": [asdict(draft) for draft in drafts if not draft.is_same],
            "mean_abs_logit_difference": fmean(draft.mean_difference for draft in drafts),
            "max_abs_logit_difference": max(draft.max_difference for draft in drafts),
            "median_top2_margin": median(draft.training_margin for draft in drafts),
            "accepted": stats.num_accepted,
            "accepted_with_training_drafts": sum(draft.training_accepted for draft in drafts),
        },
        "tokens_per_s": speed,
        "spd_over_ar": speed["spd"] / speed["ar"],
        "ar_over_generate": speed["ar"] / speed["generate"],
        "prompts": records,
    }


def main() -> None:
    """Writes the JSON file; then fails if something did not hold."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--target", required=True, help="folder or hub id of the target")
    parser.add_argument("--questions", type=Path, required=True, help="test.jsonl of GSM8K")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num_prompts", type=int, default=20, help="for the first drafter")
    parser.add_argument("--num_other_prompts", type=int, default=5, help="for each of the others")
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("drafters", nargs="+", metavar="NAME=DRAFTER")
    given = parser.parse_args()
    began, target, runs = time.perf_counter(), FrozenTarget.from_pretrained(given.target, "float32"), {}
    content = {"machine": machine(), "dtype": "float32", "max_new_tokens": given.max_new_tokens, "runs": runs}
    for name, folder in (drafter.split("=", 1) for drafter in given.drafters):
        questions = read_questions(given.questions, given.num_other_prompts if runs else given.num_prompts)
        decoder = PipelineDecoder.from_pretrained(folder, given.target, dtype="float32", max_length=1024)
        recorder = Recorder(decoder)
        answers = [answer(decoder, recorder, target, q, given.max_new_tokens) for q in tqdm(questions, desc=name)]
        runs[name] = report(answers, Path(folder))
        print(name, json.dumps({key: value for key, value in runs[name].items() if key not in ("drafter", "prompts")}))
    content["seconds"] = time.perf_counter() - began
    given.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for name, run in runs.items():
        if not run["identity"]["holds_for_every_prompt"] or run["identical_to_ar"] < run["num_prompts"]:
            raise SystemExit(f"{name}: the identity does not hold, or an answer is not that of plain decoding")


if __name__ == "__main__":
    main()
