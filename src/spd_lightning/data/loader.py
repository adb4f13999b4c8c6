"""Batches in the sampler's order, from where training stands. Knows no trainer: it is told the position."""

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from spd_lightning.data.corpus import RowSet
from spd_lightning.data.replication import Replicator
from spd_lightning.data.sampler import BatchRows, EpochSampler
from spd_lightning.modules.batch import ReplicatedBatch


class ReplicatedRows(Dataset[ReplicatedBatch]):
    """Rows on disk as a data set whose items are whole batches, named by the sampler."""

    def __init__(self, rows: RowSet, replicator: Replicator) -> None:
        self.rows = rows
        self.replicator = replicator

    def __getitem__(self, batch: BatchRows) -> ReplicatedBatch:
        input_ids, loss_masks = self.rows.read(batch.rows)
        fill = self.replicator.fill(batch.epoch, batch.rows)
        return self.replicator.collate(input_ids, loss_masks, fill, batch.is_filler)


class BatchLoader:
    """A `DataLoader` that asks where to begin when its first batch is wanted.

    A trainer makes its iterator before it knows which batch comes next after a restart, and worker processes read
    ahead from that moment; so the iterator of the `DataLoader` is made as late as possible. It is no `DataLoader`
    itself: Lightning would replace the sampler of one under a distributed strategy.

    Args:
        data: whole batches by `BatchRows`.
        sampler: the order; its length is that of a whole epoch.
        position: epoch and batch that come next.
        order: what the order depends on, kept in checkpoints: a run that resumes amid an epoch in another order sees
            some rows twice and others never, which is warned of.
        num_workers: processes that read ahead; 0 reads in this one.
    """

    def __init__(
        self,
        data: ReplicatedRows,
        sampler: EpochSampler,
        position: Callable[[], tuple[int, int]],
        order: dict[str, Any] | None = None,
        num_workers: int = 0,
    ) -> None:
        self._sampler = sampler
        self._position = position
        self._order = order or {}
        self._resumed_order: dict[str, Any] | None = None
        self.waited_seconds = 0.0
        """How long whoever takes batches has waited for them, as far as no GPU was working meanwhile."""
        self._batches: DataLoader[ReplicatedBatch] = DataLoader(
            data,
            sampler=sampler,
            batch_size=None,
            num_workers=num_workers,
            pin_memory=torch.cuda.is_available(),
        )

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[ReplicatedBatch]:
        epoch, start = self._position()
        if start and self._resumed_order is not None and self._resumed_order != self._order:
            changed = [key for key in self._order if self._order[key] != self._resumed_order.get(key)]
            warnings.warn(
                f"resuming at batch {start} of epoch {epoch} with other {', '.join(changed)} than before: the rest of "
                "this epoch shows some rows again and leaves others out. Resume with the old values for exactness",
                stacklevel=2,
            )
        self._resumed_order = None
        self._sampler.seek(epoch, start)
        batches = iter(self._batches)
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            if not _gpu_is_busy():
                self.waited_seconds += time.perf_counter() - began
            if batch is None:
                return
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """What the order depends on (the position is the trainer's)."""
        return dict(self._order)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keeps the order of the run that is resumed, to compare."""
        self._resumed_order = state


def _gpu_is_busy() -> bool:
    """Whether a GPU of this process still works on what it was given: then nothing waits for the loader."""
    return torch.cuda.is_initialized() and not torch.cuda.current_stream().query()
