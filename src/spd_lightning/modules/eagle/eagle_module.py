"""The LightningModule of EAGLE-3: distils its drafter by training-time test. Wiring only; the mathematics is beside it."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from spd_lightning.modules.batch import ReplicatedBatch
from spd_lightning.modules.distillation import Distillation, check_rates
from spd_lightning.modules.eagle.chain_acceptance import ChainAcceptance, chain_positions, draft_chances
from spd_lightning.modules.eagle.eagle_config import Eagle3Config, whole_target_layout
from spd_lightning.modules.eagle.eagle_drafter import Eagle3Drafter
from spd_lightning.modules.eagle.eagle_flops import EagleFlops
from spd_lightning.modules.losses import LossName, TargetHead, distillation_loss, full_argmax
from spd_lightning.modules.model_size import read_target_size
from spd_lightning.modules.samples import NUM_SAMPLES, DraftSamples, take_samples
from spd_lightning.modules.target import TargetDtype, read_target_shape

STEP_DECAY = 0.8
"""What each step's loss weighs of the one before it, unless weights are given."""


class Eagle3Module(Distillation[Eagle3Drafter]):
    """Trains an EAGLE-3 drafter by distillation from a frozen target.

    Args:
        target: Transformers folder or hub id of the target (Qwen3.5, Qwen3 or Llama family, at least 7 layers).
        num_steps: steps of the training-time test: the drafter is unrolled on its own outputs so often.
        step_weights: of each step's loss; 1, 0.8, 0.64 and so on when absent.
        init_from: folder or hub id of an EAGLE-3 drafter whose weights training begins with; what does not fit is
            initialised and listed.
        num_heads: query heads of the drafter; those of `init_from`, else the target's, when absent.
        num_kv_heads: key and value heads of the drafter; likewise.
        head_dim: head width of the drafter; likewise.
        intermediate_size: MLP width of the drafter; likewise.
        rope_theta: rotary base of the drafter, on the full head.
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
        num_steps: int = 7,
        step_weights: list[float] | None = None,
        init_from: str | None = None,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        intermediate_size: int | None = None,
        rope_theta: float = 1e6,
        loss: LossName = "kl",
        lr: float = 1e-4,
        warmup_steps: int = 100,
        weight_decay: float = 0.0,
        target_dtype: TargetDtype = "auto",
        compile_target: bool = False,
        acceptance_every: int = 10,
    ) -> None:
        super().__init__()
        counts = {"warmup_steps": (warmup_steps, 0), "acceptance_every": (acceptance_every, 1)}
        check_rates(lr, weight_decay, **counts, num_steps=(num_steps, 1))
        self.step_weights = checked_weights(step_weights, num_steps)
        self.save_hyperparameters()
        self.target_shape = read_target_shape(target)
        self.layout = whole_target_layout(self.target_shape.num_layers)
        self.source_config = self.read_source(init_from, is_eagle=True)
        self.drafter_config(draft_vocab_size=1)  # complains of a target with too few layers, and of sizes
        self.validation_acceptance = ChainAcceptance(num_steps)

    def drafter_config(self, draft_vocab_size: int) -> Eagle3Config:
        """The drafter's shape: the hyper-parameters, and the target's sizes where they say nothing."""
        shape = self.target_shape
        return Eagle3Config(
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            **self.target_sizes(),
            rope_theta=self.hparams["rope_theta"],
            rms_norm_eps=shape.rms_norm_eps,
            draft_vocab_size=draft_vocab_size,
        )

    def make_drafter(self, draft_vocab_size: int) -> Eagle3Drafter:
        return Eagle3Drafter(self.drafter_config(draft_vocab_size))

    def training_flops(self) -> EagleFlops:
        assert self.drafter is not None
        return EagleFlops(read_target_size(self.hparams["target"]), self.drafter.config, self.hparams["num_steps"])

    def unrolled(self, batch: ReplicatedBatch) -> tuple[list[Tensor], Tensor]:
        """The drafter's normed outputs of each step, and the target's last states."""
        assert self.drafter is not None
        states = self.states_at(batch, (0, *self.drafter.config.anchors))
        embeddings, *fused = states.anchors
        return self.drafter(fused, embeddings, batch.position_ids, self.hparams["num_steps"]), states.last

    def training_step(self, batch: ReplicatedBatch, batch_idx: int) -> Tensor:
        """The summed loss of all steps, scaled so that it becomes a mean per chain; see `Distillation.scaled`."""
        assert self.drafter is not None
        outputs, last = self.unrolled(batch)
        bases = chain_positions(batch.supervised, len(outputs))
        count = int(bases[0].sum())
        head, draft_head = self.target_head(), self.drafter.lm_head.weight
        # Without a chain one position enters with weight zero: every rank keeps the same graph.
        loss = 0.0 * F.linear(outputs[0][0, :1], draft_head).sum()
        losses = []
        for step, (output, chosen) in enumerate(zip(outputs, bases, strict=True)):
            if not bool(chosen.any()):
                break
            states, target_states = output[chosen], judging_states(last, step)[chosen]
            losses.append(distillation_loss(self.hparams["loss"], states, draft_head, target_states, head))
            loss = loss + self.step_weights[step] * losses[-1]
        self.supervised_tokens += count
        if count:
            self.log("train/loss", losses[0].detach() / count, prog_bar=True, batch_size=count)
            if batch_idx % self.hparams["acceptance_every"] == 0:
                self.log_acceptance(outputs, bases, last, head)
        return self.scaled(loss)

    @torch.no_grad()
    def log_acceptance(
        self, outputs: Sequence[Tensor], bases: Sequence[Tensor], last: Tensor, head: TargetHead
    ) -> None:
        """Logs how often the first and the last step agree with the target."""
        assert self.drafter is not None
        for step, name in {0: "acceptance", len(outputs) - 1: "acceptance_last_step"}.items():
            chosen = bases[step]
            if not (count := int(chosen.sum())):
                continue
            drafts = F.linear(outputs[step][chosen], self.drafter.lm_head.weight).argmax(dim=-1)
            agreed = self.drafter.draft_token_ids[drafts] == full_argmax(head, judging_states(last, step)[chosen])
            self.log(f"train/{name}", agreed.double().mean().float(), prog_bar=step == 0, batch_size=count)

    def validation_step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, batch: ReplicatedBatch, batch_idx: int
    ) -> DraftSamples | None:
        """Acceptance at every step of the chains; samples of the first step in the first batch."""
        assert self.drafter is not None
        outputs, last = self.unrolled(batch)
        bases = chain_positions(batch.supervised, len(outputs))
        head, draft_head, token_ids = self.target_head(), self.drafter.lm_head.weight, self.drafter.draft_token_ids
        if not bool(bases[0].any()):
            return None
        measured = [
            draft_chances(output[chosen], draft_head, token_ids, judging_states(last, step)[chosen], head)
            for step, (output, chosen) in enumerate(zip(outputs, bases, strict=True))
            if bool(chosen.any())
        ]
        _, kl, covered = measured[0]
        self.validation_acceptance.update(bases[: len(measured)], [chances for chances, _, _ in measured], kl, covered)
        if batch_idx > 0:
            return None
        behind = F.pad(bases[0], (1, 0))  # a sample's position is the one before the drafted token
        states, target_states = outputs[0][bases[0]], judging_states(last, 0)[bases[0]]
        return take_samples(NUM_SAMPLES, behind, states, draft_head, token_ids, target_states, head)

    def on_validation_epoch_end(self) -> None:
        figures = self.validation_acceptance.compute()
        self.validation_acceptance.reset()
        for name, value in figures.items():
            self.log(f"val/{name}", value, prog_bar=name in ("p_step_1", "s0_k7"), rank_zero_only=False)


def judging_states(last: Tensor, step: int) -> Tensor:
    """The target's last states that judge a step: at base `t` the one at `t+1+s`, whose next token is `t+2+s`."""
    return last[:, step + 1 :]


def checked_weights(weights: Sequence[float] | None, num_steps: int) -> tuple[float, ...]:
    """One weight per step.

    Raises:
        ValueError: if there are more or fewer, or they are negative or all zero.
    """
    if weights is None:
        return tuple(STEP_DECAY**step for step in range(num_steps))
    if len(weights) != num_steps or min(weights) < 0 or not sum(weights) > 0:
        raise ValueError(
            f"model.step_weights={list(weights)}: one weight of at least 0, and not all 0, is needed for each of "
            f"model.num_steps={num_steps} steps"
        )
    return tuple(weights)
