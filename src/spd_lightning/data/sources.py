"""Where training rows come from: hub data sets, local files and folders, Python's own documentation.

Knows where rows lie and what to call them in messages; knows no tokenizer and no mask.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from spd_lightning.data.conversations import DropRow
from spd_lightning.data.debug_dialogues import DEBUG_DIALOGUES, debug_dialogue_rows
from spd_lightning.data.hub import hub_files, hub_rows, is_hub_id
from spd_lightning.data.python_docs import PYTHON_DOCS, python_docs_rows
from spd_lightning.data.readers import READERS, TEXT_SUFFIXES, RawRow, data_suffix, read_text
from spd_lightning.data.rows import SourceRow, parse_row

__all__ = ["Source", "SourceRow", "iter_rows", "resolve_files"]

_COLUMNS = ("messages", "prompt", "response", "system", "text", "input_ids", "loss_mask")
GENERATED: dict[str, Callable[[], Iterator[RawRow]]] = {
    PYTHON_DOCS: python_docs_rows,
    DEBUG_DIALOGUES: debug_dialogue_rows,
}
_NOT_DATA = frozenset("dataset_info.json dataset_infos.json dataset_dict.json state.json config.json".split())


@dataclass
class Source:
    """One source of training rows.

    Args:
        path: a local file, folder or glob (parquet, json, jsonl, arrow, a `save_to_disk` folder, text; `.gz` is
            unpacked), a hub id such as `HuggingFaceH4/ultrachat_200k`, `python-docs`, the documentation that comes
            with Python, or `debug-dialogues`, made-up rows for debugging. A local path wins over the others.
        name: configuration of a hub data set (`all` of smoltalk).
        split: split of a hub data set or of a saved data-set folder; by default `train`, or what the data set is known
            to call it (`train_sft` of ultrachat_200k).
        data_files: a file or files of a hub repository or of a local folder to read, as glob patterns. Such hub files are
            fetched and read line by line here, which forgives broken rows; without it `datasets` reads the hub.
        revision: branch, tag or commit of a hub data set.
        format: what a row is: `chat` (turns, or a prompt and a response), `text` (all of it is supervised), `tokens`
            (`input_ids` and `loss_mask`), or `auto`, which looks at each row.
        columns: this data set's names for the columns `messages`, `prompt`, `response`, `system`, `text`,
            `input_ids` and `loss_mask`, such as `{prompt: question, response: answer}`.
        system: system prompt of dialogues that have none; by default the chat template decides.
        response_remove: regular expression; what it matches is removed from every answer (`<<.*?>>` removes the
            calculator notes of GSM8K).
        limit: read only this many rows, from the start, the dropped ones included.
        weight: how often an epoch shows a row of this source: 1 once, 2 twice, 0.5 half of the rows.
    """

    path: str
    name: str | None = None
    split: str | None = None
    data_files: str | list[str] | None = None
    revision: str | None = None
    format: Literal["auto", "chat", "text", "tokens"] = "auto"
    columns: dict[str, str] | None = None
    system: str | None = None
    response_remove: str | None = None
    limit: int | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.path or not str(self.path).strip():
            raise ValueError("path is empty: give a file, a folder, a glob, a hub id or python-docs")
        self.path = str(self.path)
        if isinstance(self.data_files, str):
            self.data_files = [self.data_files]
        if self.format not in ("auto", "chat", "text", "tokens"):
            raise ValueError(f"format={self.format!r} of {self.path}: must be auto, chat, text or tokens")
        if unknown := sorted(set(self.columns or {}) - set(_COLUMNS)):
            raise ValueError(f"columns of {self.path} names {unknown}: the columns with a meaning are {list(_COLUMNS)}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit={self.limit} of {self.path}: must be at least 1; leave it out to read all rows")
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"weight={self.weight} of {self.path}: must be positive; leave the source out instead")
        self.removal_pattern()

    def removal_pattern(self) -> re.Pattern[str] | None:
        """`response_remove`, compiled.

        Raises:
            ValueError: if it is no regular expression.
        """
        if self.response_remove is None:
            return None
        try:
            return re.compile(self.response_remove)
        except re.error as error:
            raise ValueError(
                f"response_remove={self.response_remove!r} of {self.path} is no regular expression: {error}"
            ) from error


def iter_rows(source: Source) -> Iterator[SourceRow]:
    """The rows of a source in their order; a row that cannot be used comes with the reason and ends nothing.

    Raises:
        ValueError: if the source cannot be found or one of its files cannot be read at all; one line.
    """
    pattern = source.removal_pattern()
    for number, (location, raw) in enumerate(_raw_rows(source)):
        if source.limit is not None and number >= source.limit:
            return
        try:
            if isinstance(raw, DropRow):
                raise raw
            item = parse_row(raw, source.format, source.columns or {}, system=source.system, response_remove=pattern)
            yield SourceRow(location, item=item)
        except DropRow as drop:
            yield SourceRow(location, drop=drop)


def resolve_files(source: Source) -> tuple[Path, ...]:
    """The local files that a source reads, in reading order; none for hub data sets and generated rows.

    Raises:
        ValueError: if `path` names neither local data nor a hub id.
    """
    path = Path(source.path).expanduser()
    if path.is_file():
        return (path,)
    if path.is_dir():
        return _folder_files(path, source)
    if any(mark in source.path for mark in "*?["):
        files = sorted(file for file in Path(path.anchor).glob(str(path.relative_to(path.anchor))) if file.is_file())
        if not files:
            raise ValueError(f"source {source.path!r}: no file matches this pattern")
        return tuple(files)
    if source.path in GENERATED or is_hub_id(source.path):
        return ()
    raise ValueError(f"source {source.path!r}: no such file or folder ({path.resolve()}), and it is no hub id")


def _raw_rows(source: Source) -> Iterator[RawRow]:
    """Rows as their files or data sets hold them, each with its location."""
    files = resolve_files(source)
    if files:
        for file in files:
            try:
                yield from _reader(file, source)(file)
            except OSError as error:
                raise ValueError(f"source {source.path!r}: cannot read {file}: {error.strerror or error}") from error
    elif source.path in GENERATED:
        yield from GENERATED[source.path]()
    else:
        fetched = hub_files(source.path, _patterns(source), source.revision)
        if fetched is None:
            yield from hub_rows(source.path, source.name, source.split, source.revision)
            return
        for file, location in fetched:
            for where, raw in _reader(file, source)(file):
                yield where.replace(str(file), location, 1), raw


def _reader(file: Path, source: Source) -> Callable[[Path], Iterator[RawRow]]:
    suffix = data_suffix(file)
    if suffix in READERS:
        return READERS[suffix]
    if suffix in TEXT_SUFFIXES or source.format == "text":
        return read_text
    raise ValueError(
        f"{file}: cannot tell its format from the suffix {suffix!r}; readable are {', '.join(READERS)}, text "
        f"({', '.join(sorted(TEXT_SUFFIXES))}), and any text file with `format: text`"
    )


def _folder_files(folder: Path, source: Source) -> tuple[Path, ...]:
    """The data files of a folder, else its text files; of a `save_to_disk` folder the Arrow files in their order."""
    if (folder / "dataset_dict.json").is_file():
        split = source.split or "train"
        if not (folder / split).is_dir():
            known = sorted(child.name for child in folder.iterdir() if child.is_dir())
            raise ValueError(f"source {source.path!r} has no split {split!r}; it has {known}: set `split`")
        folder = folder / split
    if (state := folder / "state.json").is_file():
        return tuple(folder / entry["filename"] for entry in json.loads(state.read_text())["_data_files"])
    patterns = _patterns(source)
    found = sorted(
        {file for pattern in patterns or ["**/*"] for file in folder.glob(pattern) if _is_data(file, folder)}
    )
    if not patterns:  # a data set's README is no data, nor are the JSON files of a folder of texts
        kinds = [frozenset(READERS), TEXT_SUFFIXES]
        by_kind = [[file for file in found if data_suffix(file) in kind] for kind in kinds]
        found = by_kind[1] or by_kind[0] if source.format == "text" else by_kind[0] or by_kind[1]
    if not found:
        wanted = f"matches {patterns}" if patterns else f"is data ({', '.join(READERS)}) or text"
        raise ValueError(f"source {source.path!r}: no file in the folder {folder.resolve()} {wanted}")
    return tuple(found)


def _patterns(source: Source) -> list[str]:
    return [source.data_files] if isinstance(source.data_files, str) else source.data_files or []


def _is_data(file: Path, folder: Path) -> bool:
    parts = file.relative_to(folder).parts
    hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
    return file.is_file() and not hidden and file.name not in _NOT_DATA
