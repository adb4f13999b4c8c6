"""The backends of structural attention by name, and which of the exact forms suits a device."""

from jaxtyping import Float, Int
from torch import Tensor

from spd_lightning.modules.attention.chunked import chunked_attention
from spd_lightning.modules.attention.dense import StructuralAttention, dense_attention
from spd_lightning.modules.attention.flex import flex_attention
from spd_lightning.modules.attention.split import split_attention

SPLIT_FROM = 1024
"""Positions from which the split form is faster on a CPU (timed with one and two threads)."""


def fast_attention(
    query: Float[Tensor, "batch heads query_rows seq head_dim"],
    key: Float[Tensor, "batch kv_heads rows seq head_dim"],
    value: Float[Tensor, "batch kv_heads rows seq head_dim"],
    visible_row: Int[Tensor, "batch rows distances"],
) -> Float[Tensor, "batch heads query_rows seq head_dim"]:
    """Chunks of query positions in the form that is fast for the tensors' device and length."""
    is_split = query.device.type == "cpu" and query.shape[3] >= SPLIT_FROM
    return (split_attention if is_split else chunked_attention)(query, key, value, visible_row)


BACKENDS: dict[str, StructuralAttention] = {
    "chunked": fast_attention,
    "dense": dense_attention,
    "flex": flex_attention,
}
