"""An append-only file of what a long generation has done so far, so that it can go on where it was stopped.

Knows lines, ids and settings; knows no dialogues, no tokenizer and no target.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any


class AnswerJournal:
    """JSON lines: the settings first, then one record with a unique `id` per dialogue.

    Opening an existing journal cuts off a last line that was not written to its end. Records are found by their
    offset, so the memory it takes is one number per record.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Opens or makes the journal.

        Args:
            path: the file; its folder must exist.
            settings: everything that the answers depend on, as JSON values.

        Raises:
            ValueError: if the file was made with other settings or is no journal.
        """
        self.path = path
        self._offsets: dict[str, int] = {}
        # JSON has no tuples: compare what a file would hold.
        stored: dict[str, Any] = json.loads(json.dumps(dict(settings)))
        self._file = path.open("a+b")
        try:
            self._read(stored)
        except ValueError:
            self._file.close()
            raise

    def __enter__(self) -> "AnswerJournal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __contains__(self, record_id: str) -> bool:
        return record_id in self._offsets

    def __len__(self) -> int:
        return len(self._offsets)

    def append(self, records: Iterable[Mapping[str, Any]]) -> int:
        """Writes the records that are not there yet, and returns their number when they are on the disk."""
        self._file.seek(0, os.SEEK_END)
        offset = self._file.tell()
        lines = []
        for record in records:
            if record["id"] in self._offsets:
                continue
            self._offsets[record["id"]] = offset
            lines.append(_line(record))
            offset += len(lines[-1])
        self._file.write(b"".join(lines))
        self._file.flush()
        os.fsync(self._file.fileno())
        return len(lines)

    def __getitem__(self, record_id: str) -> dict[str, Any]:
        self._file.seek(self._offsets[record_id])
        return json.loads(self._file.readline())

    def _read(self, settings: dict[str, Any]) -> None:
        """Indexes the records, cuts a torn tail off, or writes the settings into a new file."""
        self._file.seek(0)
        offset = 0
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                break  # the run was stopped while it wrote this line
            record = self._parsed(line, number)
            if number == 1:
                self._check_settings(record, settings)
            elif record["id"] in self._offsets:
                raise ValueError(f"{self.path}:{number}: the id {record['id']!r} is there twice: remove this line")
            else:
                self._offsets[record["id"]] = offset
            offset += len(line)
        self._file.truncate(offset)
        if offset == 0:
            self._file.write(_line({"settings": settings}))
            self._file.flush()

    def _parsed(self, line: bytes, number: int) -> dict[str, Any]:
        key = "settings" if number == 1 else "id"
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or key not in record:
            raise ValueError(
                f"{self.path}:{number}: not a line of a journal (no {key!r}): remove this line, or the whole file to "
                "begin again"
            )
        return record

    def _check_settings(self, record: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        found = record["settings"]
        if not isinstance(found, dict):
            raise ValueError(f"{self.path}:1: the settings are not a mapping: this is no journal of this command")
        changed = sorted(
            key for key in found.keys() | settings.keys() if key not in found or found[key] != settings.get(key)
        )
        if changed:
            differences = ", ".join(f"{key} {found.get(key)!r} -> {settings.get(key)!r}" for key in changed)
            raise ValueError(
                f"{self.path} was begun with other settings ({differences}): give another output file, or remove the "
                "journal to begin again"
            )


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode("utf-8") + b"\n"
