"""Groups of a summary as tables: for a terminal, for the report, and for a logger. Knows no markup but Markdown's.

What was counted, what was measured and what is simulated stand in tables of their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spd_lightning.inference.evaluation.summary import OVERALL

GroupDict = Mapping[str, Any]
RawTable = tuple[list[str], list[list[Any]]]
NONE = "-"
LOGGED = (
    "num_prompts num_committed num_cycles num_judged num_accepted alpha p s0 adjusted_s cycle_deviation "
    "tokens_per_second tokens_per_second_per_device share_identical share_correct"
).split()
PARTS_OF_ANSWERS = (("identical", "compared"), ("correct", "scored"))
RUN = ("task", "method", "drafter", "temperature")
CLOCKS = {
    "wall": ("Speed, measured by wall clock", "Decode phase only, without the prefill; batch 1."),
    "virtual": (
        "Speed, simulated by virtual clock",
        "One device did the work of all ranks one after the other; a clock per rank was advanced by the measured "
        "pieces. Decode phase only, without the prefill; batch 1.",
    ),
}


@dataclass(frozen=True)
class Table:
    """Cells as text.

    Attributes:
        title: names what the figures are.
        note: what a reader must know about them.
        columns: names; those before `num_texts` hold words, the others numbers.
        rows: as wide as `columns`.
        num_texts: number of columns with words.
    """

    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_texts: int = 2


def shown_groups(groups: Sequence[GroupDict]) -> list[GroupDict]:
    """By task and temperature, baselines first; without the totals if there is one task only."""
    tasks = list(dict.fromkeys(group["task"] for group in groups))
    shown = [group for group in groups if len(tasks) > 2 or group["task"] != OVERALL]
    return sorted(shown, key=lambda g: (tasks.index(g["task"]), g["temperature"], g["drafter"] is not None))


def make_tables(groups: Sequence[GroupDict]) -> list[Table]:
    """The tables of a summary's groups, those without rows left out."""
    groups = shown_groups(groups)
    drafted = [group for group in groups if group["drafter"] is not None]
    made = [_acceptance(drafted), *(_speed(groups, clock) for clock in CLOCKS), _simulated(drafted), _answers(groups)]
    return [table for table in made if table.rows]


def to_markdown(summary: Mapping[str, Any]) -> str:
    """The content of `summary.md`: tables whose columns stand under each other in a terminal as well."""
    parts = ["# Evaluation", f"    {summary['command']}"]
    for table in make_tables(summary["groups"]):
        parts += [f"## {table.title}", table.note, _aligned(table)]
    if skipped := summary.get("skipped"):
        parts.append("## Skipped")
        parts.append("\n".join(" ".join(f"- {i['task']} {i['question_id']}: {i['error']}".split()) for i in skipped))
    return "\n\n".join(parts) + "\n"


def logged_figures(groups: Sequence[GroupDict]) -> dict[str, float | int]:
    """Figures by flat names such as `gsm8k/spd/n6/T0/p`, for a logger's summary; what is none is left out."""
    figures: dict[str, float | int] = {}
    for group in groups:
        run = "/".join(filter(None, (group["task"], group["method"], group["drafter"], f"T{group['temperature']:g}")))
        figures |= {f"{run}/{name}": group[name] for name in LOGGED if group[name] is not None}
        figures |= {f"{run}/speedup_{speedup['baseline']}": speedup["ratio"] for speedup in group["speedups"]}
    return figures


def logged_tables(groups: Sequence[GroupDict]) -> dict[str, RawTable]:
    """(columns, rows) for a logger: `groups` with the figures, `acceptance` with every tally."""
    tallies = [
        [*(group[key] for key in RUN), by, tally["label"], tally["accepted"], tally["judged"], rate_of(tally)]
        for group in groups
        for by in ("fill", "position", "class")
        for tally in group[f"by_{by}"]
    ]
    figures = [[group[key] for key in (*RUN, *LOGGED)] for group in groups]
    return {
        "groups": ([*RUN, *LOGGED], figures),
        "acceptance": ([*RUN, "by", "label", "accepted", "judged", "rate"], tallies),
    }


def rate_of(tally: Mapping[str, Any]) -> float:
    """Accepted over judged."""
    return tally["accepted"] / tally["judged"]


