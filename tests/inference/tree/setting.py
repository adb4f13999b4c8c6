"""Tiny pipelines that decode trees, and proposers that draft at random, sometimes right."""

import random
from collections.abc import Sequence
from typing import Any

import torch

from spd_lightning.inference.coordinator import decode
from spd_lightning.inference.drafting import DraftSession
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.stats import DecodeStats
from spd_lightning.inference.stopping import StopCondition
from spd_lightning.inference.tree.drafting import TreeDraftSession
from spd_lightning.inference.tree.pipeline import TreePipeline
from spd_lightning.inference.tree.schedule import Draft, TreePlan, TreeShape, schedule_maker
from spd_lightning.inference.tree.stage import TreeStage
from spd_lightning.inference.tree.verify import Drafts, make_tree_proposer, make_tree_verifier
from spd_lightning.modules.tiny_target import NUM_TOKENS
from tests.inference.conftest import CAPACITY, GREEDY, TOKENIZER, cut
from tests.modules.conftest import make_drafter


class ScriptedTreeProposer:
    """Random trees: the right path is in a level with a given chance, and any node may have no children."""

    def __init__(self, answer: Sequence[int], accuracy: float, seed: int = 0) -> None:
        self.answer, self.accuracy, self.random = list(answer), accuracy, random.Random(seed)
        self.paths: dict[int, list[int]] = {}

    def propose(self, draft_logits: torch.Tensor, plan: TreePlan) -> Drafts:
        assert draft_logits.shape[0] == plan.num_leaves
        right = self.answer[plan.drafted] if plan.drafted < len(self.answer) else 0
        drafts: list[Draft] = []
        for node in plan.levels[-1].nodes:
            is_next = plan.drafted <= len(self.answer) and node.token == self.answer[plan.newest]
            tokens = self.random.sample(range(NUM_TOKENS), self.random.randrange(plan.width + 1))
            if is_next and self.random.random() < self.accuracy:
                tokens = [token for token in tokens if token != right]
                tokens.insert(self.random.randrange(len(tokens) + 1), right)
            elif is_next:
                tokens = [token for token in tokens if token != right]
            drafts += [Draft(token, node.id, 0.0) for token in tokens]
        chosen = sorted(self.random.sample(range(len(drafts)), min(len(drafts), plan.width)))
        kept = [drafts[index] for index in chosen]
        if self.accuracy == 1.0 and not any(draft.token == right for draft in kept):
            kept = [draft for draft in drafts if draft.token == right][:1] + kept[: plan.width - 1]
        return Drafts(tuple(kept))


class RecordingTreeVerifier:
    """Keeps the logits behind every committed token."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.logits = inner, {}

    def draw(self, logits, position):
        self.logits[position] = logits.clone()
        return self.inner.draw(logits, position)

    def judge_candidates(self, logits, candidates, draft_probs, position):
        self.logits[position] = logits.clone()
        return self.inner.judge_candidates(logits, candidates, draft_probs, position)


def make_tree_pipeline(
    target: Any,
    layout: Any,
    shape: TreeShape,
    params: SamplingParams = GREEDY,
    proposer: Any = None,
    drafter: Any = None,
    capacity: int = CAPACITY,
) -> TreePipeline:
    drafter = drafter or make_drafter(layout, target.head_weight.dtype)
    width = shape.refill_width
    session = DraftSession(drafter, target.model.model.embed_tokens, capacity + width * layout.num_stages)
    stages = [
        TreeStage(stage, layout.num_stages, width)
        for stage in cut(target, layout, capacity + width * layout.num_stages)
    ]
    verifier = make_tree_verifier(params, NUM_TOKENS, drafter.draft_token_ids)
    proposer = proposer or make_tree_proposer(params, drafter.draft_token_ids)
    return TreePipeline(stages, TreeDraftSession(session, width), proposer, RecordingTreeVerifier(verifier))


def run_tree(
    pipeline: TreePipeline,
    layout: Any,
    shape: TreeShape,
    prompt: Sequence[int],
    max_new_tokens: int,
    eos: Sequence[int] = (),
) -> tuple[list[int], DecodeStats]:
    stats, condition = DecodeStats(layout.num_stages), StopCondition(eos, max_new_tokens, (), TOKENIZER)
    tokens = decode(pipeline, layout.num_stages, prompt, condition, stats, schedule_maker(shape))
    return list(tokens), stats
