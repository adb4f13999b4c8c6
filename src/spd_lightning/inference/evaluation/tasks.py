"""Questions of MT-Bench, GSM8K and HumanEval, or of a file: local files in benchmark form, or the hub's rows.

Knows no chat format and no scores beyond the files that hold them.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, starmap
from pathlib import Path
from typing import Any

from spd_lightning.modules.hub import offline_when_unreachable, transport_errors

TASKS = ("mt_bench", "gsm8k", "humaneval")
OVERALL = "overall"
"""Not the name of a task: figures over all tasks go by it."""
GSM8K_SOLUTION = re.compile(r"(?s:.*)####\s*(-?[0-9][0-9,]*(?:\.[0-9]+)?)\s*")
_HUMANEVAL_REQUEST = "Complete the code I provided.\n\n"
# Repository, configuration, split.
_HUB_SETS: dict[str, tuple[str, str | None, str]] = {
    "mt_bench": ("HuggingFaceH4/mt_bench_prompts", None, "train"),
    "gsm8k": ("openai/gsm8k", "main", "test"),
    "humaneval": ("openai/openai_humaneval", None, "test"),
}


@dataclass(frozen=True)
class Question:
    """One question of a benchmark.

    Attributes:
        task: one of `TASKS`, or the name of a file of questions without its suffix.
        question_id: within the task.
        category: by the benchmark.
        turns: what the user says, turn by turn.
        reference: the first answer that the benchmark holds to be right; for GSM8K the solution, which ends with
            `#### 42`.
        test: for HumanEval the program text that follows the completed function and fails if it is wrong.
        original: for HumanEval the code that is to be completed.
    """

    task: str
    question_id: str
    category: str
    turns: tuple[str, ...]
    reference: str | None = None
    test: str | None = None
    original: str | None = None


def load_questions(
    tasks: Sequence[str], task_dir: Path | None, questions: Path | None, num_prompts: int
) -> list[Question]:
    """The first `num_prompts` questions of each task, or all where there are fewer, in the order of their files.

    Args:
        tasks: of `TASKS`.
        task_dir: folder with `mt_bench/question.jsonl`, `gsm8k/question.jsonl`, and for HumanEval
            `humaneval/question.jsonl` and `humaneval/HumanEval.jsonl`, where its tests are; without it the tasks come
            from the hub.
        questions: a file of questions in the same form, asked after the tasks; its name is the task's.
        num_prompts: at least 1.

    Raises:
        ValueError: for unknown or repeated tasks, files or a hub that cannot be read, and rows that are no questions;
            it names file and line.
    """
    if unknown := [task for task in tasks if task not in TASKS]:
        raise ValueError(f"unknown task {unknown[0]!r}: the tasks are {', '.join(TASKS)}; others come from a file")
    if repeated := [task for index, task in enumerate(tasks) if task in tasks[:index]]:
        raise ValueError(f"task {repeated[0]!r} is named twice")
    if not tasks and questions is None:
        raise ValueError(f"there is nothing to ask: name tasks ({', '.join(TASKS)}) or a file of questions")
    if num_prompts < 1:
        raise ValueError(f"num_prompts is {num_prompts}, but must be at least 1")
    if questions is not None and questions.stem in (*TASKS, OVERALL):
        raise ValueError(f"{questions} has a name that means something else, {questions.stem!r}: rename the file")
    found: list[Question] = []
    for task in tasks:
        rows = _hub_rows(task, num_prompts) if task_dir is None else _local_rows(task, task_dir, num_prompts)
        found += _questions(task, rows)
    if questions is not None:
        found += _questions(questions.stem, islice(_file_rows(questions), num_prompts))
    if not found:
        raise ValueError(f"there is nothing to ask: {questions or task_dir} holds no questions")
    return found


def _questions(task: str, rows: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[Question]:
    """Rows in benchmark form, each with the place where it was found."""
    places: dict[str, str] = {}
    for place, row in rows:
        identity = row.get("question_id")
        if isinstance(identity, bool) or not isinstance(identity, int | str) or not _is_text(str(identity)):
            raise ValueError(f"{place}: 'question_id' is {identity!r}, but must be a number or a text")
        if (name := str(identity)) in places:
            raise ValueError(f"{place}: question_id {name} is there already, at {places[name]}")
        places[name] = place
        # MT-Bench leaves the reference of some second turns empty.
        references = row.get("reference") or [""]
        if not isinstance(references, list) or not all(isinstance(entry, str) for entry in references):
            raise ValueError(f"{place}: 'reference' is {references!r}, but must be a list of texts")
        reference = references[0] or None
        if task == "gsm8k" and not GSM8K_SOLUTION.fullmatch(reference or ""):
            raise ValueError(f"{place}: 'reference' must be a solution that ends with a number behind ####")
        yield Question(
            task=task,
            question_id=name,
            category=_text(place, row, "category"),
            turns=_texts(place, row, "turns"),
            reference=reference,
            test=row["test"] if task == "humaneval" else None,
            original=row["original"] if task == "humaneval" else None,
        )


def _local_rows(task: str, task_dir: Path, num_rows: int) -> Iterator[tuple[str, dict[str, Any]]]:
    rows = islice(_file_rows(task_dir / task / "question.jsonl"), num_rows)
    if task != "humaneval":
        yield from rows
        return
    solved = task_dir / task / "HumanEval.jsonl"
    tests = {row["original"].strip(): row for row in starmap(_humaneval_row, _file_rows(solved))}
    for place, row in rows:
        # Files differ in the empty lines between the request and the code.
        prompt = _texts(place, row, "turns")[0].removeprefix(_HUMANEVAL_REQUEST.strip()).strip()
        if prompt not in tests:
            raise ValueError(f"{place}: {solved} has no tests for this prompt")
        yield place, row | {key: tests[prompt][key] for key in ("original", "test")}


def _humaneval_row(place: str, row: dict[str, Any]) -> dict[str, Any]:
    """A row of HumanEval in benchmark form, with its tests."""
    original, test, entry_point = (_text(place, row, key) for key in ("prompt", "test", "entry_point"))
    return {
        "question_id": row.get("task_id"),
        "category": "code",
        "turns": [_HUMANEVAL_REQUEST + original],
        "reference": [_text(place, row, "canonical_solution")],
        "original": original,
        "test": f"{test}\n\ncheck({entry_point})\n",
    }


def _hub_rows(task: str, num_rows: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The first rows of the task's set on the hub, in benchmark form.

    Raises:
        ValueError: if the hub cannot be reached; it says how to do without.
    """
    import datasets
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError

    path, name, split = _HUB_SETS[task]
    try:
        with offline_when_unreachable():
            rows: Any = datasets.load_dataset(path, name, split=split)
    except (OSError, ValueError, DatasetsError, HfHubHTTPError, *transport_errors()) as error:
        cause = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        raise ValueError(
            f"task {task!r}: {path} could not be read from the hub ({cause}); download its files and name their folder "
            f"with --task_dir: it has {task}/question.jsonl"
            + (" and humaneval/HumanEval.jsonl" if task == "humaneval" else "")
        ) from error
    for number, row in enumerate(islice(rows, num_rows)):
        place = f"{path} row {number + 1}"
        if task == "humaneval":
            row = _humaneval_row(place, row)
        elif task == "gsm8k":
            turns, reference = [row.get("question")], [row.get("answer")]
            row = {"question_id": number, "category": "math", "turns": turns, "reference": reference}
        else:
            turns, identity = row.get("prompt"), row.get("prompt_id")
            row = {**row, "question_id": identity, "turns": turns}
        yield place, row


def _file_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file of JSON lines, each with its place."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}, which should hold JSON lines")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path} line {number}"
            try:
                text = line.decode("utf-8-sig").strip()
                if not text:
                    continue
                row = json.loads(text)
            except (ValueError, RecursionError) as error:  # RecursionError: thousands of brackets
                raise ValueError(f"{place} is no JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{place} is {text[:40]!r}, but must be a JSON object")
            yield place, row


def _text(place: str, row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not _is_text(value):
        raise ValueError(f"{place}: {key!r} is {value!r}, but must be a text that is not empty")
    return value


def _texts(place: str, row: dict[str, Any], key: str) -> tuple[str, ...]:
    values = row.get(key)
    if not isinstance(values, list) or not values or not all(isinstance(v, str) and _is_text(v) for v in values):
        raise ValueError(f"{place}: {key!r} is {values!r}, but must be a list of texts that are not empty")
    return tuple(values)


def _is_text(value: str) -> bool:
    """Whether there is something in it, and nothing that no file can hold, such as half a surrogate pair."""
    try:
        return bool(value.strip() and value.encode("utf-8"))
    except UnicodeEncodeError:
        return False
