"""Attention over replicated rows in chunks of query positions, for every device (design §4)."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from spd_lightning.modules.attention.dense import visible_block

CHUNK_OVERHEAD = {"cpu": 256, "cuda": 4096}
"""What starting a chunk costs, in query rows per key head that could be computed instead.

`cpu` fits timings of several lengths, which are flat around the best; `cuda` is an estimate.
"""


class ChunkKeys(torch.autograd.Function):
    """Keys or values of every chunk `[low, end)`: the last row type at `[0, low)`, then all row types in the chunk.

    The second part runs by position and within it by row type. Ordinary slices would fill and add a whole gradient
    per chunk; here each chunk adds only what it read, in float32 at least.
    """

    @staticmethod
    def forward(ctx: Any, x: Float[Tensor, "batch kv_heads rows seq head_dim"], bounds: Sequence[tuple[int, int]]):
        ctx.bounds, ctx.shape = bounds, x.shape
        return tuple(
            torch.cat([x[:, :, -1, :low], x[:, :, :, low:end].transpose(2, 3).flatten(2, 3)], dim=2)
            for low, end in bounds
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *chunks: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        dtype = torch.promote_types(chunks[0].dtype, torch.float32)
        gradient = chunks[0].new_zeros(ctx.shape, dtype=dtype)
        for (low, end), chunk in zip(ctx.bounds, chunks, strict=True):
            near = chunk[:, :, low:].unflatten(2, (end - low, -1))
            gradient[:, :, -1, :low] += chunk[:, :, :low]
            gradient[:, :, :, low:end] += near.transpose(2, 3)
        return gradient.to(chunks[0].dtype), None


def chunk_length(num_query_rows: int, group: int, rows: int, seq: int, device: str) -> int:
    """Query positions per chunk that cost least.

    A query row of a chunk of `C` positions meets about `seq / 2 + (rows - 1/2) C` keys, and starting the chunk costs
    as much as `CHUNK_OVERHEAD` more query rows beside its own `group * num_query_rows * C`. The product of the two is
    smallest at the root taken here; it is flat around it.

    Args:
        num_query_rows: row types that are queries.
        group: query heads per key head.
        rows: row types that are keys.
        seq: positions.
        device: its type.
    """
    overhead = CHUNK_OVERHEAD.get(device, CHUNK_OVERHEAD["cuda"])
    best = math.sqrt(seq / 2 * overhead / (group * num_query_rows * (rows - 0.5)))
    return min(seq, max(16, 16 * round(best / 16)))


def hidden_from_chunk(
    visible_row: Int[Tensor, "batch rows distances"], num_query_rows: int, group: int, length: int, prefix: int
) -> Bool[Tensor, "batch group query_rows length keys"]:
    """What no query of a chunk may see, for every chunk at once: true is hidden.

    Its columns are `prefix` last rows, then all row types from `band` positions before the chunk to its end. A chunk
    with fewer keys before it takes a slice: visibility depends on the distance alone.
    """
    band = visible_row.shape[-1] - 2
    device = visible_row.device
    near = visible_block(
        visible_row,
        torch.arange(length, device=device),
        torch.arange(-band, length, device=device),
        num_query_rows,
        torch.arange(visible_row.shape[1], device=device),
    )
    hidden = ~near.transpose(3, 4).flatten(3, 4)  # batch query_rows length (positions rows)
    return F.pad(hidden, (prefix, 0))[:, None].expand(-1, group, -1, -1, -1)


def chunked_attention(
    query: Float[Tensor, "batch heads query_rows seq head_dim"],
    key: Float[Tensor, "batch kv_heads rows seq head_dim"],
    value: Float[Tensor, "batch kv_heads rows seq head_dim"],
    visible_row: Int[Tensor, "batch rows distances"],
) -> Float[Tensor, "batch heads query_rows seq head_dim"]:
    """Exact, chunk of query positions by chunk, over the keys that any of them can see.

    For positions `[start, end)` these are the last row type at `[0, end)` and the other row types in the band
    `[start - n + 1, end)`: about `rows * seq^2 / 2` scores instead of `(rows * seq)^2`. Query heads that share a key
    head enter as further query rows, so every kernel of every device will do and has long blocks to work on.
    """
    num_query_rows, seq = query.shape[2:4]
    kv_heads, rows = key.shape[1:3]
    group = query.shape[1] // kv_heads
    band = visible_row.shape[-1] - 2  # farthest distance at which another row type than the last is visible
    length = chunk_length(num_query_rows, group, rows, seq, query.device.type)
    starts = range(0, seq, length)
    bounds = [(max(0, start - band), min(start + length, seq)) for start in starts]
    hidden = hidden_from_chunk(visible_row, num_query_rows, group, length, prefix=seq)
    bias = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, -torch.inf)
    keys, values = ChunkKeys.apply(key, bounds), ChunkKeys.apply(value, bounds)
    outputs = []
    chunks = zip(query.split(length, dim=3), starts, bounds, keys, values, strict=True)
    for chunk_query, start, (low, end), chunk_key, chunk_value in chunks:
        count, cut = end - start, max(0, band - start)  # positions of the band that lie before the sequence
        columns = slice(seq + cut * rows - low, seq + (band + count) * rows)
        mask = bias[:, :, :, :count, columns].flatten(1, 3)[:, None]  # batch 1 (group query_rows queries) keys
        if mask.is_cuda:
            mask = mask.contiguous()  # the fused kernels want it aligned, and a view begins anywhere
        chunk_query = chunk_query.unflatten(1, (kv_heads, group)).flatten(2, 4)
        out = F.scaled_dot_product_attention(chunk_query, chunk_key, chunk_value, attn_mask=mask)
        outputs.append(out.unflatten(2, (group, num_query_rows, count)))
    return torch.cat(outputs, dim=4).flatten(1, 2)
