"""The structural mask as a table, and the naive twin of all attention over replicated rows (design §4).

Every backend reads the mask from one table, `visible_row`: the row type that row type `r` sees at distance
`min(t - T, n)`. The last row type is the only one visible at distance `n` and beyond. Knows no layers, no padding
(sequences are right-padded, and no position sees a later one) and no fill levels.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

StructuralAttention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(query, key, value, visible_row) -> output; shapes as in `dense_attention`."""


def visible_block(
    visible_row: Int[Tensor, "batch rows distances"],
    query_positions: Int[Tensor, " queries"],
    key_positions: Int[Tensor, " keys"],
    num_query_rows: int,
    key_rows: Int[Tensor, " key_rows"],
) -> Bool[Tensor, "batch query_rows queries key_rows keys"]:
    """Which (row, position) keys each of the first `num_query_rows` row types may see at the query positions."""
    distance = query_positions[:, None] - key_positions[None, :]
    last_distance = visible_row.shape[-1] - 1
    seen = visible_row[:, :num_query_rows, distance.clamp(0, last_distance)]  # batch query_rows queries keys
    block = seen[:, :, :, None, :] == key_rows[:, None]
    return block & (distance >= 0)[:, None, :]


def dense_attention(
    query: Float[Tensor, "batch heads query_rows seq head_dim"],
    key: Float[Tensor, "batch kv_heads rows seq head_dim"],
    value: Float[Tensor, "batch kv_heads rows seq head_dim"],
    visible_row: Int[Tensor, "batch rows distances"],
) -> Float[Tensor, "batch heads query_rows seq head_dim"]:
    """The naive twin: one softmax over all `rows * seq` keys with the whole mask."""
    num_query_rows, seq = query.shape[2:4]
    positions = torch.arange(seq, device=query.device)
    rows = torch.arange(key.shape[2], device=query.device)
    mask = visible_block(visible_row, positions, positions, num_query_rows, rows)
    mask = mask.flatten(3, 4).flatten(1, 2)[:, None]  # batch 1 (query_rows seq) (rows seq)
    out = F.scaled_dot_product_attention(
        query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3), attn_mask=mask, enable_gqa=True
    )
    return out.unflatten(2, (num_query_rows, seq))
