"""Bytes and operations of each piece of a pipeline for one token, from configurations alone.

Knows no time: a piece is what it holds, what it reads, and how much it computes. Batch 1, one token a forward; the
drafter's rows of the tokens in flight are one forward.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from spd_lightning.modules.features import FeatureLayout
from spd_lightning.modules.model_size import DrafterSize, TargetSize

RECURRENT_BYTES = 4
"""Of an entry of a recurrent matrix: float32 whatever the weights are."""
DELTA_RULE_FLOPS = 7
"""For each entry of a recurrent matrix and token: decay (1), reading the key (2), writing (2), reading the query (2)."""


@dataclass(frozen=True)
class Cost:
    """One piece, for one token.

    Attributes:
        weight_bytes: weights held in memory.
        read_bytes: what a forward moves: the weights that it uses, and the state that it reads and writes.
        flops: multiplications and additions of matrix products, attention and recurrence; norms are left out.
    """

    weight_bytes: int
    read_bytes: int
    flops: int


@dataclass(frozen=True)
class TargetCosts:
    """The pieces of a target.

    Args:
        size: of the target.
        dtype: of its weights and keys and values; `auto` is the checkpoint's.
        length: tokens of context that attention looks back on.
    """

    size: TargetSize
    dtype: str
    length: int

    @property
    def num_bytes(self) -> int:
        """Bytes of a weight."""
        return self.size.bytes_per_parameter(self.dtype)

    @cached_property
    def by_type(self) -> dict[str, Cost]:
        """The cost of one layer of each type that the target has, in order of appearance."""
        return {layer_type: self._layer(layer_type) for layer_type in dict.fromkeys(self.size.layer_types)}

    @property
    def layers(self) -> tuple[Cost, ...]:
        """The cost of each layer, in order."""
        return tuple(self.by_type[layer_type] for layer_type in self.size.layer_types)

    @property
    def head(self) -> Cost:
        """Final norm and LM head: all rows are read for each token, those of the padding too."""
        weights = (self.size.head_parameters + self.size.hidden_size) * self.num_bytes
        return Cost(weights, weights, 2 * self.size.head_parameters)

    @property
    def embedding(self) -> Cost:
        """The embedding, of which one row is read; a tied one is the same weights as the head."""
        row = self.size.hidden_size * self.num_bytes
        return Cost(self.size.head_parameters * self.num_bytes, row, 0)

    @property
    def token(self) -> Cost:
        """A whole forward of plain decoding; it holds the embedding once more where the head is not tied to it."""
        pieces = (*self.layers, self.head, self.embedding)
        held = sum(piece.weight_bytes for piece in pieces) - self.size.is_tied * self.embedding.weight_bytes
        return Cost(held, sum(piece.read_bytes for piece in pieces), sum(piece.flops for piece in pieces))

    def cache_bytes(self, layer_types: Iterable[str], capacity: int, slots: int) -> int:
        """What a stage remembers of a sequence, as `StageCache` allocates it.

        Args:
            layer_types: of the stage's layers.
            capacity: positions in the key/value buffers.
            slots: recurrent states that each ring keeps.
        """
        sizes = {"full_attention": self._kv_bytes * capacity, "linear_attention": self._recurrent_bytes * slots}
        return sum(sizes[layer_type] for layer_type in layer_types)

    def _layer(self, layer_type: str) -> Cost:
        size = self.size
        weights = size.layer_parameters(layer_type) * self.num_bytes
        flops = 2 * size.matrix_parameters(layer_type)
        if layer_type == "full_attention":
            flops += 4 * size.num_heads * size.head_dim * self.length  # scores and their sum of values
            return Cost(weights, weights + self._kv_bytes * self.length, flops)
        assert size.linear is not None
        flops += 2 * size.linear.num_channels * size.linear.conv_kernel + DELTA_RULE_FLOPS * size.linear.num_states
        return Cost(weights, weights + 2 * self._recurrent_bytes, flops)

    @property
    def _kv_bytes(self) -> int:
        """Of one position in one attention layer."""
        return 2 * self.size.num_kv_heads * self.size.head_dim * self.num_bytes

    @property
    def _recurrent_bytes(self) -> int:
        """Of one state of one Gated DeltaNet layer: recurrent matrices and convolution window."""
        linear = self.size.linear
        if linear is None:
            return 0
        return linear.num_states * RECURRENT_BYTES + linear.num_channels * linear.conv_kernel * self.num_bytes


@dataclass(frozen=True)
class DrafterCosts:
    """A Pipeline Draft Module while decoding.

    Args:
        size: of the drafter.
        layout: its stages and anchors.
        num_bytes: of a weight; the decoder gives the drafter the target's dtype.
        length: tokens of context that attention looks back on.
    """

    size: DrafterSize
    layout: FeatureLayout
    num_bytes: int
    length: int

    def row_inputs(self, fill: int) -> tuple[int, ...]:
        """Anchor states that each row of a draft is projected from, with `fill` tokens in flight.

        One row for each token in flight, and pre-step, when the pipeline is full, one for the token that has just left:
        then there is one for each depth that the drafter reads.
        """
        depths = self.layout.depths if fill == self.layout.num_stages else self.layout.depths[:fill]
        return tuple(self.layout.deepest_anchor(depth) + 1 for depth in depths)

    @property
    def draft(self) -> Cost:
        """One draft with a full pipeline."""
        return self.draft_at(self.layout.num_stages)

    def draft_at(self, fill: int) -> Cost:
        """One draft. Each row is projected by itself, so a projection is read once for every row that uses it."""
        size, inputs = self.size, self.row_inputs(fill)
        num_rows, projected = len(inputs), sum(map(size.projection_parameters, inputs))
        unprojected = size.num_parameters - sum(map(size.projection_parameters, size.projection_inputs))
        kv_bytes = size.num_layers * 2 * size.kv_width * self.length * self.num_bytes
        matrices = size.num_layers * size.matrix_parameters
        attention = size.num_layers * 4 * size.query_width * self.length
        return Cost(
            weight_bytes=size.num_parameters * self.num_bytes,
            read_bytes=(projected + unprojected) * self.num_bytes + kv_bytes,
            flops=2 * (projected + num_rows * matrices + size.head_parameters) + num_rows * attention,
        )

    def cache_bytes(self, capacity: int) -> int:
        """What the draft rank remembers of a sequence, as `DraftSession` allocates it."""
        num_stages, num_states = self.layout.num_stages, max(self.size.projection_inputs)
        kv_entries = self.size.num_layers * 2 * self.size.kv_width * (capacity + num_stages)
        return (kv_entries + num_states * (num_stages + 1) * self.size.hidden_size) * self.num_bytes
