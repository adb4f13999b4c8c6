"""What a training run will take, told before it starts: tokens, steps, memory, disk. Builds no model.

Tokens come from a random sample of the rows, sizes of the models from their configuration alone.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from spd_lightning.data.drop_report import SourceReport
from spd_lightning.data.encode_pool import encode_chunk
from spd_lightning.data.model_options import EagleOptions, ModelOptions, TrainedDrafter
from spd_lightning.data.preparation import EncodingOptions
from spd_lightning.data.rows import SourceRow
from spd_lightning.data.sampler import TokenBudgetSampler, resolve_batch_size
from spd_lightning.data.sources import Source, iter_rows
from spd_lightning.modules.model_size import TargetSize, read_target_size
from spd_lightning.modules.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTES_PER_TOKEN_ON_DISK = 5
"""An int32 id and an int8 answer mark."""
BYTES_PER_TRAINED_PARAMETER = 16
"""float32 weight, gradient and two AdamW moments."""


@dataclass(frozen=True)
class TrainerOptions:
    """The options of `trainer` that steps depend on.

    Args:
        devices: ranks on each node; `auto` counts as 1.
        num_nodes: nodes.
        accumulate_grad_batches: batches of each optimizer step.
        max_epochs: epochs; 1 unless given.
        max_steps: optimizer steps at most; -1 for no limit.
    """

    devices: int | str | list[int] = 1
    num_nodes: int = 1
    accumulate_grad_batches: int = 1
    max_epochs: int | None = None
    max_steps: int = -1

    @property
    def num_ranks(self) -> int:
        """Ranks over all nodes."""
        if isinstance(self.devices, list):
            per_node = len(self.devices)
        else:
            per_node = int(self.devices) if str(self.devices).isdecimal() else 1
        return max(1, per_node) * self.num_nodes


@dataclass(frozen=True)
class SourceEstimate:
    """One source, extrapolated from a sample to all of its rows.

    Attributes:
        report: of the sample; `read` counts the rows of the sample.
        num_read: rows of the source.
        weight: of the mix.
        lengths: tokens of each encoded row of the sample.
    """

    report: SourceReport
    num_read: int
    weight: float
    lengths: np.ndarray

    @property
    def scale(self) -> float:
        """Rows of the source for each row of the sample."""
        return self.num_read / self.report.read if self.report.read else 0.0

    @property
    def longest(self) -> int:
        """Tokens of the longest encoded row of the sample."""
        return int(self.lengths.max(initial=0))

    def per_epoch(self, of_sample: int | float) -> float:
        """A count of the sample, for an epoch of the whole source."""
        return of_sample * self.scale * self.weight

    def epoch_lengths(self, share: float) -> np.ndarray:
        """Tokens of each row of a share of an epoch, spread as those of the sample are."""
        num_rows = round(share * self.per_epoch(len(self.lengths)))
        return np.sort(self.lengths)[np.arange(num_rows) * len(self.lengths) // max(1, num_rows)]


def sample_source(
    source: Source, tokenizer: "PreTrainedTokenizerBase", options: EncodingOptions, sample_rows: int
) -> SourceEstimate:
    """Reads all rows of a source and encodes a random sample of them (all, if there are no more)."""
    if sample_rows < 1:
        raise ValueError(f"sample_rows={sample_rows}: at least one row is needed")
    with tqdm(iter_rows(source), desc=f"reading {source.path}", unit=" rows", mininterval=0.5) as bar:
        sample, num_read = _reservoir(iter(bar), sample_rows)
    report = SourceReport(source.path)
    chunk = encode_chunk(sample, tokenizer, asdict(options))
    chunk.count(report)
    return SourceEstimate(report, num_read, source.weight, np.array([len(ids) for ids in chunk.input_ids], dtype=int))


def estimate_run(
    model: ModelOptions | EagleOptions, trainer: TrainerOptions, data: Any, sample_rows: int = 1000
) -> str:
    """The estimate of a run as text.

    Args:
        model: of the drafter and the target.
        trainer: of the run.
        data: the options of the data module, as attributes.
        sample_rows: rows of each source that are encoded.
    """
    tokenizer = load_tokenizer(model.target)
    options = EncodingOptions(turns=data.turns, max_length=data.max_length, on_long=data.on_long)
    batch_size = resolve_batch_size(data.batch_size, data.tokens_per_batch, data.max_length)
    target = read_target_size(model.target)
    drafter = model.drafter(target, min(data.draft_vocab_size, len(tokenizer)))
    sources = [sample_source(source, tokenizer, options, sample_rows) for source in data.sources]
    longest = max(source.longest for source in sources)
    if batch_size is None:
        batch, tokens = f"{data.tokens_per_batch:,} tokens", data.tokens_per_batch
    else:
        batch, tokens = f"{batch_size} rows of {longest} tokens", batch_size * longest
    lines = [*_token_lines(sources), *_step_lines(sources, trainer, data, batch_size)]
    lines += _memory_lines(target, drafter, model.target_dtype, batch, tokens)
    lines += _disk_lines(sources, drafter)
    return "\n".join(lines)


def _reservoir(rows: Iterable[SourceRow], size: int) -> tuple[list[SourceRow], int]:
    """A random sample of `size` rows without knowing how many there are, and their number."""
    rng = np.random.default_rng(0)
    sample: list[SourceRow] = []
    number = 0
    for number, row in enumerate(rows, start=1):
        if len(sample) < size:
            sample.append(row)
        elif (place := int(rng.integers(number))) < size:
            sample[place] = row
    return sample, number


def _token_lines(sources: Sequence[SourceEstimate]) -> list[str]:
    lines = []
    for source in sources:
        report = source.report
        exact = "" if source.scale == 1 else f" (from {report.read:,} of them)"
        lines.append(
            f"{report.source}: {source.num_read:,} rows read{exact}, {report.drop_fraction:.1%} dropped; an epoch has "
            f"{source.per_epoch(report.rows):,.0f} training rows, {source.per_epoch(report.tokens):,.0f} tokens, "
            f"{source.per_epoch(report.supervised_tokens):,.0f} supervised"
        )
        lines += [f"  dropped as {reason}: {entry.count / report.read:.1%}" for reason, entry in report.drops.items()]
    return lines


def _step_lines(
    sources: Sequence[SourceEstimate], trainer: TrainerOptions, data: Any, batch_size: int | None
) -> list[str]:
    rows = sum(source.per_epoch(source.report.rows) for source in sources)
    tokens = sum(source.per_epoch(source.report.tokens) for source in sources)
    supervised = sum(source.per_epoch(source.report.supervised_tokens) for source in sources)
    held_out = 0 if data.val_sources else min(data.val_rows, rows)
    share = (rows - held_out) / rows if rows else 0.0
    if batch_size is None:
        size, unit = data.tokens_per_batch, " tokens"
        lengths = np.concatenate([source.epoch_lengths(share) for source in sources])
        batches = len(TokenBudgetSampler(lengths, size, trainer.num_ranks)) if len(lengths) else 0
    else:
        size, unit = batch_size, ""
        batches = math.ceil((rows - held_out) / (batch_size * trainer.num_ranks))
    steps = math.ceil(batches / trainer.accumulate_grad_batches)
    epochs = trainer.max_epochs if trainer.max_epochs is not None else 1
    total = steps * epochs if trainer.max_steps < 0 else min(steps * epochs, trainer.max_steps)
    global_size = size * trainer.num_ranks * trainer.accumulate_grad_batches
    return [
        f"training: {rows - held_out:,.0f} rows, {tokens * share:,.0f} tokens, {supervised * share:,.0f} supervised "
        f"per epoch",
        f"steps: {batches:,} batches of {size:,}{unit} on each of {trainer.num_ranks} ranks, {steps:,} optimizer "
        f"steps per epoch (global batch {global_size:,}{unit}), {total:,} in all",
    ]


def _memory_lines(target: TargetSize, drafter: TrainedDrafter, dtype: str, batch: str, tokens: int) -> list[str]:
    weights = target.num_parameters * target.bytes_per_parameter(dtype)
    trained = drafter.num_parameters * BYTES_PER_TRAINED_PARAMETER
    states = tokens * drafter.num_states * target.hidden_size * 4
    activations = tokens * drafter.activation_bytes
    total = weights + trained + states + activations
    return [
        f"memory of a rank without sharding, roughly: {_size(total)}",
        f"  target: {target.num_parameters:,} parameters, {_size(weights)}",
        f"  drafter: {drafter.num_parameters:,} parameters, {_size(trained)} with gradients and AdamW",
        f"  one batch of {batch} and {drafter.passes}: "
        f"{_size(states)} of target states, {_size(activations)} of activations",
    ]


def _disk_lines(sources: Sequence[SourceEstimate], drafter: TrainedDrafter) -> list[str]:
    rows = sum(source.report.tokens * source.scale for source in sources) * BYTES_PER_TOKEN_ON_DISK
    checkpoint = drafter.num_parameters * 12
    return [
        f"disk: {_size(rows)} of prepared rows; {_size(checkpoint)} for each checkpoint, "
        f"{_size(drafter.num_parameters * 4)} for the drafter folder"
    ]


def _size(num_bytes: int | float) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / (1 << 20):.1f} MiB"
