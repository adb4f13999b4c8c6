"""Tiny random targets of every supported family, and drafters and batches to go with them."""

import pytest
import torch

from spd_lightning.modules.drafter import PipelineDraftModule
from spd_lightning.modules.drafter_config import DrafterConfig
from spd_lightning.modules.features import FeatureLayout
from spd_lightning.modules.target import FrozenTarget, target_shape
from spd_lightning.modules.tiny_target import random_model, tiny_config

FAMILIES = ("qwen3_5", "qwen3", "llama")


def make_target(family: str, num_layers: int = 8, dtype: torch.dtype = torch.float64, **overrides) -> FrozenTarget:
    config = tiny_config(family, num_layers, **overrides)
    return FrozenTarget(random_model(config).to(dtype), target_shape(config, "tiny"), "tiny")


def make_drafter(layout: FeatureLayout, dtype: torch.dtype = torch.float64, **overrides) -> PipelineDraftModule:
    """A drafter with random gains too, so that a forgotten norm shows."""
    settings = dict(
        num_stages=layout.num_stages,
        stage_layers=layout.stage_layers,
        anchors=layout.anchors,
        rows=layout.rows,
        schedule=layout.schedule,
        num_spec_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        feature_norm="rms",
        draft_vocab_size=40,
    )
    drafter = PipelineDraftModule(DrafterConfig(**settings | overrides))
    generator = torch.Generator().manual_seed(1)
    vocab, dim = drafter.lm_head.weight.shape
    drafter.initialize(
        torch.arange(vocab) * 3, torch.ones(dim), torch.randn(vocab, dim, generator=generator), generator
    )
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return drafter.to(dtype)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param
