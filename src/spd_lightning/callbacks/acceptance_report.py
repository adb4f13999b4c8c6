"""Held-out acceptance as printed at each validation. Knows Lightning's hooks and the names of logged figures."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from spd_lightning.modules.eagle.chain_acceptance import DRAFT_LENGTHS, RULES
from spd_lightning.modules.lit_module import DistillationModule

Figure = Callable[[str], float]
"""A logged figure by its name."""
HEADINGS = {"fill": "fill", "step": "draft"}


class AcceptanceReport(Callback):
    """Prints held-out acceptance and the figures it implies, and how to upload an offline W&B run.

    Acceptance is by fill level, for EAGLE-3 by step of the chain.

    Args:
        note: a line printed below the table.
    """

    def __init__(self, note: str | None = None) -> None:
        self.note = note

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger) and trainer.is_global_zero:
                for name in ("val/s0", "val/s0_k7"):
                    logger.experiment.define_metric(name, summary="max")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = dict(trainer.callback_metrics)
        if trainer.sanity_checking or not {"val/s0", "val/p_step_1"} & metrics.keys():
            return
        step = trainer.global_step if trainer.state.fn == TrainerFn.FITTING else None  # else it counts nothing
        if "val/p_step_1" in metrics:
            table = chain_table(metrics, step)
        else:
            stages = cast(DistillationModule, pl_module).layout.num_stages
            table = acceptance_table(metrics, stages, step)
        rank_zero_info("\n" + table)
        if self.note:
            rank_zero_info(self.note)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger) and trainer.is_global_zero and logger.experiment.offline:
                rank_zero_info(f"offline W&B run: upload it with `wandb sync {Path(logger.experiment.dir).parent}`")


def acceptance_table(metrics: Mapping[str, Any], num_stages: int, step: int | None) -> str:
    """Held-out acceptance by fill level as text."""

    def implied(figure: Figure, suffix: str, label: str) -> str:
        return (
            f"implied at {label}: p {figure('p' + suffix):.3f}, tokens per cycle {figure('alpha' + suffix):.3f}, "
            f"S0 {figure('s0' + suffix):.2f} at n={num_stages}"
        )

    return table_of_rates(metrics, step, "fill", num_stages, implied)


def chain_table(metrics: Mapping[str, Any], step: int | None) -> str:
    """Held-out acceptance by step of EAGLE-3's chains as text."""

    def implied(figure: Figure, suffix: str, label: str) -> str:
        rounds = ", ".join(f"{figure(f's0{suffix}_k{k}'):.2f} with {k} drafts" for k in DRAFT_LENGTHS)
        return f"implied tokens per round at {label}: {rounds}"

    num_steps = sum(name.startswith("val/p_step_") for name in metrics)
    return table_of_rates(metrics, step, "step", num_steps, implied)


def table_of_rates(
    metrics: Mapping[str, Any],
    step: int | None,
    kind: str,
    count: int,
    implied: Callable[[Figure, str, str], str],
) -> str:
    """Acceptance by fill level or by step of a chain, and what it implies, greedily and sampled.

    Args:
        metrics: logged figures.
        step: of the optimizer; none outside of training.
        kind: what the rates are by, as the figures' names have it.
        count: of these; they are numbered from 1.
        implied: a line, of a figure by its name, the suffix of figures of a law, and the law's name.
    """

    def figure(name: str) -> float:
        return float(metrics[f"val/{name}"])

    title = "held-out acceptance" if step is None else f"held-out acceptance at step {step}"
    lines = [title, f"{HEADINGS[kind]:>6} {'T=0':>7} {'T=1':>7} {'T=1 top-k 50':>13}"]
    for number in range(1, count + 1):
        rates = [figure(f"p{suffix}_{kind}_{number}") for suffix in RULES]
        lines.append(f"{number:>6} {rates[0]:7.3f} {rates[1]:7.3f} {rates[2]:13.3f}")
    lines += [implied(figure, suffix, label) for suffix, label in (("", "T=0"), ("_t1", "T=1"))]
    lines.append(f"KL {figure('loss'):.3f}, draft vocabulary holds {figure('coverage'):.1%} of the target's tokens")
    return "\n".join(lines)
