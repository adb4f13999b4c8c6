"""Draft trees beside chains, all stages in one process: `tree_cycle.py --drafter FOLDER --questions FILE --out FILE.json`.

Tokens per cycle of the chain, of trees, and of trees that are wider while the pipeline refills, greedy or sampled; and
what width costs: the wall clock of each stage's forward of a full level over that of one node, and of the drafter's
forward over a chain's at the same number of levels in flight. The prefill is left out.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from spd_lightning.files import write_whole
from spd_lightning.inference.decoder import PipelineDecoder
from spd_lightning.inference.evaluation.journal import file_fingerprint
from spd_lightning.inference.evaluation.machine import machine
from spd_lightning.inference.runtime.local import LocalRuntime
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.stats import DecodeStats
from spd_lightning.inference.tree.schedule import TreeShape
from spd_lightning.modules.hub import WEIGHTS_FILE

Seconds = dict[tuple[Any, ...], list[float]]


def clocked(function: Callable[..., Any], seconds: Seconds, key: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    """The function, whose times are kept by a key of its arguments."""

    def run(*given: Any) -> Any:
        began = time.perf_counter()
        result = function(*given)
        seconds[key(*given)].append(time.perf_counter() - began)
        return result

    return run


def clock_forwards(runtime: LocalRuntime) -> Seconds:
    """Times from now on: ("stage", number, nodes) of trees; ("pdm", kind, levels in flight) of both."""
    seconds: Seconds = defaultdict(list)
    for stage in runtime.tree_stages:
        number = stage.number
        key = lambda _, level, number=number: ("stage", number, len(level.nodes))  # noqa: E731
        stage.run = clocked(stage.run, seconds, key)
    for session, kind in ((runtime.session, "chain"), (runtime.tree_session, "tree")):
        key = lambda plan, *_, kind=kind: ("pdm", kind, plan.fill)  # noqa: E731
        session.draft_logits = clocked(session.draft_logits, seconds, key)
    return seconds


def decode_all(
    decoder: PipelineDecoder, questions: Sequence[str], params: SamplingParams, shape: TreeShape | None
) -> dict[str, Any]:
    """Counts and wall clock of all answers; chains without a shape."""
    runtime = decoder.runtime
    assert isinstance(runtime, LocalRuntime)
    runtime.shape, parts, seconds = shape or runtime.shape, list[DecodeStats](), 0.0
    start = decoder.start_chain if shape is None else decoder.start
    for question in tqdm(questions, desc="chain" if shape is None else str(shape)):
        result = start([{"role": "user", "content": question}], params).result()
        assert result.stats is not None
        parts.append(result.stats)
        seconds += result.seconds
    stats = DecodeStats.pooled(parts)
    by_fill = {str(fill): counts for fill, counts in stats.acceptance_by_fill().items()}
    return stats.to_json() | {"seconds_one_process": seconds, "accepted_and_judged_by_fill": by_fill}


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--target", default=None)
    parser.add_argument("--questions", type=Path, required=True, help="JSON lines with `question`")
    parser.add_argument("--num_questions", type=int, default=3)
    parser.add_argument("--max_new_tokens", type=int, default=32)
    parser.add_argument("--tree_width", type=int, default=4)
    parser.add_argument("--refill_width", type=int, default=8)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--top_k", type=int, default=50)
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="float32")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()

    rows = given.questions.read_text(encoding="utf-8").splitlines()[: given.num_questions]
    questions = [json.loads(row)["question"] for row in rows]
    wide = TreeShape(given.tree_width, given.refill_width)
    shapes = {
        "chain": None,
        f"tree {given.tree_width}": TreeShape(given.tree_width, given.tree_width),
        f"tree {given.tree_width}, {given.refill_width} while refilling": wide,
    }
    decoder = PipelineDecoder.from_pretrained(
        str(given.drafter), given.target, dtype=given.dtype, max_length=1024 + given.max_new_tokens, shape=wide
    )
    assert isinstance(decoder.runtime, LocalRuntime)
    seconds = clock_forwards(decoder.runtime)
    decodes = []
    for temperature in given.temperature:
        params = SamplingParams(given.max_new_tokens, temperature, given.top_k, seed=0)
        for name, shape in shapes.items():
            found = decode_all(decoder, questions, params, shape)
            decodes.append({"name": name, "temperature": temperature} | found)
            print(
                f"T={temperature:g} {name}: {found['alpha']:.3f} tokens per cycle, S0 {found['s0']:.2f}, "
                f"{found['num_accepted']} of {found['num_judged']} accepted"
            )
    report = {
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "drafter_sha256": file_fingerprint(given.drafter / WEIGHTS_FILE),
        "settings": {name: str(value) for name, value in vars(given).items() if name not in ("out", "drafter")},
        "decodes": decodes,
        "stages": ratios_of_stages(seconds, decoder.num_stages, given.tree_width),
        "pdm": ratios_of_drafter(seconds, decoder.num_stages),
    }
    write_whole(given.out, json.dumps(report, indent=1) + "\n")


def ratios_of_stages(seconds: Seconds, num_stages: int, width: int) -> list[dict[str, Any]]:
    """Medians per stage, in milliseconds; the last stage only ever runs the root."""
    found = []
    for number in range(1, num_stages):
        one, full = (seconds.get(("stage", number, count)) for count in (1, width))
        if one and full:
            found.append({"stage": number, "one_ms": 1e3 * median(one), "full_ms": 1e3 * median(full)})
            found[-1]["ratio"] = found[-1]["full_ms"] / found[-1]["one_ms"]
            print(
                "stage {stage}: {one_ms:.2f} ms, a full level {full_ms:.2f} ms, {ratio:.2f} times".format(**found[-1])
            )
    return found


def ratios_of_drafter(seconds: Seconds, num_stages: int) -> list[dict[str, Any]]:
    """Medians per number of levels in flight, in milliseconds, over all decodes with trees."""
    found = []
    for fill in range(1, num_stages + 1):
        chain, tree = (seconds.get(("pdm", kind, fill)) for kind in ("chain", "tree"))
        if chain and tree:
            found.append({"fill": fill, "chain_ms": 1e3 * median(chain), "tree_ms": 1e3 * median(tree)})
            found[-1]["ratio"] = found[-1]["tree_ms"] / found[-1]["chain_ms"]
            print(
                "PDM, {fill} levels: {chain_ms:.2f} ms, {tree_ms:.2f} ms with trees, {ratio:.2f} times".format(
                    **found[-1]
                )
            )
    return found


if __name__ == "__main__":
    main()
