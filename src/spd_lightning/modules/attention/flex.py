"""FlexAttention over replicated rows: the structural mask as a block mask and a mask function (design §4).

Both come from the table `visible_row` (see `dense`). Compiled on a GPU, where it is the fast form;
elsewhere PyTorch runs it eagerly and forwards only, which is enough to test the mask.
"""

from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128


@cache
def compiled_attention() -> Any:
    """The kernel with lengths and batch sizes as variables: padded to whole blocks they share one compilation."""
    return torch.compile(flex.flex_attention, dynamic=True)


def block_mask(visible_row: Int[Tensor, "batch rows distances"], num_query_rows: int, seq: int) -> BlockMask:
    """The structural mask over rows of `seq` positions, a multiple of `BLOCK`, for the first row types as queries.

    Two blocks of positions are as far apart as any pair of their positions, so the table itself says of each pair of
    blocks whether some, all or none of it is visible. No `(rows * seq)^2` mask is made.
    """
    rows, num_distances = visible_row.shape[1:]
    device = visible_row.device
    blocks = torch.arange(seq // BLOCK, device=device)
    apart = BLOCK * (blocks[:, None] - blocks)
    low = (apart - BLOCK + 1).clamp(0, num_distances - 1)
    high = (apart + BLOCK).clamp(0, num_distances)  # exclusive; beyond the table the last distance stands for all
    seen = visible_row[:, :num_query_rows, None] == torch.arange(rows, device=device)[:, None]
    below = F.pad(seen.int().cumsum(dim=-1), (1, 0))  # batch query_rows rows distances: seen at how many smaller ones
    count = (below[..., high] - below[..., low]).transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, None]
    whole = ((high - low).where(apart > 0, -1))[:, None].expand(-1, rows, -1).flatten(1, 2).repeat(num_query_rows, 1)
    full = count == whole
    kinds = []
    for chosen in ((count > 0) & ~full, full):
        order = chosen.int().argsort(dim=-1, descending=True, stable=True)
        kinds += [chosen.sum(dim=-1, dtype=torch.int32), order.int()]

    row = torch.arange(rows, device=device).repeat_interleave(seq)
    position = torch.arange(seq, device=device).repeat(rows)

    # A lambda, since the type checks of the tests wrap functions, and a wrapped one cannot be traced.
    return BlockMask.from_kv_blocks(
        *kinds,
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda batch, head, query, key: (
            (position[query] >= position[key])
            & (
                visible_row[batch, row[query], (position[query] - position[key]).clamp(0, num_distances - 1)]
                == row[key]
            )
        ),
        seq_lengths=(num_query_rows * seq, rows * seq),
    )


def flex_attention(
    query: Float[Tensor, "batch heads query_rows seq head_dim"],
    key: Float[Tensor, "batch kv_heads rows seq head_dim"],
    value: Float[Tensor, "batch kv_heads rows seq head_dim"],
    visible_row: Int[Tensor, "batch rows distances"],
) -> Float[Tensor, "batch heads query_rows seq head_dim"]:
    """Exact; skips the blocks of keys that nothing in a block of queries can see.

    Raises:
        ValueError: gradients are wanted on a device other than a GPU.
    """
    num_query_rows, seq = query.shape[2:4]
    if not query.is_cuda and torch.is_grad_enabled() and query.requires_grad:
        raise ValueError(
            f"attention='flex' on {query.device.type}: FlexAttention has gradients on a GPU only; use 'chunked'"
        )
    missing = -seq % BLOCK  # positions at the end: no earlier one sees them
    query, key, value = (F.pad(x, (0, 0, 0, missing)).flatten(2, 3) for x in (query, key, value))
    attention = compiled_attention() if query.is_cuda else flex.flex_attention
    mask = block_mask(visible_row, num_query_rows, seq + missing)
    out = cast(Tensor, attention(query, key, value, block_mask=mask, enable_gqa=True))
    return out.unflatten(2, (num_query_rows, -1))[:, :, :, :seq]
