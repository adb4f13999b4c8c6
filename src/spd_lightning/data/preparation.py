"""Sources -> encoded rows on disk: read, encoded, counted, cached. Knows neither batches nor trainers.

Each source has a folder of its own in the cache, named by a fingerprint of everything that its rows depend on, so a
mix can change without encoding anything again. A folder is made under a temporary name and renamed when it is
complete: two processes that prepare the same source at once do the work twice and harm nothing.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import datasets
import numpy as np
import pyarrow as pa
from tqdm import tqdm

import spd_lightning.data as data_package
import spd_lightning.modules.tokenizer as tokenizer_module
from spd_lightning.cache import default_cache_dir
from spd_lightning.data.drop_report import SourceReport, format_reports
from spd_lightning.data.encode_pool import EncodedChunk, encode_chunks, supervised_tokens
from spd_lightning.data.fingerprint import source_fingerprint
from spd_lightning.data.inspection import render_row
from spd_lightning.data.rows import SourceRow
from spd_lightning.data.sources import Source, iter_rows
from spd_lightning.modules.tokenizer import template_fingerprint, tokenizer_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HOPELESS_ROWS = 2000
_BUILDING = ".building-"
_ABANDONED_S = 24 * 3600
# Rows do not pass through these, so a change of them leaves the cache valid. Any other file here counts.
_NOT_ROW_CODE = frozenset(
    "__init__ answer_journal answering cli corpus datamodule draws drop_report embedded_target estimate fingerprint "
    "inspection loader questions regenerate replication sampler training_config vocabulary".split()
)
_SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.int8())),
        ("length", pa.int32()),
        ("supervised", pa.int32()),
        ("group", pa.uint64()),
        ("location", pa.string()),
    ]
)


@dataclass(frozen=True)
class EncodingOptions:
    """What the encoded form of a row depends on, beside the row and the tokenizer.

    Args:
        turns: `each` makes a row of every assistant turn, `joined` one of a whole dialogue.
        max_length: longest sequence, in tokens.
        on_long: what happens to longer ones: `drop` or `truncate`.
    """

    turns: Literal["each", "joined"] = "each"
    max_length: int = 2048
    on_long: Literal["drop", "truncate"] = "drop"

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ValueError(f"max_length={self.max_length}: a row needs a token and its successor, so at least 2")


@dataclass(frozen=True)
class PreparedSource:
    """One source's encoded rows in the cache.

    Attributes:
        folder: holds `rows.arrow` and `report.json`; named by the fingerprint.
        report: what was read and dropped.
    """

    folder: Path
    report: SourceReport

    @property
    def fingerprint(self) -> str:
        return self.folder.name

    @classmethod
    def open(cls, folder: Path, name: str) -> "PreparedSource":
        """A prepared folder, called by the source's present name; `ValueError` if it is damaged."""
        try:
            report = SourceReport.from_json(json.loads((folder / "report.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder}: the prepared data is damaged ({error}): delete this folder") from None
        return cls(folder, replace(report, source=name))

    def rows(self) -> datasets.Dataset:
        """The encoded rows, memory-mapped; `ValueError` if the file is damaged."""
        try:
            rows = datasets.Dataset.from_file(str(self.folder / "rows.arrow"))
        except (OSError, pa.ArrowInvalid) as error:
            raise ValueError(f"{self.folder}: the prepared data is damaged ({error}): delete this folder") from None
        if len(rows) != self.report.rows:
            raise ValueError(
                f"{self.folder}: the prepared data is damaged ({len(rows)} rows, {self.report.rows} were written): "
                "delete this folder"
            )
        return rows


def available_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare(
    sources: Sequence[Source],
    tokenizer: "PreTrainedTokenizerBase",
    options: EncodingOptions,
    cache_dir: str | Path | None = None,
    num_proc: int | None = None,
    max_drop_fraction: float = 0.5,
) -> list[PreparedSource]:
    """Encodes each source, or finds it in the cache, and checks what came out.

    Args:
        sources: what to read; weights do not matter here.
        tokenizer: of the target, with its chat template.
        options: of the encoding.
        cache_dir: `default_cache_dir()` unless given.
        num_proc: processes that encode a large source; as many as there are CPUs unless given. Rows and their order
            do not depend on it.
        max_drop_fraction: greatest share of a source's rows that may be dropped, 0 to 1.

    Raises:
        ValueError: if a source drops more than that, has no rows, or nothing at all is supervised.
    """
    if not sources:
        raise ValueError("data.sources is empty: name at least one file, folder or hub data set to train on")
    if not 0 <= max_drop_fraction <= 1:
        raise ValueError(f"max_drop_fraction={max_drop_fraction}: must lie between 0 and 1")
    if num_proc is not None and num_proc < 1:
        raise ValueError(f"num_proc={num_proc}: at least one process is needed")
    folder = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
    num_proc = num_proc or available_cpus()
    prepared = []
    for source in sources:
        prepared.append(prepare_source(source, tokenizer, options, folder, num_proc))
        _check_report(prepared[-1], max_drop_fraction)
    if not any(entry.report.supervised_tokens for entry in prepared):
        raise ValueError(_nothing_supervised(prepared, tokenizer))
    return prepared


def prepare_source(
    source: Source, tokenizer: "PreTrainedTokenizerBase", options: EncodingOptions, cache_dir: Path, num_proc: int = 1
) -> PreparedSource:
    """Encodes one source into the cache, unless it is there."""
    folder = cache_dir / "rows" / prepared_fingerprint(source, tokenizer, options)
    if folder.exists():
        return PreparedSource.open(folder, source.path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder.parent)
    building = Path(tempfile.mkdtemp(dir=folder.parent, prefix=_BUILDING))
    try:
        report = _write_rows(building / "rows.arrow", source, tokenizer, options, num_proc)
        (building / "report.json").write_text(json.dumps(report.to_json(), indent=1), encoding="utf-8")
        building.chmod(0o755)
        try:
            building.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was faster and made the same
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return PreparedSource.open(folder, source.path)


def prepared_fingerprint(source: Source, tokenizer: "PreTrainedTokenizerBase", options: EncodingOptions) -> str:
    """Names the encoded rows of a source: content, tokenizer, template, options and the code that reads them."""
    described = {
        "source": source_fingerprint(source),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "template": template_fingerprint(tokenizer),
        "options": asdict(options),
        "code": code_fingerprint(),
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]


def code_fingerprint() -> str:
    """Hash of the code that rows pass through, so that a change of it never meets rows of before."""
    digest = hashlib.sha256()
    for path in sorted(Path(data_package.__path__[0]).glob("*.py")):
        if path.stem not in _NOT_ROW_CODE:
            digest.update(path.read_bytes())
    digest.update(Path(tokenizer_module.__file__).read_bytes())
    return digest.hexdigest()


def _remove_abandoned(folder: Path) -> None:
    """Removes what processes that were killed have left; one that works writes every few seconds."""
    for building in folder.glob(f"{_BUILDING}*"):
        # Another process may finish or remove it meanwhile.
        with contextlib.suppress(FileNotFoundError):
            written = max(path.stat().st_mtime for path in [building, *building.iterdir()])
            if time.time() - written > _ABANDONED_S:
                shutil.rmtree(building, ignore_errors=True)


def _write_rows(
    path: Path, source: Source, tokenizer: "PreTrainedTokenizerBase", options: EncodingOptions, num_proc: int
) -> SourceReport:
    report = SourceReport(source=source.path)
    arguments: dict[str, Any] = asdict(options)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, _SCHEMA) as writer:
        for chunk in encode_chunks(_counted(iter_rows(source), source.path), tokenizer, arguments, num_proc):
            chunk.count(report)
            writer.write_batch(_to_batch(chunk))
            if report.read >= _HOPELESS_ROWS and not report.kept:
                raise ValueError(
                    f"{source.path}: not one of the first {report.read} rows is usable: {report.likely_cause()}"
                )
    return report


def _counted(rows: Iterable[SourceRow], name: str) -> Iterator[SourceRow]:
    with tqdm(rows, desc=f"preparing {name}", unit=" rows", mininterval=0.5) as bar:
        yield from bar


def _to_batch(chunk: EncodedChunk) -> pa.RecordBatch:
    """The chunk as an Arrow batch."""
    lengths = np.array([len(ids) for ids in chunk.input_ids], dtype=np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int32)]).astype(np.int32)
    columns = [
        pa.ListArray.from_arrays(offsets, np.concatenate([*chunk.input_ids, np.zeros(0, np.int32)], dtype=np.int32)),
        pa.ListArray.from_arrays(offsets, np.concatenate([*chunk.loss_masks, np.zeros(0, np.int8)], dtype=np.int8)),
        pa.array(lengths),
        pa.array([supervised_tokens(mask) for mask in chunk.loss_masks], pa.int32()),
        pa.array(np.array(chunk.groups, dtype=np.uint64)),
        pa.array(chunk.locations, pa.string()),
    ]
    return pa.record_batch(columns, schema=_SCHEMA)


