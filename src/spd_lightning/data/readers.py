"""Files -> raw rows, line by line: one bad line never rejects a file. Knows file formats; knows no row shapes.

Every reader yields `(location, row)`, where `row` is a `DropRow` for what could not be read. A file that cannot be
read at all is a `ValueError` that names it.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from spd_lightning.data.conversations import DropRow
from spd_lightning.data.lines import first_text, numbered_lines, whole_text

RawRow = tuple[str, Any]

TEXT_BLOCK = 1 << 16  # size of one plain-text row; many times the usual window

_BLANK = re.compile(r"[\s,]*")


def read_json(path: Path) -> Iterator[RawRow]:
    """Rows of a file of JSON lines, of one top-level list, or of a single object.

    Lines end at a newline byte only: U+2028 and NUL may stand in a text. A top-level list is held in memory.
    """
    start = _json_start(path)
    if start == "list":
        yield from _read_json_list(path)
    elif start == "object" and not isinstance(row := _parse_json(whole_text(path)[0]), DropRow):
        yield str(path), row
    else:
        for number, line in numbered_lines(path):
            if isinstance(line, DropRow) or line.strip():
                yield f"{path}:{number}", line if isinstance(line, DropRow) else _parse_json(line)


def read_text(path: Path) -> Iterator[RawRow]:
    """A text file in blocks of whole lines, about `TEXT_BLOCK` characters each, as rows `{"text": ...}`."""
    block: list[str] = []
    size, start = 0, 1
    for number, line in numbered_lines(path, max_bytes=TEXT_BLOCK):
        if isinstance(line, DropRow):
            yield f"{path}:{number}", line
            continue
        if size and size + len(line) > TEXT_BLOCK:
            yield f"{path}:{start}", {"text": "".join(block)}
            block, size, start = [], 0, number
        block.append(line.removesuffix("\r\n") + "\n" if line.endswith("\r\n") else line)
        size += len(line)
    if "".join(block).strip():
        yield f"{path}:{start}", {"text": "".join(block)}


def read_parquet(path: Path) -> Iterator[RawRow]:
    """Rows of a parquet file, a few hundred at a time."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            yield from _batch_rows(path, file.iter_batches(batch_size=256))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a readable parquet file ({_one_line(error)}): fetch it again") from error


def read_arrow(path: Path) -> Iterator[RawRow]:
    """Rows of an Arrow file, in the stream or the file format."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as source:
            try:
                batches: Any = pa.ipc.open_stream(source)
            except pa.ArrowInvalid:
                reader = pa.ipc.open_file(source)
                batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
            yield from _batch_rows(path, batches)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a readable Arrow file ({_one_line(error)}): fetch it again") from error


READERS: dict[str, Callable[[Path], Iterator[RawRow]]] = {
    ".json": read_json,
    ".jsonl": read_json,
    ".ndjson": read_json,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".feather": read_arrow,
}
TEXT_SUFFIXES = frozenset(".txt .text .md .rst .tex .py .pyi .c .h .cc .cpp .hpp .cu .java .js .ts .go .rs .sh".split())


def data_suffix(path: Path) -> str:
    """The suffix that decides the format, in lower case and without `.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError) as error:  # an integer of too many digits is a ValueError as well
        return DropRow("invalid_json", _one_line(error))


def _json_start(path: Path) -> Literal["list", "object", "lines"]:
    """What the file starts with: one list of rows, one object that spans lines, or JSON lines."""
    head = first_text(path).lstrip()
    if not re.match(r"\[\s*([{\]]|$)|\{\s*$", head, re.MULTILINE):
        return "lines"
    filled = (line for _, line in numbered_lines(path) if isinstance(line, DropRow) or line.strip())
    first = next(filled, "")
    if head.startswith("{"):
        return "object" if isinstance(first, str) and first.strip() == "{" else "lines"
    is_row = isinstance(first, str) and not isinstance(_parse_json(first), DropRow) and next(filled, None) is not None
    return "lines" if is_row else "list"


def _read_json_list(path: Path) -> Iterator[RawRow]:
    """The elements of a top-level list; after a broken one, reading goes on where another begins."""
    text, damage = whole_text(path)
    decoder = json.JSONDecoder(strict=False)
    start = position = text.index("[") + 1
    line, counted, keys = 1, 0, frozenset()
    while True:
        blank = _BLANK.match(text, position)
        assert blank is not None
        position = blank.end()
        line, counted = line + text.count("\n", counted, position), position
        if position == len(text):
            damage = damage or DropRow("invalid_json", "the list is not closed: the file was cut")
            break
        if text[position] == "]":
            if text[position + 1 :].strip():
                damage = DropRow("invalid_json", "text follows the end of the top-level list")
            break
        try:
            row, position = decoder.raw_decode(text, position)
            keys = keys or frozenset(row if isinstance(row, dict) else ())
        except (ValueError, RecursionError) as error:
            row = DropRow("invalid_json", _one_line(error))
            found = _next_element(text, start, position, keys)
            if found is None:
                damage = damage or row
                break
            position = found
        yield f"{path}:{line}", row
    if damage is not None:
        yield f"{path}:{line}", damage


def _next_element(text: str, start: int, position: int, keys: frozenset[str]) -> int | None:
    """Where the list that begins at `start` goes on after the broken element at `position`.

    That is at an object which shares a key with the first element (the turns inside a row do not), or, if there is
    no such element, on a line that is indented like the first.
    """
    if not keys:
        indent = re.match(r"[ \t\r]*\n([ \t]*)", text[start : start + 200])
        found = re.compile(rf"\n{indent[1]}(?=\{{)").search(text, position) if indent else None
        return found.end() if found else None
    decoder = json.JSONDecoder(strict=False)
    for candidate in re.compile(r"[,\n]\s*(?=\{)").finditer(text, position):
        try:
            row, _ = decoder.raw_decode(text, candidate.end())
        except (ValueError, RecursionError):
            continue
        if not keys.isdisjoint(row):
            return candidate.end()
    return None


def _batch_rows(path: Path, batches: Any) -> Iterator[RawRow]:
    number = 0
    for batch in batches:
        try:
            rows = batch.to_pylist()
        except (ValueError, OverflowError):  # one of the rows: find it
            rows = [_single_row(batch.slice(index, 1)) for index in range(batch.num_rows)]
        for row in rows:
            number += 1
            yield f"{path} row {number}", row


def _single_row(batch: Any) -> Any:
    try:
        return batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        return DropRow("invalid_unicode", f"a text is not UTF-8 ({error.reason})")
    except (ValueError, OverflowError) as error:  # a date beyond the year 9999, for instance
        return DropRow("unreadable_value", _one_line(error))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
