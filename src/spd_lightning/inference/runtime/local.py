"""All roles in one process, one after the other: the reference, and the way on a single device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from spd_lightning.inference.coordinator import CycleOutcome
from spd_lightning.inference.drafting import DraftSession
from spd_lightning.inference.schedule import PipelineSchedule, Rollback, Verdict
from spd_lightning.inference.stage import Stage
from spd_lightning.inference.verify import DraftProposal, Proposer, Verifier


class LocalPipeline:
    """A `Pipeline` of objects in this process.

    Args:
        stages: all stages, first to last.
        session: the drafter.
        proposer: makes a token of draft logits.
        verifier: judges drafts by the last stage's logits.
    """

    def __init__(self, stages: Sequence[Stage], session: DraftSession, proposer: Proposer, verifier: Verifier) -> None:
        self.stages = stages
        self.session = session
        self.proposer = proposer
        self.verifier = verifier
        self.device = session.states.device
        self.proposals: dict[int, DraftProposal] = {}
        self.entering: dict[int, Tensor] = {}
        """What each stage takes in next, by its number: the previous stage's last output."""

    def prefill(self, prompt: Sequence[int]) -> int:
        self.proposals.clear()
        self.session.clear()
        tokens = torch.tensor([list(prompt)], device=self.device)
        entering, anchors, logits = tokens, {}, None
        for stage in self.stages:
            stage.clear()
            output = stage.run(entering, 0)
            entering, logits = output.hidden, output.logits
            anchors |= output.anchors
        self.session.prefill(tokens, anchors)
        assert logits is not None
        return self.verifier.draw(logits, len(prompt))

    def cycle(self, schedule: PipelineSchedule) -> CycleOutcome:
        plan = schedule.plan()
        newest = schedule.tokens[plan.newest]
        # Drafting reads what earlier cycles left (pre-step); over ranks it runs while the stages do.
        proposal = self.proposer.propose(self.session.draft_logits(plan, newest), plan.drafted)
        self.proposals[plan.drafted] = proposal
        verdict: Verdict | None = None
        for stage in reversed(self.stages):  # the oldest token first, so that no output is overwritten before its use
            position = plan.position_at(stage.number)
            if position is None:
                continue
            entering = (
                torch.tensor([[newest]], device=self.device) if stage.number == 1 else self.entering[stage.number]
            )
            output = stage.run(entering, position)
            self.entering[stage.number + 1] = output.hidden
            self.session.receive(position, output.anchors)
            if output.logits is not None and plan.judged is not None:
                judged = self.proposals.pop(plan.judged)
                verdict = self.verifier.judge(output.logits, judged, plan.judged)
        return CycleOutcome(proposal.token, verdict)

    def rollback(self, rollback: Rollback) -> None:
        self.proposals.clear()
        for stage in self.stages:
            stage.rollback(rollback.length)
