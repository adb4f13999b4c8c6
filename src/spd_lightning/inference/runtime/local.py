"""All roles in one process, one after the other: the reference, and the way on a single device."""

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from spd_lightning.inference.coordinator import CycleOutcome, decode
from spd_lightning.inference.drafting import DraftSession
from spd_lightning.inference.prefill import take_prompt
from spd_lightning.inference.runtime.interface import Method, OneProcess
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.schedule import CyclePlan, PipelineSchedule, Rollback
from spd_lightning.inference.stage import Stage
from spd_lightning.inference.stats import DecodeStats
from spd_lightning.inference.stopping import StopCondition
from spd_lightning.inference.timing import (
    NO_TIMER,
    PDM,
    VERIFY,
    CycleTimer,
    CycleTimes,
    Timer,
    device_seconds,
    stage_span,
)
from spd_lightning.inference.token_scores import TokenScores, scored
from spd_lightning.inference.tree.drafting import TreeDraftSession
from spd_lightning.inference.tree.pipeline import TreePipeline
from spd_lightning.inference.tree.schedule import TreeShape, schedule_maker
from spd_lightning.inference.tree.stage import TreeStage
from spd_lightning.inference.tree.verify import make_tree_proposer, make_tree_verifier, scored_candidates
from spd_lightning.inference.verify import DraftProposal, Proposer, Verifier, make_proposer, make_verifier
from spd_lightning.modules.drafter import PipelineDraftModule
from spd_lightning.modules.target import TargetDtype


class LocalPipeline:
    """A `Pipeline` of objects in this process.

    Args:
        stages: all stages, first to last.
        session: the drafter.
        proposer: makes a token of draft logits.
        verifier: judges drafts by the last stage's logits.
        timer: is told where the time of a cycle goes.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        session: DraftSession,
        proposer: Proposer,
        verifier: Verifier,
        timer: Timer = NO_TIMER,
    ) -> None:
        self.stages = stages
        self.session = session
        self.proposer = proposer
        self.verifier = verifier
        self.timer = timer
        self.device = session.states.device
        self.proposals: dict[int, DraftProposal] = {}
        self.entering: dict[int, Tensor] = {}
        """What each stage takes in next, by its number: the previous stage's last output."""
        self.logits: Tensor | None = None
        """What the last stage said of the token that left it last."""
        # Over ranks, a draft that comes first is made while the stages run.
        steps = (self._draft, self._run_stages)
        self.steps = steps if session.layout.drafts_first else steps[::-1]

    def prefill(self, prompt: Sequence[int]) -> int:
        self.proposals.clear()
        return self.verifier.draw(take_prompt(self.stages, self.session, prompt), len(prompt))

    def cycle(self, schedule: PipelineSchedule) -> CycleOutcome:
        plan = schedule.plan()
        newest = schedule.tokens[plan.newest]
        with self.timer.cycle(plan):
            for step in self.steps:
                step(plan, newest)
            draft, verdict = self.proposals[plan.drafted].token, None
            if plan.judged is not None:
                assert self.logits is not None
                with self.timer.span(VERIFY):
                    verdict = self.verifier.judge(self.logits, self.proposals.pop(plan.judged), plan.judged)
        return CycleOutcome(draft, verdict)

    def _draft(self, plan: CyclePlan, newest: int) -> None:
        """Proposes the token behind the newest one."""
        with self.timer.span(PDM):
            logits = self.session.draft_logits(plan, newest)
            self.proposals[plan.drafted] = self.proposer.propose(logits, plan.drafted)

    def _run_stages(self, plan: CyclePlan, newest: int) -> None:
        """Advances every token in flight by a stage, the oldest first, so that no output is overwritten before its use."""
        for stage in reversed(self.stages):
            position = plan.position_at(stage.number)
            if position is None:
                continue
            entering = (
                torch.tensor([[newest]], device=self.device) if stage.number == 1 else self.entering[stage.number]
            )
            with self.timer.span(stage_span(stage.number)):
                output = stage.run(entering, position)
            self.entering[stage.number + 1] = output.hidden
            self.session.receive(position, output.anchors)
            if output.logits is not None:
                self.logits = output.logits

    def rollback(self, rollback: Rollback) -> None:
        self.proposals.clear()
        for stage in self.stages:
            stage.rollback(rollback.length)

    def abandon(self, schedule: PipelineSchedule) -> None:
        """Nothing is under way between two cycles."""


class LocalRuntime(OneProcess):
    """All stages and the drafter of a decoder in this process.

    Args:
        stages: all stages, first to last.
        session: the drafter.
        num_tokens: `len(tokenizer)`.
        shape: of the trees that it can decode with; none without trees.
    """

    def __init__(
        self, stages: Sequence[Stage], session: DraftSession, num_tokens: int, shape: TreeShape | None = None
    ) -> None:
        super().__init__(stages, num_tokens, session.states.device, shape)
        self.session = session
        self.draft_token_ids = session.drafter.draft_token_ids
        self.timer: Timer = NO_TIMER
        if shape is not None:
            self.tree_stages = [TreeStage(stage, len(stages), shape.refill_width) for stage in stages]
            self.tree_session = TreeDraftSession(session, shape.refill_width)

    def start_timing(self) -> CycleTimer:
        """A timer of all cycles from now on."""
        self.timer = CycleTimer(lambda: device_seconds(self.device))
        return self.timer

    def times_of_ranks(self, mine: CycleTimer) -> list[Sequence[CycleTimes]]:
        """Each rank's times of the same cycles; this process is one."""
        return [mine.cycles]

    @classmethod
    def load(
        cls,
        drafter: PipelineDraftModule,
        target: str,
        num_tokens: int,
        capacity: int,
        dtype: TargetDtype = "auto",
        device: str = "cpu",
        shape: TreeShape | None = None,
    ) -> "LocalRuntime":
        """Loads all stages of a target, and readies the drafter.

        Args:
            drafter: the drafter.
            target: folder or hub id.
            num_tokens: `len(tokenizer)`.
            capacity: positions that the caches hold.
            dtype: of target and drafter; `auto` keeps the target checkpoint's.
            device: where everything runs.
            shape: of trees, or none.

        Raises:
            ValueError: if the target cannot be loaded.
        """
        layout = drafter.layout
        stages = [
            Stage.load(target, layout, number, capacity, dtype, device) for number in range(1, layout.num_stages + 1)
        ]
        embedding = stages[0].modules.embedding
        assert embedding is not None
        drafter.to(device=device, dtype=embedding.weight.dtype)
        return cls(stages, DraftSession(drafter, embedding, capacity), num_tokens, shape)

    def decode(
        self,
        method: Method,
        prompt: Sequence[int],
        params: SamplingParams,
        stop: StopCondition,
        stats: DecodeStats,
        scores: TokenScores | None = None,
    ) -> Generator[int]:
        ids, num_stages = self.draft_token_ids, len(self.stages)
        match method:
            case "plain":
                return self._plain(prompt, params, stop, scores)
            case "pipelined":
                verifier = scored(make_verifier(params, self.num_tokens, ids), scores)
                chain = LocalPipeline(self.stages, self.session, make_proposer(params, ids), verifier, self.timer)
                return decode(chain, num_stages, prompt, stop, stats)
            case "tree":
                assert self.shape is not None
                judge = scored_candidates(make_tree_verifier(params, self.num_tokens, ids), scores)
                proposer = make_tree_proposer(params, ids)
                tree = TreePipeline(self.tree_stages, self.tree_session, proposer, judge, self.timer)
                return decode(tree, num_stages, prompt, stop, stats, schedule_maker(self.shape))
