"""The batch that the data pipeline hands to the distillation module. Knows neither tokenizers nor models."""

from typing import NamedTuple

from jaxtyping import Bool, Int
from torch import Tensor


class ReplicatedBatch(NamedTuple):
    """Right-padded sequences with the row types, rotary positions and structural mask of the replicated layout.

    Attributes:
        input_ids: token ids.
        attention_mask: 1 at real tokens, 0 at padding.
        supervised: true at position `t` iff token `t+1` is an answer token, so never at the last real token.
        fill: tokens in flight that each sequence simulates, `1..n`.
        row_depths: the depth of each row type, ascending.
        position_ids: rotary positions, the same for every row type.
        visible_row: the structural mask: the row type that each row type sees at distance `min(t - T, n)`.
    """

    input_ids: Int[Tensor, "batch seq"]
    attention_mask: Int[Tensor, "batch seq"]
    supervised: Bool[Tensor, "batch seq"]
    fill: Int[Tensor, " batch"]
    row_depths: Int[Tensor, " rows"]
    position_ids: Int[Tensor, "batch seq"]
    visible_row: Int[Tensor, "batch rows distances"]
