"""The rank of the drafter while trees are decoded. Knows neither processes nor files."""

from collections.abc import Sequence

from spd_lightning.inference.coordinator import CycleOutcome
from spd_lightning.inference.runtime.distributed import Operation, Transport
from spd_lightning.inference.runtime.draft_rank import DraftRank
from spd_lightning.inference.runtime.rank import Mailbox, Rank, level_laws
from spd_lightning.inference.runtime.wire import Request, Stamp
from spd_lightning.inference.timing import PDM
from spd_lightning.inference.tree.drafting import TreeDraftSession
from spd_lightning.inference.tree.schedule import Pruning, TreePlan, TreeSchedule
from spd_lightning.inference.tree.verify import Drafts, make_tree_proposer


class TreeDraftRank(DraftRank):
    """The drafter on trees. A `Pipeline` of its own part; it is given trees only.

    Args:
        transport: to the other ranks.
        tree: the drafter and its caches.
    """

    def __init__(self, transport: Transport, tree: TreeDraftSession) -> None:
        super().__init__(transport, tree.session)
        self.tree = tree
        dim, dtype = tree.states.shape[-1], tree.states.dtype
        self.mailboxes = {
            number: Mailbox(len(anchors), dim, dtype, self.device, transport.max_width)
            for number, anchors in self.anchors_of.items()
        }
        self.drafts = Drafts(())

    def begin(self, request: Request) -> None:
        Rank.begin(self, request)
        drafter = self.session.drafter
        self.proposer = make_tree_proposer(request.params, drafter.draft_token_ids)
        self.level_laws = level_laws(request.params, drafter.config.draft_vocab_size, self.device)

    def prefill(self, prompt: Sequence[int]) -> int:
        token = super().prefill(prompt)
        self.tree.start()
        return token

    def rollback(self, rollback: Pruning) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.tree.prune(rollback)

    def _run_cycle(self, plan: TreePlan, schedule: TreeSchedule) -> CycleOutcome:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.arrivals = {
            number: mailbox.next(count)
            for number, mailbox in self.mailboxes.items()
            if (count := plan.count_at(number))
        }
        self.arriving = self._receive(self.arrivals)
        for step in self.steps:
            step(plan, schedule)  # pyright: ignore[reportArgumentType]
        return self._end_tree_cycle(plan, candidates=self.drafts.candidates)

    def _draft(self, plan: TreePlan, schedule: TreeSchedule) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        with self.transport.timer.span(PDM):
            self.drafts = self.proposer.propose(self.tree.draft_logits(plan), plan)
        if self.level_laws is not None:
            laws = [self.drafts.laws[node] for node in plan.levels[-1].ids]
            message = self.level_laws.write(laws, Stamp(self.request, plan.epoch, plan.drafted))
            self.posted = self.transport.post([Operation("send", message.data, self.num_stages - 1)])

    def _take(self, plan: TreePlan, schedule: TreeSchedule) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Waits for the states that the stages send in this cycle."""
        self.arriving.wait()
        for number, message in self.arrivals.items():
            level = plan.level_at(number)
            assert level is not None
            states = message.open(Stamp(self.request, plan.epoch, level.position))[:, None]
            self.tree.receive(level.ids, dict(zip(self.anchors_of[number], states, strict=True)))
