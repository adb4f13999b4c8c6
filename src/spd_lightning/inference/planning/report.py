"""What a plan looks like: a table to read, and JSON. Says in both what is estimated, measured and assumed."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from textwrap import wrap
from typing import Any

from spd_lightning.inference.planning.costs import Cost
from spd_lightning.inference.planning.model import BUDGET_SPEEDUPS
from spd_lightning.inference.planning.plan import Plan, Planner, best_by_split, best_plan

WIDTH = 119
COLUMNS = (
    ("", -1), ("n", 2), ("split", -9), ("layers x stages", -16), ("L_s", 3), ("slowest stage", -15), ("draft", 6),
    ("hidden", 6), ("cycle", 6), ("mean", 6), ("tokens/s", 8), ("/device", 7), ("speedup", 7),
    *((f"for {speedup:g}x", 7) for speedup in BUDGET_SPEEDUPS),
)  # fmt: skip
"""Of the table: heading and width, negative where the entries stand at the left."""


@dataclass(frozen=True)
class PlanReport:
    """The plans for a target.

    Attributes:
        target_name: folder or hub id.
        planner: what made the plans.
        plans: all that were considered.
        own: of the drafter that was given, if one was.
    """

    target_name: str
    planner: Planner
    plans: Sequence[Plan]
    own: Plan | None

    @property
    def best(self) -> Plan:
        return best_plan(self.plans)

    @property
    def head_share(self) -> float:
        """The head's share of the bytes that plain decoding reads for a token."""
        target = self.planner.target
        return target.head.read_bytes / target.token.read_bytes

    @property
    def head_exceeds_stage_at(self) -> list[int]:
        """Numbers of stages at which the head takes longer than any stage's layers of the uniform split."""
        uniform = {plan.num_stages: plan for plan in self.plans if plan.split == "uniform"}
        return [
            count
            for count, plan in uniform.items()
            if plan.prediction.pieces.head_ms > max(plan.prediction.pieces.stage_ms)
        ]

    @property
    def _mean_layer_ms(self) -> float:
        return sum(self.planner.layers_ms) / len(self.planner.layers_ms)

    def to_json(self) -> dict[str, Any]:
        """Everything, times in milliseconds."""
        planner, target = self.planner, self.planner.target
        pieces = self.best.prediction.pieces
        layers = {
            layer_type: asdict(cost)
            | {"count": target.size.layer_types.count(layer_type), "ms": planner.layer_ms[layer_type]}
            for layer_type, cost in target.by_type.items()
        }
        return {
            "target": self.target_name,
            "num_layers": target.size.num_layers,
            "dtype": target.dtype if target.dtype != "auto" else target.size.dtype,
            "num_parameters": target.size.num_parameters,
            "times": "measured" if planner.times.is_measured else "estimated",
            "times_explained": planner.times.explanation,
            "assumed": asdict(planner.assumed) | {"length": target.length, "schedule": planner.options.schedule},
            "layers": layers,
            "head": asdict(target.head)
            | {"ms": planner.times.head_ms, "share": self.head_share, "exceeds_stage_at": self.head_exceeds_stage_at},
            "embedding": asdict(target.embedding),
            "stage_fixed_ms": planner.times.stage_fixed_ms,
            "ar": asdict(target.token) | {"ms": pieces.ar_ms, "tokens_per_second": 1000 / pieces.ar_ms},
            "best": self.best.to_json(),
            "drafter": None if self.own is None else self.own.to_json(),
            "plans": [plan.to_json() for plan in self.plans],
        }

    def text(self) -> str:
        """The table, with what it rests on above and the proposal below."""
        rows = best_by_split(self.plans)
        if self.own is not None:
            rows.insert(0, self.own)
        table = [_aligned([heading for heading, _ in COLUMNS]), *(_aligned(self._cells(plan)) for plan in rows)]
        prose = [*self._target_lines(), "", *table, "", *self._best_lines()]
        return "\n".join(line if line in table else _wrapped(line) for line in prose)

    def _target_lines(self) -> list[str]:
        planner, target = self.planner, self.planner.target
        size, assumed, ar_ms = target.size, planner.assumed, self.best.prediction.pieces.ar_ms
        lines = [
            f"target {self.target_name}: {size.num_layers} layers, {size.num_parameters:,} parameters of "
            f"{target.num_bytes} bytes"
        ]
        for layer_type, cost in target.by_type.items():
            count, milliseconds = size.layer_types.count(layer_type), planner.layer_ms[layer_type]
            lines.append(f"  {count} x {layer_type}: {_piece(cost, milliseconds)}")
        head_ms, exceeded = planner.times.head_ms, ", ".join(map(str, self.head_exceeds_stage_at))
        lines += [
            f"  head of {size.vocab_size:,} rows{' (tied)' if size.is_tied else ''}: {_piece(target.head, head_ms)}; "
            f"{self.head_share:.0%} of what a token reads, as long as {head_ms / self._mean_layer_ms:.1f} layers"
            + (f": longer than a whole stage of the uniform split at n = {exceeded}" if exceeded else ""),
            f"times: {planner.times.explanation}",
            f"assumed: acceptance p = {assumed.p:g}, whatever the split and the drafter; {assumed.overhead_ms:g} ms of "
            f"overhead a cycle; {assumed.link_ms:g} ms a link; drafting {planner.options.schedule}",
            f"plain decoding on one device, without that overhead: {ar_ms:.3f} ms a token, {1000 / ar_ms:.1f} "
            "tokens/s; speedups are against it",
        ]
        return lines

    def _cells(self, plan: Plan) -> list[str]:
        prediction = plan.prediction
        place = f"({prediction.slowest_stage}{'+head' if prediction.slowest_stage == plan.num_stages else ''})"
        budgets = (prediction.overhead_budget_ms(speedup) for speedup in BUDGET_SPEEDUPS)
        return [
            "*" if plan == self.best else "",
            str(plan.num_stages),
            plan.split,
            _runs(plan.stage_layers),
            str(plan.num_spec_layers),
            f"{max(prediction.ranks_ms):.3f} {place}",
            f"{prediction.pieces.drafter_ms:.3f}",
            "always" if prediction.is_drafter_always_hidden else "full" if prediction.is_drafter_hidden else "no",
            f"{prediction.cycle_ms:.3f}",
            f"{prediction.mean_cycle_ms:.3f}",
            f"{prediction.tokens_per_second:.1f}",
            f"{prediction.tokens_per_second_per_device:.1f}",
            f"{prediction.speedup:.2f}x",
            *("-" if budget is None else f"{budget:.3f}" for budget in budgets),
        ]

    def _best_lines(self) -> list[str]:
        best = self.best
        prediction = best.prediction
        lines = [
            "Times in ms. slowest stage: its number stands behind it. hidden: whether the draft ends before the stages "
            "do, always or only when the pipeline is full. cycle: with a full pipeline; mean: with those that refill it "
            "after rejections, in which the last stage rests. for 2x: the overhead, links included, that a cycle may "
            "have for this speedup; -: none is low enough.",
            "Of each n and split the best drafter is shown: the fastest, and of equally fast ones the deepest. A deeper "
            "drafter accepts more, which one p for all does not show.",
            f"best (*): num_stages: {best.num_stages}, stage_layers: {list(best.stage_layers)}, num_spec_layers: "
            f"{best.num_spec_layers}, anchors: {list(best.drafter.layout.anchors)}",
        ]
        if prediction.slowest_stage == best.num_stages and best.stage_layers[-1] == 1:
            lines.append("  the head bounds its cycle: that stage has one layer only, so no other split is faster")
        lines.append(f"  memory of each rank for {self.planner.assumed.max_length:,} tokens, weights + caches:")
        for rank in best.memory:
            role = "drafter" if rank.rank == best.num_stages else f"stage {rank.rank + 1}"
            parts = f"{_size(rank.weight_bytes):>8} + {_size(rank.cache_bytes):>8}"
            lines.append(f"    {role:<8}  {parts} = {_size(rank.total_bytes):>8}")
        return lines


def _aligned(cells: Sequence[str]) -> str:
    pairs = zip(cells, (width for _, width in COLUMNS), strict=True)
    return " ".join(cell.ljust(-width) if width < 0 else cell.rjust(width) for cell, width in pairs).rstrip()


def _wrapped(line: str) -> str:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return "\n".join(wrap(line, WIDTH, subsequent_indent=indent)) if len(line) > WIDTH else line


def _runs(stage_layers: Sequence[int]) -> str:
    """`5x3 4x4 1x1`: three stages of five layers, four of four, one of one."""
    return " ".join(f"{layers}x{len(list(group))}" for layers, group in groupby(stage_layers))


def _piece(cost: Cost, milliseconds: float) -> str:
    return f"{_size(cost.read_bytes)} read, {cost.flops / 1e6:,.1f} MFLOP, {milliseconds:.3f} ms"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
