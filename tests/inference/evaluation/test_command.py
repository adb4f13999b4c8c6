"""`spd-infer eval` on a tiny target: what it writes, resuming, the losslessness gate, and the mistakes of users."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from spd_lightning.inference.cli import main
from spd_lightning.inference.evaluation.journal import SAMPLES_FILE, SampleJournal
from spd_lightning.inference.evaluation.lossless import check_lossless
from spd_lightning.inference.schedule import Verdict
from spd_lightning.inference.verify import GreedyVerifier
from tests.inference.evaluation.synthetic import drafted
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
        (["--temperature", "1", "--check_lossless", "true"], "--temperature needs 0"),
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
    assert "holds an answer to another question asked two: use another --out" in capsys.readouterr().err
    questions.write_text(json.dumps(QUESTIONS[2]) + "\n")
    save_folders(tmp_path, num_stages=4, name="mine")
    with pytest.raises(SystemExit):
        main(args)
    assert "holds answers made with another drafter mine: use another --out" in capsys.readouterr().err
    assert lines(tmp_path / "out") == made


def test_questions_may_be_added_and_only_what_is_asked_for_is_reported(root: Path, tmp_path: Path) -> None:
    """The summary of a folder that was used before is that of a new one."""
    questions = tmp_path / "asked.jsonl"
    questions.write_text("".join(json.dumps(question) + "\n" for question in (QUESTIONS[0], QUESTIONS[2])))
    asked = ("--questions", str(questions), "--drafter", str(root / "two"))
    main(arguments(root, tmp_path / "new", *asked))
    questions.write_text(json.dumps(QUESTIONS[0]) + "\n")
    main(arguments(root, tmp_path / "used", *asked, "--turns", "all", "--methods", "ar", "generate"))
    questions.write_text("".join(json.dumps(question) + "\n" for question in (QUESTIONS[0], QUESTIONS[2])))
    main(arguments(root, tmp_path / "used", *asked, "--drafter", str(root / "four"), "--temperature", "0", "1"))
    main(arguments(root, tmp_path / "used", *asked, "--check_lossless", "true"))
    counted = (
        "task",
        "method",
        "drafter",
        "temperature",
        "num_prompts",
        "num_committed",
        "num_cycles",
        "num_identical",
    )
    new, used = (
        [
            tuple(group[key] for key in counted)
            for group in json.loads((tmp_path / name / "summary.json").read_text())["groups"]
        ]
        for name in ("new", "used")
    )
    assert new == used


def test_answers_that_were_made_before_plain_decoding_are_compared_later(root: Path, tmp_path: Path, capsys) -> None:
    args = ("--drafter", str(root / "two"), "--num_prompts", "1")
    main(arguments(root, tmp_path, *args, "--methods", "spd"))
    [sample] = lines(tmp_path)
    assert sample["identical_to_ar"] is None
    wrong = sample | {"token_ids": [*sample["token_ids"][:5], 1, *sample["token_ids"][6:]]}
    (tmp_path / SAMPLES_FILE).write_text(json.dumps(wrong) + "\n")
    with pytest.raises(SystemExit) as raised:
        main(arguments(root, tmp_path, *args, "--methods", "ar", "spd", "--check_lossless", "true"))
    assert raised.value.code == 3
    printed = capsys.readouterr().err
    assert f"token 1 instead of {sample['token_ids'][5]}" in printed and "NOT lossless: 1 of 1" in printed
    found = {line["method"]: line for line in lines(tmp_path)}
    assert len(lines(tmp_path)) == 2 and found["spd"]["identical_to_ar"] is False


def test_the_gate_does_not_pass_what_was_not_compared(capsys) -> None:
    alone = drafted([True, False], identical_to_ar=None)
    with pytest.raises(SystemExit) as raised:
        check_lossless([alone])
    assert raised.value.code == 3
    assert "1 of 1 greedy answers have no plain one beside them" in capsys.readouterr().err


def test_a_seed_that_was_not_given_is_drawn_once_for_all_drafters(root: Path, tmp_path: Path) -> None:
    args = ("--num_prompts", "1", "--temperature", "1", "--verify", "coupled")
    main(arguments(root, tmp_path, *args, "--drafter", str(root / "four")))
    main(arguments(root, tmp_path, *args, "--drafter", str(root / "four"), str(root / "two")))
    samples = lines(tmp_path)
    assert len({sample["seed"] for sample in samples}) == 1 and len({tuple(s["token_ids"]) for s in samples}) == 1
    assert [sample["identical_to_ar"] for sample in samples] == [None, True, True]


def test_a_baseline_that_cannot_work_stops_the_run_before_it_begins(
    root: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    def failing(*_):
        raise ValueError("no compiler here")

    monkeypatch.setattr("spd_lightning.inference.evaluation.compiled.CompiledTarget.__init__", failing)
    with pytest.raises(SystemExit) as raised:
        main(arguments(root, tmp_path, "--methods", "ar", "compiled", "spd"))
    assert raised.value.code == 2 and "no compiler here" in capsys.readouterr().err
    assert not (tmp_path / SAMPLES_FILE).exists()


def test_a_run_that_answered_nothing_says_why(root: Path, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments(root, tmp_path, "--max_length", "5"))
    assert raised.value.code == 2
    assert "no question could be answered; the first: a prompt of" in capsys.readouterr().err


def test_drafters_for_different_targets_are_refused(root: Path, tmp_path: Path, capsys) -> None:
    other, _ = save_folders(tmp_path, "llama", num_stages=4, name="other")
    with pytest.raises(SystemExit):
        main(arguments(root, tmp_path / "out", "--drafter", str(root / "four"), other))
    assert "the drafters are for different targets" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(
            arguments(
                root, tmp_path / "out", "--drafter", str(root / "four"), str(root / "two"), "--runtime", "distributed"
            )
        )
    assert "drafters of [2, 4] stages need other numbers of processes" in capsys.readouterr().err


def test_a_target_with_other_weights_is_another_target(tmp_path: Path, capsys) -> None:
    drafter, target = save_folders(tmp_path, "llama", num_stages=2, name="mine")
    (tmp_path / "own.jsonl").write_text(json.dumps(QUESTIONS[2]) + "\n")
    main(arguments(tmp_path, tmp_path / "out", "--drafter", drafter))
    weights = load_file(Path(target) / "model.safetensors")
    last = sorted(weights)[-1]
    save_file(weights | {last: weights[last] + 1}, Path(target) / "model.safetensors", {"format": "pt"})
    with pytest.raises(SystemExit):
        main(arguments(tmp_path, tmp_path / "out", "--drafter", drafter))
    assert f"made with another target {target}" in capsys.readouterr().err


def test_a_folder_in_use_or_without_settings_is_refused(root: Path, tmp_path: Path, capsys) -> None:
    journal = SampleJournal(tmp_path / "one", {})
    with pytest.raises(ValueError, match="another evaluation is writing to"):
        SampleJournal(tmp_path / "one", {})
    journal.close()
    SampleJournal(tmp_path / "one", {}).close()
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / SAMPLES_FILE).touch()
    with pytest.raises(ValueError, match=r"per_sample.jsonl is there, but no settings.json beside it"):
        SampleJournal(tmp_path / "two", {})
    (tmp_path / "one" / "settings.json").write_text("{")
    with pytest.raises(ValueError, match=r"settings.json is no JSON"):
        SampleJournal(tmp_path / "one", {})
