"""Prepared sources -> the rows of training and validation: mixing weights, validation split. Knows no batches."""

import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import datasets
import numpy as np
import pyarrow as pa

from spd_lightning.data.draws import random_bits
from spd_lightning.data.preparation import PreparedSource


@dataclass(frozen=True)
class RowSet:
    """Rows of a memory-mapped data set, each as often as an epoch shows it.

    Attributes:
        rows: the encoded rows of all sources, in Arrow format.
        index: positions in `rows`.
        data_hash: of what the rows are: prepared fingerprints, weights and split.
    """

    rows: datasets.Dataset
    index: np.ndarray
    data_hash: str

    def __len__(self) -> int:
        return len(self.index)

    def lengths(self) -> np.ndarray:
        """Tokens of each row."""
        return _column(self.rows, "length")[self.index]

    def num_supervised(self) -> int:
        """Answer tokens that one epoch predicts."""
        return int(_column(self.rows, "supervised")[self.index].sum(dtype=np.int64))

    def read(self, positions: Sequence[int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Token ids and answer masks of the rows at these positions of `index`."""
        table = self.rows[self.index[list(positions)].tolist()]
        ids, masks = (table.column(name).combine_chunks() for name in ("input_ids", "loss_mask"))
        return _split(ids), _split(masks)

    def location(self, position: int) -> str:
        """Where the row at this position of `index` comes from."""
        return self.rows[int(self.index[position])]["location"][0].as_py()

    def multiplicity(self) -> np.ndarray:
        """How often an epoch shows each row of `rows`."""
        return np.bincount(self.index, minlength=len(self.rows))

    def blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Token ids, answer masks and row lengths of all of `rows`, flat, in order, a block of rows at a time."""
        for batch in self.rows.data.table.to_batches():
            ids, masks = batch.column("input_ids"), batch.column("loss_mask")
            yield ids.flatten().to_numpy(), masks.flatten().to_numpy(), batch.column("length").to_numpy()


def join_sources(prepared: Sequence[PreparedSource], weights: Sequence[float]) -> RowSet:
    """The rows of all sources, mixed by weight.

    The weight says how often an epoch shows a row of that source: 1.0 once, 2.0 twice, 0.5 a half of them (always
    the same, chosen by hash), 1.5 all of them and a half of them again.

    Raises:
        ValueError: for a weight that is not positive and finite.
    """
    parts, indices, first = [], [], 0
    for source, weight in zip(prepared, weights, strict=True):
        if not 0 < weight < float("inf"):
            raise ValueError(f"source {source.report.source}: weight={weight} must be a positive number")
        rows = source.rows()
        if len(rows):
            parts.append(rows)
            indices.append(first + _repeat(len(rows), weight))
            first += len(rows)
    if not parts:
        raise ValueError("no source has a usable row")
    described = [[source.fingerprint, weight] for source, weight in zip(prepared, weights, strict=True)]
    return RowSet(datasets.concatenate_datasets(parts).with_format("arrow"), np.concatenate(indices), _hash(described))


def split_off(rows: RowSet, num_rows: int) -> tuple[RowSet, RowSet]:
    """Training and validation rows: at most `num_rows` rows are taken out, chosen by a hash of what they say.

    Rows of one dialogue, or with the same question, stay together, so nothing of the validation is trained on. A
    validation row is shown once, whatever its source's weight.

    Raises:
        ValueError: if nothing is left on one of the two sides.
    """
    groups = _column(rows.rows, "group")
    keys, sizes = np.unique(groups[np.unique(rows.index)], return_counts=True)
    chosen: list[int] = []
    left = num_rows
    for place in np.argsort(random_bits(0, "split", keys), kind="stable"):
        if left == 0:
            break
        if sizes[place] <= left:
            chosen.append(place)
            left -= int(sizes[place])
    held_out = np.isin(groups[rows.index], keys[chosen])
    if held_out.all() or not held_out.any():
        raise ValueError(
            f"data.val_rows={num_rows} of {len(np.unique(rows.index))} rows ({len(keys)} different dialogues) leaves no "
            f"{'training' if held_out.all() else 'validation'} row: change data.val_rows or give data.val_sources"
        )
    split = [rows.data_hash, num_rows]
    training = RowSet(rows.rows, rows.index[~held_out], _hash([*split, "training"]))
    validation = RowSet(rows.rows, np.unique(rows.index[held_out]), _hash([*split, "validation"]))
    return training, validation


def _repeat(num_rows: int, weight: float) -> np.ndarray:
    """Row numbers of one source: each `floor(weight)` times, and a share of them chosen by hash once more."""
    whole = int(weight)
    extra = round((weight - whole) * num_rows)
    order = np.argsort(random_bits(0, "weight", np.arange(num_rows, dtype=np.uint64)), kind="stable")
    return np.concatenate([np.tile(np.arange(num_rows), whole), np.sort(order[:extra])]).astype(np.int64)


def _column(rows: datasets.Dataset, name: str) -> np.ndarray:
    return rows.data.column(name).to_numpy()


def _split(lists: "pa.ListArray | pa.ChunkedArray") -> list[np.ndarray]:
    if isinstance(lists, pa.ChunkedArray):
        lists = pa.concat_arrays(lists.chunks)
    return [entry.values.to_numpy() for entry in lists]


def _hash(described: object) -> str:
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def warn_of_overlap(training: RowSet, validation: RowSet) -> None:
    """Warns if validation rows have the dialogue or question of a training row."""
    groups = _column(validation.rows, "group")[validation.index]
    shared = int(np.isin(groups, _column(training.rows, "group")[training.index]).sum())
    if shared:
        warnings.warn(
            f"{shared} of {len(groups)} validation rows share their prompt with a training row: "
            "acceptance on them is not held out",
            stacklevel=2,
        )
