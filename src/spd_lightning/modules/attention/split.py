"""Chunks of query positions for the CPU: what all queries of a chunk see is read in place and without a mask.

Each chunk has two parts, computed apart and joined by their log-sum-exp. Far: the last row type at all positions before
the chunk's band, which every query sees. Near: the rest, in blocks of a few positions, so that the band of all row types
stays short; a mask says who sees whom. One flash kernel does both, forwards and backwards: its backward pass needs the
joined output and log-sum-exp only, of whatever keys.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from spd_lightning.modules.attention.dense import visible_block

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

BLOCK = 16
"""Positions of a near block."""
FAR_QUERIES = 2800
"""Query rows per key head that are enough for the far part to run at full speed."""
MAX_BLOCKS = 16
"""Blocks of a chunk, beyond which its own keys are too many for each of them."""


@dataclass(frozen=True)
class Tiling:
    """How positions are cut: `chunks` of `blocks` blocks of `block` positions, the last ones padding.

    Attributes:
        seq: positions that are not padding.
        band: positions before a block at which it sees other row types than the last.
        kv_heads: key heads, each read by `group` query heads.
        query_rows: row types that are queries.
        rows: row types that are keys.
    """

    seq: int
    band: int
    kv_heads: int
    group: int
    query_rows: int
    rows: int
    chunks: int
    blocks: int
    block: int

    @classmethod
    def of(cls, query: Tensor, key: Tensor, band: int) -> "Tiling":
        """The tiling with the fewest positions of padding near the wanted length; a chunk is no shorter than the band."""
        (heads, query_rows, seq), (kv_heads, rows) = query.shape[1:4], key.shape[1:3]
        group = heads // kv_heads
        block = min(BLOCK, seq)
        needed, fewest = math.ceil(seq / block), math.ceil(band / block)
        wanted = min(max(FAR_QUERIES // (group * query_rows * block), 1), MAX_BLOCKS, needed)
        near = range(max(1, fewest, 2 * wanted // 3), max(fewest, 4 * wanted // 3) + 1)
        blocks = min(near, key=lambda count: (-needed % count, abs(count - wanted)))
        return cls(seq, band, kv_heads, group, query_rows, rows, math.ceil(needed / blocks), blocks, block)

    @property
    def length(self) -> int:
        """Positions of a chunk."""
        return self.blocks * self.block

    @property
    def padding(self) -> int:
        """Positions after the last."""
        return self.chunks * self.length - self.seq

    def tiles(self, x: Float[Tensor, "batch heads query_rows seq head_dim"]) -> Float[Tensor, "chunks tiles queries _"]:
        """Queries by chunk: one tile per sequence, key head and block."""
        x = F.pad(x, (0, 0, 0, self.padding)).unflatten(3, (self.chunks, self.blocks, self.block))
        x = x.unflatten(1, (self.kv_heads, self.group))  # batch kv_heads group query_rows chunks blocks block head_dim
        return x.permute(4, 0, 1, 5, 2, 3, 6, 7).flatten(4, 6).flatten(1, 3)

    def untile(
        self, x: Float[Tensor, "chunks tiles queries _"]
    ) -> Float[Tensor, "batch heads query_rows seq head_dim"]:
        """The inverse of `tiles`."""
        x = x.unflatten(2, (self.group, self.query_rows, self.block)).unflatten(1, (-1, self.kv_heads, self.blocks))
        x = x.permute(1, 2, 4, 5, 0, 3, 6, 7).flatten(4, 6)
        return x[:, :, :, :, : self.seq].flatten(1, 2)

    def pad_keys(
        self, x: Float[Tensor, "batch kv_heads rows seq head_dim"]
    ) -> Float[Tensor, "heads rows padded head_dim"]:
        """Keys or values with a band before the first position and padding after the last."""
        return F.pad(x, (0, 0, self.band, self.padding)).flatten(0, 1)

    def unpad_keys(self, x: Tensor) -> Tensor:
        """The inverse of `pad_keys`."""
        return x[:, :, self.band : self.band + self.seq].unflatten(0, (-1, self.kv_heads))

    def near_keys(self, x: Float[Tensor, "heads rows padded head_dim"], chunk: int) -> Float[Tensor, "tiles 1 keys _"]:
        """Keys of each block: the last row type from the chunk's band on, then all row types from its own."""
        window = x[:, :, chunk * self.length : (chunk + 1) * self.length + self.band]
        shared = window[:, -1, None].expand(-1, self.blocks, -1, -1)
        own = window.unfold(2, self.block + self.band, self.block).permute(0, 2, 4, 1, 3).flatten(2, 3)
        return torch.cat([shared, own], dim=2).flatten(0, 1)[:, None]

    def add_near_gradient(self, gradient: Tensor, of_keys: Tensor, chunk: int) -> None:
        """Adds the gradient of `near_keys` to that of `pad_keys`."""
        of_keys = of_keys[:, 0].unflatten(0, (-1, self.blocks)).to(gradient.dtype)
        window = gradient[:, :, chunk * self.length : (chunk + 1) * self.length + self.band]
        shared, own = of_keys.split([self.length + self.band, of_keys.shape[2] - self.length - self.band], dim=2)
        window[:, -1] += shared.sum(dim=1)
        own = own.unflatten(2, (-1, self.rows)).transpose(2, 3)
        for index in range(self.blocks):
            window[:, :, index * self.block : (index + 1) * self.block + self.band] += own[:, index]

    def far_keys(self, x: Float[Tensor, "heads rows padded head_dim"], chunk: int) -> Float[Tensor, "heads 1 keys _"]:
        """The last row type at the positions before the chunk's band; a view."""
        return x[:, -1:, self.band : chunk * self.length]

    def near_mask(self, visible_row: Int[Tensor, "batch rows distances"]) -> list[Bool[Tensor, "tiles 1 queries keys"]]:
        """What the queries of each block see of `near_keys`: in the first chunk, and in all others."""
        device = visible_row.device
        positions = torch.arange(self.length, device=device).unflatten(0, (self.blocks, self.block))
        keys = torch.arange(-self.band, self.length, device=device)
        own_keys = keys.unfold(0, self.block + self.band, self.block)  # of each block; all are as far from its queries
        is_far = positions[:, :, None] - keys > self.band
        rows = torch.arange(self.rows, device=device)
        own = visible_block(visible_row, positions[0], own_keys[0], self.query_rows, rows)
        own &= (positions[0][:, None] - own_keys[0] <= self.band)[:, None]
        own = own.transpose(3, 4).flatten(3)[:, None].expand(-1, self.blocks, -1, -1, -1)
        others = torch.cat([is_far[:, None].expand(*own.shape[:4], -1), own], dim=-1)
        is_position = (
            torch.cat([keys.expand(self.blocks, -1), own_keys.repeat_interleave(self.rows, dim=1)], dim=1) >= 0
        )
        first = others & is_position[:, None, None]
        return [
            mask[:, None, :, None]
            .expand(-1, self.kv_heads, -1, self.group, -1, -1, -1)
            .flatten(3, 5)
            .flatten(0, 2)[:, None]
            for mask in (first, others)
        ]

    def far_heads(self, x: Tensor) -> Tensor:
        """Tiles of a chunk as queries of the far part, cut further where the threads would have unequal work.

        The backward kernel shares out heads, not queries.
        """
        heads, threads, cuts = len(x) // self.blocks, torch.get_num_threads(), 1
        while heads * cuts % threads and heads * cuts < 4 * threads and self.block % (2 * cuts) == 0:
            cuts *= 2
        return x.unflatten(0, (heads, self.blocks)).flatten(1, 2).unflatten(1, (cuts, -1))


