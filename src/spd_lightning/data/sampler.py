"""Which rows make which batch: a pure function of (seed, epoch, index).

Knows the rows' lengths and the number of ranks; knows neither rows nor a trainer.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Sampler

from spd_lightning.data.draws import random_bits, random_order

DEFAULT_BATCH_SIZE = 8
"""Rows of a batch where neither these nor a token budget are given."""
_EQUAL_LENGTH_BITS = 4
"""Lengths that agree in so many binary digits behind the first count as equal: within 1/16 at most."""


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


class EpochSampler(Sampler[BatchRows], ABC):
    """An epoch's global batches, the same number on every rank and in every epoch, each row exactly once.

    Args:
        lengths: tokens of each row.
        num_replicas: ranks that share the rows.
        rank: this one.
        seed: of the order.
        shuffle: if false, rows are sorted by length over the whole dataset, in every epoch alike.
    """

    def __init__(
        self, lengths: np.ndarray, num_replicas: int = 1, rank: int = 0, seed: int = 0, shuffle: bool = True
    ) -> None:
        assert 0 <= rank < num_replicas
        self.lengths = np.asarray(lengths)
        self.num_replicas = num_replicas
        self.rank = rank
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.start = 0
        self._made: tuple[int, list[np.ndarray]] | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Batches of a whole epoch, wherever this one starts."""

    @property
    @abstractmethod
    def order(self) -> dict[str, Any]:
        """What the order depends on beside the rows and the seed, in the words of the configuration."""

    @abstractmethod
    def make_global_batches(self, epoch: int) -> list[np.ndarray]:
        """Every global batch of an epoch, in order."""

    @abstractmethod
    def share(self, rows: np.ndarray) -> np.ndarray:
        """This rank's rows of a global batch; none where there are fewer rows than ranks."""

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
        share = self.share(rows)
        if len(share):
            return BatchRows(epoch, tuple(share.tolist()))
        return BatchRows(epoch, (int(rows[0]),), is_filler=True)

    def _global_batches(self, epoch: int) -> list[np.ndarray]:
        if self._made is None or self._made[0] != epoch:
            self._made = (epoch, self.make_global_batches(epoch))
        return self._made[1]


