"""Samples as they are made: a file of JSON lines that a stopped run goes on from. Knows no models."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spd_lightning.inference.evaluation.sample import Sample, SampleKey

SETTINGS_FILE, SAMPLES_FILE = "settings.json", "per_sample.jsonl"


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
        self._check_settings(folder / SETTINGS_FILE, settings)
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

    def _check_settings(self, path: Path, settings: dict[str, Any]) -> None:
        if not path.exists():
            scratch = path.with_suffix(".part")
            scratch.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
            os.replace(scratch, path)
            return
        before = json.loads(path.read_text(encoding="utf-8"))
        if different := sorted(key for key in before.keys() | settings.keys() if before.get(key) != settings.get(key)):
            changes = ", ".join(f"{key} {before.get(key)!r} instead of {settings.get(key)!r}" for key in different)
            raise ValueError(f"{path.parent} holds answers made with other settings ({changes}): use another --out")

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
