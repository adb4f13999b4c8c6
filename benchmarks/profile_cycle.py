"""Where the time of a decoding cycle goes when all stages run in one process: `profile_cycle.py --out FILE.json ...`.

Records, per dtype, the wall clock of every cycle and of the stage forwards and the drafter's forward in it, by fill
level. The rest (scheduling, tokens from logits, moving states, rollbacks, text) is the overhead, given as a share of the
cycle. The prefill is left out.
"""

import argparse
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from tqdm import tqdm

from spd_lightning.inference.decoder import PipelineDecoder
from spd_lightning.inference.evaluation.machine import processor_name
from spd_lightning.inference.sampling import SamplingParams

DTYPES = ("float32", "bfloat16")
LAYOUT_KEYS = ("num_stages", "stage_layers", "anchors", "rows", "feature_norm", "num_spec_layers", "draft_vocab_size")


def read_questions(path: Path, count: int) -> list[str]:
    """The first questions of a GSM8K file."""
    return [json.loads(line)["question"] for line in path.read_text(encoding="utf-8").splitlines()[:count]]


def machine() -> dict[str, Any]:
    """What the speeds depend on."""
    return {
        "cpu": processor_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average_at_start": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in ("spd-lightning", "torch", "transformers")},
    }


def drafter_facts(folder: Path) -> dict[str, Any]:
    """Layout and identity of a drafter folder."""
    drafter = json.loads((folder / "config.json").read_text(encoding="utf-8"))["drafter"]
    digest = hashlib.sha256((folder / "drafter.safetensors").read_bytes()).hexdigest()
    return {key: drafter[key] for key in LAYOUT_KEYS} | {"weights_sha256": digest}


@dataclass
class Cycle:
    """Seconds of one cycle.

    Attributes:
        began: reading of the clock.
        total: from its begin to that of the next, or to the end of the decode.
        draft: the drafter's forward.
        stages: the forward of each stage that ran, by its number.
    """

    began: float
    total: float = 0.0
    draft: float = 0.0
    stages: dict[int, float] = field(default_factory=dict)

    @property
    def fill(self) -> int:
        """Tokens in flight at its start: each is advanced by a stage."""
        return len(self.stages)

    @property
    def is_complete(self) -> bool:
        """Whether all forwards are done; stage 1 takes in the newest token, after the other stages."""
        return self.draft > 0 and 1 in self.stages

    @property
    def outside(self) -> float:
        """What is neither a stage's forward nor the drafter's."""
        return self.total - self.draft - sum(self.stages.values())


class CycleClock:
    """Clocks the forwards of a decoder; whichever comes first, the drafter's or a stage's, begins a cycle."""

    def __init__(self, decoder: PipelineDecoder) -> None:
        runtime: Any = decoder.runtime
        self.decoder = decoder
        self.cycles: list[Cycle] = []
        self._draft_logits, runtime.session.draft_logits = runtime.session.draft_logits, self._draft
        for stage in runtime.stages:
            stage.run = self._clocked(stage.number, stage.run)

    def decode(self, question: str, params: SamplingParams) -> list[Cycle]:
        """The cycles of one answer, without the prefill."""
        tokens = self.decoder.start([{"role": "user", "content": question}], params).tokens()
        self.cycles = []  # of the prefill
        next(tokens)
        began, self.cycles = time.perf_counter(), []
        for _ in tokens:
            pass
        self._close(time.perf_counter())
        self.cycles[0].total += self.cycles[0].began - began
        return self.cycles

    def _close(self, now: float) -> None:
        self.cycles[-1].total = now - self.cycles[-1].began

    def _begin(self) -> float:
        now = time.perf_counter()
        if self.cycles and self.cycles[-1].is_complete:
            self._close(now)
        if not self.cycles or self.cycles[-1].is_complete:
            self.cycles.append(Cycle(now))
        return now

    def _draft(self, *given: Any) -> Any:
        began = self._begin()
        logits = self._draft_logits(*given)
        self.cycles[-1].draft = time.perf_counter() - began
        return logits

    def _clocked(self, number: int, run: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*given: Any) -> Any:
            began = self._begin()
            output = run(*given)
            self.cycles[-1].stages[number] = time.perf_counter() - began
            return output

        return clocked


def mean_ms(seconds: Iterable[float]) -> float:
    """In milliseconds, to a tenth of a microsecond."""
    return round(1000 * fmean(seconds), 4)


def figures(cycles: Sequence[Cycle]) -> dict[str, Any]:
    """Mean milliseconds per cycle of each part, and the overhead's share of the cycles' whole time."""
    return {
        "num_cycles": len(cycles),
        "cycle_ms": mean_ms(cycle.total for cycle in cycles),
        "draft_ms": mean_ms(cycle.draft for cycle in cycles),
        "stages_ms": mean_ms(sum(cycle.stages.values()) for cycle in cycles),
        "outside_ms": mean_ms(cycle.outside for cycle in cycles),
        "outside_ms_median": round(1000 * median(cycle.outside for cycle in cycles), 4),
        "outside_share": round(sum(cycle.outside for cycle in cycles) / sum(cycle.total for cycle in cycles), 5),
    }


def profile(decoder: PipelineDecoder, questions: Sequence[str], params: SamplingParams, label: str) -> dict[str, Any]:
    """The figures of all cycles, by fill level, and of each stage; the first question is decoded once to warm up."""
    clock = CycleClock(decoder)
    clock.decode(questions[0], params)
    cycles = [cycle for question in tqdm(questions, desc=label) for cycle in clock.decode(question, params)]
    numbers = range(1, decoder.num_stages + 1)
    return {
        "all": figures(cycles),
        "by_fill": {fill: figures([cycle for cycle in cycles if cycle.fill == fill]) for fill in numbers},
        "stage_ms": {number: mean_ms(c.stages[number] for c in cycles if number in c.stages) for number in numbers},
    }


def main() -> None:
    """Writes the JSON file and prints one line per dtype."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--target", required=True, help="folder or hub id of the target")
    parser.add_argument("--drafter", required=True, help="drafter folder")
    parser.add_argument("--questions", type=Path, required=True, help="test.jsonl of GSM8K")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num_prompts", type=int, default=5)
    parser.add_argument("--max_new_tokens", type=int, default=128)
    given = parser.parse_args()
    questions, params = read_questions(given.questions, given.num_prompts), SamplingParams(given.max_new_tokens)
    report: dict[str, Any] = {
        "machine": machine(),
        "drafter": drafter_facts(Path(given.drafter)),
        "num_prompts": given.num_prompts,
        "max_new_tokens": given.max_new_tokens,
        "dtypes": {},
    }
    for dtype in DTYPES:
        decoder = PipelineDecoder.from_pretrained(given.drafter, given.target, dtype=dtype, max_length=1024)
        report["dtypes"][dtype] = profile(decoder, questions, params, dtype)
        print(dtype, json.dumps(report["dtypes"][dtype]["all"]))
    given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
