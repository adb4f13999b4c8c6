import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest

from spd_lightning.inference.evaluation.tasks import TASKS, Question, load_questions

PROMPT = '\n\ndef count(items):\n    """How many."""\n'
TEST = "\n\ndef check(candidate):\n    assert candidate([1]) == 1\n"
SOLUTION = "    return len(items)\n"


def gsm8k(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "question_id": number,
        "category": "math",
        "turns": [f"What is 1 + {number}?"],
        "reference": [f"1 + {number} = {1 + number}\n#### {1 + number}"],
    } | changes


def write(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def task_dir(tmp_path: Path) -> Path:
    write(
        tmp_path / "mt_bench" / "question.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
        {"question_id": "b", "category": "math", "turns": ["2+2?", "And?"], "reference": ["4", ""]},
    )
    write(tmp_path / "gsm8k" / "question.jsonl", *map(gsm8k, range(5)))
    write(
        tmp_path / "humaneval" / "question.jsonl",
        {
            "question_id": 0,
            "category": "code",
            "turns": [f"Complete the code I provided.{PROMPT}"],
            "reference": [SOLUTION],
        },
    )
    write(
        tmp_path / "humaneval" / "HumanEval.jsonl",
        {"task_id": "HumanEval/7", "prompt": "def other():\n", "canonical_solution": " return\n"}
        | {"test": "def check(c): pass", "entry_point": "other"},
        {"task_id": "HumanEval/9", "prompt": PROMPT, "canonical_solution": SOLUTION}
        | {"test": TEST, "entry_point": "count"},
    )
    return tmp_path


def test_local_files_give_the_questions_in_their_order(task_dir: Path) -> None:
    found = load_questions(["humaneval", "mt_bench"], task_dir, None, 80)
    turn = f"Complete the code I provided.{PROMPT}"
    assert found == [
        Question("humaneval", "0", "code", (turn,), SOLUTION, f"{TEST}\n\ncheck(count)\n", PROMPT),
        Question("mt_bench", "81", "writing", ("Write.", "Again.")),
        Question("mt_bench", "b", "math", ("2+2?", "And?"), "4"),
    ]


def test_num_prompts_takes_the_first_of_each_task_and_reads_no_further(task_dir: Path) -> None:
    write(task_dir / "gsm8k" / "question.jsonl", gsm8k(0), gsm8k(1), "broken")
    found = load_questions(TASKS, task_dir, None, 2)
    counts = [(question.task, question.question_id) for question in found]
    assert counts == [("mt_bench", "81"), ("mt_bench", "b"), ("gsm8k", "0"), ("gsm8k", "1"), ("humaneval", "0")]
    with pytest.raises(ValueError, match="line 3 is no JSON"):
        load_questions(["gsm8k"], task_dir, None, 3)


@pytest.mark.parametrize("between", ["", "\n", "\n\n", "\n\n\n"])
def test_humaneval_tests_are_found_whatever_stands_between_request_and_prompt(task_dir: Path, between: str) -> None:
    turn = f"Complete the code I provided.{between}{PROMPT.strip()}"
    write(task_dir / "humaneval" / "question.jsonl", {"question_id": 3, "category": "code", "turns": [turn]})
    (question,) = load_questions(["humaneval"], task_dir, None, 1)
    assert (question.turns, question.original) == ((turn,), PROMPT)
    assert question.test == f"{TEST}\n\ncheck(count)\n"


def test_a_prompt_without_tests_is_refused(task_dir: Path) -> None:
    row = {"question_id": 3, "category": "code", "turns": ["Complete the code I provided.\n\ndef unknown():"]}
    path = write(task_dir / "humaneval" / "question.jsonl", row)
    with pytest.raises(ValueError, match=rf"^{path} line 1: .*HumanEval.jsonl has no tests for this prompt"):
        load_questions(["humaneval"], task_dir, None, 1)


def test_questions_come_from_a_file(tmp_path: Path) -> None:
    rows = [gsm8k(1, reference=["no number"]), "", {"question_id": 2, "category": "x", "turns": ["Zoë?"], "more": 1}]
    path = write(tmp_path / "own.jsonl", *rows)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_questions([], None, path, 80) == [
        Question("own", "1", "math", ("What is 1 + 1?",), "no number"),
        Question("own", "2", "x", ("Zoë?",)),
    ]
    assert len(load_questions([], None, path, 1)) == 1


@pytest.mark.parametrize(
    "row, message",
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        (gsm8k(1, question_id="b\ud800"), "'question_id' is"),
        (gsm8k(1, turns=["hi \ud800"]), "'turns' is"),
        ("[1]", r"is '\[1\]', but must be a JSON object"),
        (gsm8k(1, question_id=None), "'question_id' is None, but must be a number or a text"),
        (gsm8k(1, question_id=True), "'question_id' is True"),
        (gsm8k(1, question_id=""), "'question_id' is ''"),
        (gsm8k(1, question_id=0), "question_id 0 is there already, at .*question.jsonl line 1"),
        (gsm8k(1, question_id="0"), "question_id 0 is there already"),
        (gsm8k(1, category=None), "'category' is None, but must be a text"),
        (gsm8k(1, category=" "), "'category' is ' '"),
        (gsm8k(1, turns=[]), r"'turns' is \[\], but must be a list of texts"),
        (gsm8k(1, turns="What?"), "'turns' is 'What\\?', but must be a list of texts"),
        (gsm8k(1, turns=["What?", " "]), "'turns' is"),
        (gsm8k(1, turns=["What?", 1]), "'turns' is"),
        (gsm8k(1, reference="#### 1"), "'reference' is '#### 1', but must be a list of texts"),
        (gsm8k(1, reference=[1]), r"'reference' is \[1\]"),
        (gsm8k(1, reference=["42"]), "'reference' must be a solution that ends with a number behind ####"),
        (gsm8k(1, reference=["#### forty"]), "'reference' must be a solution"),
        (gsm8k(1, reference=None), "'reference' must be a solution"),
    ],
)
def test_a_row_that_is_no_question_is_named_by_file_and_line(task_dir: Path, row: Any, message: str) -> None:
    path = write(task_dir / "gsm8k" / "question.jsonl", gsm8k(0), "", row)
    with pytest.raises(ValueError, match=rf"^{path} line 3:? {message}"):
        load_questions(["gsm8k"], task_dir, None, 80)


