"""`spd-infer eval` on a tiny target: what it writes, resuming, the losslessness gate, and the mistakes of users."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spd_lightning.inference.cli import main
from spd_lightning.inference.evaluation.journal import SAMPLES_FILE, SampleJournal
from spd_lightning.inference.schedule import Verdict
from spd_lightning.inference.verify import GreedyVerifier
from tests.inference.folders import save_folders

QUESTIONS = [
    {"question_id": "one", "category": "short", "turns": ["What is 2 + 2?", "And times 3?"]},
    {"question_id": "long", "category": "too long", "turns": ["x" * 300]},
    {"question_id": "two", "category": "short", "turns": ["Name a colour."]},
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, two drafters and a file of questions, the second of which does not fit."""
    root = tmp_path_factory.mktemp("eval")
    save_folders(root, num_stages=4, name="four")
    save_folders(root, num_stages=2, name="two")
    (root / "own.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    return root


def arguments(root: Path, out: Path, *more: str) -> list[str]:
    return [
        *("eval", "--drafter", str(root / "four"), "--questions", str(root / "own.jsonl"), "--out", str(out)),
        *("--max_new_tokens", "10", "--max_length", "200", *more),
    ]


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / SAMPLES_FILE).read_text().splitlines()]


def test_drafters_and_baselines_stand_in_one_table_and_page(root: Path, tmp_path: Path, capsys) -> None:
    """Greedy answers are plain decoding's, `generate`'s too; the question that does not fit is reported and skipped."""
    more = ("--drafter", str(root / "four"), str(root / "two"), "--temperature", "0", "1", "--turns", "all")
    main(
        arguments(
            root, tmp_path, *more, "--methods", "ar", "generate", "spd", "--check_lossless", "true", "--seed", "3"
        )
    )
    printed = capsys.readouterr().out
    assert "lossless: 6 of 6 greedy answers" in printed
    samples = lines(tmp_path)
    # (1 question of 2 turns + 1 of 1) x 2 temperatures x (ar, generate, spd of two drafters)
    assert len(samples) == 3 * 2 * 4
    assert {(s["method"], s["drafter"]) for s in samples} == {
        ("ar", None), ("generate", None), ("spd", "four"), ("spd", "two")
    }  # fmt: skip
    for sample in samples:
        compared = sample["temperature"] == 0 and sample["method"] != "ar"
        assert sample["identical_to_ar"] is (True if compared else None)
        assert sample["num_committed"] == len(sample["token_ids"]) - 1
        assert (sample["num_cycles"] > 0) == (sample["method"] == "spd")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [item["question_id"] for item in summary["skipped"]] == ["long"]
    assert "do not fit into max_length=200" in summary["skipped"][0]["error"]
    assert "spd" in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_a_run_goes_on_where_it_was_stopped(root: Path, tmp_path: Path, monkeypatch) -> None:
    add, made = SampleJournal.add, []

    def failing(journal, sample):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(sample.key)
        return add(journal, sample)

    monkeypatch.setattr(SampleJournal, "add", failing)
    with pytest.raises(SystemExit):
        main(arguments(root, tmp_path))
    with (tmp_path / SAMPLES_FILE).open("a") as file:
        file.write('{"version": 1, "ta')  # a line that was cut
    before = [json.loads(line) for line in (tmp_path / SAMPLES_FILE).read_text().split("\n")[:3]]

    def counting(journal, sample):
        made.append(sample.key)
        return add(journal, sample)

    monkeypatch.setattr(SampleJournal, "add", counting)
    main(arguments(root, tmp_path))
    assert lines(tmp_path)[:3] == before
    assert len(made) == len(set(made)) == len(lines(tmp_path)) == 4
    main(arguments(root, tmp_path))  # nothing is left to do
    assert len(made) == 4
    with pytest.raises(SystemExit):
        main(arguments(root, tmp_path, "--max_new_tokens", "11"))


