"""The cost model of a cycle (design §9): from times of the pieces to cycle time, tokens/s and speedup.

Plain numbers; knows no model and does not ask where a time comes from. Against the published cycles of Qwen3.5-4B,
`T = max(28.4 / n, 1.3 + 0.73 L_s) + 1.2` ms, it is within 6% for 4 and 8 stages and 14% too fast for 16: those 17 ranks
lay on more than one node, and the constants have no link between nodes in them. Such a link is given as `link_ms`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from spd_lightning.inference.planning.costs import DrafterCosts, TargetCosts
from spd_lightning.modules.features import Schedule

BUDGET_SPEEDUPS = (2.0, 2.5, 3.0)
"""Speedups for which the overhead that a cycle may have is stated."""


@dataclass(frozen=True)
class Pieces:
    """Milliseconds of the pieces of a cycle, each run by itself.

    Attributes:
        stage_ms: the forward of one token in each stage, first to last, without the head.
        head_ms: final norm and LM head, after the last stage.
        drafter_ms: one draft with a full pipeline.
        stage_fixed_ms: part of each stage's time that does not come from its layers; one rank that has all layers
            spends it once.
        filling_drafter_ms: one draft with `1 .. n - 1` tokens in flight, whose rows are fewer; as with a full pipeline
            unless given.
    """

    stage_ms: tuple[float, ...]
    head_ms: float
    drafter_ms: float
    stage_fixed_ms: float = 0.0
    filling_drafter_ms: tuple[float, ...] = ()

    def drafter_ms_at(self, fill: int) -> float:
        """One draft with so many tokens in flight."""
        has_own = self.filling_drafter_ms and fill < len(self.stage_ms)
        return self.filling_drafter_ms[fill - 1] if has_own else self.drafter_ms

    @property
    def ar_ms(self) -> float:
        """A token of plain decoding on one rank: all layers and the head."""
        return sum(self.stage_ms) - (len(self.stage_ms) - 1) * self.stage_fixed_ms + self.head_ms


class MeasuredPieces(Pieces):
    """Pieces that were timed."""


class EstimatedPieces(Pieces):
    """Pieces whose times were computed from what they read."""


@dataclass(frozen=True)
class CyclePrediction:
    """What the model says of a pipeline whose drafts are accepted with one and the same chance.

    Attributes:
        pieces: what it was computed from.
        p: acceptance.
        overhead_ms: of a cycle: launching, scheduling, verification.
        link_ms: for one message between two ranks.
        schedule: `pre_step` drafts while the stages run, `post_step` after those that it reads.
        read_stages: numbers of the stages whose states the drafter reads.
    """

    pieces: Pieces
    p: float
    overhead_ms: float
    link_ms: float
    schedule: Schedule
    read_stages: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return len(self.pieces.stage_ms)

    @property
    def ranks_ms(self) -> tuple[float, ...]:
        """The work of each stage's rank in a cycle: the last one has the head."""
        *others, last = self.pieces.stage_ms
        return (*others, last + self.pieces.head_ms)

    @property
    def slowest_stage(self) -> int:
        """Number of the stage that the others wait for, the first of several."""
        return self.ranks_ms.index(max(self.ranks_ms)) + 1

    @property
    def slack_ms(self) -> float:
        """By how much the slowest stage outlasts a draft; negative when the stages wait for the drafter."""
        return max(self.ranks_ms) - self.pieces.drafter_ms

    @property
    def is_drafter_hidden(self) -> bool:
        """Whether drafting costs no time in a full cycle: it is done at the same time as the stages, and first."""
        return self.schedule == "pre_step" and self.slack_ms >= 0

    @property
    def is_drafter_always_hidden(self) -> bool:
        """Whether that is so as well while the pipeline fills, when only the first stages run."""
        return self.is_drafter_hidden and all(
            self.pieces.drafter_ms_at(fill) <= max(self.ranks_ms[:fill]) for fill in range(1, self.num_stages)
        )

    def work_ms(self, fill: int) -> float:
        """A cycle with `fill` tokens in flight, in which as many stages run, without overhead and links."""
        slowest, drafted = max(self.ranks_ms[:fill]), self.pieces.drafter_ms_at(fill)
        if self.schedule == "post_step":
            drafted += max((self.ranks_ms[number - 1] for number in self.read_stages if number <= fill), default=0)
        return max(slowest, drafted)

    @property
    def mean_work_ms(self) -> float:
        """Of all cycles: for each full one there are `1 - p` rejections, each with a cycle at every lower fill level."""
        filling = sum(self.work_ms(fill) for fill in range(1, self.num_stages))
        return self.alpha * (self.work_ms(self.num_stages) + (1 - self.p) * filling)

    @property
    def links_ms(self) -> float:
        """States and record travel together once a cycle; post-step the states must have come before the draft."""
        return self.link_ms * (1 if self.schedule == "pre_step" else 2)

    @property
    def cycle_ms(self) -> float:
        """A cycle of the full pipeline, `T`."""
        return self.work_ms(self.num_stages) + self.links_ms + self.overhead_ms

    @property
    def mean_cycle_ms(self) -> float:
        """A cycle on average: `T`, unless the first stage and the drafter are both faster than the slowest stage."""
        return self.mean_work_ms + self.links_ms + self.overhead_ms

    @property
    def alpha(self) -> float:
        """Tokens per cycle in the long run: a rejection costs `n - 1` cycles of refilling (design §1)."""
        return 1 / (1 + (1 - self.p) * (self.num_stages - 1))

    @property
    def tokens_per_second(self) -> float:
        return 1000 * self.alpha / self.mean_cycle_ms

    @property
    def tokens_per_second_per_device(self) -> float:
        """With one device for each stage and one for the drafter."""
        return self.tokens_per_second / (self.num_stages + 1)

    @property
    def speedup(self) -> float:
        """Against plain decoding on one such device, which has none of the overhead and no links."""
        return self.alpha * self.pieces.ar_ms / self.mean_cycle_ms

    def overhead_budget_ms(self, speedup: float) -> float | None:
        """The overhead, links included, that a cycle may have for this speedup; none if no overhead is low enough."""
        budget = self.alpha * self.pieces.ar_ms / speedup - self.mean_work_ms
        return budget if budget >= 0 else None


