"""The rank of a stage; the last one verifies as well. Knows neither processes nor files."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from spd_lightning.inference.coordinator import CycleOutcome
from spd_lightning.inference.runtime.distributed import Operation, Posted, Transport
from spd_lightning.inference.runtime.rank import Mailbox, Rank, law_slots
from spd_lightning.inference.runtime.wire import Request, Stamp
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.schedule import CyclePlan, PipelineSchedule, Rollback, Verdict
from spd_lightning.inference.stage import Stage, StageOutput
from spd_lightning.inference.timing import VERIFY, stage_span
from spd_lightning.inference.token_scores import TokenScore, TokenScores, scored
from spd_lightning.inference.verify import DraftProposal, Verifier


class StageRank(Rank):
    """A stage; the last one also draws and verifies. A `Pipeline` and a `Target` of its own part.

    Args:
        transport: to the other ranks.
        stage: the layers and caches.
        num_stages: `n`.
        make_request_verifier: for the sampling parameters of a request.
        draft_vocab_size: rows of the draft head.
        num_tokens: `len(tokenizer)`; rows of logits beyond are padding.
    """

    def __init__(
        self,
        transport: Transport,
        stage: Stage,
        num_stages: int,
        make_request_verifier: Callable[[SamplingParams], Verifier],
        draft_vocab_size: int,
        num_tokens: int,
    ) -> None:
        super().__init__(transport, num_stages)
        self.stage = stage
        self.is_last = stage.number == num_stages
        self.make_request_verifier = make_request_verifier
        self.draft_vocab_size = draft_vocab_size
        self.num_tokens = num_tokens
        self.noted: TokenScores | None = None
        weight = next(stage.modules.layers.parameters())
        dim, shape = stage.modules.config.hidden_size, (weight.dtype, weight.device)
        self.device = weight.device
        self.inbox, self.outbox = Mailbox(1, dim, *shape), Mailbox(1, dim, *shape)
        self.anchors = Mailbox(len(stage.taps), dim, *shape)

    def begin(self, request: Request) -> None:
        self._begin(request)
        self.verifier = scored(self.make_request_verifier(request.params), self.noted)
        self.laws = law_slots(request, self.num_stages, self.draft_vocab_size, self.device)

    def _begin(self, request: Request) -> None:
        """What chains and trees have in common."""
        super().begin(request)
        self.noted = None if request.num_top is None else TokenScores(self.num_tokens, request.num_top)

    def rollback(self, rollback: Rollback) -> None:
        self.stage.rollback(rollback.length)

    def prefill(self, prompt: Sequence[int]) -> int:
        self._announce("the prefill")
        return self._run_block(prompt, 0, has_drafter=True)

    def forward(self, tokens: Sequence[int], position: int) -> int:
        self._announce(f"position {position} (plain decoding)")
        return self._run_block(tokens, position, has_drafter=False)

    def _run_cycle(self, plan: CyclePlan, schedule: PipelineSchedule) -> CycleOutcome:
        position, number = plan.position_at(self.stage.number), self.stage.number
        operations: list[Operation] = []
        logits: Tensor | None = None
        if position is not None:
            stamp = Stamp(self.request, plan.epoch, position)
            if number == 1:
                entering = torch.tensor([[schedule.tokens[position]]], device=self.device)
            else:
                entering = self.inbox.last.open(stamp)
            logits, operations = self._run_stage(entering, stamp, has_drafter=True)
        if number > 1 and plan.position_at(number - 1) is not None:
            operations.append(Operation("receive", self.inbox.next().data, self.transport.rank - 1))
        self.posted = self.transport.post(operations)
        verdict = self._verify(plan, schedule, logits) if self.is_last else None
        return self._end_cycle(plan, verdict=verdict)

    def _verify(self, plan: CyclePlan, schedule: PipelineSchedule, logits: Tensor | None) -> Verdict | None:
        """Takes this cycle's draft in, if drafts come with a law, and judges the due one."""
        law: Posted | None = None
        if self.laws is not None:
            message = self.laws.at(plan.drafted)
            law = self.transport.post([Operation("receive", message.data, self.num_stages)])
            if plan.judged == plan.drafted:
                law.wait()
        verdict = None
        if plan.judged is not None:
            assert logits is not None
            if self.laws is None:
                proposal = DraftProposal(schedule.tokens[plan.judged])
            else:
                # Since its flush the draft has come one cycle after the other, so it is of this epoch.
                proposal = self.laws.read(Stamp(self.request, plan.epoch, plan.judged))
            with self.transport.timer.span(VERIFY):
                verdict = self.verifier.judge(logits, proposal, plan.judged)
        if law is not None:
            law.wait()
        return verdict

    def _run_block(self, tokens: Sequence[int], position: int, has_drafter: bool) -> int:
        """A prompt, or one token of plain decoding, through all stages one after the other."""
        self.settle()
        if position == 0:
            self.stage.clear()
        stamp = Stamp(self.request, 0, position)
        if self.stage.number == 1:
            entering = torch.tensor([list(tokens)], device=self.device)
        else:
            message = self.inbox.next(len(tokens))
            self.transport.post([Operation("receive", message.data, self.transport.rank - 1)]).wait()
            entering = message.open(stamp)
        logits, operations = self._run_stage(entering, stamp, has_drafter)
        self.posted = self.transport.post(operations)
        newest = position + len(tokens) - 1
        if logits is None:
            return self._end_block(newest)
        return self._end_block(newest, self.verifier.draw(logits, newest + 1))

    def _score(self, position: int | None) -> TokenScore | None:
        return None if self.noted is None or position is None else self.noted.by_position.pop(position, None)

    def _run_stage(self, entering: Tensor, stamp: Stamp, has_drafter: bool) -> tuple[Tensor | None, list[Operation]]:
        """Advances tokens; the last one's logits, and what there is to send."""
        with self.transport.timer.span(stage_span(self.stage.number)):
            output = self.stage.run(entering, stamp.position)
        return output.logits, self._to_send(output, stamp, has_drafter)

    def _to_send(self, output: StageOutput, stamp: Stamp, has_drafter: bool) -> list[Operation]:
        """Hidden states for the next stage, anchors for the drafter."""
        count, operations = output.hidden.shape[1], list[Operation]()
        if not self.is_last:
            message = self.outbox.next(count)
            message.fill(stamp, output.hidden)
            operations.append(Operation("send", message.data, self.transport.rank + 1))
        if output.anchors and has_drafter:
            message = self.anchors.next(count)
            message.fill(stamp, *output.anchors.values())
            operations.append(Operation("send", message.data, self.num_stages))
        return operations
