"""The drafter on trees: the states of the live nodes, and draft logits behind every node of the newest level.

It reads what it has received; whether a cycle's own stage forwards are among that is the layout's schedule. Knows no
transport.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from spd_lightning.inference.drafting import DraftSession
from spd_lightning.inference.tree.schedule import PREFIX, Pruning, TreePlan


class TreeDraftSession:
    """Draft logits of one sequence, cycle by cycle, on top of a session's cache of what has left the pipeline.

    Each live node has a row, at the depth that the newest level and the number of levels imply
    (`FeatureLayout.depth_when_drafting`, as in training), and sees the cached rows, its ancestors' and itself. Where
    levels have been skipped, nodes have passed more stages than that: then the states of the stages beyond are left out.

    Args:
        session: whose drafter and buffers these are; takes the prompt in.
        max_width: nodes of a level at most.
    """

    def __init__(self, session: DraftSession, max_width: int) -> None:
        self.session = session
        self.layout = session.layout
        count, _, dim = session.states.shape
        self.num_slots = 1 + session.num_stages * max_width
        self.states = session.states.new_zeros(count, self.num_slots, dim)
        self.start()

    def start(self) -> None:
        """Goes on behind the prompt that the session has taken in."""
        self.slot_of: dict[int, int] = {}
        self.free = list(range(self.num_slots))
        self.left: int | None = None
        """The node that has left the pipeline and has no row in the cache yet."""

    @torch.no_grad()
    def receive(self, nodes: Sequence[int], anchors: Mapping[int, Float[Tensor, "1 nodes dim"]]) -> None:
        """Keeps the states that a stage's forward of these nodes gave."""
        for node in nodes:
            if node not in self.slot_of:
                self.slot_of[node] = self.free.pop()
        slots = self._slots(nodes)
        for index, anchor in enumerate(self.session.anchors):
            if anchor in anchors:
                self.states[index, slots] = anchors[anchor][0]

    @torch.no_grad()
    def draft_logits(self, plan: TreePlan) -> Float[Tensor, "leaves draft_vocab"]:
        """Logits over the draft vocabulary for the position after the newest level, one row per node of it.

        Pre-step, nothing of this cycle has been received yet; post-step, all of it has (`layout.drafts_first`).
        """
        session, newest = self.session, plan.levels[-1]
        tokens = torch.tensor([newest.tokens], device=self.states.device)
        self.receive(newest.ids, {0: session.embedding(tokens)})
        waiting = [] if self.left is None else [(self.left, PREFIX)]
        groups = [(session.length, waiting)] if waiting else []
        groups += [(level.position, [(node.id, node.parent) for node in level.nodes]) for level in plan.levels]
        assert plan.levels[0].position == session.length + len(waiting)
        rows, positions, parents, keep = [], list[int](), list[tuple[int, int]](), 0
        for position, nodes in groups:
            depth = self.layout.depth_when_drafting(plan.newest - position, plan.fill)
            states = self.states[:, self._slots([node for node, _ in nodes])]
            rows.append(session.features([state[None] for state in states], depth))
            positions += [position] * len(nodes)
            parents += nodes
            keep += len(nodes) if depth == session.num_stages else 0
        visible = self._visible(parents, len(waiting))
        position_ids = torch.tensor(positions, device=self.states.device)
        hidden = session.run(torch.cat(rows, dim=2), position_ids, visible, keep)
        if keep and self.left is not None:
            self._release(self.left)
            self.left = None
        return session.drafter.lm_head(hidden[0, 0, -len(newest.nodes) :])

    def _visible(self, parents: Sequence[tuple[int, int]], num_waiting: int) -> Tensor | None:
        """Which cached and new rows each row sees; `parents` has (node, its parent), parents first."""
        cached, count = self.session.length, len(parents)
        if count == 1:
            return None
        visible = torch.zeros(count, cached + count, dtype=torch.bool)
        row_of = {node: row for row, (node, _) in enumerate(parents)}
        visible[:, : cached + num_waiting] = True
        for row, (_, parent) in enumerate(parents):
            if parent != PREFIX:
                visible[row] |= visible[row_of[parent]]
            visible[row, cached + row] = True
        return visible.to(self.states.device)

    def prune(self, pruning: Pruning) -> None:
        """Forgets the nodes that a verdict drops."""
        if self.session.length < pruning.length:
            assert self.left is None
            self.left = pruning.left
        for node in [node for node in self.slot_of if node not in pruning.kept and node != self.left]:
            self._release(node)

    def _release(self, node: int) -> None:
        self.free.append(self.slot_of.pop(node))

    def _slots(self, nodes: Sequence[int]) -> Tensor:
        return torch.tensor([self.slot_of[node] for node in nodes], device=self.states.device)
