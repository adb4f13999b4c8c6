"""Callbacks that stop a training run, named by class path in the tests' configurations."""

import os
import shutil
import signal

import torch
from lightning import Callback, LightningModule, Trainer


class SigtermAfter(Callback):
    """Sends SIGTERM to its own process when so many batches of the run are done."""

    def __init__(self, batches: int, only_first_rank: bool = False) -> None:
        self.batches, self.only_first_rank = batches, only_first_rank
        self.seen = 0

    def on_train_batch_end(self, trainer: Trainer, *args) -> None:
        self.seen += 1
        if self.seen == self.batches and (trainer.is_global_zero or not self.only_first_rank):
            os.kill(os.getpid(), signal.SIGTERM)


class CopyBefore(Callback):
    """Copies a file when so many batches of the run are done: what a run that is killed then leaves behind."""

    def __init__(self, batches: int, path: str, to: str) -> None:
        self.batches, self.path, self.to = batches, path, to
        self.seen = 0

    def on_train_batch_start(self, trainer: Trainer, *args) -> None:
        if self.seen == self.batches:
            shutil.copyfile(self.path, self.to)
        self.seen += 1


class RecordBatches(Callback):
    """Appends the token ids and fills of each training batch to a file: what a run has really seen."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch, batch_idx: int) -> None:
        with open(self.path, "a") as file:
            file.write(f"{trainer.current_epoch} {batch_idx} {hash_of(batch.input_ids)} {batch.fill.tolist()}\n")


class UnsuperviseFirstRank(Callback):
    """Takes all supervision from rank 0's batches, as a rank with prompts only would have."""

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch, batch_idx: int) -> None:
        if trainer.global_rank == 0:
            batch.supervised.zero_()


def hash_of(tensor: torch.Tensor) -> int:
    return int((tensor.double() * torch.arange(1, tensor.numel() + 1).view_as(tensor)).sum())