def predict(
    pieces: Pieces,
    p: float,
    overhead_ms: float = 0.0,
    link_ms: float = 0.0,
    schedule: Schedule = "pre_step",
    read_stages: tuple[int, ...] | None = None,
) -> CyclePrediction:
    """The prediction for measured or estimated pieces.

    Args:
        pieces: `MeasuredPieces` or `EstimatedPieces`, one entry a stage.
        p: chance that a draft is accepted.
        overhead_ms: what a cycle takes beside its pieces and links.
        link_ms: latency of one message between two ranks.
        schedule: when drafts are made.
        read_stages: numbers of the stages whose states the drafter reads; all unless given.

    Raises:
        ValueError: if a time is negative or `p` is no probability.
    """
    check_assumptions(p, overhead_ms, link_ms)
    assert pieces.stage_ms and pieces.ar_ms > 0
    if read_stages is None:
        read_stages = tuple(range(1, len(pieces.stage_ms) + 1))
    return CyclePrediction(pieces, p, overhead_ms, link_ms, schedule, read_stages)


def check_assumptions(p: float, overhead_ms: float, link_ms: float) -> None:
    """Raises `ValueError` if a time is negative or `p` is no probability."""
    if not 0 <= p <= 1:
        raise ValueError(f"p={p}: acceptance is between 0 and 1")
    for name, value in (("overhead_ms", overhead_ms), ("link_ms", link_ms)):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name}={value}: a number of milliseconds, 0 or more, is needed")


@dataclass(frozen=True)
class RankMemory:
    """What a rank holds, without the libraries' own memory and temporary results.

    Attributes:
        rank: a stage's rank is its number less one, the drafter's comes last.
        weight_bytes: layers, and embedding, head or drafter where it has them.
        cache_bytes: keys and values, recurrent states, states of the tokens in flight.
    """

    rank: int
    weight_bytes: int
    cache_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes


def memory_by_rank(target: TargetCosts, drafter: DrafterCosts, max_length: int) -> tuple[RankMemory, ...]:
    """The memory of each stage's rank, and of the draft rank, which has an embedding of its own.

    Args:
        target: the target's pieces.
        drafter: the drafter's, whose layout says how the target is cut.
        max_length: longest sequence, prompt and answer together.
    """
    layout, num_layers = drafter.layout, target.size.num_layers
    capacity = max_length + layout.num_stages  # what is in flight beyond the last committed token
    ranks = [
        RankMemory(
            rank=number - 1,
            weight_bytes=sum(cost.weight_bytes for cost in target.layers[first:last])
            + (target.head.weight_bytes if number == layout.num_stages else 0)
            + (
                target.embedding.weight_bytes if number == 1 and not (target.size.is_tied and last == num_layers) else 0
            ),
            cache_bytes=target.cache_bytes(
                target.size.layer_types[first:last], capacity, slots=layout.num_stages - number + 1
            ),
        )
        for number, (first, last) in enumerate(stage_slices(layout.stage_ends), start=1)
    ]
    weights = drafter.draft.weight_bytes + target.embedding.weight_bytes
    return (*ranks, RankMemory(layout.num_stages, weights, drafter.cache_bytes(capacity)))


def stage_slices(stage_ends: Sequence[int]) -> list[tuple[int, int]]:
    """For each stage the layers before it and up to its end."""
    return list(zip(stage_ends, stage_ends[1:], strict=False))
