"""The decode algorithm of draft trees as plain integers: live nodes by level, what a verdict keeps (design §8).

Every runtime, and every rank of one, drives a copy of this object. Knows no tensors, no sampling and no transport.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from spd_lightning.inference.schedule import CyclePlan, Rollback, Verdict

PREFIX = -1
"""The parent of the root: what is committed and has left the pipeline."""

MAX_WIDTH = 256
"""Of a level. Caches are allocated for as many candidates in every stage, and messages for every number of them."""


@dataclass(frozen=True)
class TreeShape:
    """How wide a tree may be.

    Args:
        width: live nodes of a level at most, in full flight.
        refill_width: of a level that is drafted while the pipeline refills; at least `width`.
    """

    width: int
    refill_width: int

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"tree_width={self.width}: at least 1 is needed; 1 is a chain")
        if self.refill_width < self.width:
            raise ValueError(
                f"refill_width={self.refill_width} is less than tree_width={self.width}: give at least as much, or "
                "leave it out"
            )
        for name, width in (("tree_width", self.width), ("refill_width", self.refill_width)):
            if width > MAX_WIDTH:
                raise ValueError(f"{name}={width}: at most {MAX_WIDTH} is possible, and a few are useful, such as 4")

    @classmethod
    def build(cls, width: int, refill_width: int | None = None) -> "TreeShape | None":
        """The shape of these widths, refilling as wide as in flight unless told otherwise; none for a chain."""
        shape = cls(width, width if refill_width is None else refill_width)
        return shape if shape.refill_width > 1 else None


@dataclass(frozen=True)
class Draft:
    """A candidate that is to enter the pipeline.

    Attributes:
        token: its id.
        parent: the node that it would follow.
        score: logarithm of how likely its path from the last flush on is thought to be right.
    """

    token: int
    parent: int
    score: float


@dataclass(frozen=True)
class Node:
    """A candidate in flight.

    Attributes:
        id: no other node of the request has it.
        token: its id in the vocabulary.
        parent: the node before it; `PREFIX` of the root.
        score: as of its draft; 0 of a root that was reseeded.
    """

    id: int
    token: int
    parent: int
    score: float


@dataclass(frozen=True)
class Level:
    """The live candidates for one position.

    Attributes:
        position: of them all.
        depth: stages that they have completed.
        nodes: at least one, in the order in which they were drafted.
    """

    position: int
    depth: int
    nodes: tuple[Node, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(node.id for node in self.nodes)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(node.token for node in self.nodes)


@dataclass(frozen=True)
class TreePlan(CyclePlan):
    """What one cycle does. `fill` counts levels in flight, of which `newest` is the last one's position.

    Attributes:
        levels: in flight, the root's first. Positions are contiguous; depths fall, and may skip some: where a verdict
            has left no candidate for the newest levels, the next ones enter later.
        width: nodes of the level that is drafted, at most.
    """

    levels: tuple[Level, ...]
    width: int

    @property
    def root(self) -> Node:
        """The oldest node in flight, which is verified."""
        return self.levels[0].nodes[0]

    @property
    def candidates(self) -> tuple[int, ...]:
        """The root's children, in the order in which they are judged."""
        return self.levels[1].tokens if self.fill > 1 else ()

    def level_at(self, stage: int) -> Level | None:
        """The level that stage `1..n` advances in this cycle, if any: the one of depth `stage - 1`."""
        return next((level for level in self.levels if level.depth == stage - 1), None)

    def position_at(self, stage: int) -> int | None:
        level = self.level_at(stage)
        return None if level is None else level.position

    def count_at(self, stage: int) -> int:
        level = self.level_at(stage)
        return 0 if level is None else len(level.nodes)

    @property
    def num_leaves(self) -> int:
        return len(self.levels[-1].nodes)

    @property
    def judged(self) -> int | None:
        """The position that is judged: the one behind the root, in the cycle in which that leaves the last stage."""
        root = self.levels[0]
        return root.position + 1 if root.depth == self.num_stages - 1 else None


@dataclass(frozen=True)
class Pruning(Rollback):
    """A verdict: every cache keeps the positions `0 .. length - 1`, and behind them what these nodes have left.

    Attributes:
        left: the node at `length - 1`, which is out of the pipeline now.
        kept: nodes that stay in flight; none after a rejection.
    """

    left: int
    kept: frozenset[int]


