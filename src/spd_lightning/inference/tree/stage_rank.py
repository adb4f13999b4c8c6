"""The rank of a stage while trees are decoded; the last one verifies as well. Knows neither processes nor files."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from spd_lightning.inference.coordinator import CycleOutcome
from spd_lightning.inference.runtime.distributed import Operation, Posted, Transport
from spd_lightning.inference.runtime.rank import Mailbox, level_laws
from spd_lightning.inference.runtime.stage_rank import StageRank
from spd_lightning.inference.runtime.wire import Request, Stamp
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.schedule import Verdict
from spd_lightning.inference.timing import VERIFY, stage_span
from spd_lightning.inference.tree.pipeline import LevelStates
from spd_lightning.inference.tree.schedule import Level, Pruning, TreePlan, TreeSchedule
from spd_lightning.inference.tree.stage import TreeStage
from spd_lightning.inference.tree.verify import TreeVerifier, scored_candidates


class TreeStageRank(StageRank):
    """A stage on trees; the last one also draws and verifies. A `Pipeline` of its own part; it is given trees only.

    Args:
        transport: to the other ranks.
        tree: the layers and caches.
        num_stages: `n`.
        make_request_verifier: for the sampling parameters of a request.
        draft_vocab_size: rows of the draft head.
        num_tokens: `len(tokenizer)`; rows of logits beyond are padding.
    """

    verifier: TreeVerifier

    def __init__(
        self,
        transport: Transport,
        tree: TreeStage,
        num_stages: int,
        make_request_verifier: Callable[[SamplingParams], TreeVerifier],
        draft_vocab_size: int,
        num_tokens: int,
    ) -> None:
        verifier: Any = make_request_verifier
        super().__init__(transport, tree.stage, num_stages, verifier, draft_vocab_size, num_tokens)
        self.tree = tree
        dim, weight = tree.stage.modules.config.hidden_size, next(tree.stage.modules.layers.parameters())
        shape = (weight.dtype, weight.device, transport.max_width)
        self.inbox, self.outbox = Mailbox(1, dim, *shape), Mailbox(1, dim, *shape)
        self.anchors = Mailbox(len(tree.stage.taps), dim, *shape)
        self.arriving: Level | None = None
        """Whose states the previous stage has sent last."""
        self.law_of: dict[int, Tensor] = {}
        """Of the children of each live node that has been drafted behind."""

    def begin(self, request: Request) -> None:
        self._begin(request)
        verifier: Any = self.make_request_verifier(request.params)
        self.verifier = scored_candidates(verifier, self.noted)
        self.law_of.clear()
        self.level_laws = level_laws(request.params, self.draft_vocab_size, self.device)

    def prefill(self, prompt: Sequence[int]) -> int:
        token = super().prefill(prompt)
        self.tree.start()
        return token

    def rollback(self, rollback: Pruning) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.tree.prune(rollback)
        self.law_of = {node: law for node, law in self.law_of.items() if node in rollback.kept}

    def _run_cycle(self, plan: TreePlan, schedule: TreeSchedule) -> CycleOutcome:  # pyright: ignore[reportIncompatibleMethodOverride]
        level, number = plan.level_at(self.stage.number), self.stage.number
        operations: list[Operation] = []
        logits: Tensor | None = None
        if level is not None:
            stamp = Stamp(self.request, plan.epoch, level.position)
            with self.transport.timer.span(stage_span(number)):
                output = self.tree.run(self._entering(level, stamp), level)
            logits, operations = output.logits, self._to_send(output, stamp, has_drafter=True)
        self.arriving = plan.level_at(number - 1)
        if self.arriving is not None:
            data = self.inbox.next(len(self.arriving.nodes)).data
            operations.append(Operation("receive", data, self.transport.rank - 1))
        self.posted = self.transport.post(operations)
        verdict = self._judge(plan, logits) if self.is_last else None
        return self._end_tree_cycle(plan, verdict=verdict)

    def _entering(self, level: Level, stamp: Stamp) -> Tensor:
        if self.stage.number == 1:
            return torch.tensor([level.tokens], device=self.device)
        assert self.arriving is not None
        return LevelStates(self.arriving, self.inbox.last.open(stamp)).of(level)

    def _judge(self, plan: TreePlan, logits: Tensor | None) -> Verdict | None:
        """Takes the laws of this cycle's drafts in, if they come with any, and judges the root's children if due."""
        posted, newest, verdict = Posted((), (), self.transport), plan.levels[-1], None
        if self.level_laws is not None:
            data = self.level_laws.of(len(newest.nodes)).data
            posted = self.transport.post([Operation("receive", data, self.num_stages)])
        if plan.judged is not None:
            assert logits is not None
            law = self.law_of.get(plan.root.id)
            with self.transport.timer.span(VERIFY):
                verdict = self.verifier.judge_candidates(logits, plan.candidates, law, plan.judged)
        posted.wait()
        if self.level_laws is not None:
            stamp = Stamp(self.request, plan.epoch, plan.drafted)
            self.law_of |= zip(newest.ids, self.level_laws.read(len(newest.nodes), stamp), strict=True)
        return verdict