class SplitAttention(torch.autograd.Function):
    """`split_attention` with its gradients: the same kernels over the same keys, given the joined log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, visible_row: Tensor) -> Tensor:
        cut = Tiling.of(query, key, visible_row.shape[-1] - 2)
        queries, keys, values = cut.tiles(query), cut.pad_keys(key), cut.pad_keys(value)
        biases = [
            torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
            for mask in cut.near_mask(visible_row)
        ]
        wide = torch.promote_types(query.dtype, torch.float32)
        outputs, totals = torch.empty_like(queries), queries.new_empty(queries.shape[:3], dtype=wide)
        for chunk, tile in enumerate(queries):
            near = cut.near_keys(keys, chunk), cut.near_keys(values, chunk)
            output, total = (x[:, 0] for x in flash(tile[:, None], *near, attn_mask=biases[chunk > 0]))
            far_key, far_value = cut.far_keys(keys, chunk), cut.far_keys(values, chunk)
            if far_key.shape[2]:
                far_query = cut.far_heads(tile)
                shape = (-1, far_query.shape[1], -1, -1)
                far_output, far_total = flash(far_query, far_key.expand(shape), far_value.expand(shape))
                far_output, far_total = far_output.reshape(output.shape), far_total.reshape(total.shape)
                joined = torch.logaddexp(total, far_total)
                output = output.to(wide).lerp_(far_output.to(wide), (far_total - joined).exp_()[..., None])
                total = joined
            outputs[chunk], totals[chunk] = output, total
        ctx.cut = cut
        ctx.save_for_backward(queries, keys, values, *biases, outputs, totals)
        return cut.untile(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        queries, keys, values, *biases, outputs, totals = ctx.saved_tensors
        cut: Tiling = ctx.cut
        of_queries, of_outputs = torch.empty_like(queries), cut.tiles(gradient)
        of_keys, of_values = (torch.zeros_like(x, dtype=totals.dtype) for x in (keys, values))
        for chunk, chunk_tensors in enumerate(zip(of_outputs, queries, outputs, totals, strict=True)):
            of_output, query, output, total = (x[:, None] for x in chunk_tensors)
            near = cut.near_keys(keys, chunk), cut.near_keys(values, chunk)
            of_query, *of_near = flash_backward(
                of_output, query, *near, output, total, 0.0, False, attn_mask=biases[chunk > 0]
            )
            of_queries[chunk] = of_query[:, 0]
            for gradients, of_chunk in zip((of_keys, of_values), of_near, strict=True):
                cut.add_near_gradient(gradients, of_chunk, chunk)
            far = cut.far_keys(keys, chunk), cut.far_keys(values, chunk)
            if far[0].shape[2]:
                of_output, query, output, total = (cut.far_heads(x) for x in chunk_tensors)
                far = (x.expand(-1, query.shape[1], -1, -1) for x in far)
                of_query, *of_far = flash_backward(of_output, query, *far, output, total, 0.0, False)
                of_queries[chunk] += of_query.reshape(of_queries[chunk].shape)
                for gradients, of_chunk in zip((of_keys, of_values), of_far, strict=True):
                    cut.far_keys(gradients, chunk).add_(of_chunk.sum(dim=1, keepdim=True, dtype=gradients.dtype))
        return cut.untile(of_queries), *(cut.unpad_keys(x).to(keys.dtype) for x in (of_keys, of_values)), None


def split_attention(
    query: Float[Tensor, "batch heads query_rows seq head_dim"],
    key: Float[Tensor, "batch kv_heads rows seq head_dim"],
    value: Float[Tensor, "batch kv_heads rows seq head_dim"],
    visible_row: Int[Tensor, "batch rows distances"],
) -> Float[Tensor, "batch heads query_rows seq head_dim"]:
    """Exact, on the CPU. Gradients of keys and values are summed in float32 at least."""
    return SplitAttention.apply(query, key, value, visible_row)
