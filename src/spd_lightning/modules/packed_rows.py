"""Feature rows without those that no draft depends on (design §4): sequences with few tokens in flight have fewer.

Rows of all sequences lie side by side as if of one, so every linear map still runs once; attention runs once for each
set of row types that occurs. Knows no layers and no losses.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spd_lightning.modules.attention.dense import StructuralAttention
from spd_lightning.modules.features import needed_rows


class RowGroup:
    """Sequences that need the same row types.

    Args:
        sequences: their indices in the batch.
        rows: the row types, ascending.
        visible_row: the mask of these sequences over all row types.
    """

    def __init__(
        self, sequences: Sequence[int], rows: Sequence[int], visible_row: Int[Tensor, "group rows distances"]
    ) -> None:
        device = visible_row.device
        self.sequences, self.rows = list(sequences), torch.tensor(rows, device=device)
        kept = torch.full(visible_row.shape[1:2], -1, device=device)
        kept[self.rows] = torch.arange(len(rows), device=device)
        self.visible_row = kept[visible_row[:, self.rows]]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.sequences), len(self.rows)


class PackedRows:
    """The rows that the drafts of a batch depend on: first the newest of every sequence, then the others.

    Args:
        visible_row: the structural mask of the batch.
    """

    def __init__(self, visible_row: Int[Tensor, "batch rows distances"]) -> None:
        rows = [needed_rows(table) for table in visible_row.tolist()]
        order = sorted(range(len(rows)), key=rows.__getitem__)
        grouped = [(needed, list(members)) for needed, members in groupby(order, key=rows.__getitem__)]
        self.groups = [RowGroup(members, needed, visible_row[members]) for needed, members in grouped]
        self.num_sequences = len(rows)
        self.is_whole = [len(needed) for needed, _ in grouped] == [visible_row.shape[1]]
        self.original_order = sorted(range(len(order)), key=order.__getitem__)

    def pack(self, hidden: Float[Tensor, "batch rows seq dim"]) -> Float[Tensor, "1 packed seq dim"]:
        """The needed rows of all sequences."""
        return self._join([hidden[group.sequences][:, group.rows] for group in self.groups])

    def newest(self, packed: Float[Tensor, "1 batch seq dim"]) -> Float[Tensor, "batch seq dim"]:
        """The newest row of each sequence, in the batch's order."""
        return packed[0, self.original_order]

    def attend(
        self,
        attention: StructuralAttention,
        query: Float[Tensor, "1 heads query_rows seq head_dim"],
        key: Float[Tensor, "1 kv_heads packed seq head_dim"],
        value: Float[Tensor, "1 kv_heads packed seq head_dim"],
    ) -> Float[Tensor, "1 heads query_rows seq head_dim"]:
        """Structural attention of packed rows; the queries are all of them, or the newest alone."""
        parts = (self._split(x.movedim(1, 3)) for x in (query, key, value))
        outputs = [
            attention(q.movedim(3, 1), k.movedim(3, 1), v.movedim(3, 1), group.visible_row).movedim(1, 3)
            for group, q, k, v in zip(self.groups, *parts, strict=True)
        ]
        return self._join(outputs).movedim(3, 1)

    def _split(self, packed: Float[Tensor, "1 packed *rest"]) -> list[Tensor]:
        """Of each group: `group rows *rest`, or `group 1 *rest` if there are the newest rows alone."""
        newest, others = packed[0].split([self.num_sequences, packed.shape[1] - self.num_sequences])
        first = [x[:, None] for x in newest.split([len(group.sequences) for group in self.groups])]
        if not len(others):
            return first
        shapes = [(count, rows - 1) for count, rows in (group.shape for group in self.groups)]
        rest = [
            x.unflatten(0, shape) for x, shape in zip(others.split([a * b for a, b in shapes]), shapes, strict=True)
        ]
        return [torch.cat(pair, dim=1) for pair in zip(first, rest, strict=True)]

    def _join(self, parts: Sequence[Float[Tensor, "_ _ *rest"]]) -> Float[Tensor, "1 packed *rest"]:
        """The inverse of `_split`."""
        return torch.cat([x[:, 0] for x in parts] + [x[:, 1:].flatten(0, 1) for x in parts])[None]
