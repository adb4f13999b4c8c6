"""What a stage remembers of a sequence: key/value buffers and rings of recurrent states, rolled back by position.

Handed to Transformers' decoder layers in the place of its own cache, of which it has the methods that they call.
Everything is allocated once, at addresses that never change. Knows no schedule and no stages.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


class KeyValueBuffer:
    """Keys and values of one attention layer: a buffer and a length.

    Args:
        capacity: positions that fit.
        num_kv_heads: key and value heads.
        head_dim: width of a head.
        dtype: of the entries.
        device: where they lie.
    """

    def __init__(
        self, capacity: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (1, num_kv_heads, capacity, head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0

    def append(
        self, keys: Float[Tensor, "1 kv_heads new head_dim"], values: Float[Tensor, "1 kv_heads new head_dim"]
    ) -> tuple[Tensor, Tensor]:
        """Writes behind what is there and returns views of all of it."""
        end = self.length + keys.shape[2]
        assert end <= self.keys.shape[2], f"position {end - 1} does not fit into {self.keys.shape[2]}"
        self.keys[:, :, self.length : end].copy_(keys)
        self.values[:, :, self.length : end].copy_(values)
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def rollback(self, length: int) -> None:
        """Keeps the positions `0 .. length - 1`."""
        assert length <= self.length, f"cannot roll back to {length} positions, only {self.length} are here"
        self.length = length

    def select(self, length: int, rows: Sequence[int]) -> None:
        """Keeps the positions `0 .. length - 1` and, moved up behind them, the entries `length + row` in rising order."""
        if any(row != index for index, row in enumerate(rows)):
            kept = torch.tensor(rows, device=self.keys.device) + length
            for entries in (self.keys, self.values):
                entries[:, :, length : length + len(rows)] = entries[:, :, kept]  # indexing copies first
        self.rollback(length + len(rows))


class RecurrentRing:
    """States of one recurrent layer after each of the last positions: convolution window and recurrent matrix.

    Slot `position mod slots` holds the state after `position` and its tag. A step reads the slot of the position
    before and writes its own, so a rollback moves nothing: it only forgets what comes after.

    Args:
        slots: positions that can be gone back to, and one.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.conv: Tensor | None = None
        self.recurrent: Tensor | None = None
        self.tags = [-1] * slots
        self.last = self.target = -1

    @property
    def slot(self) -> int:
        """Where the position that is being run writes."""
        return self.target % self.slots

    def read(self, states: Tensor | None) -> Tensor | None:
        """The state after the last position; none before the first.

        Raises:
            LookupError: if it has been overwritten: the ring is too small for what was rolled back.
        """
        if self.last < 0:
            return None
        slot = self.last % self.slots
        if self.tags[slot] != self.last or states is None:
            raise LookupError(
                f"the recurrent state after position {self.last} is gone: its slot holds position {self.tags[slot]}"
            )
        return states[slot]

    def begin(self, position: int) -> None:
        """Readies the slot of `position`: its window starts as a copy of the last one, to be shifted in place."""
        before = self.read(self.conv)
        self.target = position
        if before is not None:
            assert self.conv is not None
            if self.slot != self.last % self.slots:
                self.conv[self.slot].copy_(before)

    def rollback(self, length: int) -> None:
        """Goes back to the state after position `length - 1`."""
        self.last = length - 1
        for slot, tag in enumerate(self.tags):
            if tag >= length:
                self.tags[slot] = -1
        self.read(self.conv)


class StageCache:
    """The caches of a stage's layers, under the names by which Transformers' layers call them.

    Args:
        layer_types: `full_attention` or `linear_attention` of each layer.
        capacity: positions that fit.
        slots: recurrent states kept per layer; `n - j + 1` in stage `j` (design §5).
        num_kv_heads: of the attention layers.
        head_dim: of the attention layers.
        dtype: of keys and values.
        device: where everything lies.
    """

    def __init__(
        self,
        layer_types: Sequence[str],
        capacity: int,
        slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.capacity = capacity
        self.length = 0
        self.layers: list[KeyValueBuffer | RecurrentRing] = [
            RecurrentRing(slots)
            if kind == "linear_attention"
            else KeyValueBuffer(capacity, num_kv_heads, head_dim, dtype, device)
            for kind in layer_types
        ]

    def begin(self, position: int, count: int) -> None:
        """Announces that all layers now run positions `position .. position + count - 1`."""
        assert position == self.length, f"position {position} comes, but {self.length} are here"
        assert position + count <= self.capacity
        for layer in self.layers:
            if isinstance(layer, RecurrentRing):
                layer.begin(position + count - 1)

    def end(self, count: int) -> None:
        """Closes what `begin` announced."""
        self.length += count
        for layer in self.layers:
            if isinstance(layer, RecurrentRing):
                layer.last = layer.target
                layer.tags[layer.slot] = layer.target
            else:
                assert layer.length == self.length

    def rollback(self, length: int) -> None:
        """Every layer keeps the positions `0 .. length - 1`; a stage that has not come so far keeps what it has."""
        if length >= self.length:
            return
        for layer in self.layers:
            layer.rollback(length)
        self.length = length

    def clear(self) -> None:
        """Forgets the sequence; the buffers stay."""
        self.length = 0
        for layer in self.layers:
            if isinstance(layer, RecurrentRing):
                layer.last, layer.tags = -1, [-1] * layer.slots
            else:
                layer.length = 0

    # What Transformers' layers call, each with its index within the stage.

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self._buffer(layer_idx).append(keys, values)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The window to shift in place by one position, in the slot of that position; none in the prefill."""
        ring = self._ring(layer_idx)
        if ring.last < 0:
            return None
        assert ring.conv is not None
        return ring.conv[ring.slot]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        ring = self._ring(layer_idx)
        return ring.read(ring.recurrent)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(
        self, conv_states: Float[Tensor, "1 channels new"], layer_idx: int, conv_kernel_size: int, **_: Any
    ) -> Tensor:
        """Keeps the prefill's last inputs of the convolution, zeros before the first; returns what it was given."""
        ring = self._ring(layer_idx)
        assert ring.last < 0, "a block of positions can only be the first"
        if ring.conv is None:
            shape = (ring.slots, *conv_states.shape[:-1], conv_kernel_size)
            ring.conv = torch.zeros(shape, dtype=conv_states.dtype, device=conv_states.device)
        window = ring.conv[ring.slot]
        kept = conv_states[..., -conv_kernel_size:]
        window.zero_()
        window[..., conv_kernel_size - kept.shape[-1] :].copy_(kept)
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Tensor:
        ring = self._ring(layer_idx)
        if ring.recurrent is None:
            shape = (ring.slots, *recurrent_states.shape)
            ring.recurrent = torch.zeros(shape, dtype=recurrent_states.dtype, device=recurrent_states.device)
        state = ring.recurrent[ring.slot]
        state.copy_(recurrent_states)
        return state

    def _buffer(self, layer_idx: int) -> KeyValueBuffer:
        layer = self.layers[layer_idx]
        assert isinstance(layer, KeyValueBuffer), f"layer {layer_idx} is recurrent"
        return layer

    def _ring(self, layer_idx: int) -> RecurrentRing:
        layer = self.layers[layer_idx]
        assert isinstance(layer, RecurrentRing), f"layer {layer_idx} is an attention layer"
        return layer