def test_bytes_that_are_no_text_are_named_by_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_bytes(b'{"question_id": 1, "category": "\xff", "turns": ["a"]}\n')
    with pytest.raises(ValueError, match=rf"^{tmp_path}/own.jsonl line 1 is no JSON: 'utf-8' codec"):
        load_questions([], None, tmp_path / "own.jsonl", 1)


@pytest.mark.parametrize(
    "tasks, num_prompts, message",
    [
        (["mtbench"], 1, "unknown task 'mtbench': the tasks are mt_bench, gsm8k, humaneval"),
        (["gsm8k", "mt_bench", "gsm8k"], 1, "task 'gsm8k' is named twice"),
        ([], 1, "there is nothing to ask: name tasks"),
        (["gsm8k"], 0, "num_prompts is 0, but must be at least 1"),
    ],
)
def test_what_cannot_be_asked_is_refused(task_dir: Path, tasks: list[str], num_prompts: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_questions(tasks, task_dir, None, num_prompts)


@pytest.mark.parametrize("file", ["mt_bench/question.jsonl", "humaneval/question.jsonl", "humaneval/HumanEval.jsonl"])
def test_a_missing_file_is_named(task_dir: Path, file: str) -> None:
    (task_dir / file).unlink()
    with pytest.raises(ValueError, match=rf"there is no file {task_dir}/{file}, which should hold JSON lines"):
        load_questions([file.split("/")[0]], task_dir, None, 1)


def test_a_file_named_like_a_task_is_refused(tmp_path: Path) -> None:
    """Its answers could be taken for those of the task, and be scored like them."""
    path = write(tmp_path / "gsm8k.jsonl", gsm8k(0))
    with pytest.raises(ValueError, match=rf"{path} has a name that means something else, 'gsm8k': rename the file"):
        load_questions([], None, path, 1)


HUB_ROWS = {
    "HuggingFaceH4/mt_bench_prompts": [
        {"prompt": ["Write.", "Again."], "category": "writing", "reference": [], "prompt_id": 12},
        {"prompt": ["2+2?", "And?"], "category": "math", "reference": ["4", ""], "prompt_id": 11},
    ],
    "openai/gsm8k": [{"question": f"What is 1 + {n}?", "answer": f"#### {1 + n}"} for n in range(3)],
    "openai/openai_humaneval": [
        {"task_id": "HumanEval/0", "prompt": PROMPT, "canonical_solution": SOLUTION, "test": TEST}
        | {"entry_point": "count"},
    ],
}


def test_rows_of_the_hub_give_the_same_form(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(path: str, name: str | None, *, split: str) -> list[dict[str, Any]]:
        asked.append((path, name, split))
        return HUB_ROWS[path]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_questions(TASKS, None, None, 2) == [
        Question("mt_bench", "12", "writing", ("Write.", "Again.")),
        Question("mt_bench", "11", "math", ("2+2?", "And?"), "4"),
        Question("gsm8k", "0", "math", ("What is 1 + 0?",), "#### 1"),
        Question("gsm8k", "1", "math", ("What is 1 + 1?",), "#### 2"),
        Question(
            "humaneval",
            "HumanEval/0",
            "code",
            (f"Complete the code I provided.\n\n{PROMPT}",),
            SOLUTION,
            f"{TEST}\n\ncheck(count)\n",
            PROMPT,
        ),
    ]
    assert asked == [
        ("HuggingFaceH4/mt_bench_prompts", None, "train"),
        ("openai/gsm8k", "main", "test"),
        ("openai/openai_humaneval", None, "test"),
    ]


def test_rows_of_the_hub_without_a_key_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [HUB_ROWS["openai/openai_humaneval"][0] | {"test": None}]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    with pytest.raises(ValueError, match=r"^openai/openai_humaneval row 1: 'test' is None, but must be a text"):
        load_questions(["humaneval"], None, None, 1)


@pytest.mark.parametrize("task", TASKS)
def test_without_the_hub_one_line_says_how_to_do_without(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    with pytest.raises(
        ValueError, match=rf"^task '{task}': \S+ could not be read from the hub \(.+\); download"
    ) as got:
        load_questions([task], None, None, 1)
    assert "\n" not in str(got.value)
    assert re.search(rf"with --task_dir: it has {task}/question.jsonl", str(got.value))
    assert ("HumanEval.jsonl" in str(got.value)) == (task == "humaneval")


def test_what_the_hub_complains_of_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route.\nTry again")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"openai/gsm8k could not be read from the hub \(no route\); download") as got:
        load_questions(["gsm8k"], None, None, 1)
    assert "\n" not in str(got.value)


def test_the_measuring_data_is_read_whole(shared_dir: Path) -> None:
    found = load_questions(TASKS, shared_dir / "data", None, 80)
    assert [question.task for question in found] == [task for task in TASKS for _ in range(80)]
    assert all(len(question.turns) == 2 for question in found[:80])
    assert all(question.reference for question in found[80:])
    for question in found[160:]:
        assert question.original is not None and question.original.strip() in question.turns[0]
        assert question.test is not None and "def check(candidate)" in question.test


def test_files_without_questions_or_with_a_name_of_another_meaning_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"empty.jsonl holds no questions"):
        load_questions([], None, write(tmp_path / "empty.jsonl", ""), 80)
    with pytest.raises(ValueError, match=r"means something else, 'overall'"):
        load_questions([], None, write(tmp_path / "overall.jsonl", gsm8k(1)), 80)
