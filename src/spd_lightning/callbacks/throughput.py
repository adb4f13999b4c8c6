"""How fast a run trains, in its log and its progress bar. Knows Lightning's hooks; what is counted lies beside."""

from typing import Any, cast

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.utilities import rank_zero_warn

from spd_lightning.data.loader import BatchLoader
from spd_lightning.modules.batch import ReplicatedBatch
from spd_lightning.modules.distillation import Distillation
from spd_lightning.modules.throughput import ThroughputMeter, peak_memory_gib


class Throughput(Callback):
    """Logs how fast the run trains, over all ranks: `train/` and the names below, every `log_every_n_steps` steps.

    `tokens_per_s`, `supervised_tokens_per_s`; `padding_share` of the positions; `data_wait_share` of the time, in which
    the device waited for batches; `flops_utilisation`, the operations that the steps need over what the device can do;
    `peak_memory_gib` of the GPU, or of the process where there is none. Warns when the loader is the bottleneck.

    Args:
        peak_tflops: what a device can do, in 10^12 operations per second and in the run's precision; Lightning's figure
            for the device unless given. Where neither is known, utilisation is not logged.
    """

    BOTTLENECK = 0.1
    """Share of the time spent waiting for batches from which on it is worth a warning."""
    IN_BAR = ("tokens_per_s", "flops_utilisation", "data_wait_share")

    def __init__(self, peak_tflops: float | None = None) -> None:
        if peak_tflops is not None and not peak_tflops > 0:
            raise ValueError(f"peak_tflops={peak_tflops}: a number above 0 is needed")
        self.peak_flops = None if peak_tflops is None else peak_tflops * 1e12
        self.meter = ThroughputMeter()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.flops = cast(Distillation[Any], pl_module).training_flops()
        if self.peak_flops is None:
            precision = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(str(trainer.precision))
            self.peak_flops = get_available_flops(pl_module.device, precision or torch.float32)
        self.has_warned, self.is_first = False, True
        self.meter.restart(self.waited(trainer))

    @staticmethod
    def waited(trainer: Trainer) -> float:
        return cast(BatchLoader, trainer.train_dataloader).waited_seconds

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.meter.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.meter.resume()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: ReplicatedBatch, batch_idx: int
    ) -> None:
        self.meter.count(batch, self.flops)
        if (batch_idx + 1) % cast(Any, trainer).log_every_n_steps:
            return
        rates, shares = self.meter.rates(self.waited(trainer), self.peak_flops)
        figures = {name: self.over_ranks(trainer, pl_module, value, "sum") for name, value in rates.items()}
        figures |= {name: self.over_ranks(trainer, pl_module, value, "mean") for name, value in shares.items()}
        figures["peak_memory_gib"] = self.over_ranks(trainer, pl_module, peak_memory_gib(pl_module.device), "max")
        for name, value in figures.items():
            pl_module.log(f"train/{name}", value, prog_bar=name in self.IN_BAR)
        self.warn_of_loader(float(figures["data_wait_share"]), trainer)
        self.meter.restart(self.waited(trainer))

    @staticmethod
    def over_ranks(trainer: Trainer, pl_module: LightningModule, value: float, how: str) -> torch.Tensor:
        figure = torch.tensor(value, device=pl_module.device)
        return cast(torch.Tensor, trainer.strategy.reduce(figure, reduce_op=how))

    def warn_of_loader(self, share: float, trainer: Trainer) -> None:
        """Once; not of the first steps, in which workers start."""
        if not (self.is_first or self.has_warned) and share > self.BOTTLENECK:
            workers = cast(Any, trainer).datamodule.num_workers
            rank_zero_warn(
                f"the loader is the bottleneck: training waits for batches {share:.0%} of the time; give "
                f"data.num_workers more than {workers}, or put data.cache_dir on a faster disk"
            )
            self.has_warned = True
        self.is_first = False
