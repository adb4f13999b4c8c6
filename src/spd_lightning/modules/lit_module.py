"""The LightningModule: distils the drafter from a frozen target. Wiring only; the mathematics is beside it.

Knows the trainer and the data module's vocabulary; knows no tokenizer internals and no sources.
"""

import math
from dataclasses import asdict
from typing import Any, Literal, Protocol, cast, runtime_checkable

import torch
import torch.nn.functional as F
from lightning import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor

from spd_lightning.modules.batch import ReplicatedBatch
from spd_lightning.modules.checkpoint import drafter_record
from spd_lightning.modules.draft_vocab import DraftVocab
from spd_lightning.modules.drafter import PipelineDraftModule
from spd_lightning.modules.drafter_config import DrafterConfig, FeatureNorm
from spd_lightning.modules.features import AnchorRule, FeatureLayout, RowMode, Schedule
from spd_lightning.modules.learning_rate import use_own_rates, warmup_then_decay
from spd_lightning.modules.losses import LossName, TargetHead, distillation_loss, full_argmax
from spd_lightning.modules.metrics import FillAcceptance, acceptance_sums
from spd_lightning.modules.model_size import resolve_stage_layers
from spd_lightning.modules.resume import rewind_to_last_step
from spd_lightning.modules.samples import DraftSamples, take_samples
from spd_lightning.modules.sharding import shard_drafter
from spd_lightning.modules.structural_attention import BACKENDS
from spd_lightning.modules.target import FrozenTarget, TargetDtype, TargetStates, read_target_shape
from spd_lightning.modules.tokenizer import tokenizer_record

NUM_SAMPLES = 16
"""Draft samples taken from the first validation batch."""

TARGET_SIZES = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim")
"""Sizes of the drafter that are the target's unless given."""

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "16-mixed")


@runtime_checkable
class DistillationData(Protocol):
    """What the module reads of its data module after `setup`."""

    draft_vocab: DraftVocab
    tokenizer: Any
    eos_token_ids: tuple[int, ...]


