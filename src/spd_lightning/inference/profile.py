"""`spd-infer profile`: where the time of a cycle goes, by fill level (design §9). Knows arguments and printing.

Two views that are never added together: the parts of a cycle one after the other, as one process runs them, and the
ranks side by side, where the slowest stage less the PDM is the slack that hides drafting.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from spd_lightning.files import write_whole
from spd_lightning.inference.arguments import add_decoding_arguments, opened_decoder, run_on_ranks, sampling_params
from spd_lightning.inference.generate import add_prompt_arguments, read_prompt
from spd_lightning.inference.timing import COMMUNICATION, PDM, SYNCHRONISATION, VERIFY, CycleTimes

if TYPE_CHECKING:
    from spd_lightning.inference.decoder import PipelineDecoder

NOTES = {
    "local": "One process ran all parts one after the other; rest is scheduling, rollback and moving states.",
    "virtual": "One process ran all parts one after the other; the cycle is that of a device per rank, by virtual clock.",
    "distributed": "Each part on its own rank; communication and synchronisation, waiting included, are means over ranks.",
}


@dataclass(frozen=True)
class FillProfile:
    """Mean times of the cycles of one fill level.

    Attributes:
        fill: tokens in flight.
        num_cycles: that the means are of.
        cycle_ms: of a whole cycle.
        parts_ms: by name: `PDM`, `stage 1`, and so on.
    """

    fill: int
    num_cycles: int
    cycle_ms: float
    parts_ms: Mapping[str, float]

    @property
    def slowest_ms(self) -> float:
        """Of the stages."""
        return max(value for name, value in self.parts_ms.items() if name.startswith("stage "))

    @property
    def slack_ms(self) -> float:
        """The slowest stage less the PDM: where it is positive, the PDM hides behind the stages."""
        return self.slowest_ms - self.parts_ms["PDM"]

    def to_json(self) -> dict[str, Any]:
        return {
            "fill": self.fill,
            "num_cycles": self.num_cycles,
            "cycle_ms": self.cycle_ms,
            "parts_ms": dict(self.parts_ms),
            "slack_ms": self.slack_ms,
        }


def profile_by_fill(ranks: Sequence[Sequence[CycleTimes]], has_rest: bool) -> list[FillProfile]:
    """The profile of every fill level that occurred, ascending.

    Args:
        ranks: each rank's times of the same cycles; those of one process are one rank's. The first is the lead, whose
            cycles count. A part is the mean over the ranks that had it.
        has_rest: whether the parts ran one after the other, so that what is left of a cycle is a part as well.
    """
    by_fill: dict[int, list[int]] = defaultdict(list)
    for index, times in enumerate(ranks[0]):
        by_fill[times.fill].append(index)
    profiles = []
    for fill, cycles in sorted(by_fill.items()):
        spans: dict[str, list[float]] = defaultdict(list)
        for rank in ranks:
            for name in dict.fromkeys(name for index in cycles for name in rank[index].spans):
                spans[name].append(fmean(rank[index].spans.get(name, 0.0) for index in cycles))
        parts = {name: 1000 * fmean(values) for name, values in spans.items()}
        names = {PDM: "PDM", VERIFY: "verification", COMMUNICATION: COMMUNICATION, SYNCHRONISATION: SYNCHRONISATION}
        stages = sorted((name for name in parts if name not in names), key=lambda name: int(name.split()[1]))
        ordered = {"PDM": parts[PDM], **{name: parts[name] for name in stages}}
        ordered |= {names[name]: parts[name] for name in (VERIFY, COMMUNICATION, SYNCHRONISATION) if name in parts}
        cycle = 1000 * fmean(ranks[0][index].seconds for index in cycles)
        if has_rest:
            ordered["rest"] = cycle - sum(ordered.values())
        profiles.append(FillProfile(fill, len(cycles), cycle, ordered))
    return profiles


def to_table(profiles: Sequence[FillProfile]) -> str:
    """Milliseconds by fill level."""
    fullest_first = sorted(profiles, key=lambda profile: -profile.fill)
    names = list(dict.fromkeys(name for profile in fullest_first for name in profile.parts_ms))
    rows = [["fill", "cycles", "cycle", *names, "slack"]]
    for profile in profiles:
        parts = [f"{profile.parts_ms[name]:.2f}" if name in profile.parts_ms else "-" for name in names]
        figures = [f"{profile.cycle_ms:.2f}", *parts, f"{profile.slack_ms:.2f}"]
        rows.append([str(profile.fill), str(profile.num_cycles), *figures])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def add_profile_arguments(parser: ArgumentParser) -> None:
    """The arguments of `spd-infer profile`."""
    parser.add_argument("--drafter", type=str, required=True, help="drafter folder, as `spd-train fit` writes it")
    parser.add_argument("--out", type=Path | None, default=None, help="folder for profile.json and profile.html")
    add_prompt_arguments(parser)
    add_decoding_arguments(parser)


def run_profile(given: Namespace, args: Sequence[str]) -> None:
    """Decodes one prompt twice, the first time to warm up, and shows the cycles of the second."""
    from spd_lightning.inference.runtime.cluster import DistributedRuntime
    from spd_lightning.inference.runtime.local import LocalRuntime

    messages, params = read_prompt(given), sampling_params(given)

    def work() -> None:
        with opened_decoder(given, given.drafter) as decoder:
            if not isinstance(decoder.runtime, LocalRuntime | DistributedRuntime):
                raise ValueError(f"{given.drafter}: an EAGLE-3 drafter has no pipeline whose cycles could be profiled")
            if not decoder.is_lead:
                decoder.runtime.start_timing()
                decoder.follow()
                return
            decoder.generate(messages, params)
            timer = decoder.runtime.start_timing()
            decoder.generate(messages, params)
            ranks = decoder.runtime.times_of_ranks(timer)
        profiles = profile_by_fill(ranks, has_rest=given.runtime == "local")
        if not profiles:
            raise ValueError("the answer ended with the prefill's token, so there is no cycle: take another prompt")
        show(given, decoder, profiles)

    run_on_ranks(given, args, work)


def show(given: Namespace, decoder: "PipelineDecoder", profiles: Sequence[FillProfile]) -> None:
    """Prints the table, and writes the files."""
    print(to_table(profiles))
    print(f"\nmilliseconds, means. {NOTES[given.runtime]} slack: the slowest stage less the PDM.")
    if given.out is None:
        return
    from spd_lightning.inference.evaluation.report import render_profile

    title = f"{Path(given.drafter).resolve().name} on {decoder.target_name}, {given.runtime} runtime"
    content = {"title": title, "note": NOTES[given.runtime], "fills": [profile.to_json() for profile in profiles]}
    given.out.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("profile.json", json.dumps(content, indent=1) + "\n"),
        ("profile.html", render_profile(content)),
    ):
        write_whole(given.out / name, text)
    print(f"{given.out / 'profile.html'} shows this as a page")
