"""Samples as they are made: a file of JSON lines that a stopped run goes on from. Knows no models."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spd_lightning.inference.evaluation.sample import Sample, SampleKey

SETTINGS_FILE, SAMPLES_FILE = "settings.json", "per_sample.jsonl"
FILES = "files"
"""Of the settings: fingerprints of what answers depend on and know by name only."""


class SampleJournal:
    """The samples of one folder; each is on disk before the next one is made.

    Args:
        folder: made if it is not there. A last line that was cut is dropped, and its answer made again.
        settings: what all samples have in common. A folder with others is refused.

    Raises:
        ValueError: if the folder holds samples of other settings, or lines that are no samples.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / SAMPLES_FILE
        self.settings_path = folder / SETTINGS_FILE
        self.settings: dict[str, Any]
        self._check_settings(settings)
        self.samples: dict[SampleKey, Sample] = {}
        if self.path.exists():
            self._read()

    def add(self, sample: Sample) -> Sample:
        """Writes a sample down."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(sample.to_json(), ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.samples[sample.key] = sample
        return sample

    def select(self, prompts: Iterable[tuple[str, str]]) -> list[Sample]:
        """The samples of these (task, question id) pairs, in the order in which they were made."""
        wanted = set(prompts)
        return [sample for sample in self.samples.values() if sample.prompt[:2] in wanted]

    def pin(self, name: str, path: Path) -> None:
        """Notes which file goes by a name; answers of another one, a drafter trained anew say, are not mixed in.

        Raises:
            ValueError: if it was another file when this folder's answers were made.
        """
        with path.open("rb") as file:
            fingerprint = hashlib.file_digest(file, "sha256").hexdigest()
        files = self.settings.setdefault(FILES, {})
        if files.setdefault(name, fingerprint) != fingerprint:
            raise ValueError(
                f"{self.path.parent} holds answers made with another file as {name} than {path}: use another --out"
            )
        self._write_settings()

    def _check_settings(self, settings: dict[str, Any]) -> None:
        if not self.settings_path.exists():
            self.settings = settings
            self._write_settings()
            return
        self.settings = before = json.loads(self.settings_path.read_text(encoding="utf-8"))
        keys = before.keys() | settings.keys()
        if different := sorted(key for key in keys - {FILES} if before.get(key) != settings.get(key)):
            changes = ", ".join(f"{key} {before.get(key)!r} instead of {settings.get(key)!r}" for key in different)
            raise ValueError(
                f"{self.path.parent} holds answers made with other settings ({changes}): use another --out"
            )

    def _write_settings(self) -> None:
        scratch = self.settings_path.with_suffix(".part")
        scratch.write_text(json.dumps(self.settings, indent=1) + "\n", encoding="utf-8")
        os.replace(scratch, self.settings_path)

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
