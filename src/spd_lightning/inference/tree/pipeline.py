"""All roles of a tree decode in one process, one after the other: the reference, and the way on a single device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from spd_lightning.inference.coordinator import CycleOutcome
from spd_lightning.inference.prefill import take_prompt
from spd_lightning.inference.timing import NO_TIMER, PDM, VERIFY, Timer, stage_span
from spd_lightning.inference.tree.drafting import TreeDraftSession
from spd_lightning.inference.tree.schedule import Level, Pruning, TreePlan, TreeSchedule
from spd_lightning.inference.tree.stage import TreeStage
from spd_lightning.inference.tree.verify import Drafts, TreeProposer, TreeVerifier


class TreePipeline:
    """A `Pipeline` of objects in this process.

    Args:
        stages: all stages, first to last.
        session: the drafter.
        proposer: makes candidates of draft logits.
        verifier: judges candidates by the last stage's logits.
        timer: is told where the time of a cycle goes.
    """

    def __init__(
        self,
        stages: Sequence[TreeStage],
        session: TreeDraftSession,
        proposer: TreeProposer,
        verifier: TreeVerifier,
        timer: Timer = NO_TIMER,
    ) -> None:
        self.stages = stages
        self.session = session
        self.proposer = proposer
        self.verifier = verifier
        self.timer = timer
        self.device = session.states.device
        self.drafts = Drafts(())
        self.laws: dict[int, Tensor] = {}
        """Of the children of each live node that has been drafted behind."""
        self.outputs: dict[int, LevelStates] = {}
        """What each stage said last, by its number."""
        self.logits: Tensor | None = None
        """What the last stage said of the root."""
        # Over ranks, a draft that comes first is made while the stages run.
        steps = (self._draft, self._run_stages)
        self.steps = steps if session.layout.drafts_first else steps[::-1]

    def prefill(self, prompt: Sequence[int]) -> int:
        self.laws.clear()
        logits = take_prompt([tree.stage for tree in self.stages], self.session.session, prompt)
        for stage in self.stages:
            stage.start()
        self.session.start()
        return self.verifier.draw(logits, len(prompt))

    def cycle(self, schedule: TreeSchedule) -> CycleOutcome:
        plan, verdict = schedule.plan(), None
        with self.timer.cycle(plan):
            for step in self.steps:
                step(plan)
            if plan.judged is not None:
                assert self.logits is not None
                with self.timer.span(VERIFY):
                    law = self.laws.get(plan.root.id)
                    verdict = self.verifier.judge_candidates(self.logits, plan.candidates, law, plan.judged)
        return CycleOutcome(self.drafts.candidates, verdict)

    def _draft(self, plan: TreePlan) -> None:
        """Proposes the level behind the newest one."""
        with self.timer.span(PDM):
            self.drafts = self.proposer.propose(self.session.draft_logits(plan), plan)
        self.laws |= self.drafts.laws

    def _run_stages(self, plan: TreePlan) -> None:
        """Advances every level in flight by a stage, the root first, so that no output is overwritten before its use."""
        for stage in reversed(self.stages):
            level = plan.level_at(stage.number)
            if level is None:
                continue
            if stage.number == 1:
                entering = torch.tensor([level.tokens], device=self.device)
            else:
                entering = self.outputs[stage.number - 1].of(level)
            with self.timer.span(stage_span(stage.number)):
                output = stage.run(entering, level)
            self.outputs[stage.number] = LevelStates(level, output.hidden)
            self.session.receive(level.ids, output.anchors)
            if output.logits is not None:
                self.logits = output.logits

    def rollback(self, rollback: Pruning) -> None:
        for stage in self.stages:
            stage.prune(rollback)
        self.session.prune(rollback)
        self.laws = {node: law for node, law in self.laws.items() if node in rollback.kept}

    def abandon(self, schedule: TreeSchedule) -> None:
        """Nothing is under way between two cycles."""


class LevelStates:
    """States of a level's nodes, of which a verdict may have dropped some since.

    Args:
        level: as it was.
        states: one row a node in their order.
    """

    def __init__(self, level: Level, states: Tensor) -> None:
        self.ids = level.ids
        self.states = states

    def of(self, level: Level) -> Tensor:
        """The states of the nodes that are left."""
        if level.ids == self.ids:
            return self.states
        return self.states[..., [self.ids.index(node) for node in level.ids], :]
