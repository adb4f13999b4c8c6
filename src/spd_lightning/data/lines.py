"""Bytes of text files -> numbered lines, plain or gzipped, valid UTF-8 or not. Knows no JSON and no rows."""

import gzip
import zlib
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path

from spd_lightning.data.conversations import DropRow

_BROKEN_GZIP = (EOFError, zlib.error, gzip.BadGzipFile)
_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


def numbered_lines(path: Path, max_bytes: int = -1) -> Iterator[tuple[int, str | DropRow]]:
    """Lines with their newline, counted from 1, or why a line is none; lines end at newline bytes only.

    Lines longer than `max_bytes` come in pieces that carry the same number. A byte-order mark is left out.

    Raises:
        ValueError: if the file is no UTF-8 text at all, or is not compressed though its name says so.
        OSError: if it cannot be read.
    """
    number, rest, at_start = 1, b"", True
    with _open(path) as file:
        while True:
            try:
                line = rest + file.readline(max_bytes)
            except _BROKEN_GZIP as error:
                if at_start and isinstance(error, gzip.BadGzipFile):
                    raise ValueError(f"{path} is not a gzip file: rename it or compress it again") from error
                yield number, _truncated(error)
                return
            if not line:
                return
            if at_start:
                if line.startswith(_UTF16_BOMS):
                    raise ValueError(f"{path} is UTF-16 text: convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)")
                line, at_start = line.removeprefix(_BOM), False
            ended = line.endswith(b"\n")
            rest = _unfinished_character(line) if max_bytes > 0 and len(line) >= max_bytes and not ended else b""
            line = line[: len(line) - len(rest)]
            try:
                yield number, line.decode("utf-8")
            except UnicodeDecodeError as error:
                yield (
                    number,
                    DropRow("invalid_unicode", f"the line is not UTF-8 ({error.reason} at byte {error.start})"),
                )
            number += ended


def first_text(path: Path, num_bytes: int = 4096) -> str:
    """The beginning of a file; what is not UTF-8 is replaced."""
    with _open(path) as file:
        try:
            return file.read(num_bytes).removeprefix(_BOM).decode("utf-8", errors="replace")
        except _BROKEN_GZIP:
            return ""  # the reader of lines says what is wrong


def whole_text(path: Path) -> tuple[str, DropRow | None]:
    """The text of a file, and what is wrong with its end; bytes that are not UTF-8 become lone surrogates.

    So only the rows with such bytes are lost.
    """
    data, damage = bytearray(), None
    with _open(path) as file:
        try:
            while chunk := file.read(1 << 20):
                data += chunk
        except _BROKEN_GZIP as error:
            damage = _truncated(error)
    return data.removeprefix(_BOM).decode("utf-8", errors="surrogateescape"), damage


def _open(path: Path) -> BufferedIOBase:
    if path.suffix.lower() == ".gz":
        return gzip.GzipFile(path, "rb")
    return path.open("rb")


def _truncated(error: BaseException) -> DropRow:
    return DropRow("truncated_file", f"the compressed file ends or breaks here ({error})")


def _unfinished_character(piece: bytes) -> bytes:
    """The first bytes of a character of which `piece` lacks the last."""
    for length in range(1, min(3, len(piece)) + 1):
        byte = piece[-length]
        if 0b1100_0000 <= byte < 0b1111_1000:
            needed = 2 + (byte >= 0b1110_0000) + (byte >= 0b1111_0000)
            return piece[-length:] if needed > length else b""
        if not 0b1000_0000 <= byte < 0b1100_0000:
            return b""
    return b""