class LengthBucketedSampler(EpochSampler):
    """Batches of so many rows, of similar length.

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
        super().__init__(lengths, num_replicas, rank, seed, shuffle)
        self.global_size = batch_size * num_replicas
        self.window = window

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.global_size)

    @property
    def order(self) -> dict[str, Any]:
        return {"global batch size": self.global_size, "bucket_window": self.window}

    def share(self, rows: np.ndarray) -> np.ndarray:
        return rows[self.rank :: self.num_replicas]

    def make_global_batches(self, epoch: int) -> list[np.ndarray]:
        if not self.shuffle:
            order = np.argsort(self.lengths, kind="stable")
            return [order[begin : begin + self.global_size] for begin in range(0, len(order), self.global_size)]
        order = random_order(self.seed, "rows", len(self.lengths), epoch)
        bucket = np.arange(len(order)) // (self.global_size * self.window)
        order = order[np.lexsort((self.lengths[order], bucket))]
        batches = [order[begin : begin + self.global_size] for begin in range(0, len(order), self.global_size)]
        return [batches[index] for index in random_order(self.seed, "batches", len(batches), epoch)]


class TokenBudgetSampler(EpochSampler):
    """Batches of so many tokens, padding included: rows times the longest of them is within the budget.

    An epoch is a sequence of global batches, each of one batch for every rank. Rows are sorted by length, longest
    first, and cut where all ranks' batches are full. Two things differ between epochs, neither of which changes the
    number of cuts, so an epoch is always as long: rows of about the same length (within 1/16) swap places, and the
    first global batch takes a random number of rows, which moves all cuts behind it. Only the first and the last one
    are not full, and are dealt out evenly (see `BatchRows` for a rank that gets none). Global batches are put in
    random order.

    Args:
        lengths: tokens of each row, none above the budget.
        tokens_per_batch: the budget of a batch on one rank.
        num_replicas: ranks that share the rows.
        rank: this one.
        seed: of the order.
        shuffle: if false, rows are sorted by length over the whole dataset, in every epoch alike.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        tokens_per_batch: int,
        num_replicas: int = 1,
        rank: int = 0,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        super().__init__(lengths, num_replicas, rank, seed, shuffle)
        assert len(self.lengths) and self.lengths.max() <= tokens_per_batch
        self.tokens_per_batch = tokens_per_batch
        self._sort_lengths = _longest_alike(self.lengths) if shuffle else self.lengths
        self._ends = self._global_ends()
        self._first_sizes = self._choose_first_sizes()
        self._num_batches = len(self._begins(self._first_sizes[-1]))

    def __len__(self) -> int:
        return self._num_batches

    @property
    def order(self) -> dict[str, Any]:
        return {"tokens_per_batch": self.tokens_per_batch, "ranks": self.num_replicas}

    def share(self, rows: np.ndarray) -> np.ndarray:
        """Dealt out by the smallest budget with which the ranks can take all rows: about as many tokens on each."""
        lengths = self.lengths[rows].tolist()
        budgets = range(self.tokens_per_batch + 1)
        budget = bisect_left(
            budgets, True, lo=lengths[0], key=lambda tokens: self._deal(lengths, tokens)[-1] >= len(rows)
        )
        ends = self._deal(lengths, budget)
        return rows[ends[self.rank] : ends[self.rank + 1]]

    def make_global_batches(self, epoch: int) -> list[np.ndarray]:
        sizes = self._first_sizes
        first = sizes[int(random_bits(self.seed, "first", epoch)[0] % np.uint64(len(sizes)))]
        order = np.arange(len(self.lengths))
        if self.shuffle:
            order = random_order(self.seed, "rows", len(order), epoch)
        order = order[np.argsort(-self._sort_lengths[order], kind="stable")]
        batches = np.split(order, self._begins(first)[1:])
        batches = [rows[np.argsort(-self.lengths[rows], kind="stable")] for rows in batches]
        if not self.shuffle:
            return batches[::-1]
        return [batches[index] for index in random_order(self.seed, "batches", len(batches), epoch)]

    def _global_ends(self) -> list[int]:
        """For each place in the sorted rows, the end of a full global batch that begins there."""
        lengths = np.sort(self._sort_lengths)[::-1]
        places = np.arange(len(lengths))
        end_of_one = np.minimum(places + self.tokens_per_batch // lengths, len(lengths))
        ends = end_of_one
        for _ in range(self.num_replicas - 1):
            ends = np.append(end_of_one, len(lengths))[ends]
        return ends.tolist()

    def _begins(self, first_size: int) -> list[int]:
        """Where each global batch begins if the first has so many rows and the others are full."""
        begins, place = [0], first_size
        while place < len(self._ends):
            begins.append(place)
            place = self._ends[place]
        return begins

    def _choose_first_sizes(self) -> range:
        """Sizes of the first global batch that all give the same number of batches.

        Smaller sizes move the later cuts forward, so up to some size there is one batch more than with a full one, and
        from there on as many. The longer of the two ranges has at least half a batch of freedom.
        """
        full = self._ends[0]
        fewest = len(self._begins(full))
        turn = bisect_left(range(full), True, lo=1, key=lambda size: len(self._begins(size)) == fewest)
        few, more = range(turn, full + 1), range(1, turn)
        if not self.shuffle:
            return few[-1:]
        return few if len(few) >= len(more) else more

    def _deal(self, lengths: list[int], budget: int) -> list[int]:
        """Where the ranks' shares begin and end if each takes as many of the rows as its budget allows."""
        ends = [0]
        for _ in range(self.num_replicas):
            begin = ends[-1]
            ends.append(min(len(lengths), begin + budget // lengths[begin]) if begin < len(lengths) else begin)
        return ends


def resolve_batch_size(batch_size: int | None, tokens_per_batch: int | None, max_length: int) -> int | None:
    """Rows of a batch, or nothing where a token budget says how large it is.

    Raises:
        ValueError: if both are given, or a row of `max_length` tokens would fit in no batch.
    """
    if tokens_per_batch is None:
        size = DEFAULT_BATCH_SIZE if batch_size is None else batch_size
        if size < 1:
            raise ValueError(f"data.batch_size={size}: must be at least 1")
        return size
    if batch_size is not None:
        raise ValueError(
            f"data.batch_size={batch_size} and data.tokens_per_batch={tokens_per_batch}: one of them says how large a "
            "batch is; set the other to null"
        )
    if tokens_per_batch < max_length:
        raise ValueError(
            f"data.tokens_per_batch={tokens_per_batch} is below data.max_length={max_length}: a row of that length "
            "would fit in no batch; raise the one or lower the other"
        )
    return None


def _longest_alike(lengths: np.ndarray) -> np.ndarray:
    """For each row, the length of the longest row that counts as equally long."""
    exponents = np.frexp(lengths)[1] - 1  # of the power of two at or below the length
    steps = 1 << np.maximum(exponents - _EQUAL_LENGTH_BITS, 0)
    _, groups = np.unique(-(-lengths // steps) * steps, return_inverse=True)
    longest = np.zeros(groups.max() + 1, dtype=np.int64)
    np.maximum.at(longest, groups, lengths)
    return longest[groups]
