"""Held-out acceptance as printed at each validation. Knows Lightning's hooks and the names of logged figures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_info

from spd_lightning.modules.lit_module import DistillationModule


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


def acceptance_table(metrics: Mapping[str, Any], num_stages: int, step: int) -> str:
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
