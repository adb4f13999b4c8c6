"""Which target states a token shows the drafter, at which depth (design §§2 and 4).

Plain integers: the training mask and the decoder both read the one rule here. Knows no tensors.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from spd_lightning.modules.partition import check_stage_layers, even_stage_layers, stage_ends

RowMode = Literal["exact", "shared"]
AnchorRule = Literal["auto", "first_stage"]
"""Anchors in words: every stage boundary, or the end of the first stage alone (post-step)."""
Schedule = Literal["pre_step", "post_step"]
FIRST_DEPTH: dict[Schedule, int] = {"pre_step": 0, "post_step": 1}
"""Depth of the newest token when the drafter reads it, by schedule (design §5)."""


def visible_depth(depth: int, distance: int, fill: int, num_stages: int) -> int:
    """Depth at which a row of `depth` sees the position `distance` before it: `D(d, delta; a)` of design §4.

    When the row was made, every younger token was one stage behind its predecessor, and only `fill` tokens were in
    flight: what lay further back had left the pipeline.
    """
    if fill < num_stages and distance > 0 and depth + distance >= fill:
        return num_stages
    return min(num_stages, depth + distance)


def needed_rows(visible_row: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The row types that the newest one sees, or that a row type sees that it sees, and so on; ascending.

    With `a` tokens in flight no draft ever depends on the depths `a .. n-1` (design §4).

    Args:
        visible_row: one fill level's entry of `FeatureLayout.visibility_table`.
    """
    needed, unseen = set[int](), {0}
    while unseen:
        needed |= unseen
        unseen = {seen for row in unseen for seen in visible_row[row]} - needed
    return tuple(sorted(needed))


def auto_anchors(ends: Sequence[int]) -> tuple[int, ...]:
    """Every stage boundary, with `L-1` in place of `L` unless the last stage begins there (design §2)."""
    num_layers = ends[-1]
    last = num_layers if ends[-2] == num_layers - 1 else num_layers - 1
    return (*ends[:-1], last)


