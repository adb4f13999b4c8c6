"""How fast a run trains: what its steps hold, how long they wait, how much of the device they use. Knows no trainer."""

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from spd_lightning.modules.batch import ReplicatedBatch
from spd_lightning.modules.drafter_config import DrafterConfig
from spd_lightning.modules.features import FeatureLayout, needed_rows
from spd_lightning.modules.model_size import TARGET_SIZES, DrafterSize, TargetSize, read_target_size


@runtime_checkable
class TrainingFlops(Protocol):
    """Operations that a training step of some drafter needs; `StepFlops` says what is counted."""

    def of(self, lengths: Int[Tensor, " batch"], num_supervised: int, fill: Int[Tensor, " batch"]) -> float:
        """Of one batch.

        Args:
            lengths: tokens of each sequence.
            num_supervised: positions at which the loss is taken.
            fill: tokens in flight that each sequence simulates.
        """
        ...


def target_flops(
    target: TargetSize, draft_head_parameters: int, tokens: float, pairs: float, num_supervised: int
) -> float:
    """Of the frozen forward: all layers, and of the head the rows of the draft vocabulary.

    Args:
        target: its sizes.
        draft_head_parameters: of those rows.
        tokens: of the batch.
        pairs: a query and a key that it sees, so half the square of each length.
        num_supervised: positions at which the head is applied.
    """
    matrices = sum(map(target.matrix_parameters, target.layer_types))
    attention = target.layer_types.count("full_attention") * 4 * target.num_heads * target.head_dim
    return 2 * matrices * tokens + attention * pairs + 2 * draft_head_parameters * num_supervised


def tokens_and_pairs(lengths: Int[Tensor, " batch"]) -> tuple[float, float]:
    """Tokens of a batch of these lengths, and pairs of a query and a key that it sees."""
    return float(lengths.sum()), float((lengths.double() * (lengths + 1)).sum()) / 2


@dataclass(frozen=True)
class StepFlops:
    """Operations that a training step needs: multiplications and additions of matrix products and attention.

    What the mathematics of design §4 asks for: padding, recomputation in the backward pass and masked scores are left
    out, so a faster implementation of the same step reaches a higher utilisation. Norms, softmax and the recurrences of
    linear attention are left out too.

    Args:
        target: runs forward once; of its head the rows of the draft vocabulary, at supervised positions.
        drafter: runs forward, and backward at twice the cost.
        layout: its row types, of which each sequence has those that its fill level needs. Each token is projected once
            for each anchor count. In the last layer all rows give keys and values, but only the newest one is a query
            and passes the MLP.
    """

    target: TargetSize
    drafter: DrafterSize
    layout: FeatureLayout

    @classmethod
    def of_run(cls, target: str, config: DrafterConfig) -> "StepFlops":
        """Of the run that distils this drafter from the target of that name."""
        size = read_target_size(target)
        names = (*TARGET_SIZES, "num_spec_layers", "draft_vocab_size", "gated_attention")
        drafter = DrafterSize.of(size, config.layout, **{name: getattr(config, name) for name in names})
        return cls(size, drafter, config.layout)

    @cached_property
    def num_rows(self) -> tuple[int, ...]:
        """Row types that a sequence has, by fill level from 1 on."""
        return tuple(len(needed_rows(table)) for table in self.layout.visibility_table())

    def of(self, lengths: Int[Tensor, " batch"], num_supervised: int, fill: Int[Tensor, " batch"]) -> float:
        """Of one batch (see `TrainingFlops`)."""
        drafter = 2 * self.drafter.head_parameters * num_supervised
        for level in fill.unique().tolist():
            drafter += self._rows(*tokens_and_pairs(lengths[fill == level]), level)
        return self._target(*tokens_and_pairs(lengths), num_supervised) + 3 * drafter

    def _target(self, tokens: float, pairs: float, num_supervised: int) -> float:
        return target_flops(self.target, self.drafter.head_parameters, tokens, pairs, num_supervised)

    def _rows(self, tokens: float, pairs: float, fill: int) -> float:
        """Of the drafter's projections and layers for sequences of one fill level."""
        size, num_rows = self.drafter, self.num_rows[fill - 1]
        projections = sum(map(size.projection_parameters, size.projection_inputs))
        keys_and_values = 2 * size.hidden_size * size.kv_width
        full_layers = (size.num_layers - 1) * num_rows
        in_matrices = full_layers * size.matrix_parameters
        in_matrices += (num_rows - 1) * keys_and_values + size.matrix_parameters  # the last layer
        in_attention = (full_layers + 1) * 4 * size.query_width
        return 2 * (projections + in_matrices) * tokens + in_attention * pairs


@dataclass
class ThroughputMeter:
    """Counts the batches between two reports.

    Args:
        now: a clock in seconds.
    """

    now: Callable[[], float] = time.perf_counter
    since: float = 0.0
    waited_before: float = 0.0
    tokens: int = 0
    supervised: int = 0
    padded: int = 0
    flops: float = 0.0
    paused_at: float | None = field(default=None, init=False)

    def restart(self, waited: float) -> None:
        """Begins anew; `waited` is the loader's own count so far, in seconds."""
        self.since, self.waited_before = self.now(), waited
        self.tokens = self.supervised = self.padded = 0
        self.flops = 0.0

    def pause(self) -> None:
        """What follows, such as a validation, is not training."""
        self.paused_at = self.now()

    def resume(self) -> None:
        """Training goes on."""
        if self.paused_at is not None:
            self.since += self.now() - self.paused_at
        self.paused_at = None

    def count(self, batch: ReplicatedBatch, flops: TrainingFlops) -> None:
        """Adds a batch that was trained on."""
        lengths, supervised = batch.attention_mask.sum(dim=1).cpu(), int(batch.supervised.sum())
        self.tokens += int(lengths.sum())
        self.padded += batch.attention_mask.numel()
        self.supervised += supervised
        self.flops += flops.of(lengths, supervised, batch.fill.cpu())

    def rates(self, waited: float, peak_flops: float | None) -> tuple[dict[str, float], dict[str, float]]:
        """What adds up over ranks, in 1/s, and shares, of which ranks have a mean.

        Args:
            waited: seconds that the loader has kept training waiting so far.
            peak_flops: operations a second that the device can do; without it there is no utilisation.
        """
        seconds = self.now() - self.since
        rates = {"tokens_per_s": self.tokens / seconds, "supervised_tokens_per_s": self.supervised / seconds}
        shares = {
            "padding_share": 1 - self.tokens / self.padded,
            "data_wait_share": (waited - self.waited_before) / seconds,
        }
        if peak_flops is not None:
            shares["flops_utilisation"] = self.flops / seconds / peak_flops
        return rates, shares


def peak_memory_gib(device: torch.device) -> float:
    """The most that was allocated on a GPU, or the most that this process had in memory, in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss: bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
