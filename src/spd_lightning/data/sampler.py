"""Which rows make which batch: a pure function of (seed, epoch, index).

Knows the rows' lengths and the number of ranks; knows neither rows nor a trainer.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch.utils.data import Sampler

from spd_lightning.data.draws import random_order


class BatchRows(NamedTuple):
    """One rank's share of one batch.

    Attributes:
        epoch: selects the fill draws.
        rows: indices into the dataset.
        is_filler: the rows stand in for a share that is empty: they are shown to the model (every rank must run as
            many batches as the others), but nothing in them is supervised.
    """

    epoch: int
    rows: tuple[int, ...]
    is_filler: bool = False


class LengthBucketedSampler(Sampler[BatchRows]):
    """Batches of rows of similar length, the same number on every rank, each row exactly once in an epoch.

    An epoch is a sequence of global batches of `batch_size * num_replicas` rows. Rows are put in random order, sorted
    by length within windows of `window` global batches, cut into global batches, and these are put in random order.
    Each rank takes every `num_replicas`-th row of a global batch, so the ranks' shares are as long as each other.
    The last rows of an epoch make one smaller global batch, dealt out evenly; a rank that gets none of it has a
    filler (see `BatchRows`), so no row is lost, repeated or counted twice.

    Args:
        lengths: tokens of each row.
        batch_size: rows of a batch on one rank.
        num_replicas: ranks that share the rows.
        rank: this one.
        seed: of the order.
        shuffle: if false, rows are sorted by length over the whole dataset, in every epoch alike.
        window: global batches that are sorted together. More means less padding and less mixing.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        batch_size: int,
        num_replicas: int = 1,
        rank: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        window: int = 50,
    ) -> None:
        assert batch_size >= 1
        assert window >= 1
        assert 0 <= rank < num_replicas
        self.lengths = np.asarray(lengths)
        self.global_size = batch_size * num_replicas
        self.num_replicas = num_replicas
        self.rank = rank
        self.seed = seed
        self.shuffle = shuffle
        self.window = window
        self.epoch = 0
        self.start = 0
        self._made: tuple[int, list[np.ndarray]] | None = None

    def __len__(self) -> int:
        """Batches of a whole epoch, wherever this one starts."""
        return -(-len(self.lengths) // self.global_size)

    def set_epoch(self, epoch: int) -> None:
        """Iterations make the whole of this epoch."""
        self.seek(epoch, 0)

    def seek(self, epoch: int, start: int) -> None:
        """Iterations begin at batch `start` of `epoch`."""
        self.epoch, self.start = epoch, start

    def __iter__(self) -> Iterator[BatchRows]:
        # Nothing is changed here: a DataLoader with worker processes asks for two iterators and uses the second.
        return (self.batch(self.epoch, index) for index in range(self.start, len(self)))

    def batch(self, epoch: int, index: int) -> BatchRows:
        """This rank's share of global batch `index` of `epoch`."""
        rows = self._global_batches(epoch)[index]
        share = rows[self.rank :: self.num_replicas]
        if len(share):
            return BatchRows(epoch, tuple(share.tolist()))
        return BatchRows(epoch, (int(rows[0]),), is_filler=True)

    def _global_batches(self, epoch: int) -> list[np.ndarray]:
        if self._made is None or self._made[0] != epoch:
            self._made = (epoch, self.make_global_batches(epoch))
        return self._made[1]

    def make_global_batches(self, epoch: int) -> list[np.ndarray]:
        """Every global batch of an epoch, in order."""
        if not self.shuffle:
            order = np.argsort(self.lengths, kind="stable")
            return [order[begin : begin + self.global_size] for begin in range(0, len(order), self.global_size)]
        order = random_order(self.seed, "rows", len(self.lengths), epoch)
        bucket = np.arange(len(order)) // (self.global_size * self.window)
        order = order[np.lexsort((self.lengths[order], bucket))]
        batches = [order[begin : begin + self.global_size] for begin in range(0, len(order), self.global_size)]
        return [batches[index] for index in random_order(self.seed, "batches", len(batches), epoch)]
