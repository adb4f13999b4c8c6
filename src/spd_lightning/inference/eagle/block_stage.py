"""The whole target as one stage that also runs blocks behind what it has, and takes back a part of one.

Knows no drafts and no verdicts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spd_lightning.inference.caches import KeyValueBuffer, RecurrentRing, StageCache
from spd_lightning.inference.stage import Stage
from spd_lightning.inference.stage_loading import StageModules, load_stage
from spd_lightning.modules.target import TargetDtype


class BlockCache(StageCache):
    """The caches of layers that run blocks at any position; of a recurrent layer only a block's last state is kept.

    The state before a block stays in its slot, which is the snapshot that a rollback goes back to: with two slots more
    than the block's drafts, no position of a block shares it.
    """

    def rewind(self, start: int, length: int) -> None:
        """Readies a replay of the block that began at `start`, up to position `length - 1`, by the recurrent layers.

        Attention layers drop what comes after; recurrent ones go back to the state before the block. `end` closes it.
        """
        for layer in self.layers:
            if isinstance(layer, RecurrentRing):
                layer.rollback(start)
                layer.begin(length - 1)
            else:
                layer.rollback(length)
        self.length = start

    def update_conv_state(
        self, conv_states: Float[Tensor, "1 channels new"], layer_idx: int, conv_kernel_size: int, **given: object
    ) -> Tensor:
        """As the base, but a block behind others comes back with the window before it, which the caller cuts off."""
        ring = self._ring(layer_idx)
        if ring.last < 0:
            return super().update_conv_state(conv_states, layer_idx, conv_kernel_size, **given)
        assert ring.conv is not None
        window = ring.conv[ring.slot]  # begins as a copy of the last one
        joined = torch.cat([window, conv_states], dim=-1)
        window.copy_(joined[..., -conv_kernel_size:])
        return joined


@dataclass(frozen=True)
class BlockOutput:
    """What a block of tokens gives.

    Attributes:
        anchors: raw streams at the anchors, by layer count.
        logits: of every position.
    """

    anchors: dict[int, Float[Tensor, "1 block dim"]]
    logits: Float[Tensor, "block vocab"]


class BlockStage(Stage):
    """The one stage of a target that is not cut.

    A block can be taken back in part. Attention layers truncate; recurrent ones (Gated DeltaNet), whose state after the
    kept part was never seen, go back to a copy from before the block and run the kept part again, from the inputs that
    they had. So a round with a rejection costs a target with them up to one more pass of these layers.

    Args:
        modules: the whole target.
        anchors: layer counts whose output is wanted.
        capacity: positions that the caches hold.
        max_block: tokens of a block at most.
    """

    cache: BlockCache
    cache_type = BlockCache

    def __init__(self, modules: StageModules, anchors: Sequence[int], capacity: int, max_block: int) -> None:
        super().__init__(modules, 1, 1, 0, anchors, capacity, slots=max_block + 1)
        self.max_block = max_block
        self.block_start = 0
        self.block_inputs: dict[int, Tensor] = {}
        """What entered each recurrent layer in the last block, by the layer's index."""

    @classmethod
    def whole(
        cls,
        target: str,
        num_layers: int,
        anchors: Sequence[int],
        capacity: int,
        max_block: int,
        dtype: TargetDtype = "auto",
        device: torch.device | str = "cpu",
    ) -> "BlockStage":
        """All of a target folder or hub id.

        Raises:
            ValueError: as `load_stage`.
        """
        modules = load_stage(target, 0, num_layers, True, True, dtype, device)
        return cls(modules, anchors, capacity, max_block)

    @torch.no_grad()
    def run_block(self, tokens: Int[Tensor, "1 block"], position: int) -> BlockOutput:
        """Runs tokens from `position` on, behind at least one that has been run."""
        modules, count = self.modules, tokens.shape[1]
        assert position > 0 and count <= self.max_block
        assert modules.embedding is not None and modules.norm is not None and modules.head is not None
        hidden = modules.embedding(tokens)
        mask = torch.zeros(count, position + count, dtype=hidden.dtype, device=hidden.device)
        mask.masked_fill_(torch.ones_like(mask, dtype=torch.bool).triu(position + 1), -torch.inf)
        anchors: dict[int, Tensor] = {}
        self.block_start = position
        self.block_inputs.clear()
        self.cache.begin(position, count)
        for index in range(len(modules.layers)):
            is_attention = isinstance(self.cache.layers[index], KeyValueBuffer)
            if not is_attention:
                self.block_inputs[index] = hidden
            hidden = self._run_layer(index, hidden, position, mask[None, None] if is_attention else None)
            if index in self.taps:
                anchors[self.taps[index]] = hidden
        self.cache.end(count)
        return BlockOutput(anchors, modules.head(modules.norm(hidden))[0])

    @torch.no_grad()
    def keep(self, length: int) -> None:
        """Takes back what the last block has run from position `length` on; at least its first token stays."""
        assert self.block_start < length <= self.cache.length
        if length == self.cache.length:
            return
        count = length - self.block_start
        self.cache.rewind(self.block_start, length)
        for index, hidden in self.block_inputs.items():
            self._run_layer(index, hidden[:, :count], self.block_start, None)
        self.cache.end(count)

    def _run_layer(self, index: int, hidden: Tensor, position: int, mask: Tensor | None) -> Tensor:
        positions = torch.arange(position, position + hidden.shape[1], device=hidden.device)[None]
        return self.modules.layers[index](
            hidden,
            position_embeddings=self.modules.rotary(hidden, positions),
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{self.cache_keyword: self.cache},
        )
