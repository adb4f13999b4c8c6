"""What became of each source's rows: read, kept and dropped by reason. Knows no files but its own JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

_EXAMPLES = 3


@dataclass
class DropReason:
    """Rows dropped for one reason, with where a few of them are."""

    count: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass
class SourceReport:
    """The rows of one source.

    Attributes:
        source: its name.
        read: dialogues, texts or pre-tokenised rows read.
        kept: those of them that gave at least one training row.
        rows: training rows (with `turns: each` one for each assistant turn).
        tokens: of all training rows.
        supervised_tokens: answer tokens that are predicted.
        drops: the rows that gave nothing, by reason.
        turn_drops: single turns that were dropped from dialogues that keep others, by reason.
    """

    source: str
    read: int = 0
    kept: int = 0
    rows: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    drops: dict[str, DropReason] = field(default_factory=dict)
    turn_drops: dict[str, DropReason] = field(default_factory=dict)

    @property
    def drop_fraction(self) -> float:
        """Share of the rows read that gave nothing, 0 to 1."""
        return 1 - self.kept / self.read if self.read else 0.0

    @staticmethod
    def add_drop(drops: dict[str, DropReason], reason: str, location: str, detail: str) -> None:
        """Counts one dropped row or turn and keeps its location while there are few."""
        entry = drops.setdefault(reason, DropReason())
        entry.count += 1
        if len(entry.examples) < _EXAMPLES:
            entry.examples.append(f"{location}: {detail}" if detail else location)

    def likely_cause(self) -> str:
        """The reason of most drops with an example, for a message; empty when nothing was dropped."""
        if not self.drops:
            return ""
        reason, entry = max(self.drops.items(), key=lambda item: item[1].count)
        return f"{entry.count} of {self.read} rows were dropped as {reason}, e.g. {entry.examples[0]}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "SourceReport":
        drops = {
            key: {reason: DropReason(**entry) for reason, entry in content[key].items()}
            for key in ("drops", "turn_drops")
        }
        return cls(**{**content, **drops})


def format_reports(reports: Sequence[SourceReport]) -> str:
    """The drop report as text: a line for each source, then one for each reason with examples."""
    lines = []
    for report in reports:
        lines.append(
            f"{report.source}: {report.read:,} read, {report.kept:,} kept ({report.drop_fraction:.1%} dropped), "
            f"{report.rows:,} rows, {report.tokens:,} tokens, {report.supervised_tokens:,} supervised"
        )
        lines += _drop_lines(report.drops, "rows") + _drop_lines(report.turn_drops, "single turns")
    return "\n".join(lines)


def _drop_lines(drops: dict[str, DropReason], what: str) -> list[str]:
    lines = []
    for reason, entry in sorted(drops.items(), key=lambda item: -item[1].count):
        lines.append(f"  {reason}: {entry.count:,} {what}")
        lines += [f"    {example}" for example in entry.examples]
    return lines
