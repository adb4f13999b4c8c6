"""Checkpoints of a run, and the drafter folder that it ends with. Knows Lightning's hooks; no mathematics."""

import signal
from pathlib import Path
from typing import Any, cast

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

from spd_lightning.modules.checkpoint import FORMAT, check_replaceable, export_checkpoint, read_checkpoint
from spd_lightning.modules.hub import CONFIG_FILE, WEIGHTS_FILE


def is_dry_run(trainer: Trainer) -> bool:
    """Whether `fast_dev_run` is on, in which nothing is written."""
    return bool(cast(Any, trainer).fast_dev_run)


class DrafterCheckpoint(ModelCheckpoint):
    """Keeps the best checkpoint by implied speedup and the last one; ends the run with a drafter folder.

    The last one is written after each validation and epoch, and when the run is stopped by SIGTERM, or on one device
    by Ctrl-C or an error.

    Args:
        dirpath: folder of the checkpoints; `checkpoints` below `trainer.default_root_dir` when absent.
        export_to: drafter folder; `drafter` below `trainer.default_root_dir` when absent.
        monitor: logged figure that decides which checkpoint is best.
        mode: whether more (`max`) or less (`min`) of it is better.
        save_top_k: best checkpoints kept.
        every_n_train_steps: also write `last.ckpt` every so many optimizer steps, to resume from.
    """

    def __init__(
        self,
        dirpath: str | None = None,
        export_to: str | None = None,
        monitor: str = "val/s0",
        mode: str = "max",
        save_top_k: int = 1,
        every_n_train_steps: int | None = None,
    ) -> None:
        name = monitor.rpartition("/")[2]
        super().__init__(
            dirpath=dirpath,
            filename=f"step{{step}}-{name}={{{monitor}:.3f}}",
            auto_insert_metric_name=False,
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k,
            save_last=False,  # Lightning's would be the last one that was among the best; ours is the last one
            enable_version_counter=False,
        )
        self.export_to = export_to
        self.every_n_last = every_n_train_steps
        self.last_step = -1
        self.is_asked_to_stop = False
        if every_n_train_steps is not None and every_n_train_steps < 1:
            raise ValueError(f"every_n_train_steps={every_n_train_steps}: must be at least 1; leave it out instead")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.dirpath is None:
            self.dirpath = str(Path(trainer.default_root_dir) / "checkpoints")
        folder = self.drafter_folder(trainer)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"export_to={str(folder)!r}: that is a file; name a folder for the drafter")
        if stage == "fit" and not is_dry_run(trainer):
            check_replaceable(folder / WEIGHTS_FILE, {"format": FORMAT})  # not only when the run has ended
            if (folder / CONFIG_FILE).exists():
                rank_zero_info(
                    f"{folder} has a drafter, which this run replaces when it ends; --trainer.default_root_dir keeps both"
                )
        super().setup(trainer, pl_module, stage)

    def drafter_folder(self, trainer: Trainer) -> Path:
        return Path(self.export_to or Path(trainer.default_root_dir) / "drafter")

    def save_last_now(self, trainer: Trainer, knows_best: bool = False) -> None:
        """Writes `last.ckpt`, unless it is of this step already and knows as much of the best one."""
        if is_dry_run(trainer) or (self.last_step == trainer.global_step and not knows_best):
            return
        self.last_model_path = str(Path(cast(str, self.dirpath)) / "last.ckpt")
        trainer.save_checkpoint(self.last_model_path)
        self.last_step = trainer.global_step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """On several ranks SIGTERM becomes a request that they grant together, so that they can save together.

        Lightning's own handler communicates while the signal is handled, and hangs when every rank gets one, as
        schedulers and torchrun do it.
        """
        super().on_train_start(trainer, pl_module)
        if trainer.world_size > 1:
            signal.signal(signal.SIGTERM, self.ask_to_stop)

    def ask_to_stop(self, *_: Any) -> None:
        """Notes a SIGTERM."""
        self.is_asked_to_stop = True

    def stop_if_asked(self, trainer: Trainer) -> None:
        """Ends the run on all ranks, at the same batch, if any of them was asked to."""
        if trainer.world_size > 1 and trainer.strategy.reduce_boolean_decision(self.is_asked_to_stop, all=False):
            raise SIGTERMException

    def on_validation_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if trainer.training and not trainer.sanity_checking:
            self.stop_if_asked(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.stop_if_asked(trainer)
        stepped = (trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if self.every_n_last and stepped and trainer.global_step % self.every_n_last == 0:
            self.save_last_now(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if trainer.training and not trainer.sanity_checking and not self._should_save_on_train_epoch_end(trainer):
            self.save_last_now(trainer, knows_best=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        self.save_last_now(trainer, knows_best=self._should_save_on_train_epoch_end(trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save_last_now(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves what was trained; on several ranks only after SIGTERM, which stops them all at the same batch.

        Elsewhere the other ranks would not take part in saving, and this one would wait for them.
        """
        is_alone = trainer.world_size == 1 or isinstance(exception, SIGTERMException)
        if is_alone and trainer.global_step > 0 and not trainer.sanity_checking and not is_dry_run(trainer):
            self.save_last_now(trainer)
            rank_zero_info(f"stopped; go on with --ckpt_path {self.last_model_path}")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if is_dry_run(trainer):
            return
        if not self.best_model_path and not self.last_model_path:  # all saving was switched off
            self.save_last_now(trainer)
        source = self.best_model_path or self.last_model_path
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            folder = self.drafter_folder(trainer)
            export_checkpoint(read_checkpoint(Path(source)), folder)
            rank_zero_info(f"drafter: {folder} (from {source})")
        trainer.strategy.barrier()
