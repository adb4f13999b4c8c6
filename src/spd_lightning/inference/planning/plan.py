"""Every way to cut a target that is worth a look, what the model says of each, and the best, as table and JSON.

Times come from an object that either computes or has measured them; which one is said in whatever comes out.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from spd_lightning.inference.planning.costs import Cost, DrafterCosts, TargetCosts
from spd_lightning.inference.planning.model import (
    BUDGET_SPEEDUPS,
    CyclePrediction,
    EstimatedPieces,
    MeasuredPieces,
    RankMemory,
    check_assumptions,
    memory_by_rank,
    predict,
    stage_slices,
)
from spd_lightning.modules.drafter_config import FeatureNorm
from spd_lightning.modules.features import FeatureLayout, Schedule, auto_anchors
from spd_lightning.modules.model_size import DrafterSize
from spd_lightning.modules.partition import balanced_stage_layers, even_stage_layers, stage_ends

BANDWIDTH_SHARE = 0.6
"""Of the memory bandwidth, what forwards of one token reach (design §9)."""
FIGURES = (
    "slowest_stage", "slack_ms", "is_drafter_hidden", "is_drafter_always_hidden", "links_ms", "cycle_ms",
    "mean_cycle_ms", "alpha", "tokens_per_second", "tokens_per_second_per_device", "speedup",
)  # fmt: skip
"""Of a prediction, what is written under its own name."""
Anchors = tuple[int, ...] | Literal["auto", "quarters"]
Split = Literal["uniform", "balanced", "drafter's"]


@runtime_checkable
class PieceTimes(Protocol):
    """Milliseconds of each piece by itself."""

    @property
    def is_measured(self) -> bool:
        """Whether these times are measured or estimated."""
        ...

    @property
    def explanation(self) -> str:
        """Where the times come from, in words."""
        ...

    @property
    def stage_fixed_ms(self) -> float:
        """Of a stage beside its layers."""
        ...

    @property
    def head_ms(self) -> float: ...

    def layer_ms(self, layer_type: str) -> float: ...

    def drafter_ms(self, drafter: DrafterCosts, fill: int) -> float: ...


@dataclass(frozen=True)
class EstimatedTimes:
    """Bytes that a piece reads over a share of the memory bandwidth: a forward of one token is bound by it.

    Args:
        target: the target's pieces.
        bandwidth: of a device's memory, in GB/s (10^9 bytes).
    """

    target: TargetCosts
    bandwidth: float
    is_measured = False
    stage_fixed_ms = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth < float("inf"):
            raise ValueError(f"bandwidth={self.bandwidth}: a number of GB/s above 0 is needed")

    @property
    def explanation(self) -> str:
        return (
            f"ESTIMATED: bytes read / ({BANDWIDTH_SHARE} x {self.bandwidth:,.0f} GB/s) at {self.target.length:,} tokens "
            "of context; launches and caches of the device are not in it"
        )

    @property
    def head_ms(self) -> float:
        return self._ms(self.target.head)

    def layer_ms(self, layer_type: str) -> float:
        return self._ms(self.target.by_type[layer_type])

    def drafter_ms(self, drafter: DrafterCosts, fill: int) -> float:
        return self._ms(drafter.draft_at(fill))

    def _ms(self, cost: Cost) -> float:
        return cost.read_bytes / (BANDWIDTH_SHARE * self.bandwidth * 1e9) * 1000


@dataclass(frozen=True)
class DrafterOptions:
    """What is common to the drafters that are considered; sizes that are not given are the target's.

    Attributes:
        anchors: layers read; `auto` is every stage boundary, `quarters` every quarter of the target.
        schedule: when drafts are made.
    """

    anchors: Anchors
    schedule: Schedule
    draft_vocab_size: int
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    feature_norm: FeatureNorm = "rms"
    gated_attention: bool = False

    def costs(self, target: TargetCosts, stage_layers: tuple[int, ...], num_spec_layers: int) -> DrafterCosts:
        """The drafter of `num_spec_layers` layers for a split."""
        num_layers = sum(stage_layers)
        anchors = self.anchors
        if anchors == "auto":
            anchors = auto_anchors(stage_ends(stage_layers))
        elif anchors == "quarters":
            inner = {num_layers * quarter // 4 for quarter in range(4)}
            anchors = tuple(sorted(inner | {num_layers - 1}))
        layout = FeatureLayout(stage_layers, anchors, "exact", self.schedule)
        given = {name: value for name, value in asdict(self).items() if name not in ("anchors", "schedule")}
        size = DrafterSize.of(target.size, layout, num_spec_layers, **given)
        return DrafterCosts(size, layout, target.num_bytes, target.length)


@dataclass(frozen=True)
class Assumptions:
    """What is taken for granted.

    Attributes:
        p: acceptance, the same for every split and drafter.
        overhead_ms: of a cycle.
        link_ms: of one message between ranks.
        max_length: longest sequence, for which caches are made.
    """

    p: float
    overhead_ms: float
    link_ms: float
    max_length: int

    def __post_init__(self) -> None:
        check_assumptions(self.p, self.overhead_ms, self.link_ms)


@dataclass(frozen=True)
class Plan:
    """One split with one drafter."""

    split: Split
    drafter: DrafterCosts
    prediction: CyclePrediction
    memory: tuple[RankMemory, ...]

    @property
    def stage_layers(self) -> tuple[int, ...]:
        return self.drafter.layout.stage_layers

    @property
    def num_stages(self) -> int:
        return len(self.stage_layers)

    @property
    def num_spec_layers(self) -> int:
        return self.drafter.size.num_layers

    @property
    def merit(self) -> tuple[float, int, bool]:
        """What the best has most of. A deeper drafter that costs nothing, being hidden, is the better one."""
        return self.prediction.speedup, self.num_spec_layers, self.split == "uniform"

    def to_json(self) -> dict[str, Any]:
        """All that is known of the plan; times in milliseconds."""
        prediction = self.prediction
        return {
            "num_stages": self.num_stages,
            "split": self.split,
            "stage_layers": list(self.stage_layers),
            "num_spec_layers": self.num_spec_layers,
            "anchors": list(self.drafter.layout.anchors),
            "schedule": prediction.schedule,
            "stage_ms": list(prediction.ranks_ms),
            "drafter_ms": prediction.pieces.drafter_ms,
            **{name: getattr(prediction, name) for name in FIGURES},
            "overhead_budget_ms": {
                f"{speedup:g}": prediction.overhead_budget_ms(speedup) for speedup in BUDGET_SPEEDUPS
            },
            "ranks": [asdict(rank) | {"total_bytes": rank.total_bytes} for rank in self.memory],
        }


class Planner:
    """Puts costs, times and assumptions together.

    Args:
        target: the target's pieces.
        times: of them.
        options: of the drafters that are considered.
        assumed: what is taken for granted.
    """

    def __init__(self, target: TargetCosts, times: PieceTimes, options: DrafterOptions, assumed: Assumptions) -> None:
        self.target = target
        self.times = times
        self.options = options
        self.assumed = assumed
        self.layer_ms = {layer_type: times.layer_ms(layer_type) for layer_type in target.by_type}
        self.layers_ms = [self.layer_ms[layer_type] for layer_type in target.size.layer_types]

    def splits(self, num_stages: int) -> dict[Split, tuple[int, ...]]:
        """The uniform split, and the one whose slowest stage, the last with the head, is as fast as can be."""
        return {
            "uniform": even_stage_layers(self.target.size.num_layers, num_stages),
            "balanced": balanced_stage_layers(self.layers_ms, num_stages, self.times.head_ms),
        }

    def plan(self, split: Split, stage_layers: tuple[int, ...], num_spec_layers: int) -> Plan:
        """One split with a drafter of so many layers."""
        drafter = self.options.costs(self.target, stage_layers, num_spec_layers)
        fixed = self.times.stage_fixed_ms
        stages = stage_slices(stage_ends(stage_layers))
        *filling_ms, full_ms = (self.times.drafter_ms(drafter, fill) for fill in range(1, len(stages) + 1))
        pieces_class = MeasuredPieces if self.times.is_measured else EstimatedPieces
        pieces = pieces_class(
            stage_ms=tuple(fixed + sum(self.layers_ms[first:last]) for first, last in stages),
            head_ms=self.times.head_ms,
            drafter_ms=full_ms,
            stage_fixed_ms=fixed,
            filling_drafter_ms=tuple(filling_ms),
        )
        assumed = self.assumed
        layout = drafter.layout
        read_stages = tuple(
            number
            for number, (first, last) in enumerate(stages, start=1)
            if any(first < layout.anchors[index] <= last for index in range(layout.used_anchor_indices[-1] + 1))
        )
        prediction = predict(
            pieces, assumed.p, assumed.overhead_ms, assumed.link_ms, self.options.schedule, read_stages
        )
        return Plan(split, drafter, prediction, memory_by_rank(self.target, drafter, assumed.max_length))

    def plans(self, stage_counts: Iterable[int], spec_layers: Sequence[int]) -> list[Plan]:
        """Every number of stages, split and number of drafter layers."""
        return [
            self.plan(split, stage_layers, num_spec_layers)
            for num_stages in stage_counts
            for split, stage_layers in self.splits(num_stages).items()
            for num_spec_layers in spec_layers
        ]


def best_plan(plans: Iterable[Plan]) -> Plan:
    """The fastest; of equally fast ones the deepest drafter, and the uniform split."""
    return max(plans, key=lambda plan: plan.merit)


def best_by_split(plans: Iterable[Plan]) -> list[Plan]:
    """The best of each number of stages and split, in order of appearance."""
    groups: dict[tuple[int, Split], list[Plan]] = {}
    for plan in plans:
        groups.setdefault((plan.num_stages, plan.split), []).append(plan)
    return [best_plan(group) for group in groups.values()]
