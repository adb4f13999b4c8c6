"""Reading a folder of `spd-infer eval` back: what was written comes back, and what is no such folder is refused."""

import json
from pathlib import Path

import pytest

from spd_lightning.inference.evaluation.folder import load_folder
from spd_lightning.inference.evaluation.summary import summarize
from tests.inference.evaluation.synthetic import evaluation


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as an evaluation leaves it."""
    summary, samples = evaluation(num_prompts=2, num_tokens=20)
    (tmp_path / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    lines = [json.dumps(sample.to_json(), ensure_ascii=False) + "\n" for sample in samples]
    (tmp_path / "per_sample.jsonl").write_text("".join(lines), encoding="utf-8")
    return tmp_path


def test_summary_and_samples_come_back(folder: Path) -> None:
    loaded = load_folder(folder)
    assert loaded.samples == tuple(evaluation(num_prompts=2, num_tokens=20)[1])
    assert loaded.summary == json.loads((folder / "summary.json").read_text())
    groups = [(group.task, group.method, group.drafter, group.p) for group in summarize(loaded.samples)]
    assert groups == [
        (group["task"], group["method"], group["drafter"], group["p"]) for group in loaded.summary["groups"]
    ]


def test_reading_changes_nothing(folder: Path) -> None:
    """Not even a cut last line, which a resumed evaluation would drop: it is refused."""
    samples = folder / "per_sample.jsonl"
    cut = samples.read_bytes()[:-9]
    samples.write_bytes(cut)
    with pytest.raises(ValueError, match=r"per_sample\.jsonl, line \d+ is not the sample"):
        load_folder(folder)
    assert samples.read_bytes() == cut


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere"):
        load_folder(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["summary.json", "per_sample.jsonl"])
def test_an_unfinished_evaluation_is_refused(name: str, folder: Path) -> None:
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"has no {name}: it is not a finished"):
        load_folder(str(folder))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("summary.json", "{", r"summary\.json is no JSON"),
        ("summary.json", "[]", r"summary\.json has no groups"),
        ("summary.json", '{"version": 1, "loss": 0.5}', r"summary\.json has no groups"),
        (
            "summary.json",
            '{"version": 99, "groups": []}',
            r"summary\.json is of version 99; this release reads version 1",
        ),
        ("per_sample.jsonl", '{"version": 99}\n', r"per_sample\.jsonl, line 1 is not .*version 99"),
        (
            "per_sample.jsonl",
            '{"version": 1, "text": ""}\n',
            r"per_sample\.jsonl, line 1 is not .*missing or unknown keys",
        ),
        ("per_sample.jsonl", "3\n", r"per_sample\.jsonl, line 1 is not the sample"),
    ],
)
def test_foreign_files_are_refused(name: str, content: str, message: str, folder: Path) -> None:
    (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_folder(folder)
