"""What a decode did, in counts; the figures of design §9 come from them. Knows no time and no tokens."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Judgement:
    """One verdict.

    Attributes:
        position: of the judged token.
        fill: tokens in flight when it was drafted, `1..n`.
        accepted: whether the draft stayed.
    """

    position: int
    fill: int
    accepted: bool


@dataclass
class DecodeStats:
    """Counts of one decode, or of several pooled.

    Attributes:
        num_stages: `n`.
        num_committed: `N`: tokens committed in the decode phase, without the prefill's own.
        num_cycles: `K`.
        judgements: every verdict, in order.
    """

    num_stages: int
    num_committed: int = 0
    num_cycles: int = 0
    judgements: list[Judgement] = field(default_factory=list)

    @property
    def num_judged(self) -> int:
        return len(self.judgements)

    @property
    def num_accepted(self) -> int:
        return sum(judgement.accepted for judgement in self.judgements)

    @property
    def alpha(self) -> float | None:
        """Committed tokens per cycle, `N / K`; none before the first cycle."""
        return self.num_committed / self.num_cycles if self.num_cycles else None

    @property
    def acceptance(self) -> float | None:
        """`p`: accepted over judged; none before the first verdict."""
        return self.num_accepted / self.num_judged if self.num_judged else None

    @property
    def speedup(self) -> float | None:
        """`S0 = n * alpha`: the speedup if drafting and communication were free."""
        return None if self.alpha is None else self.num_stages * self.alpha

    def to_json(self) -> dict[str, int | float | None]:
        """The counts and what follows from them, by the names of the command's output."""
        return {
            "num_committed": self.num_committed,
            "num_cycles": self.num_cycles,
            "num_judged": self.num_judged,
            "num_accepted": self.num_accepted,
            "alpha": self.alpha,
            "p": self.acceptance,
            "s0": self.speedup,
        }

    def acceptance_by_fill(self) -> dict[int, tuple[int, int]]:
        """(accepted, judged) of the drafts made at each fill level that occurred."""
        counts: dict[int, tuple[int, int]] = {}
        for judgement in self.judgements:
            accepted, judged = counts.get(judgement.fill, (0, 0))
            counts[judgement.fill] = (accepted + judgement.accepted, judged + 1)
        return dict(sorted(counts.items()))

    @classmethod
    def pooled(cls, parts: Iterable["DecodeStats"]) -> "DecodeStats":
        """The counts of several decodes together: totals, never means of ratios.

        Raises:
            ValueError: if there is nothing to pool, or the stages differ.
        """
        parts = list(parts)
        stages = {part.num_stages for part in parts}
        if len(stages) != 1:
            raise ValueError(f"cannot pool decodes of {sorted(stages)} stages: they need one number of stages")
        return cls(
            stages.pop(),
            sum(part.num_committed for part in parts),
            sum(part.num_cycles for part in parts),
            [judgement for part in parts for judgement in part.judgements],
        )