def method_name(run: GroupDict) -> str:
    """Method and, if it has one, drafter, of a group or a sample's fields."""
    return " ".join(filter(None, (run["method"], run["drafter"])))


def number(value: float | int | None, digits: int) -> str:
    """A figure with so many digits behind the point."""
    return NONE if value is None else f"{value:,.{digits}f}"


def share(part: int, whole: int) -> str:
    """Such as `19/20 (95.0%)`."""
    return f"{part}/{whole} ({part / whole:.1%})" if whole else NONE


def _run(group: GroupDict) -> tuple[str, ...]:
    return group["task"], method_name(group), f"{group['temperature']:g}"


def _acceptance(groups: Sequence[GroupDict]) -> Table:
    note = "N tokens committed by the decode, K cycles (EAGLE-3: rounds); p = accepted / judged, alpha = N / K."
    columns = ("task", "method", "T", "prompts", "N", "K", "judged", "p", "alpha")
    counts = ("num_prompts", "num_committed", "num_cycles", "num_judged")
    rows = [
        (*_run(group), *(number(group[key], 0) for key in counts), number(group["p"], 3), number(group["alpha"], 3))
        for group in groups
    ]
    return Table("Acceptance, counted", note, columns, tuple(rows))


def _speed(groups: Sequence[GroupDict], clock: str) -> Table:
    groups = [group for group in groups if group["clock"] == clock]
    met = {speedup["baseline"] for group in groups for speedup in group["speedups"]}
    baselines = [method for method in dict.fromkeys(group["method"] for group in groups) if method in met]
    shown = ["ratio", *(["per_device"] if any(group["num_devices"] > 1 for group in groups) else [])]
    title, note = CLOCKS[clock]
    columns = [f"x {baseline}{' per device' * (key == 'per_device')}" for key in shown for baseline in baselines]
    rows = []
    for group in groups:
        ratios = {(speedup["baseline"], key): speedup[key] for speedup in group["speedups"] for key in shown}
        rows.append((
            *_run(group),
            number(group["num_prompts"], 0),
            number(group["num_committed"], 0),
            number(group["tokens_per_second"], 2),
            number(group["num_devices"], 0),
            number(group["tokens_per_second_per_device"], 2),
            *(number(ratios.get((baseline, key)), 2) for key in shown for baseline in baselines),
        ))  # fmt: skip
    fixed = ("task", "method", "T", "prompts", "N", "tokens/s", "devices", "per device")
    if baselines:
        note += " 'x' is the ratio of tokens/s to a baseline's over the prompts that both have."
    return Table(title, note, (*fixed, *columns), tuple(rows))


def _simulated(groups: Sequence[GroupDict]) -> Table:
    note = (
        "S0 = n alpha assumes that drafting and communication are free; adjusted S counts the layers of drafts that "
        "nothing hides. 'implied' follows from acceptance by fill level, as if answers had no end."
    )
    columns = ("task", "method", "T", "n", "L_s", "S0", "adjusted S", "implied S0", "implied p")
    rows = []
    for group in groups:
        implied = group["implied"] or {"s0": None, "p": None}
        figures = [(group["num_stages"], 0), (group["num_spec_layers"], 0), (group["s0"], 2), (group["adjusted_s"], 2)]
        figures += [(implied["s0"], 2), (implied["p"], 3)]
        rows.append((*_run(group), *(number(*figure) for figure in figures)))
    return Table("Theoretical speedup, simulated", note, columns, tuple(rows))


def _answers(groups: Sequence[GroupDict]) -> Table:
    note = "Same tokens as plain decoding ('ar'); correct by the task's own score."
    rows = []
    for group in groups:
        shares = [share(group[f"num_{part}"], group[f"num_{whole}"]) for part, whole in PARTS_OF_ANSWERS]
        if shares != [NONE, NONE]:
            rows.append((*_run(group), *shares))
    return Table("Answers", note, ("task", "method", "T", "identical to AR", "correct"), tuple(rows))


def _aligned(table: Table) -> str:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (table.columns, *table.rows)]
    widths = [max(2, *(len(cell) for cell in column)) for column in zip(*cells, strict=True)]
    rule = ["-" * width if i < table.num_texts else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    lines = []
    for row in (cells[0], rule, *cells[1:]):
        padded = [
            cell.ljust(width) if i < table.num_texts else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"| {' | '.join(padded)} |")
    return "\n".join(lines)