class DistillationModule(LightningModule):
    """Trains a Pipeline Draft Module by distillation from a frozen target.

    Args:
        target: Transformers folder or hub id of the target (Qwen3.5, Qwen3 or Llama family).
        num_stages: pipeline stages `n` that the target is cut into.
        stage_layers: target layers per stage; `balanced` makes stages of like weight, the head counted to the last one;
            as even as possible when absent.
        anchors: target layers whose raw output the drafter reads, beginning with 0; `auto` takes every stage boundary,
            `first_stage` the end of the first stage alone (post-step; with one layer this is PPSD).
        rows: `exact` has one row type per depth, `shared` one per anchor count (as published).
        schedule: `pre_step` drafts while the stages run; `post_step` waits for them and sees one stage more (ablation).
        num_spec_layers: decoder layers `L_s` of the drafter; about `L/n - 1` hides behind one stage.
        num_heads: query heads of the drafter; the target's when absent.
        num_kv_heads: key and value heads of the drafter; the target's when absent.
        head_dim: head width of the drafter; the target's when absent.
        intermediate_size: MLP width of the drafter; the target's when absent.
        rope_theta: rotary base of the drafter, on the full head.
        feature_norm: `rms` normalises each anchor state with a learned gain before they are joined; `none` does not.
        attention: `auto` is `flex` (FlexAttention) on a GPU, else `chunked`; all exact. `dense` is their naive twin.
        loss: `kl` (target to drafter), `reverse_kl`, or `tv` (one minus the expected acceptance).
        lr: peak learning rate of AdamW.
        warmup_steps: steps of linear warm-up; then linear decay to zero over the run.
        weight_decay: of AdamW.
        target_dtype: dtype of the target's weights and arithmetic; `auto` keeps the checkpoint's.
        compile_target: whether the target's layers go through `torch.compile`: a minute at the start, faster steps.
        acceptance_every: training steps between two measurements of training acceptance (it needs the full head).
    """

    def __init__(
        self,
        target: str,
        num_stages: int,
        stage_layers: list[int] | Literal["balanced"] | None = None,
        anchors: list[int] | AnchorRule = "auto",
        rows: RowMode = "exact",
        schedule: Schedule = "pre_step",
        num_spec_layers: int = 2,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        intermediate_size: int | None = None,
        rope_theta: float = 1e6,
        feature_norm: FeatureNorm = "rms",
        attention: Literal["auto", "chunked", "dense", "flex"] = "auto",
        loss: LossName = "kl",
        lr: float = 1e-4,
        warmup_steps: int = 100,
        weight_decay: float = 0.0,
        target_dtype: TargetDtype = "auto",
        compile_target: bool = False,
        acceptance_every: int = 10,
    ) -> None:
        super().__init__()
        for name, value, least in (("warmup_steps", warmup_steps, 0), ("acceptance_every", acceptance_every, 1)):
            if value < least:
                raise ValueError(f"model.{name}={value}: must be at least {least}")
        if not (0 < lr < math.inf and 0 <= weight_decay < math.inf):
            raise ValueError(f"model.lr={lr} must be positive and model.weight_decay={weight_decay} not negative")
        self.save_hyperparameters()
        self.target_shape = shape = read_target_shape(target)
        split = resolve_stage_layers(target, num_stages, stage_layers)
        self.layout = FeatureLayout.build(shape.num_layers, num_stages, split, anchors, rows, schedule)
        self.validation_acceptance = FillAcceptance(num_stages)
        self.drafter: PipelineDraftModule | None = None
        self.target: FrozenTarget | None = None
        self.supervised_tokens = 0.0
        """Supervised tokens in the gradients accumulated so far, on this rank."""

    @property
    def data(self) -> DistillationData:
        return cast(DistillationData, cast(Any, self.trainer).datamodule)

    def drafter_config(self, draft_vocab_size: int) -> DrafterConfig:
        """The drafter's shape: the hyper-parameters, and the target's sizes where they say nothing."""
        given, shape = self.hparams, self.target_shape
        return DrafterConfig(
            num_stages=self.layout.num_stages,
            **asdict(self.layout),
            num_spec_layers=given["num_spec_layers"],
            hidden_size=shape.hidden_size,
            **{name: getattr(shape, name) if given[name] is None else given[name] for name in TARGET_SIZES},
            rope_theta=given["rope_theta"],
            rms_norm_eps=shape.rms_norm_eps,
            feature_norm=given["feature_norm"],
            draft_vocab_size=draft_vocab_size,
        )

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
        config = self.drafter_config(len(token_ids))
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            drafter = PipelineDraftModule(config, BACKENDS[self.hparams["attention"]])
        generator = torch.Generator().manual_seed(torch.initial_seed() % 2**63)
        head_rows = target.head_rows(token_ids)
        drafter.initialize(token_ids, target.final_norm_gain.cpu(), head_rows.cpu(), generator)
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            drafter.to(device)
            shard_drafter(drafter, cast(Any, self.device_mesh)["data_parallel"])
        self.tokenizer_record = tokenizer_record(self.data.tokenizer, self.data.eos_token_ids)
        # The target is not a module, so it reaches neither the checkpoint nor the optimizer.
        self.target, self.drafter = target, drafter

    def on_fit_start(self) -> None:
        strangers = [name for name, _ in self.named_parameters() if not name.startswith("drafter.")]
        assert not strangers, f"only the drafter is trained, but there are also {strangers}"

    def target_head(self) -> TargetHead:
        """The target's head, with the rows that no token has cut off."""
        assert self.target is not None and self.drafter is not None
        weight = self.target.head_weight
        num_tokens = min(self.tokenizer_record["num_tokens"], weight.shape[0])
        return TargetHead(weight, weight[self.drafter.draft_token_ids], num_tokens)

    def target_states(self, batch: ReplicatedBatch) -> TargetStates:
        """The frozen forward, in the target's own dtype whatever the trainer's precision."""
        assert self.target is not None and self.drafter is not None
        anchors = self.layout.anchors[: self.drafter.features.num_anchors]
        with torch.autocast(batch.input_ids.device.type, enabled=False):
            return self.target.forward(batch.input_ids, batch.attention_mask, anchors)

    def training_step(self, batch: ReplicatedBatch, batch_idx: int) -> Tensor:
        """The summed loss, scaled so that `on_before_optimizer_step` can make it an exact mean per token."""
        assert self.drafter is not None
        states = self.target_states(batch)
        hidden = self.drafter(states.anchors, batch.position_ids, batch.visible_row)
        count = int(batch.supervised.sum())
        # Without a supervised token one position enters with weight zero: every rank keeps the same graph.
        chosen = batch.supervised if count else torch.ones_like(batch.supervised)
        drafter_states, last = hidden[chosen], states.last[chosen]
        if not count:
            drafter_states, last = drafter_states[:1], last[:1]
        head = self.target_head()
        loss = distillation_loss(self.hparams["loss"], drafter_states, self.drafter.lm_head.weight, last, head)
        loss = loss if count else 0.0 * loss
        self.supervised_tokens += count
        self.log_training(loss.detach(), drafter_states.detach(), last, head, count, batch_idx)
        return loss * (self.trainer.accumulate_grad_batches * self.trainer.world_size)

    def log_training(
        self, loss: Tensor, drafter_states: Tensor, last: Tensor, head: TargetHead, count: int, batch_idx: int
    ) -> None:
        if not count:
            return
        assert self.drafter is not None
        self.log("train/loss", loss / count, prog_bar=True, batch_size=count)
        if batch_idx % self.hparams["acceptance_every"] == 0:
            with torch.no_grad():
                drafts = F.linear(drafter_states, self.drafter.lm_head.weight).argmax(dim=-1)
                agreed = self.drafter.draft_token_ids[drafts] == full_argmax(head, last)
            self.log("train/acceptance", agreed.double().mean().float(), prog_bar=True, batch_size=count)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the summed gradients by the supervised tokens of all ranks and accumulated batches."""
        total = torch.tensor(self.supervised_tokens, dtype=torch.float64, device=self.device)
        total = float(cast(Tensor, self.trainer.strategy.reduce(total, reduce_op="sum")))
        self.supervised_tokens = 0.0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(max(total, 1.0))

    def validation_step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, batch: ReplicatedBatch, batch_idx: int
    ) -> DraftSamples | None:
        """Acceptance at every fill level on the same sequences; samples of the first batch."""
        assert self.drafter is not None
        states = self.target_states(batch)
        table = torch.tensor(self.layout.visibility_table(), device=self.device)
        size = batch.input_ids.shape[0]
        by_fill = [
            self.drafter(states.anchors, batch.position_ids, table[fill].expand(size, -1, -1))[batch.supervised]
            for fill in range(self.layout.num_stages)
        ]
        last, head = states.last[batch.supervised], self.target_head()
        draft_head, token_ids = self.drafter.lm_head.weight, self.drafter.draft_token_ids
        self.validation_acceptance.update(acceptance_sums(by_fill, draft_head, token_ids, last, head))
        if batch_idx > 0 or not len(last):
            return None
        return take_samples(NUM_SAMPLES, batch.supervised, by_fill[-1], draft_head, token_ids, last, head)

    def on_validation_epoch_end(self) -> None:
        figures = self.validation_acceptance.compute()
        self.validation_acceptance.reset()
        for name, value in figures.items():
            self.log(f"val/{name}", value, prog_bar=name in ("p", "s0"), rank_zero_only=False)

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
            self.drafter.config,
            target_name=self.hparams["target"],
            target=self.target_shape,
            tokenizer=self.tokenizer_record,
            draft_vocab=self.data.draft_vocab,
            metrics=metrics,
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["drafter"] = self.drafter_record()
        trainer = self.trainer
        rewind_to_last_step(checkpoint["loops"], trainer.accumulate_grad_batches, trainer.num_training_batches)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuses a checkpoint of another drafter: same shapes do not make the same draft vocabulary."""
        assert self.drafter is not None
        saved, here = checkpoint["drafter"]["drafter"], self.drafter.config.to_dict()
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
