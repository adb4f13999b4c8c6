"""Wires the data of a training run: prepared once, memory-mapped, batched in the replicated layout.

The only file here that knows a trainer.
"""

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, cast

import numpy as np
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from transformers import PreTrainedTokenizerBase

from spd_lightning.cache import default_cache_dir
from spd_lightning.data.corpus import RowSet, join_sources, split_off, warn_of_overlap
from spd_lightning.data.drop_report import SourceReport
from spd_lightning.data.loader import BatchLoader, ReplicatedRows
from spd_lightning.data.preparation import EncodingOptions, PreparedSource, describe, prepare
from spd_lightning.data.replication import Replicator
from spd_lightning.data.sampler import EpochSampler, LengthBucketedSampler, TokenBudgetSampler, resolve_batch_size
from spd_lightning.data.sources import Source
from spd_lightning.data.vocabulary import cached_counts, vocabulary_from_counts
from spd_lightning.files import write_whole
from spd_lightning.modules.draft_vocab import DraftVocab
from spd_lightning.modules.features import FeatureLayout
from spd_lightning.modules.target_files import read_generation_config
from spd_lightning.modules.tokenizer import eos_token_ids, load_tokenizer, tokenizer_fingerprint


@dataclass(frozen=True)
class _PreparedFolders:
    training: tuple[Path, ...]
    validation: tuple[Path, ...]