def _check_report(prepared: PreparedSource, max_drop_fraction: float) -> None:
    report = prepared.report
    if not report.read:
        raise ValueError(f"{report.source}: no rows at all")
    if report.drop_fraction > max_drop_fraction:
        raise ValueError(
            f"{report.source}: {report.drop_fraction:.1%} of the rows were dropped, more than "
            f"data.max_drop_fraction={max_drop_fraction}: {report.likely_cause()}. "
            f"All reasons are in {prepared.folder / 'report.json'}"
        )


def _nothing_supervised(prepared: Sequence[PreparedSource], tokenizer: "PreTrainedTokenizerBase") -> str:
    """Why a run could learn nothing, with a rendered row if there is one."""
    causes = [f"{entry.report.source}: {entry.report.likely_cause()}" for entry in prepared if entry.report.drops]
    for entry in prepared:
        if entry.report.rows:
            row = entry.rows()[0]
            text = render_row(tokenizer, row["input_ids"], row["loss_mask"])[:400]
            causes.append(f"{row['location']} has no answer token (loss_mask is all zero), it reads {text!r}")
            break
    return f"no token is supervised, so there is nothing to learn. {'; '.join(causes)}"


def describe(prepared: Sequence[PreparedSource], tokenizer: "PreTrainedTokenizerBase") -> str:
    """The drop report and one rendered row, for the log of a run."""
    text = format_reports([entry.report for entry in prepared])
    for entry in prepared:
        if entry.report.rows:
            row = entry.rows()[0]
            rendered = render_row(tokenizer, row["input_ids"], row["loss_mask"])
            return f"{text}\nOne row ({row['location']}), its answer tokens in [[ ]]:\n{rendered[:2000]}"
    return text
