"""The rank of the drafter, which runs at the same time as the stages. Knows neither processes nor files."""

from collections.abc import Sequence

import torch
from torch import Tensor

from spd_lightning.inference.coordinator import CycleOutcome
from spd_lightning.inference.drafting import DraftSession
from spd_lightning.inference.runtime.distributed import Operation, Posted, Transport
from spd_lightning.inference.runtime.rank import Mailbox, Rank, law_slots
from spd_lightning.inference.runtime.wire import Message, Request, Stamp
from spd_lightning.inference.schedule import CyclePlan, PipelineSchedule, Rollback
from spd_lightning.inference.timing import PDM
from spd_lightning.inference.verify import make_proposer


class DraftRank(Rank):
    """The drafter. A `Pipeline` and a `Target` of its own part, which in plain decoding is nothing.

    Args:
        transport: to the other ranks.
        session: the drafter and its caches.
    """

    def __init__(self, transport: Transport, session: DraftSession) -> None:
        layout = session.drafter.layout
        super().__init__(transport, layout.num_stages)
        self.session = session
        self.device = session.states.device
        ends, dim, dtype = layout.stage_ends, session.states.shape[-1], session.states.dtype
        self.anchors_of = {
            number: [anchor for anchor in session.anchors if ends[number - 1] < anchor <= ends[number]]
            for number in range(1, layout.num_stages + 1)
        }
        """Anchors that each stage sends, by its number; stages without any are left out."""
        self.anchors_of = {number: anchors for number, anchors in self.anchors_of.items() if anchors}
        self.mailboxes = {
            number: Mailbox(len(anchors), dim, dtype, self.device) for number, anchors in self.anchors_of.items()
        }
        steps = (self._draft, self._take)
        self.steps = steps if layout.drafts_first else steps[::-1]
        self.arrivals: dict[int, Message] = {}
        self.arriving = transport.post(())
        self.draft = -1

    def begin(self, request: Request) -> None:
        super().begin(request)
        drafter = self.session.drafter
        self.proposer = make_proposer(request.params, drafter.draft_token_ids)
        self.laws = law_slots(request, self.num_stages, drafter.config.draft_vocab_size, self.device)

    def prefill(self, prompt: Sequence[int]) -> int:
        self._announce("the prefill")
        self.settle()
        self.session.clear()
        arrivals = {number: mailbox.next(len(prompt)) for number, mailbox in self.mailboxes.items()}
        for number, message in arrivals.items():  # one after the other, as the stages run
            self._receive({number: message}).wait()
        stamp, anchors = Stamp(self.request, 0, 0), dict[int, Tensor]()
        for number, message in arrivals.items():
            anchors |= zip(self.anchors_of[number], message.open(stamp)[:, None], strict=True)
        self.session.prefill(torch.tensor([list(prompt)], device=self.device), anchors)
        return self._end_block(len(prompt) - 1)

    def forward(self, tokens: Sequence[int], position: int) -> int:
        self._announce(f"position {position} (plain decoding)")
        return self._end_block(position + len(tokens) - 1)

    def _run_cycle(self, plan: CyclePlan, schedule: PipelineSchedule) -> CycleOutcome:
        self.arrivals = {
            number: mailbox.next() for number, mailbox in self.mailboxes.items() if plan.position_at(number) is not None
        }
        self.arriving = self._receive(self.arrivals)
        for step in self.steps:
            step(plan, schedule)
        return self._end_cycle(plan, draft=self.draft)

    def rollback(self, rollback: Rollback) -> None:
        """Nothing: the rows of what is in flight are made anew in every cycle."""

    def _draft(self, plan: CyclePlan, schedule: PipelineSchedule) -> None:
        with self.transport.timer.span(PDM):
            logits = self.session.draft_logits(plan, schedule.tokens[plan.newest])
            proposal = self.proposer.propose(logits, plan.drafted)
        self.draft = proposal.token
        if self.laws is not None:
            message = self.laws.write(proposal, Stamp(self.request, plan.epoch, plan.drafted))
            self.posted = self.transport.post([Operation("send", message.data, self.num_stages - 1)])

    def _take(self, plan: CyclePlan, schedule: PipelineSchedule) -> None:
        """Waits for the states that the stages send in this cycle."""
        self.arriving.wait()
        for number, message in self.arrivals.items():
            position = plan.position_at(number)
            assert position is not None
            states = message.open(Stamp(self.request, plan.epoch, position))[:, None]
            self.session.receive(position, dict(zip(self.anchors_of[number], states, strict=True)))

    def _receive(self, arrivals: dict[int, Message]) -> Posted:
        return self.transport.post([Operation("receive", m.data, number - 1) for number, m in arrivals.items()])
