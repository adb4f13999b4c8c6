"""The attention pattern of the training-time test: what each step of every chain sees. Knows no layers.

A chain begins at a base position `t`. Its step `s` stands at position `t + s` and sees step 0 of the positions up to
`t`, made of the target's own states, and of the later steps `1 .. s` those of its own chain: what the cache holds
while decoding.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = 64
"""Base positions of a chunk. Each step of a chunk costs as many keys, of which every query sees one."""


def unrolled_attention(
    query: Float[Tensor, "batch heads bases head_dim"],
    keys: Sequence[Float[Tensor, "batch kv_heads _ head_dim"]],
    values: Sequence[Float[Tensor, "batch kv_heads _ head_dim"]],
) -> Float[Tensor, "batch heads bases head_dim"]:
    """Exact, in chunks of base positions: over step 0 of all that lies before, and the later steps of the chunk's own.

    About `seq^2 / 2` scores, with a few hundred keys more a query, instead of `steps * seq^2`. A chunk's keys are put
    side by side again in the backward pass, so that they are not kept.

    Args:
        query: of the latest step, one for each base.
        keys: of the steps `0 .. s`, each at the bases that it has, of which later steps have fewer.
        values: as `keys`.
    """
    bases = query.shape[2]
    if len(keys) == 1:
        return F.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True, enable_gqa=True)
    chunks = []
    for start in range(0, bases, CHUNK):
        end = min(start + CHUNK, bases)
        tensors = [query[:, :, start:end]]
        for parts in (keys, values):
            tensors += [parts[0][:, :, :end], *(part[:, :, start:end] for part in parts[1:])]
        chunks.append(checkpoint(_attend_chunk, start, *tensors, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(chunks, dim=2)


def _attend_chunk(start: int, query: Tensor, *keys_and_values: Tensor) -> Tensor:
    """Bases from `start` on; first all keys, then all values, of step 0 up to the chunk's end and of the others in it.

    Query heads that share a key head enter as further queries, so every kernel of every device will do.
    """
    steps, count = len(keys_and_values) // 2, query.shape[2]
    keys, values = (torch.cat(parts, dim=2) for parts in (keys_and_values[:steps], keys_and_values[steps:]))
    before = torch.ones(count, start + count, dtype=torch.bool, device=query.device).tril(start)
    own = torch.eye(count, dtype=torch.bool, device=query.device)
    group = query.shape[1] // keys.shape[1]
    seen = torch.cat([before, *([own] * (steps - 1))], dim=1).repeat(group, 1)
    mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill_(~seen, -torch.inf)
    query = query.unflatten(1, (-1, group)).flatten(2, 3)  # batch kv_heads (group bases) head_dim
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    return out.unflatten(2, (group, count)).flatten(1, 2)