def test_a_planted_difference_is_caught(root: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    judge = GreedyVerifier.judge

    def wrong(verifier, logits, proposal, position):
        verdict = judge(verifier, logits, proposal, position)
        return Verdict(False, (verdict.token + 1) % 250) if position % 5 == 0 else verdict

    monkeypatch.setattr(GreedyVerifier, "judge", wrong)
    with pytest.raises(SystemExit) as raised:
        main(arguments(root, tmp_path, "--check_lossless", "true"))
    assert raised.value.code == 3
    printed = capsys.readouterr().err
    assert (
        "NOT lossless: 2 of 2" in printed and "instead of" in printed and "margin of the two best logits 0." in printed
    )


def test_drafters_of_several_methods_stand_in_one_table(root: Path, tmp_path: Path, capsys) -> None:
    """Each under the method that its configuration names; those that are not asked for are refused."""
    save_folders(root, num_stages=4, name="post", schedule="post_step")
    save_folders(root, num_stages=4, name="first", schedule="post_step", anchors="first_stage", rows="shared")
    drafters = ("--drafter", *(str(root / name) for name in ("four", "post", "first")))
    main(arguments(root, tmp_path, *drafters, "--check_lossless", "true"))
    assert "lossless: 6 of 6 greedy answers" in capsys.readouterr().out
    groups = json.loads((tmp_path / "summary.json").read_text())["groups"]
    found = {(group["method"], group["drafter"]): group for group in groups if group["task"] == "overall"}
    assert list(found) == [("ar", None), ("spd", "four"), ("spd_post", "post"), ("ppsd", "first")]
    for key, group in found.items():
        if key[1] is not None:
            exposed = 0 if key[0] == "spd" else 4  # n times L_s = 2 layers of the target's 8
            assert group["adjusted_s"] == pytest.approx(group["s0"] / (1 + exposed * 2 / 8))
    with pytest.raises(SystemExit):
        main(arguments(root, tmp_path, *drafters, "--methods", "ar", "spd", "ppsd"))
    assert "is of method 'spd_post': add it to --methods" in capsys.readouterr().err


def test_the_virtual_clock_is_a_clock_of_its_own(root: Path, tmp_path: Path) -> None:
    main(arguments(root, tmp_path, "--runtime", "virtual", "--drafter", str(root / "two")))
    groups = json.loads((tmp_path / "summary.json").read_text())["groups"]
    assert {(group["method"], group["clock"], group["num_devices"]) for group in groups} == {
        ("ar", "virtual", 1), ("spd", "virtual", 3)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--methods", "ar", "magic"], "methods ['magic']: known are ar, compiled, generate, spd, spd_post, ppsd"),
        (["--methods", "spd", "--check_lossless", "true"], "--methods needs both"),
        (["--methods", "ar", "--check_lossless", "true"], "--methods needs both"),
        (["--methods", "ar", "ppsd"], "--methods ppsd: none of the drafters is of this method"),
        (["--temperature", "0", "-1"], "temperature=-1.0"),
        (["--num_prompts", "0"], "num_prompts=0"),
        (["--questions", "/no/such/file"], "/no/such/file"),
        (["--drafter", "/no/such/drafter"], "no drafter here"),
    ],
)
def test_mistakes_give_one_line_and_exit_2(args: list[str], message: str, root: Path, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments(root, tmp_path, *args))
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_tables_figures_and_page_are_logged(root: Path, tmp_path: Path) -> None:
    """To a real, offline W&B run; in a process of its own, since wandb keeps the settings of the first run."""
    command = arguments(root, tmp_path / "out", "--wandb_project", "eval")
    variables = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "spd_lightning.inference.cli", *command],
        env=os.environ | variables, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "wandb sync" in done.stdout
    [run] = (tmp_path / "wandb").glob("offline-run-*")
    assert {path.suffix for path in run.glob("files/media/**/*") if path.is_file()} == {".html", ".json"}


def test_tasks_and_own_questions_are_asked_together(root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tasks" / "mt_bench"
    folder.mkdir(parents=True)
    (folder / "question.jsonl").write_text(json.dumps({**QUESTIONS[0], "question_id": 7}) + "\n")
    main(
        arguments(
            root, tmp_path / "out", "--tasks", "mt_bench", "--task_dir", str(tmp_path / "tasks"), "--num_prompts", "1"
        )
    )
    assert [(s["task"], s["question_id"]) for s in lines(tmp_path / "out")] == [("mt_bench", "7")] * 2 + [
        ("own", "one")
    ] * 2


def test_answers_of_a_file_that_has_changed_are_not_mixed_in(root: Path, tmp_path: Path, capsys) -> None:
    """A drafter trained anew under the same name, or other questions in a file of the same name."""
    save_folders(tmp_path, num_stages=2, name="mine")
    questions = tmp_path / "asked.jsonl"
    questions.write_text(json.dumps(QUESTIONS[2]) + "\n")
    args = arguments(
        root, tmp_path / "out", "--drafter", str(tmp_path / "mine"), "--questions", str(questions), "--methods", "spd"
    )
    main(args)
    main(args)
    made = lines(tmp_path / "out")
    questions.write_text(json.dumps({**QUESTIONS[2], "turns": ["Name a number."]}) + "\n")
    with pytest.raises(SystemExit):
        main(args)
    assert "made with another file as questions asked than" in capsys.readouterr().err
    questions.write_text(json.dumps(QUESTIONS[2]) + "\n")
    save_folders(tmp_path, num_stages=4, name="mine")
    with pytest.raises(SystemExit):
        main(args)
    assert "made with another file as drafter mine than" in capsys.readouterr().err
    assert lines(tmp_path / "out") == made