class DialogueDataModule(LightningDataModule):
    """Dialogues, encoded for one target and replicated for one drafter.

    After `setup()`: `draft_vocab`, `tokenizer`, `tokenizer_hash`, `eos_token_ids`, `coverage` (share of the training
    answer tokens that the draft vocabulary has), `reports` (what was dropped and why), `training`, `validation`.

    A run that is interrupted and resumed sees exactly the batches that were left.

    Args:
        layout: stages, anchors, row types and schedule of the drafter; comes from the model.
        target: folder or hub id of the target, whose tokenizer, template and EOS ids are used; comes from the model.
        sources: what to train on, mixed by `weight`: how often an epoch shows each row of the source (0.5: a half).
        val_sources: what to validate on; without it `val_rows` of the training rows are held out.
        val_rows: rows held out when there are no `val_sources`, chosen by hash; a dialogue is never split.
        max_length: longest sequence, in tokens.
        turns: `each` makes one row of every assistant turn, as in serving; `joined` one of a whole dialogue (cheaper,
            but the history of templates that remove reasoning differs from serving).
        on_long: what becomes of longer sequences: `drop` (counted) or `truncate`.
        batch_size: rows of a batch, on each rank; 8 unless this or `tokens_per_batch` is given.
        tokens_per_batch: tokens of a batch on each rank, padding included, instead of `batch_size`: rows times the
            longest of them is within it, so steps take about equally long. At least `max_length`.
        val_batch_size: rows of a validation batch, on each rank; sized as training batches are unless given.
        num_workers: processes that make batches ahead, on each rank; 0 makes them in the training process.
        num_proc: processes that encode while preparing; as many as there are CPUs unless given.
        draft_vocab: draft vocabulary file (JSON) or drafter folder; without it the most frequent answer tokens of the
            training rows are counted.
        draft_vocab_size: ids of a counted draft vocabulary.
        simulate_fill: if false, every sequence is trained with a full pipeline.
        fill_acceptance: expected acceptance of drafts, 0 to 1: fill levels are drawn as often as decoding judges drafts
            made at them. Without it half the sequences have a full pipeline, the others any lower fill.
        max_drop_fraction: greatest share of a source's rows that may be dropped before the run stops, 0 to 1.
        bucket_window: global batches of `batch_size` that are sorted by length together; more means less padding, less
            mixing.
        cache_dir: where prepared data is kept; `$SPD_CACHE` or `~/.cache/spd-lightning` unless given.
        seed: of the order of rows and of the fill levels.
    """

    draft_vocab: DraftVocab
    tokenizer: PreTrainedTokenizerBase
    tokenizer_hash: str
    eos_token_ids: tuple[int, ...]
    coverage: float
    reports: list[SourceReport]
    training: RowSet
    validation: RowSet

    def __init__(
        self,
        layout: FeatureLayout,
        target: str,
        sources: list[Source],
        val_sources: list[Source] | None = None,
        val_rows: int = 256,
        max_length: int = 2048,
        turns: Literal["each", "joined"] = "each",
        on_long: Literal["drop", "truncate"] = "drop",
        batch_size: int | None = None,
        tokens_per_batch: int | None = None,
        val_batch_size: int | None = None,
        num_workers: int = 0,
        num_proc: int | None = None,
        draft_vocab: str | None = None,
        draft_vocab_size: int = 32000,
        simulate_fill: bool = True,
        fill_acceptance: float | None = None,
        max_drop_fraction: float = 0.5,
        bucket_window: int = 50,
        cache_dir: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.layout = layout
        self.target = target
        self.sources = sources
        self.val_sources = val_sources
        self.val_rows = val_rows
        self.options = EncodingOptions(turns=turns, max_length=max_length, on_long=on_long)
        self.batch_size = resolve_batch_size(batch_size, tokens_per_batch, max_length)
        self.tokens_per_batch = tokens_per_batch
        self.val_batch_size = self.batch_size if val_batch_size is None else val_batch_size
        self.num_workers = num_workers
        self.num_proc = num_proc
        self.draft_vocab_path = draft_vocab
        self.draft_vocab_size = draft_vocab_size
        self.fill_acceptance = fill_acceptance if simulate_fill else 1.0
        self.max_drop_fraction = max_drop_fraction
        self.bucket_window = bucket_window
        self.cache_dir = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
        self.seed = seed
        self._folders: _PreparedFolders | None = None
        for name, value in (("val_batch_size", val_batch_size), ("bucket_window", bucket_window)):
            if value is not None and value < 1:
                raise ValueError(f"data.{name}={value}: must be at least 1")
        if fill_acceptance is not None and not 0 <= fill_acceptance <= 1:
            raise ValueError(f"data.fill_acceptance={fill_acceptance}: a share from 0 to 1 is needed")
        if fill_acceptance is not None and not simulate_fill:
            raise ValueError(
                f"data.fill_acceptance={fill_acceptance} with simulate_fill: false: the pipeline is always full then"
            )
        if num_workers < 0:
            raise ValueError(f"data.num_workers={num_workers}: cannot be negative")
        if not val_sources and val_rows < 1:
            raise ValueError(
                f"data.val_rows={val_rows}: at least one row, or data.val_sources, is needed to validate on"
            )

    def prepare_data(self) -> None:
        """Encodes the sources and counts the answer tokens, both into the cache. Runs once on each node."""
        tokenizer = load_tokenizer(self.target)
        training, validation = (
            prepare(sources, tokenizer, self.options, self.cache_dir, self.num_proc, self.max_drop_fraction)
            if sources
            else []
            for sources in (self.sources, self.val_sources or [])
        )
        if not training:
            raise ValueError("data.sources is empty: name at least one file, folder or hub data set to train on")
        self._folders = _PreparedFolders(
            tuple(entry.folder for entry in training), tuple(entry.folder for entry in validation)
        )
        rank_zero_info(describe([*training, *validation], tokenizer))
        if self.draft_vocab_path is None:
            rows, _ = self._split(training, validation)
            cached_counts(rows, tokenizer_fingerprint(tokenizer), len(tokenizer), self.cache_dir)

    def setup(self, stage: str | None = None) -> None:
        """Maps the prepared rows and makes or reads the draft vocabulary."""
        trainer = self.trainer
        if trainer is not None and trainer.world_size > 1:
            self._folders = trainer.strategy.broadcast(self._folders)
        if self._folders is None:
            self.prepare_data()
        assert self._folders is not None
        self.tokenizer = load_tokenizer(self.target)
        self.tokenizer_hash = tokenizer_fingerprint(self.tokenizer)
        self.eos_token_ids = eos_token_ids(self.tokenizer, read_generation_config(self.target))
        training = _open(self._folders.training, self.sources)
        validation = _open(self._folders.validation, self.val_sources or [])
        self.reports = [entry.report for entry in [*training, *validation]]
        self.training, self.validation = self._split(training, validation)
        counts = self.counts()
        self.draft_vocab = self._draft_vocab(counts)
        self.coverage = self.draft_vocab.coverage(counts)
        rank_zero_info(
            f"training: {len(self.training):,} rows, {self.training.num_supervised():,} supervised tokens; "
            f"validation: {len(self.validation):,} rows; draft vocabulary: {len(self.draft_vocab):,} of "
            f"{len(self.tokenizer):,} tokens, coverage {self.coverage:.2%}"
        )
        self._write_report()

    def train_dataloader(self) -> BatchLoader:
        """Batches from the trainer's position on; the length is that of the whole epoch."""
        overfit_batches = getattr(self.trainer, "overfit_batches", 0)
        if overfit_batches:
            raise ValueError(
                f"trainer.overfit_batches={overfit_batches} does not work with bucketed batches, which "
                "differ between epochs: set `limit` on the data sources to train on few rows"
            )
        return self._loader(self.training, self.batch_size, shuffle=True)

    def val_dataloader(self) -> BatchLoader:
        """The validation rows by length, each once over all ranks."""
        return self._loader(self.validation, self.val_batch_size, shuffle=False)

    def _split(self, training: list[PreparedSource], validation: list[PreparedSource]) -> tuple[RowSet, RowSet]:
        rows = join_sources(training, [source.weight for source in self.sources])
        if not validation:
            return split_off(rows, self.val_rows)
        held_out = join_sources(validation, [source.weight for source in self.val_sources or []])
        warn_of_overlap(rows, held_out)
        return rows, held_out

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where the prepared rows lie."""
        return () if self._folders is None else (*self._folders.training, *self._folders.validation)

    def counts(self) -> np.ndarray:
        """How often each token id is an answer token of an epoch of training."""
        return cached_counts(self.training, self.tokenizer_hash, len(self.tokenizer), self.cache_dir)

    def _draft_vocab(self, counts: np.ndarray) -> DraftVocab:
        if self.draft_vocab_path is None:
            return vocabulary_from_counts(
                counts,
                self.draft_vocab_size,
                self.eos_token_ids,
                tokenizer_name=self.target,
                tokenizer_hash=self.tokenizer_hash,
                data_hash=self.training.data_hash,
            )
        vocab = DraftVocab.load(self.draft_vocab_path, len(self.tokenizer), self.tokenizer_hash)
        if missing := sorted(set(self.eos_token_ids) - set(vocab.token_ids)):
            warnings.warn(
                f"{self.draft_vocab_path} lacks the EOS ids {missing}: the drafter can never propose them", stacklevel=2
            )
        return vocab

    def _sampler(self, lengths: np.ndarray, batch_size: int | None, shuffle: bool) -> EpochSampler:
        given = (self.trainer.distributed_sampler_kwargs if self.trainer is not None else None) or {}
        num_replicas, rank = given.get("num_replicas", 1), given.get("rank", 0)
        if batch_size is None:
            assert self.tokens_per_batch is not None
            return TokenBudgetSampler(lengths, self.tokens_per_batch, num_replicas, rank, self.seed, shuffle)
        window = self.bucket_window
        return LengthBucketedSampler(lengths, batch_size, num_replicas, rank, self.seed, shuffle, window)

    def _loader(self, rows: RowSet, batch_size: int | None, shuffle: bool) -> BatchLoader:
        sampler = self._sampler(rows.lengths(), batch_size, shuffle)
        pad_token_id = cast(int | None, self.tokenizer.pad_token_id)
        replicator = Replicator(
            self.layout,
            seed=self.seed,
            pad_token_id=self.eos_token_ids[0] if pad_token_id is None else pad_token_id,
            fill_acceptance=self.fill_acceptance,
        )
        order = {"data": rows.data_hash, "seed": self.seed, **sampler.order}
        position = self._position if shuffle else partial(tuple, (0, 0))
        return BatchLoader(ReplicatedRows(rows, replicator), sampler, position, order, self.num_workers)

    def _position(self) -> tuple[int, int]:
        """Epoch and batch that training comes to next."""
        if self.trainer is None:
            return 0, 0
        return self.trainer.current_epoch, self.trainer.fit_loop.batch_idx + 1

    def _write_report(self) -> None:
        """Writes the drop report beside the run, as `data_report.json`."""
        folder = self.trainer.log_dir if self.trainer is not None else None
        if isinstance(folder, str) and self.trainer is not None and self.trainer.is_global_zero:
            path = Path(folder)
            path.mkdir(parents=True, exist_ok=True)
            content = json.dumps([report.to_json() for report in self.reports], indent=1)
            write_whole(path / "data_report.json", content)


def _open(folders: Sequence[Path], sources: Sequence[Source]) -> list[PreparedSource]:
    return [PreparedSource.open(folder, source.path) for folder, source in zip(folders, sources, strict=True)]
