"""What distilling any drafter from a frozen target takes, whatever it reads. Wiring only.

Knows the trainer and the data module's vocabulary; knows no drafter's architecture, no losses and no metrics.
"""

import math
from abc import abstractmethod
from dataclasses import MISSING, asdict, fields
from typing import Any, Generic, Protocol, TypeVar, cast, runtime_checkable

import torch
from lightning import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from spd_lightning.modules.batch import ReplicatedBatch
from spd_lightning.modules.checkpoint import drafter_record, load_drafter, read_drafter_config
from spd_lightning.modules.draft_vocab import DraftVocab
from spd_lightning.modules.drafter import DraftModule
from spd_lightning.modules.drafter_config import DrafterConfig
from spd_lightning.modules.eagle.eagle_config import Eagle3Config
from spd_lightning.modules.features import FeatureLayout
from spd_lightning.modules.init_from import (
    ARITHMETIC,
    STRUCTURAL,
    carry_over,
    changed_settings,
    check_source,
)
from spd_lightning.modules.learning_rate import use_own_rates, warmup_then_decay
from spd_lightning.modules.losses import TargetHead
from spd_lightning.modules.model_size import TARGET_SIZES
from spd_lightning.modules.resume import rewind_to_last_step
from spd_lightning.modules.sharding import shard_drafter
from spd_lightning.modules.target import FrozenTarget, TargetShape, TargetStates
from spd_lightning.modules.throughput import TrainingFlops
from spd_lightning.modules.tokenizer import tokenizer_record

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "16-mixed")

DrafterModule = TypeVar("DrafterModule", bound=DraftModule)


@runtime_checkable
class DistillationData(Protocol):
    """What the module reads of its data module after `setup`."""

    draft_vocab: DraftVocab
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    sources: list[Any]


