"""Samples as they are made: a file of JSON lines that a stopped run goes on from. Knows no models."""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from spd_lightning.files import write_whole
from spd_lightning.inference.evaluation.sample import Sample, SampleKey

SETTINGS_FILE, SAMPLES_FILE, LOCK_FILE = "settings.json", "per_sample.jsonl", ".lock"
KEPT = ("files", "questions", "drawn_seed")
"""Of the settings what the folder adds to those that it is opened with."""


class SampleJournal:
    """The samples of one folder; each is on disk before the next one is made. One process at a time may have it open.

    Args:
        folder: made if it is not there. A last line that was cut is dropped, and its answer made again.
        settings: what all samples have in common. A folder with others is refused.

    Raises:
        ValueError: if the folder holds samples of other settings or of none, lines that are no samples, or is in use.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.settings_path = folder / SAMPLES_FILE, folder / SETTINGS_FILE
        self._lock = (folder / LOCK_FILE).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"another evaluation is writing to {folder}: wait for it or use another --out") from error
        self.settings: dict[str, Any] = self._checked(settings)
        self.samples: dict[SampleKey, Sample] = {}
        if self.path.exists():
            self._read()

    def close(self) -> None:
        """Lets others have the folder."""
        self._lock.close()

    def add(self, sample: Sample) -> Sample:
        """Writes a sample down."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(sample))
            file.flush()
            os.fsync(file.fileno())
        self.samples[sample.key] = sample
        return sample

    def update(self, samples: Iterable[Sample]) -> None:
        """Puts samples in the place of those of the same keys."""
        changed = {sample.key: sample for sample in samples if self.samples[sample.key] != sample}
        if changed:
            self.samples |= changed
            write_whole(self.path, "".join(map(_line, self.samples.values())))

    def select(self, wanted: Callable[[Sample], bool]) -> list[Sample]:
        """Some of the samples, in the order in which they were made."""
        return [sample for sample in self.samples.values() if wanted(sample)]

    def pin(self, name: str, fingerprint: str) -> None:
        """Notes what goes by a name; answers of another one, a drafter trained anew say, are not mixed in.

        Raises:
            ValueError: if it was another one when this folder's answers were made.
        """
        if self.settings.setdefault("files", {}).setdefault(name, fingerprint) != fingerprint:
            raise ValueError(f"{self.path.parent} holds answers made with another {name}: use another --out")
        self._write_settings()

    def pin_questions(self, contents: Sequence[tuple[str, str]]) -> None:
        """Notes the content of each question by its name; more questions may come, but none may change.

        Raises:
            ValueError: if one was another when it was answered.
        """
        known = self.settings.setdefault("questions", {})
        for name, content in contents:
            digest = hashlib.sha256(content.encode()).hexdigest()[:16]
            if known.setdefault(name, digest) != digest:
                raise ValueError(f"{self.path.parent} holds an answer to another question {name}: use another --out")
        self._write_settings()

    def seed(self, given: int | None, draw: Callable[[], int]) -> int:
        """The seed of all answers: the given one, the one that was drawn when the folder was new, or one drawn now."""
        if given is not None:
            return given
        if "drawn_seed" not in self.settings:
            self.settings["drawn_seed"] = draw()
            self._write_settings()
        return self.settings["drawn_seed"]

    def _checked(self, settings: dict[str, Any]) -> dict[str, Any]:
        if not self.settings_path.exists():
            if self.path.exists():
                raise ValueError(f"{self.path} is there, but no {SETTINGS_FILE} beside it: use another --out")
            write_whole(self.settings_path, json.dumps(settings, indent=1) + "\n")
            return settings
        try:
            before = json.loads(self.settings_path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{self.settings_path} is no JSON ({error}): use another --out") from error
        keys = before.keys() | settings.keys()
        if different := sorted(key for key in keys if key not in KEPT and before.get(key) != settings.get(key)):
            changes = ", ".join(f"{key} {before.get(key)!r} instead of {settings.get(key)!r}" for key in different)
            raise ValueError(
                f"{self.path.parent} holds answers made with other settings ({changes}): use another --out"
            )
        return before

    def _write_settings(self) -> None:
        write_whole(self.settings_path, json.dumps(self.settings, indent=1) + "\n")

    def _read(self) -> None:
        kept = 0
        lines = self.path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, start=1):
            if number == len(lines):  # what follows the last newline: nothing, or a line that was cut
                break
            try:
                sample = Sample.from_json(json.loads(line))
            except (ValueError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{self.path}, line {number}: {error}; remove the line or use another --out"
                ) from error
            self.samples[sample.key] = sample
            kept += len(line) + 1
        if kept < self.path.stat().st_size:
            os.truncate(self.path, kept)


def file_fingerprint(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _line(sample: Sample) -> str:
    return json.dumps(sample.to_json(), ensure_ascii=False) + "\n"
