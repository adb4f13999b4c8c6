"""What a stage remembers of a tree: the committed prefix once, and behind it an entry per live node it has run.

Handed to Transformers' decoder layers in the place of their own cache, of which it has the methods that they call.
Knows no schedule.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from spd_lightning.inference.caches import KeyValueBuffer, RecurrentRing, StageCache
from spd_lightning.inference.tree.schedule import PREFIX, Level, Pruning


class StatePool:
    """States of one recurrent layer, one slot a live node: convolution window and recurrent matrix.

    Args:
        slots: states that fit.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.conv: Tensor | None = None
        self.recurrent: Tensor | None = None
        self.windows: Tensor | None = None
        """Of the nodes that are being run, shifted in place by the layer."""

    def seed(self, ring: RecurrentRing) -> None:
        """Slot 0 takes the state behind the prompt."""
        conv, recurrent = ring.read(ring.conv), ring.read(ring.recurrent)
        assert conv is not None and recurrent is not None
        if self.conv is None or self.recurrent is None:
            self.conv = conv.new_zeros(self.slots, *conv.shape[1:])
            self.recurrent = recurrent.new_zeros(self.slots, *recurrent.shape[1:])
        self.conv[0].copy_(conv[0])
        self.recurrent[0].copy_(recurrent[0])


class TreeCache:
    """The caches of a stage's layers for a tree.

    Attention layers share one buffer with the chain's cache: the prefix, then a row per node in the order in which the
    nodes were run. A recurrent layer keeps the state after each node; that after the prefix only until the root has
    been run, which is verified.

    Args:
        chain: the stage's own cache, which the prompt is run into.
        slots: recurrent states kept per layer; `1 + (n - j) * width` in stage `j`.
    """

    def __init__(self, chain: StageCache, slots: int) -> None:
        self.chain = chain
        self.slots = slots
        self.layers: list[KeyValueBuffer | StatePool] = [
            layer if isinstance(layer, KeyValueBuffer) else StatePool(slots) for layer in chain.layers
        ]
        self.committed = 0
        self.parents: dict[int, int] = {}
        """Of each node that has been run and is live, in the order of their rows."""
        self.slot_of: dict[int, int] = {}
        self.free: list[int] = []
        self.device = torch.device("cpu")
        self.reading = self.writing = torch.empty(0, dtype=torch.long)

    def start(self, device: torch.device) -> None:
        """Goes on behind the prompt that the chain's cache has taken in."""
        self.device = device
        self.committed = self.chain.length
        self.parents.clear()
        self.slot_of = {PREFIX: 0}
        self.free = list(range(self.slots - 1, 0, -1))
        for layer, own in zip(self.chain.layers, self.layers, strict=True):
            if isinstance(layer, RecurrentRing):
                assert isinstance(own, StatePool)
                own.seed(layer)

    def path(self, node: int) -> list[int]:
        """A node and its ancestors behind the prefix, the youngest first."""
        found = [node]
        while (parent := self.parents[found[-1]]) in self.parents:
            found.append(parent)
        return found

    def begin(self, level: Level, dtype: torch.dtype) -> Float[Tensor, "1 1 nodes keys"] | None:
        """Announces that all layers now run these nodes.

        Returns:
            Who sees what: the prefix, the node's ancestors and itself. None where a node sees all there is.
        """
        reading = [self.slot_of[node.parent] for node in level.nodes]
        if level.nodes[0].parent == PREFIX:
            self._release(PREFIX)
        for node in level.nodes:
            assert node.parent == PREFIX or node.parent in self.parents, f"the parent of node {node.id} is not here"
            self.parents[node.id] = node.parent
            self.slot_of[node.id] = self.free.pop()
            assert level.position == self.committed + len(self.path(node.id)) - 1
        self.reading = torch.tensor(reading, device=self.device)
        self.writing = torch.tensor([self.slot_of[node] for node in level.ids], device=self.device)
        return self._mask(level, dtype)

    def _mask(self, level: Level, dtype: torch.dtype) -> Tensor | None:
        row_of = {node: self.committed + row for row, node in enumerate(self.parents)}
        paths = [self.path(node) for node in level.ids]
        if len(paths) == 1 and len(paths[0]) == len(row_of):
            return None
        mask = torch.zeros(len(paths), self.committed + len(row_of), dtype=dtype)
        mask[:, self.committed :] = -torch.inf
        for row, path in zip(mask, paths, strict=True):
            row[[row_of[node] for node in path]] = 0.0
        return mask[None, None].to(self.device)

    def prune(self, pruning: Pruning) -> None:
        """Keeps what the verdict leaves. The node that has left becomes part of the prefix, whose last row it is."""
        assert pruning.length == self.committed + 1 and next(iter(self.parents)) == pruning.left
        del self.parents[pruning.left]
        self.committed = pruning.length
        rows = [row for row, node in enumerate(self.parents) if node in pruning.kept]
        for layer in self.layers:
            if isinstance(layer, KeyValueBuffer):
                layer.select(pruning.length, rows)
        for node in [node for node in self.parents if node not in pruning.kept]:
            del self.parents[node]
            self._release(node)
        if self.parents:
            self._release(pruning.left)
        else:
            self.slot_of[PREFIX] = self.slot_of.pop(pruning.left)

    def _release(self, node: int) -> None:
        self.free.append(self.slot_of.pop(node))

    # What Transformers' layers call, each with its index within the stage.

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        layer = self.layers[layer_idx]
        assert isinstance(layer, KeyValueBuffer), f"layer {layer_idx} is recurrent"
        return layer.append(keys, values)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Copies of the parents' windows, to shift in place by one position."""
        pool = self._pool(layer_idx)
        assert pool.conv is not None
        pool.windows = pool.conv[self.reading]
        return pool.windows

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        pool = self._pool(layer_idx)
        assert pool.recurrent is not None
        return pool.recurrent[self.reading]

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Tensor:
        pool = self._pool(layer_idx)
        assert pool.conv is not None and pool.recurrent is not None and pool.windows is not None
        pool.recurrent[self.writing] = recurrent_states
        pool.conv[self.writing] = pool.windows
        return recurrent_states

    def _pool(self, layer_idx: int) -> StatePool:
        layer = self.layers[layer_idx]
        assert isinstance(layer, StatePool), f"layer {layer_idx} is an attention layer"
        return layer
