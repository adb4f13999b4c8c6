"""Distillation losses over the draft vocabulary, chunked so that no full-vocabulary logits of a batch exist.

Knows flat lists of supervised positions; no sequences, rows or fill levels (design §4, "Big vocabularies").
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LossName = Literal["kl", "reverse_kl", "tv"]
CHUNK_ELEMENTS = 2**24
"""Logits held at once, a vocabulary row times positions: 64 MiB in float32."""


def chunk_size(vocab: int) -> int:
    """Positions per chunk for logits of this width."""
    return max(1, CHUNK_ELEMENTS // vocab)


def kl_loss(
    draft_logits: Float[Tensor, "positions draft_vocab"],
    target_logits: Float[Tensor, "positions draft_vocab"],
    log_normalizer: Float[Tensor, " positions"] | None,
) -> Float[Tensor, ""]:
    """Summed `KL(P || Q)`, the target law `P` renormalised on the draft vocabulary."""
    del log_normalizer
    target_logs = F.log_softmax(target_logits, dim=-1)
    return (target_logs.exp() * (target_logs - F.log_softmax(draft_logits, dim=-1))).sum()


def reverse_kl_loss(
    draft_logits: Float[Tensor, "positions draft_vocab"],
    target_logits: Float[Tensor, "positions draft_vocab"],
    log_normalizer: Float[Tensor, " positions"] | None,
) -> Float[Tensor, ""]:
    """Summed `KL(Q || P)`, the target law `P` renormalised on the draft vocabulary."""
    del log_normalizer
    draft_logs = F.log_softmax(draft_logits, dim=-1)
    return (draft_logs.exp() * (draft_logs - F.log_softmax(target_logits, dim=-1))).sum()


def tv_loss(
    draft_logits: Float[Tensor, "positions draft_vocab"],
    target_logits: Float[Tensor, "positions draft_vocab"],
    log_normalizer: Float[Tensor, " positions"] | None,
) -> Float[Tensor, ""]:
    """Summed total variation `1 - sum_v min(P_v, Q_v)`, with `P` over the full vocabulary.

    Args:
        draft_logits: the drafter's.
        target_logits: the target's at the draft ids.
        log_normalizer: log-sum-exp of the target's logits over the full vocabulary.
    """
    assert log_normalizer is not None
    target_probs = (target_logits - log_normalizer[:, None]).exp()
    overlap = torch.minimum(target_probs, F.softmax(draft_logits, dim=-1))
    return draft_logits.shape[0] - overlap.sum()


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "kl": kl_loss,
    "reverse_kl": reverse_kl_loss,
    "tv": tv_loss,
}


@dataclass(frozen=True)
class TargetHead:
    """The target's head as the losses need it.

    Attributes:
        weight: all head rows, `vocab dim`.
        draft_rows: the rows of the draft vocabulary, `draft_vocab dim`, in its order.
        num_tokens: ids that the tokenizer knows; the rows beyond are padding and get no probability.
    """

    weight: Float[Tensor, "vocab dim"]
    draft_rows: Float[Tensor, "draft_vocab dim"]
    num_tokens: int

    def logits(self, states: Float[Tensor, "positions dim"]) -> Float[Tensor, "positions tokens"]:
        """Full-vocabulary logits, float32 or wider, computed in the target's own dtype."""
        with torch.autocast(states.device.type, enabled=False):
            return wide(states @ self.weight[: self.num_tokens].T)

    def draft_logits(self, states: Float[Tensor, "positions dim"]) -> Float[Tensor, "positions draft_vocab"]:
        """Logits at the draft ids, computed like `logits`."""
        with torch.autocast(states.device.type, enabled=False):
            return wide(states @ self.draft_rows.T)


def wide(logits: Tensor) -> Tensor:
    """Logits in the precision that a softmax needs: float32, or float64 where they are."""
    return logits if logits.dtype == torch.float64 else logits.float()


@torch.no_grad()
def log_normalizers(head: TargetHead, states: Float[Tensor, "positions dim"]) -> Float[Tensor, " positions"]:
    """Log-sum-exp of the target's logits over the full vocabulary, in chunks."""
    chunks = states.split(chunk_size(head.num_tokens))
    return torch.cat([head.logits(chunk).logsumexp(dim=-1) for chunk in chunks])


@torch.no_grad()
def full_argmax(head: TargetHead, states: Float[Tensor, "positions dim"]) -> Int[Tensor, " positions"]:
    """The target's greedy token over the full vocabulary, in chunks."""
    return torch.cat([head.logits(chunk).argmax(dim=-1) for chunk in states.split(chunk_size(head.num_tokens))])


def distillation_loss(
    name: LossName,
    drafter_states: Float[Tensor, "positions dim"],
    draft_head: Float[Tensor, "draft_vocab dim"],
    target_states: Float[Tensor, "positions dim"],
    head: TargetHead,
) -> Float[Tensor, ""]:
    """The loss summed over positions; each chunk's logits live only in its forward and again in its backward.

    Args:
        name: `kl`, `reverse_kl` or `tv`.
        drafter_states: the drafter's normed outputs at supervised positions, at least one.
        draft_head: the drafter's head rows.
        target_states: the target's final-normed states at the same positions.
        head: the target's head.
    """
    loss = LOSSES[name]

    def chunk_loss(drafter_chunk: Tensor, target_chunk: Tensor, normalizer: Tensor | None) -> Tensor:
        return loss(wide(F.linear(drafter_chunk, draft_head)), head.draft_logits(target_chunk), normalizer)

    size = chunk_size(draft_head.shape[0])
    target_chunks = target_states.split(size)
    normalizers = [log_normalizers(head, chunk) if name == "tv" else None for chunk in target_chunks]
    chunks = zip(drafter_states.split(size), target_chunks, normalizers, strict=True)
    parts = [checkpoint(chunk_loss, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return torch.stack(parts).sum()
