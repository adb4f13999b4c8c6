"""What `spd-infer plan --measure` predicts, against the virtual clock: `predict_cycle.py --out FILE.json ...`.

In each round the pieces are timed one by one, as the plan does it, and then answers are decoded under
`--runtime virtual`, so that both see the same machine. Compared are the cycle at every fill level, the mean cycle and
tokens/s at the acceptance that was measured, and a token of plain decoding.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from profile_cycle import drafter_facts, machine, read_questions

from spd_lightning.files import write_whole
from spd_lightning.inference.decoder import PipelineDecoder
from spd_lightning.inference.planning.costs import TargetCosts
from spd_lightning.inference.planning.measurement import MeasuredTimes
from spd_lightning.inference.planning.model import CyclePrediction
from spd_lightning.inference.planning.plan import Assumptions, DrafterOptions, Planner
from spd_lightning.inference.runtime.virtual import Link
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.modules.model_size import read_target_size


def predict(decoder: PipelineDecoder, dtype: str, length: int, p: float, link: Link) -> CyclePrediction:
    """The plan's prediction for the decoder's own drafter and split, from times measured now."""
    config = decoder.drafter.module.config
    target = TargetCosts(read_target_size(decoder.target_name), dtype, length)
    options = DrafterOptions(
        tuple(config.anchors), config.schedule, config.draft_vocab_size, config.num_heads, config.num_kv_heads,
        config.head_dim, config.intermediate_size, config.feature_norm,
    )  # fmt: skip
    assumed = Assumptions(p, 1000 * link.record, 1000 * link.latency, decoder.max_length)
    planner = Planner(target, MeasuredTimes(decoder.target_name, target, "cpu"), options, assumed)
    return planner.plan("drafter's", tuple(config.stage_layers), config.num_spec_layers).prediction


def measure(decoder: PipelineDecoder, questions: list[str], params: SamplingParams) -> dict[str, Any]:
    """What the virtual clock says of some answers, and the wall clock of plain decoding."""
    timer = decoder.runtime.start_timing()
    committed = judged = accepted = plain_tokens = 0
    seconds = plain_seconds = 0.0
    lengths = []
    for question in questions:
        messages = [{"role": "user", "content": question}]
        run = decoder.start(messages, params)
        result = run.result()
        assert result.stats is not None
        committed, seconds = committed + result.stats.num_committed, seconds + result.seconds
        judged += len(result.stats.judgements)
        accepted += sum(judgement.accepted for judgement in result.stats.judgements)
        lengths.append(len(run.prompt) + len(run.token_ids) / 2)
        plain = decoder.start_autoregressive(messages, params)
        plain_tokens += len(plain.result().token_ids) - 1
        plain_seconds += plain.seconds
    [cycles] = decoder.runtime.times_of_ranks(timer)
    by_fill = {fill: [c.seconds for c in cycles if c.fill == fill] for fill in range(1, decoder.num_stages + 1)}
    return {
        "length": round(fmean(lengths)),
        "p": accepted / judged,
        "num_cycles": len(cycles),
        "ar_ms": 1000 * plain_seconds / plain_tokens,
        "cycle_ms_by_fill": {fill: 1000 * fmean(seconds) for fill, seconds in by_fill.items() if seconds},
        "mean_cycle_ms": 1000 * seconds / len(cycles),
        "tokens_per_second": committed / seconds,
    }


def compare(measured: dict[str, Any], predicted: CyclePrediction) -> dict[str, Any]:
    """Both, and the predicted over the measured."""
    extra = predicted.links_ms + predicted.overhead_ms
    figures = {
        "ar_ms": predicted.pieces.ar_ms,
        "cycle_ms_by_fill": {fill: predicted.work_ms(fill) + extra for fill in measured["cycle_ms_by_fill"]},
        "mean_cycle_ms": predicted.mean_cycle_ms,
        "tokens_per_second": predicted.tokens_per_second,
    }
    ratios = {name: figures[name] / measured[name] for name in figures if name != "cycle_ms_by_fill"}
    fills = figures["cycle_ms_by_fill"]
    ratios["cycle_ms_by_fill"] = {fill: fills[fill] / measured["cycle_ms_by_fill"][fill] for fill in fills}
    return {"measured": measured, "predicted": figures, "predicted_over_measured": ratios}


def main() -> None:
    """Writes the JSON file and prints one line a round."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--target", required=True, help="folder or hub id of the target")
    parser.add_argument("--drafter", required=True, help="drafter folder")
    parser.add_argument("--questions", type=Path, required=True, help="test.jsonl of GSM8K")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num_prompts", type=int, default=3)
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    questions, link = read_questions(given.questions, given.num_prompts), Link()
    decoder = PipelineDecoder.from_pretrained(
        given.drafter, given.target, runtime="virtual", dtype=given.dtype, max_length=1024, link=link
    )
    params = SamplingParams(given.max_new_tokens)
    measure(decoder, questions[:1], params)  # to warm up
    rounds = []
    for _ in range(given.rounds):
        began = time.perf_counter()
        measured = measure(decoder, questions, params)
        predicted = predict(decoder, given.dtype, measured["length"], measured["p"], link)
        rounds.append(compare(measured, predicted))
        ratios = rounds[-1]["predicted_over_measured"]
        print(
            f"tokens/s: virtual clock {measured['tokens_per_second']:.2f}, predicted {predicted.tokens_per_second:.2f} "
            f"({ratios['tokens_per_second']:.2f}); full cycle {ratios['cycle_ms_by_fill'][decoder.num_stages]:.2f}, "
            f"plain token {ratios['ar_ms']:.2f} of the measured; {time.perf_counter() - began:.0f} s",
            flush=True,
        )
    facts = {name: getattr(given, name) for name in ("num_prompts", "max_new_tokens", "dtype")}
    content = {"machine": machine(), "drafter": drafter_facts(Path(given.drafter)), **facts, "rounds": rounds}
    write_whole(given.out, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