@dataclass(frozen=True)
class FeatureLayout:
    """How a drafter sees the target: stages, anchors and row types. Part of the drafter, saved with it.

    Args:
        stage_layers: layers per stage; their sum is the number of target layers `L`.
        anchors: layers whose raw output the drafter reads, ascending, beginning with 0 (the embedding) or, post-step,
            at the latest with the end of the first stage: with what every token that is read has passed.
        rows: `exact` has one row type per depth that the drafter reads; `shared` one per reachable anchor count.
        schedule: `pre_step` drafts from the states before a cycle's stage forwards, so depths are `0..n`; `post_step`
            waits for them, so every token in flight is one stage deeper and depths are `1..n`.
    """

    stage_layers: tuple[int, ...]
    anchors: tuple[int, ...]
    rows: RowMode
    schedule: Schedule = "pre_step"

    def __post_init__(self) -> None:
        if self.schedule not in FIRST_DEPTH:
            raise ValueError(f"schedule={self.schedule!r}: must be 'pre_step' or 'post_step'")
        if self.rows not in ("exact", "shared"):
            raise ValueError(f"rows={self.rows!r}: must be 'exact' or 'shared'")
        anchors = list(self.anchors)
        if self.first_depth == 0 and (not anchors or anchors[0] != 0):
            raise ValueError(f"anchors={anchors}: the first anchor must be 0, the embedding: a new token has no other")
        if not anchors or not 0 <= anchors[0] <= self.stage_ends[self.first_depth]:
            raise ValueError(
                f"anchors={anchors}: the first anchor must be one that every token has passed, so 0 to "
                f"{self.stage_ends[self.first_depth]}, where the first stage ends"
            )
        if any(later <= earlier for earlier, later in zip(anchors, anchors[1:], strict=False)):
            raise ValueError(f"anchors={anchors} must ascend without repeats")
        if anchors[-1] > self.num_layers:
            raise ValueError(f"anchors={anchors}: the target has {self.num_layers} layers, so anchors end there")

    @classmethod
    def build(
        cls,
        num_layers: int,
        num_stages: int,
        stage_layers: Sequence[int] | None = None,
        anchors: Sequence[int] | AnchorRule = "auto",
        rows: RowMode = "exact",
        schedule: Schedule = "pre_step",
    ) -> "FeatureLayout":
        """The layout for a target of `num_layers`; even stages and anchors at every boundary unless given.

        Warns when an anchor beyond the first is never the deepest of any depth: its projection would never be used.
        """
        if stage_layers is None:
            split = even_stage_layers(num_layers, num_stages)
        else:
            split = check_stage_layers(stage_layers, num_layers, num_stages)
        if isinstance(anchors, str):
            if anchors not in ("auto", "first_stage"):
                raise ValueError(f"anchors={anchors!r}: give a list of layers, 'auto' or 'first_stage'")
            ends = stage_ends(split)
            anchors = auto_anchors(ends) if anchors == "auto" else ends[1:2]
        layout = cls(stage_layers=split, anchors=tuple(anchors), rows=rows, schedule=schedule)
        # The first anchor is not a choice, and every projection reads it.
        used = layout.used_anchor_indices
        if unused := [anchor for index, anchor in enumerate(layout.anchors) if index > 0 and index not in used]:
            warnings.warn(
                f"anchors {unused} are never the deepest anchor of any depth (stages end at {layout.stage_ends}): "
                "they get no row and no projection of their own",
                stacklevel=2,
            )
        return layout

    @property
    def num_stages(self) -> int:
        return len(self.stage_layers)

    @property
    def num_layers(self) -> int:
        return sum(self.stage_layers)

    @cached_property
    def stage_ends(self) -> tuple[int, ...]:
        """`e_0=0 .. e_n=L`."""
        return stage_ends(self.stage_layers)

    @property
    def first_depth(self) -> int:
        """Depth of the newest token when the drafter reads it: the smallest that it reads."""
        return FIRST_DEPTH[self.schedule]

    @property
    def drafts_first(self) -> bool:
        """Whether a cycle's draft is made without the cycle's stage forwards, so that both can run at once."""
        return self.first_depth == 0

    @property
    def depths(self) -> range:
        """The depths that the drafter reads, the newest token's first."""
        return range(self.first_depth, self.num_stages + 1)

    def mask_fill(self, fill: int) -> int:
        """The fill level for `visible_depth` of a draft whose cycle began with `fill` tokens in flight (design §5).

        Post-step it is one more, as if a token that the drafter does not see yet were the newest, at depth 0.
        """
        return min(self.num_stages, fill + self.first_depth)

    def depth_when_drafting(self, distance: int, fill: int) -> int:
        """Depth at which the drafter reads the token `distance` before the newest one; `n` if it has left.

        Args:
            distance: 0 for the newest token itself.
            fill: tokens in flight at the start of the cycle.
        """
        return visible_depth(self.first_depth, distance, self.mask_fill(fill), self.num_stages)

    def deepest_anchor(self, depth: int) -> int:
        """`agg(k)`: index of the deepest anchor that a token of this depth has passed."""
        return max(i for i, anchor in enumerate(self.anchors) if anchor <= self.stage_ends[depth])

    @cached_property
    def used_anchor_indices(self) -> tuple[int, ...]:
        """The values that `deepest_anchor` takes: the anchor counts (less one) that have a projection."""
        return tuple(sorted({self.deepest_anchor(depth) for depth in self.depths}))

    @cached_property
    def row_depths(self) -> tuple[int, ...]:
        """The depth that each row type stands for, ascending; the first is the newest token's.

        The last row type shows what left the pipeline. Shared rows are represented by the smallest depth of their
        anchor count.
        """
        if self.rows == "exact":
            return tuple(self.depths)
        return tuple(
            min(depth for depth in self.depths if self.deepest_anchor(depth) == index)
            for index in self.used_anchor_indices
        )

    @property
    def num_rows(self) -> int:
        return len(self.row_depths)

    def row_of_depth(self, depth: int) -> int:
        """The row type that shows a token of this depth."""
        if self.rows == "exact":
            return self.depths.index(depth)
        return self.used_anchor_indices.index(self.deepest_anchor(depth))

    def visibility_table(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Row type seen by each row type at each distance: entry `[a-1][row][min(distance, n)]` for fill `a`.

        `a` counts the tokens in flight at the start of the cycle. Beyond `n` nothing changes any more, so this table
        of `n x R x (n+1)` integers is the whole structural mask.
        """
        n = self.num_stages
        return tuple(
            tuple(
                tuple(
                    self.row_of_depth(visible_depth(depth, distance, self.mask_fill(fill), n))
                    for distance in range(n + 1)
                )
                for depth in self.row_depths
            )
            for fill in range(1, n + 1)
        )
