"""EAGLE-3 drafters for tiny targets, and the naive twin of their training."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from spd_lightning.modules.eagle.eagle_config import Eagle3Config
from spd_lightning.modules.eagle.eagle_drafter import Eagle3Drafter


def make_eagle(num_layers: int = 8, dtype: torch.dtype = torch.float64, **overrides) -> Eagle3Drafter:
    """A drafter with random gains too, so that a forgotten norm shows."""
    settings = dict(
        num_layers=num_layers,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        draft_vocab_size=40,
    )
    drafter = Eagle3Drafter(Eagle3Config(**settings | overrides))
    generator = torch.Generator().manual_seed(1)
    vocab, dim = drafter.lm_head.weight.shape
    drafter.initialize(
        torch.arange(vocab) * 3, torch.ones(dim), torch.randn(vocab, dim, generator=generator), generator
    )
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return drafter.to(dtype)


def unrolled_mask(bases: Sequence[int]) -> Tensor:
    """The pattern over all steps at once, from its definition: entry by entry, rows and columns ordered by step.

    Args:
        bases: how many base positions each step has.
    """
    entries = [(step, base) for step, count in enumerate(bases) for base in range(count)]
    mask = torch.zeros(len(entries), len(entries), dtype=torch.bool)
    for row, (step, base) in enumerate(entries):
        for column, (other_step, other_base) in enumerate(entries):
            if other_step == 0:
                mask[row, column] = other_base <= base
            else:
                mask[row, column] = other_base == base and other_step <= step
    return mask


def dense_unrolled_attention(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """The naive twin of `unrolled_attention`: one softmax over all keys with the whole mask."""
    mask = unrolled_mask([key.shape[2] for key in keys])[-keys[-1].shape[2] :]
    return F.scaled_dot_product_attention(
        query, torch.cat(list(keys), dim=2), torch.cat(list(values), dim=2), attn_mask=mask, enable_gqa=True
    )
