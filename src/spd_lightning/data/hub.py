"""Data sets of the Hugging Face hub -> raw rows, or one line that says how to do without the hub.

The only file here that imports `datasets`. Knows no row shapes.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spd_lightning.modules.hub import first_sentence, hub_errors, offline_when_unreachable

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True)
class _Known:
    """What a data set calls its parts, where that is not `train` of its only configuration."""

    name: str | None = None
    split: str = "train"
    data_files: tuple[str, ...] | None = None


_KNOWN = {
    "anon8231489123/sharegpt_vicuna_unfiltered": _Known(data_files=("ShareGPT_V3_unfiltered_cleaned_split.json",)),
    "huggingfaceh4/ultrachat_200k": _Known(split="train_sft"),
    "huggingfacetb/smoltalk": _Known(name="all"),
}


def is_hub_id(path: str) -> bool:
    """Whether `path` is spelled `owner/name` or `name`, without a data suffix."""
    return bool(_HUB_ID.fullmatch(path)) and not re.search(r"\.(jsonl?|ndjson|parquet|arrow|txt|gz|csv)$", path)


def hub_files(path: str, data_files: list[str], revision: str | None) -> list[tuple[Path, str]] | None:
    """Local copies of a repository's files, each with its name for messages; `None` if no files are asked for.

    Raises:
        ValueError: if the hub cannot be reached or has no such file; one line.
    """
    known = _KNOWN.get(path.lower(), _Known())
    patterns = data_files or known.data_files
    if not patterns:
        return None
    from huggingface_hub import snapshot_download

    try:
        with offline_when_unreachable():
            folder = snapshot_download(path, repo_type="dataset", revision=revision, allow_patterns=list(patterns))
    except _unreachable() as error:
        raise _not_found(path, f"its files {list(patterns)}", error) from error
    root = Path(folder)
    files = sorted({file for pattern in patterns for file in root.glob(pattern) if file.is_file()})
    if not files:
        raise ValueError(f"source {path!r}: the hub repository has no file that matches {list(patterns)}")
    return [(file, f"{path}/{file.relative_to(root).as_posix()}") for file in files]


def hub_rows(
    path: str, name: str | None, split: str | None, revision: str | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a hub data set, read by `datasets`.

    Raises:
        ValueError: if it cannot be reached, or has no such configuration or split; one line.
    """
    import datasets

    known = _KNOWN.get(path.lower(), _Known())
    name, split = name or known.name, split or known.split
    try:
        with offline_when_unreachable():
            rows: Any = datasets.load_dataset(path, name, split=split, revision=revision)
    except _unreachable() as error:
        part = f"split {split!r}" + (f" of configuration {name!r}" if name else "")
        raise _not_found(path, part, error) from error
    number = 0
    for table in rows.with_format("arrow").iter(batch_size=256):  # no decoding of images and audio
        for row in table.to_pylist():
            number += 1
            yield f"{path} row {number}", row


def _unreachable() -> tuple[type[Exception], ...]:
    """What the hub's libraries raise when a data set is not there, not reachable or not readable."""
    from datasets.exceptions import DatasetsError

    return (*hub_errors(), DatasetsError)


def _not_found(path: str, part: str, error: Exception) -> ValueError:
    return ValueError(
        f"source {path!r}: no local file or folder {Path(path).resolve()}, and {part} could not be read from the hub "
        f"({first_sentence(error)}); download the data set and set `path` to the local folder or file"
    )
