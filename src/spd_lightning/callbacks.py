"""What a run leaves beside its weights: checkpoints and the drafter folder, draft samples, throughput, a report.

Knows Lightning's hooks; knows no mathematics of the drafter.
"""

import json
import signal
import time
from pathlib import Path
from typing import Any, cast

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

from spd_lightning.modules.batch import ReplicatedBatch
from spd_lightning.modules.checkpoint import export_checkpoint, read_checkpoint
from spd_lightning.modules.lit_module import DistillationModule
from spd_lightning.modules.samples import DraftSamples

CONTEXT_TOKENS = 24


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
        if is_alone and trainer.global_step > 0 and not trainer.sanity_checking:
            self.save_last_now(trainer)

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


class SampleDrafts(Callback):
    """Writes drafts beside the target's tokens at each validation: a W&B table and `sample_drafts.jsonl`."""

    COLUMNS = ("context", "target_token", "draft_token", "draft_probability")

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not isinstance(outputs, DraftSamples) or not trainer.is_global_zero or trainer.sanity_checking:
            return
        tokenizer = cast(Any, trainer).datamodule.tokenizer
        rows = []
        for index, (sequence, position) in enumerate(outputs.positions.tolist()):
            context = cast(ReplicatedBatch, batch).input_ids[
                sequence, max(0, position + 1 - CONTEXT_TOKENS) : position + 1
            ]
            rows.append(
                [
                    tokenizer.decode(context.tolist()),
                    tokenizer.decode([int(outputs.target_tokens[index])]),
                    tokenizer.decode([int(outputs.draft_tokens[index])]),
                    round(float(outputs.draft_probs[index]), 4),
                ]
            )
        path = Path(trainer.default_root_dir) / "sample_drafts.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            for row in rows:
                record = {"step": trainer.global_step} | dict(zip(self.COLUMNS, row, strict=True))
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_table("val/sample_drafts", list(self.COLUMNS), rows, step=trainer.global_step)


class Throughput(Callback):
    """Logs tokens and supervised tokens per second over all ranks, and the accelerator's peak memory."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.restart()

    def restart(self) -> None:
        self.since, self.tokens, self.supervised = time.perf_counter(), 0, 0

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.paused = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and trainer.training:
            self.since += time.perf_counter() - self.paused

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: ReplicatedBatch, batch_idx: int
    ) -> None:
        self.tokens += int(batch.attention_mask.sum())
        self.supervised += int(batch.supervised.sum())
        if (batch_idx + 1) % cast(Any, trainer).log_every_n_steps:
            return
        seconds = time.perf_counter() - self.since
        for name, count in (("tokens_per_s", self.tokens), ("supervised_tokens_per_s", self.supervised)):
            rate = torch.tensor(count / seconds, device=pl_module.device)
            total = cast(torch.Tensor, trainer.strategy.reduce(rate, reduce_op="sum"))
            pl_module.log(f"train/{name}", total, prog_bar=name == "tokens_per_s")
        if pl_module.device.type == "cuda":
            pl_module.log("train/peak_memory_gib", torch.cuda.max_memory_allocated(pl_module.device) / 2**30)
        self.restart()


class AcceptanceReport(Callback):
    """Prints held-out acceptance by fill level and the figures it implies, and how to upload an offline W&B run.

    Args:
        note: a line printed below the table.
    """

    def __init__(self, note: str | None = None) -> None:
        self.note = note

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger) and trainer.is_global_zero:
                logger.experiment.define_metric("val/s0", summary="max")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or "val/s0" not in trainer.callback_metrics:
            return
        stages = cast(DistillationModule, pl_module).layout.num_stages
        rank_zero_info("\n" + acceptance_table(dict(trainer.callback_metrics), stages, trainer.global_step))
        if self.note:
            rank_zero_info(self.note)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger) and trainer.is_global_zero and logger.experiment.offline:
                rank_zero_info(f"offline W&B run: upload it with `wandb sync {Path(logger.experiment.dir).parent}`")


def acceptance_table(metrics: dict[str, Any], num_stages: int, step: int) -> str:
    """Held-out acceptance by fill level as text."""

    def figure(name: str) -> float:
        return float(metrics[f"val/{name}"])

    lines = [f"held-out acceptance at step {step}", f"{'fill':>6} {'T=0':>7} {'T=1':>7} {'T=1 top-k 50':>13}"]
    lines += [
        f"{fill:>6} {figure(f'p_fill_{fill}'):7.3f} {figure(f'p_t1_fill_{fill}'):7.3f} "
        f"{figure(f'p_t1_top50_fill_{fill}'):13.3f}"
        for fill in range(1, num_stages + 1)
    ]
    for suffix, label in (("", "T=0"), ("_t1", "T=1")):
        lines.append(
            f"implied at {label}: p {figure('p' + suffix):.3f}, tokens per cycle {figure('alpha' + suffix):.3f}, "
            f"S0 {figure('s0' + suffix):.2f} at n={num_stages}"
        )
    lines.append(f"KL {figure('loss'):.3f}, draft vocabulary holds {figure('coverage'):.1%} of the target's tokens")
    return "\n".join(lines)
