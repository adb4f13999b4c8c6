"""Drafts beside the target's tokens, for people to look at. Knows no tokenizer and no logger."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spd_lightning.modules.losses import TargetHead, full_argmax

NUM_SAMPLES = 16
"""Draft samples that a validation takes from its first batch."""


class DraftSamples(NamedTuple):
    """Some drafts of a batch.

    Attributes:
        positions: (sequence in the batch, position) of each sample; the draft is for the position after it.
        target_tokens: the target's greedy tokens.
        draft_tokens: the drafter's greedy tokens, as target ids.
        draft_probs: the drafter's probability of its token.
    """

    positions: Int[Tensor, "samples 2"]
    target_tokens: Int[Tensor, " samples"]
    draft_tokens: Int[Tensor, " samples"]
    draft_probs: Float[Tensor, " samples"]


@torch.no_grad()
def take_samples(
    count: int,
    supervised: Bool[Tensor, "batch seq"],
    drafter_states: Float[Tensor, "positions dim"],
    draft_head: Float[Tensor, "draft_vocab dim"],
    draft_token_ids: Int[Tensor, " draft_vocab"],
    target_states: Float[Tensor, "positions dim"],
    head: TargetHead,
) -> DraftSamples:
    """At most `count` samples, spread evenly over the supervised positions, of which there is at least one."""
    total = len(target_states)
    chosen = torch.linspace(0, total - 1, min(count, total), device=target_states.device).long()
    draft_probs, drafts = F.linear(drafter_states[chosen], draft_head).float().softmax(dim=-1).max(dim=-1)
    return DraftSamples(
        positions=supervised.nonzero()[chosen],
        target_tokens=full_argmax(head, target_states[chosen]),
        draft_tokens=draft_token_ids[drafts],
        draft_probs=draft_probs,
    )