class TreeSchedule:
    """The committed tokens of one sequence, and the tree of candidates behind them.

    The root is the newest committed token, and all live nodes descend from it. Each cycle every level goes a stage
    on, and children of the newest level are drafted, which enter in the next cycle. When the root has left the last
    stage one of its children, if any is right, becomes the root, and what does not descend from it is dropped.

    Args:
        num_stages: `n`, at least 2: with one stage nothing is in flight behind the root.
        prompt: token ids of the prompt, at least one.
        first_token: what the target says after the prompt; it comes out of the prefill.
        shape: of the tree.
    """

    def __init__(self, num_stages: int, prompt: Sequence[int], first_token: int, shape: TreeShape) -> None:
        if num_stages < 2:
            raise ValueError(f"num_stages={num_stages}: a draft tree needs at least 2 stages")
        if not prompt:
            raise ValueError("the prompt is empty: at least one token is needed")
        self.num_stages = num_stages
        self.shape = shape
        self.tokens = [*prompt, first_token]
        self.num_cycles = self.num_judged = self.num_accepted = self.num_flushes = 0
        self._num_nodes = 0
        self._reseed()

    @property
    def num_verified(self) -> int:
        return len(self.tokens)

    @property
    def verified(self) -> list[int]:
        """The tokens that are certain, prompt included."""
        return self.tokens

    def plan(self) -> TreePlan:
        """What the coming cycle does; the stages and the drafter may work on it at the same time."""
        fill = len(self.levels)
        width = self.shape.width if fill == self.num_stages else self.shape.refill_width
        newest = self.levels[-1].position
        return TreePlan(
            self.num_cycles, self.num_flushes, fill, newest, self.num_stages, levels=tuple(self.levels), width=width
        )

    def advance(self, drafts: Sequence[Draft], verdict: Verdict | None) -> Pruning | None:
        """Closes a cycle.

        Args:
            drafts: children of the newest level, in the order in which they will be judged.
            verdict: on the root's children; none unless the root has left.

        Returns:
            What to drop, after a verdict.
        """
        plan = self.plan()
        assert (verdict is None) == (plan.judged is None), f"cycle {plan.cycle}: a verdict exactly when one is due"
        assert len(drafts) <= plan.width and all(draft.parent in plan.levels[-1].ids for draft in drafts)
        self.num_cycles += 1
        self.levels = [replace(level, depth=level.depth + 1) for level in plan.levels]
        if drafts:
            nodes = tuple(self._node(draft.token, draft.parent, draft.score) for draft in drafts)
            self.levels.append(Level(plan.drafted, 0, nodes))
        if verdict is None:
            return None
        self.num_judged += 1
        self.num_accepted += verdict.accepted
        self.tokens.append(verdict.token)
        if verdict.accepted:
            self._keep_under(verdict.token)
            kept = frozenset(node.id for level in self.levels for node in level.nodes)
        else:
            self.num_flushes += 1
            self._reseed()
            kept = frozenset[int]()
        return Pruning(len(self.tokens) - 1, left=plan.root.id, kept=kept)

    def _reseed(self) -> None:
        """Nothing is in flight but the newest committed token."""
        self.levels = [Level(len(self.tokens) - 1, 0, (self._node(self.tokens[-1], PREFIX, 0.0),))]

    def _keep_under(self, token: int) -> None:
        """The root's child with this token becomes the root, and its descendants stay."""
        (accepted,) = (node for node in self.levels[1].nodes if node.token == token)
        levels, live = [replace(self.levels[1], nodes=(replace(accepted, parent=PREFIX),))], {accepted.id}
        for level in self.levels[2:]:
            nodes = tuple(node for node in level.nodes if node.parent in live)
            if not nodes:
                break
            levels.append(replace(level, nodes=nodes))
            live = {node.id for node in nodes}
        self.levels = levels

    def _node(self, token: int, parent: int, score: float) -> Node:
        self._num_nodes += 1
        return Node(self._num_nodes - 1, token, parent, score)


def schedule_maker(shape: TreeShape) -> partial[TreeSchedule]:
    """What `decode` makes its schedule with."""
    return partial(TreeSchedule, shape=shape)
