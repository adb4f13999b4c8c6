"""Tiny EAGLE-3 decoders: a random target in one piece, and a drafter of chosen accuracy."""

import copy
from pathlib import Path

import torch

from spd_lightning.inference.eagle.block_stage import BlockStage
from spd_lightning.inference.eagle.chain_session import ChainSession
from spd_lightning.inference.eagle.rounds import decode_in_rounds
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.stage_loading import StageModules
from spd_lightning.inference.stats import DecodeStats
from spd_lightning.inference.stopping import StopCondition
from spd_lightning.inference.verify import make_proposer, make_verifier
from spd_lightning.modules.checkpoint import drafter_record, save_drafter
from spd_lightning.modules.draft_vocab import DraftVocab
from spd_lightning.modules.target import FrozenTarget, read_target_shape
from spd_lightning.modules.tiny_target import NUM_TOKENS, save_tiny_target
from spd_lightning.modules.tokenizer import load_tokenizer, tokenizer_record
from tests.inference.conftest import TOKENIZER
from tests.modules.eagle.drafters import make_eagle

CAPACITY = 160


def whole_stage(target: FrozenTarget, anchors, max_block: int, capacity: int = CAPACITY) -> BlockStage:
    """A stage over copies of a whole model's layers."""
    model = target.model
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * target.shape.num_layers
    modules = StageModules(
        layers=copy.deepcopy(model.model.layers),
        embedding=model.model.embed_tokens,
        norm=model.model.norm,
        head=model.lm_head,
        rotary=model.model.rotary_emb,
        config=model.config,
        layer_types=tuple(kinds),
        vocab_size=target.shape.vocab_size,
    )
    return BlockStage(modules, anchors, capacity, max_block)


class EagleBench:
    """A target, a drafter and their caches; one decode after the other."""

    def __init__(self, target: FrozenTarget, draft_length: int, drafter=None, num_tokens: int = NUM_TOKENS) -> None:
        self.target, self.draft_length, self.num_tokens = target, draft_length, num_tokens
        self.drafter = drafter or make_eagle(target.shape.num_layers, target.head_weight.dtype)
        self.stage = whole_stage(target, self.drafter.config.anchors, draft_length + 1)
        self.session = ChainSession(self.drafter, target.model.model.embed_tokens, CAPACITY)

    def decode(self, prompt, params=None, proposer=None, verifier=None, eos=()) -> tuple[list[int], DecodeStats]:
        params = params or SamplingParams(24)
        ids = self.drafter.draft_token_ids
        stats, stop = DecodeStats(1), StopCondition(eos, params.max_new_tokens, params.stop, TOKENIZER)
        proposer = proposer or make_proposer(params, ids)
        verifier = verifier or make_verifier(params, self.num_tokens, ids)
        rounds = decode_in_rounds(self.stage, self.session, proposer, verifier, self.draft_length, prompt, stop, stats)
        return list(rounds), stats


def save_eagle_folders(root: Path, family: str = "qwen3_5", name: str = "eagle") -> tuple[str, str]:
    """Writes a drafter and its target below `root` and returns both folders; a target that is there is used."""
    target = root / "target"
    if not target.exists():
        save_tiny_target(target, family, 8)
    drafter = make_eagle(8, torch.float32)
    record = drafter_record(
        drafter.config,
        target_name=str(target),
        target=read_target_shape(str(target)),
        tokenizer=tokenizer_record(load_tokenizer(str(target)), [258]),
        draft_vocab=DraftVocab(tuple(drafter.draft_token_ids.tolist())),
        metrics={"val/s0_k7": 1.5},
    )
    save_drafter(root / name, drafter.state_dict(), record)
    return str(root / name), str(target)