class Distillation(LightningModule, Generic[DrafterModule]):
    """Trains a drafter by distillation from a frozen target; subclasses say which, and take its steps.

    A subclass sets `target_shape`, `layout` and `source_config` when it is made, and saves its arguments as
    hyper-parameters: `target`, `target_dtype`, `compile_target`, `init_from`, `lr`, `warmup_steps` and `weight_decay`
    are read here.
    """

    target_shape: TargetShape
    layout: FeatureLayout
    """Of the batches that the data module makes."""
    source_config: DrafterConfig | Eagle3Config | None = None
    """Of the drafter that training begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.drafter: DrafterModule | None = None
        self.target: FrozenTarget | None = None
        self.supervised_tokens = 0.0
        """Supervised tokens in the gradients accumulated so far, on this rank."""

    @abstractmethod
    def make_drafter(self, draft_vocab_size: int) -> DrafterModule:
        """The drafter, not initialised yet."""

    @abstractmethod
    def training_flops(self) -> TrainingFlops:
        """What a training step needs."""

    @property
    def data(self) -> DistillationData:
        return cast(DistillationData, cast(Any, self.trainer).datamodule)

    def read_source(self, init_from: str | None, is_eagle: bool) -> DrafterConfig | Eagle3Config | None:
        """The configuration of the drafter that training begins with, if there is one, checked against the target."""
        if init_from is None:
            return None
        _, source = read_drafter_config(init_from)
        check_source(source, is_eagle, self.target_shape)
        return source

    def option(self, name: str, default: Any) -> Any:
        """A hyper-parameter; where it says nothing, what the drafter that training begins with has, or the default."""
        given = self.hparams[name]
        return getattr(self.source_config, name, default) if given is None else given

    def target_sizes(self) -> dict[str, Any]:
        """The drafter's sizes: the hyper-parameters, or the first drafter's and the target's where they say nothing."""
        return {name: self.option(name, getattr(self.target_shape, name)) for name in TARGET_SIZES}

    def setup(self, stage: str) -> None:
        if self.trainer.precision not in PRECISIONS:
            raise ValueError(
                f"trainer.precision={self.trainer.precision!r}: drafter parameters must be float32 (with 16-bit "
                f"parameters and a small learning rate the norm gains never move); use one of {', '.join(PRECISIONS)}"
            )

    def configure_model(self) -> None:
        """Loads the target and builds the drafter, once; Lightning may call this again."""
        if self.drafter is not None:
            return
        device = self.trainer.strategy.root_device
        target = FrozenTarget.from_pretrained(self.hparams["target"], self.hparams["target_dtype"], device)
        if self.global_rank == 0:
            target.warn_of_slow_layers()
        if self.hparams["compile_target"]:
            target.compile_layers()
        token_ids = torch.tensor(self.data.draft_vocab.token_ids)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            drafter = self.make_drafter(len(token_ids))
        generator = torch.Generator().manual_seed(torch.initial_seed() % 2**63)
        head_rows = target.head_rows(token_ids)
        drafter.initialize(token_ids, target.final_norm_gain.cpu(), head_rows.cpu(), generator)
        self.tokenizer_record = tokenizer_record(self.data.tokenizer, self.data.eos_token_ids)
        if self.hparams["init_from"] is not None:
            self.begin_with(self.hparams["init_from"], drafter)
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            drafter.to(device)
            shard_drafter(drafter, cast(Any, self.device_mesh)["data_parallel"])
        # The target is not a module, so it reaches neither the checkpoint nor the optimizer.
        self.target, self.drafter = target, drafter

    def begin_with(self, init_from: str, drafter: DrafterModule) -> None:
        """Gives the drafter the weights of another one, and says what it has not got of it."""
        source = load_drafter(init_from)
        if source.record["tokenizer"]["hash"] != self.tokenizer_record["hash"]:
            raise ValueError(
                f"model.init_from={init_from!r}: the drafter was trained with another tokenizer than this run's, so its "
                "token ids mean something else"
            )
        told = carry_over(source.module, drafter)
        configs = source.module.config, cast(Any, drafter).config
        for line in changed_settings(*configs, ARITHMETIC):
            rank_zero_warn(f"init_from {init_from}: {line}: the same weights compute something else", stacklevel=2)
        for line in [*changed_settings(*configs, STRUCTURAL), *told] or ["all weights are carried over"]:
            rank_zero_info(f"init_from {init_from}: {line}")

    def on_fit_start(self) -> None:
        strangers = [name for name, _ in self.named_parameters() if not name.startswith("drafter.")]
        assert not strangers, f"only the drafter is trained, but there are also {strangers}"

    def target_head(self) -> TargetHead:
        """The target's head, with the rows that no token has cut off."""
        assert self.target is not None and self.drafter is not None
        weight = self.target.head_weight
        num_tokens = min(self.tokenizer_record["num_tokens"], weight.shape[0])
        return TargetHead(weight, weight[self.drafter.draft_token_ids], num_tokens)

    def states_at(self, batch: ReplicatedBatch, anchors: tuple[int, ...]) -> TargetStates:
        """The frozen forward, in the target's own dtype whatever the trainer's precision."""
        assert self.target is not None
        with torch.autocast(batch.input_ids.device.type, enabled=False):
            return self.target.forward(batch.input_ids, batch.attention_mask, anchors)

    def scaled(self, loss: Tensor) -> Tensor:
        """A summed loss as `on_before_optimizer_step` makes an exact mean per token of it."""
        return loss * (self.trainer.accumulate_grad_batches * self.trainer.world_size)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the summed gradients by the supervised tokens of all ranks and accumulated batches."""
        total = torch.tensor(self.supervised_tokens, dtype=torch.float64, device=self.device)
        total = float(cast(Tensor, self.trainer.strategy.reduce(total, reduce_op="sum")))
        self.supervised_tokens = 0.0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(max(total, 1.0))

    def configure_optimizers(self) -> Any:
        assert self.drafter is not None
        optimizer = torch.optim.AdamW(
            self.drafter.parameters(), lr=self.hparams["lr"], weight_decay=self.hparams["weight_decay"]
        )
        factor = warmup_then_decay(self.hparams["warmup_steps"], self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        """The run's own learning rate and weight decay win over those of a checkpoint that it resumes."""
        [optimizer], [config] = self.trainer.optimizers, self.trainer.lr_scheduler_configs
        scheduler = cast(torch.optim.lr_scheduler.LambdaLR, config.scheduler)
        use_own_rates(optimizer, scheduler, self.hparams["lr"], self.hparams["weight_decay"])

    def drafter_record(self) -> dict[str, Any]:
        """What a drafter folder says of this drafter beside its weights."""
        assert self.drafter is not None
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        return drafter_record(
            cast(Any, self.drafter).config,
            target_name=self.hparams["target"],
            target=self.target_shape,
            tokenizer=self.tokenizer_record,
            draft_vocab=self.data.draft_vocab,
            metrics=metrics,
            provenance={
                "data": [_stated(source) for source in self.data.sources],
                "init_from": self.hparams["init_from"],
            },
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["drafter"] = self.drafter_record()
        trainer = self.trainer
        rewind_to_last_step(checkpoint["loops"], trainer.accumulate_grad_batches, trainer.num_training_batches)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuses a checkpoint of another drafter: same shapes do not make the same draft vocabulary."""
        assert self.drafter is not None
        config = cast(Any, self.drafter).config
        saved, here = default_settings(type(config)) | checkpoint["drafter"]["drafter"], config.to_dict()
        if different := [name for name in here if saved.get(name) != here[name]]:
            raise ValueError(
                f"the checkpoint's drafter has {', '.join(f'{name}={saved.get(name)!r}' for name in different)}, this "
                f"run's has {', '.join(f'{name}={here[name]!r}' for name in different)}: resume with the same model"
            )
        if checkpoint["drafter"]["draft_vocab"]["token_ids"] != self.drafter.draft_token_ids.tolist():
            raise ValueError(
                "the checkpoint's draft vocabulary is not this run's: resume with the same training data, or export "
                "the checkpoint and give its drafter folder as data.draft_vocab"
            )


def default_settings(config_class: type) -> dict[str, Any]:
    """Settings that older checkpoints do not name, with what they were then; JSON-ready as `to_dict`."""
    defaults = {field.name: field.default for field in fields(config_class) if field.default is not MISSING}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}


def _stated(source: Any) -> dict[str, Any]:
    """The options of a data source that say something."""
    return {name: value for name, value in asdict(source).items() if value is not None}


def check_rates(lr: float, weight_decay: float, **counts: tuple[int, int]) -> None:
    """Raises `ValueError` for what no run can be trained with.

    Args:
        lr: peak learning rate.
        weight_decay: of AdamW.
        counts: a value and the least that it may be, by the option's name.
    """
    for name, (value, least) in counts.items():
        if value < least:
            raise ValueError(f"model.{name}={value}: must be at least {least}")
    if not (0 < lr < math.inf and 0 <= weight_decay < math.inf):
        raise ValueError(f"model.lr={lr} must be positive and model.weight_decay={weight_decay} not negative")
