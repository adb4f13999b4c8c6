"""What `spd-infer eval` left in a folder, read back. Knows files; changes none, and knows no models."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spd_lightning.inference.evaluation.command import SUMMARY_FILE
from spd_lightning.inference.evaluation.journal import SAMPLES_FILE
from spd_lightning.inference.evaluation.sample import Sample
from spd_lightning.inference.evaluation.summary import VERSION


@dataclass(frozen=True)
class EvalFolder:
    """One evaluation.

    Attributes:
        path: of the folder.
        summary: content of `summary.json`: the facts of the run and the pooled `groups`.
        samples: the answers that the summary may be made of. A folder that was used again with fewer questions holds
            more answers than its summary counts.
    """

    path: Path
    summary: Mapping[str, Any]
    samples: tuple[Sample, ...]


def load_folder(folder: str | Path) -> EvalFolder:
    """The summary and the samples of a folder that `spd-infer eval --out` has finished.

    Raises:
        ValueError: if there is no such folder, if the evaluation has not come to its end, or if the files are not its
            own or another version's; it names the file.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"there is no folder {path}: name one that `spd-infer eval --out` wrote")
    for name in (SUMMARY_FILE, SAMPLES_FILE):
        if not (path / name).is_file():
            raise ValueError(f"{path} has no {name}: it is not a finished `spd-infer eval --out` (start that again)")
    return EvalFolder(path, _summary(path / SUMMARY_FILE), _samples(path / SAMPLES_FILE))


def _summary(path: Path) -> dict[str, Any]:
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(summary, dict) or "groups" not in summary:
        raise ValueError(f"{path} has no groups: it is not the summary of an evaluation")
    if (version := summary.get("version")) != VERSION:
        raise ValueError(f"{path} is of version {version!r}; this release reads version {VERSION}: evaluate again")
    return summary


def _samples(path: Path) -> tuple[Sample, ...]:
    samples = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            samples.append(Sample.from_json(json.loads(line)))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number} is not the sample of an evaluation: {error}") from error
    return tuple(samples)
