"""Tiny pipelines: a random target cut into stages, a drafter of chosen accuracy, and what ties them together."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from spd_lightning.inference.coordinator import decode
from spd_lightning.inference.drafting import DraftSession
from spd_lightning.inference.runtime.local import LocalPipeline
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.stage import Stage
from spd_lightning.inference.stage_loading import StageModules
from spd_lightning.inference.stats import DecodeStats
from spd_lightning.inference.stopping import StopCondition
from spd_lightning.inference.verify import DraftProposal, make_proposer, make_verifier
from spd_lightning.modules.features import FeatureLayout
from spd_lightning.modules.target import FrozenTarget
from spd_lightning.modules.tiny_target import NUM_TOKENS, byte_tokenizer
from tests.modules.conftest import make_drafter

CAPACITY = 160
GREEDY = SamplingParams()
TOKENIZER = byte_tokenizer()


def cut(target: FrozenTarget, layout: FeatureLayout, capacity: int = CAPACITY) -> list[Stage]:
    """Stages over copies of a whole model's layers."""
    model = target.model
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * target.shape.num_layers
    stages = []
    for number in range(1, layout.num_stages + 1):
        first, last = layout.stage_ends[number - 1 : number + 1]
        layers = copy.deepcopy(model.model.layers[first:last])
        for index, layer in enumerate(layers):
            for part in (getattr(layer, "self_attn", None), getattr(layer, "linear_attn", None)):
                if part is not None:
                    part.layer_idx = index
        modules = StageModules(
            layers=layers,
            embedding=model.model.embed_tokens if number == 1 else None,
            norm=model.model.norm if number == layout.num_stages else None,
            head=model.lm_head if number == layout.num_stages else None,
            rotary=model.model.rotary_emb,
            config=model.config,
            layer_types=tuple(kinds[first:last]),
            vocab_size=target.shape.vocab_size,
        )
        stages.append(Stage(modules, number, layout.num_stages, first, layout.anchors, capacity))
    return stages


class ScriptedProposer:
    """Right with a given chance, whatever the drafter says: it knows the target's answer in advance."""

    def __init__(self, answer: Sequence[int], accuracy: float, seed: int = 0) -> None:
        self.answer, self.accuracy = list(answer), accuracy
        self.generator = torch.Generator().manual_seed(seed)

    def propose(self, draft_logits: Tensor, position: int) -> DraftProposal:
        right = self.answer[position] if position < len(self.answer) else 0
        if float(torch.rand((), generator=self.generator)) < self.accuracy:
            return DraftProposal(right)
        return DraftProposal(
            (right + 1 + int(torch.randint(NUM_TOKENS - 1, (), generator=self.generator))) % NUM_TOKENS
        )


class RecordingVerifier:
    """Keeps the logits behind every committed token."""

    def __init__(self, inner) -> None:
        self.inner, self.logits = inner, {}

    def draw(self, logits, position):
        self.logits[position] = logits.clone()
        return self.inner.draw(logits, position)

    def judge(self, logits, proposal, position):
        self.logits[position] = logits.clone()
        return self.inner.judge(logits, proposal, position)


def make_pipeline(target, layout, params=GREEDY, proposer=None, drafter=None) -> LocalPipeline:
    drafter = drafter or make_drafter(layout, target.head_weight.dtype)
    session = DraftSession(drafter, target.model.model.embed_tokens, CAPACITY)
    verifier = make_verifier(params, NUM_TOKENS, drafter.draft_token_ids)
    proposer = proposer or make_proposer(params, drafter.draft_token_ids)
    return LocalPipeline(cut(target, layout), session, proposer, RecordingVerifier(verifier))


def run(pipeline, layout, prompt, max_new_tokens, eos=(), stop=()) -> tuple[list[int], DecodeStats, StopCondition]:
    stats, condition = DecodeStats(layout.num_stages), StopCondition(eos, max_new_tokens, stop, TOKENIZER)
    return list(decode(pipeline, layout.num_stages, prompt, condition, stats)), stats, condition
