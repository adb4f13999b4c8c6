"""The LightningModule: distils the drafter from a frozen target. Wiring only; the mathematics is beside it.

Knows the trainer and the data module's vocabulary; knows no tokenizer internals and no sources.
"""

from dataclasses import asdict, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from spd_lightning.modules.attention.backends import BACKENDS
from spd_lightning.modules.batch import ReplicatedBatch
from spd_lightning.modules.distillation import Distillation, check_rates
from spd_lightning.modules.drafter import PipelineDraftModule
from spd_lightning.modules.drafter_config import DrafterConfig, FeatureNorm
from spd_lightning.modules.features import AnchorRule, FeatureLayout, RowMode, Schedule
from spd_lightning.modules.init_from import kept_projections
from spd_lightning.modules.losses import LossName, TargetHead, distillation_loss, full_argmax
from spd_lightning.modules.metrics import FillAcceptance, acceptance_sums
from spd_lightning.modules.model_size import resolve_stage_layers
from spd_lightning.modules.samples import NUM_SAMPLES, DraftSamples, take_samples
from spd_lightning.modules.target import TargetDtype, TargetStates, read_target_shape
from spd_lightning.modules.throughput import StepFlops


class DistillationModule(Distillation[PipelineDraftModule]):
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
        init_from: folder or hub id of a drafter whose weights training begins with, as far as they have a place in the
            new one; what has none is initialised and listed. Its draft vocabulary is another option: data.draft_vocab.
        num_spec_layers: decoder layers `L_s` of the drafter; about `L/n - 1` hides behind one stage.
        num_heads: query heads of the drafter; those of `init_from`, else the target's, when absent.
        num_kv_heads: key and value heads of the drafter; likewise.
        head_dim: head width of the drafter; likewise.
        intermediate_size: MLP width of the drafter; likewise.
        gated_attention: whether the drafter's layers are those of Qwen3.5's full attention, in which each head's output
            passes a gate (published drafters for Qwen3.5 have them); as `init_from`, else false, when absent.
        rope_theta: rotary base of the drafter.
        partial_rotary_factor: share of each head that rotary positions turn; as `init_from`, else 1, when absent.
        feature_norm: `rms` normalises each anchor state with a learned gain before they are joined; `none` does not.
        attention: structural attention backend: `chunked`, `flex` (FlexAttention, GPU only) or their naive twin `dense`.
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
        init_from: str | None = None,
        num_spec_layers: int = 2,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        intermediate_size: int | None = None,
        gated_attention: bool | None = None,
        rope_theta: float = 1e6,
        partial_rotary_factor: float | None = None,
        feature_norm: FeatureNorm = "rms",
        attention: Literal["chunked", "flex", "dense"] = "chunked",
        loss: LossName = "kl",
        lr: float = 1e-4,
        warmup_steps: int = 100,
        weight_decay: float = 0.0,
        target_dtype: TargetDtype = "auto",
        compile_target: bool = False,
        acceptance_every: int = 10,
    ) -> None:
        super().__init__()
        check_rates(lr, weight_decay, warmup_steps=(warmup_steps, 0), acceptance_every=(acceptance_every, 1))
        self.save_hyperparameters()
        self.target_shape = shape = read_target_shape(target)
        split = resolve_stage_layers(target, num_stages, stage_layers)
        self.layout = FeatureLayout.build(shape.num_layers, num_stages, split, anchors, rows, schedule)
        self.source_config = self.read_source(init_from, is_eagle=False)
        self.validation_acceptance = FillAcceptance(num_stages)

    def drafter_config(self, draft_vocab_size: int) -> DrafterConfig:
        """The drafter's shape: the hyper-parameters, and the target's sizes where they say nothing."""
        given, shape, source = self.hparams, self.target_shape, self.source_config
        config = DrafterConfig(
            num_stages=self.layout.num_stages,
            **asdict(self.layout),
            num_spec_layers=given["num_spec_layers"],
            hidden_size=shape.hidden_size,
            **self.target_sizes(),
            rope_theta=given["rope_theta"],
            rms_norm_eps=shape.rms_norm_eps,
            feature_norm=given["feature_norm"],
            draft_vocab_size=draft_vocab_size,
            gated_attention=self.option("gated_attention", False),
            partial_rotary_factor=self.option("partial_rotary_factor", 1.0),
        )
        if isinstance(source, DrafterConfig):
            kept = kept_projections(source, config)
            config = replace(config, kept_projections=kept, rope_scaling=source.rope_scaling)
        return config

    def make_drafter(self, draft_vocab_size: int) -> PipelineDraftModule:
        return PipelineDraftModule(self.drafter_config(draft_vocab_size), BACKENDS[self.hparams["attention"]])

    def training_flops(self) -> StepFlops:
        assert self.drafter is not None
        return StepFlops.of_run(self.hparams["target"], self.drafter.config)

    def target_states(self, batch: ReplicatedBatch) -> TargetStates:
        """The target's states at the anchors that the drafter reads."""
        assert self.drafter is not None
        return self.states_at(batch, self.layout.anchors[: self.drafter.features.num_anchors])

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
        return self.scaled(loss)

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
