import json
from pathlib import Path

import datasets
import pytest
from jsonargparse import ArgumentError, ArgumentParser

from spd_lightning.data.conversations import Conversation, Message
from spd_lightning.data.rows import PlainText, PretokenisedRow
from spd_lightning.data.sources import Source, iter_rows, resolve_files

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
DIALOGUE = Conversation((Message("user", "q"), Message("assistant", "a")))


def write(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def items(source: Source) -> list[object]:
    """Item or drop reason of each row."""
    return [row.item if row.drop is None else row.drop.reason for row in iter_rows(source)]


def names(source: Source, root: Path) -> list[str]:
    return [file.relative_to(root).as_posix() for file in resolve_files(source)]


def test_a_file_of_dialogues_with_a_bad_line(tmp_path):
    path = write(tmp_path / "rows.jsonl", CHAT, "{broken\n", {"messages": []}, [1], CHAT)
    rows = list(iter_rows(Source(path=str(path))))
    assert [row.location for row in rows] == [f"{path}:{line}" for line in range(1, 6)]
    assert items(Source(path=str(path))) == [
        DIALOGUE,
        "invalid_json",
        "empty_conversation",
        "not_an_object",
        DIALOGUE,
    ]


def test_questions_and_answers_with_notes_removed(tmp_path):
    path = write(tmp_path / "rows.jsonl", {"question": "6*7?", "answer": "6*7=<<6*7=42>>42\n#### 42"})
    source = Source(
        path=str(path), columns={"prompt": "question", "response": "answer"}, response_remove="<<.*?>>", system="s"
    )
    assert items(source) == [
        Conversation((Message("system", "s"), Message("user", "6*7?"), Message("assistant", "6*7=42\n#### 42")))
    ]


def test_the_limit_counts_rows_from_the_start_also_dropped_ones(tmp_path):
    first = write(tmp_path / "a.jsonl", CHAT, "broken\n")
    write(tmp_path / "b.jsonl", CHAT, CHAT)
    assert items(Source(path=str(tmp_path), limit=3)) == [DIALOGUE, "invalid_json", DIALOGUE]
    assert items(Source(path=str(first), limit=99)) == [DIALOGUE, "invalid_json"]


def test_files_of_a_folder_may_differ_in_their_columns(tmp_path):
    write(tmp_path / "a.jsonl", CHAT)
    write(tmp_path / "sub" / "b.json", json.dumps([{"conversations": [{"from": "human", "value": "q"}], "id": "x"}]))
    write(tmp_path / "c.jsonl", {"text": "plain"}, {"input_ids": [1, 2], "loss_mask": [0, 1], "id": 3})
    assert items(Source(path=str(tmp_path))) == [
        DIALOGUE,
        PlainText("plain"),
        PretokenisedRow((1, 2), (0, 1)),
        Conversation((Message("user", "q"),)),
    ]


def test_a_folder_of_data_is_read_without_its_readme_and_hidden_files(tmp_path):
    for name in ("b.parquet", "a.jsonl", "README.md", ".hidden/c.jsonl", "dataset_infos.json", "x.png", "z/y.json.gz"):
        write(tmp_path / name, "")
    assert names(Source(path=str(tmp_path)), tmp_path) == ["a.jsonl", "b.parquet", "z/y.json.gz"]


def test_a_folder_of_texts_is_read_as_text(tmp_path):
    write(tmp_path / "pkg" / "__init__.py", "x = 1\n")
    write(tmp_path / "notes.txt", "some\u2028text\n")
    write(tmp_path / "pkg" / "__pycache__" / "junk.py", "y\n")
    assert items(Source(path=str(tmp_path))) == [PlainText("some\u2028text\n"), PlainText("x = 1\n")]
    write(tmp_path / "settings.json", "{}")
    assert items(Source(path=str(tmp_path), format="text")) == [PlainText("some\u2028text\n"), PlainText("x = 1\n")]


def test_data_files_choose_within_a_folder(tmp_path):
    for name in ("a.jsonl", "b.jsonl", "sub/c.jsonl"):
        write(tmp_path / name, CHAT)
    assert names(Source(path=str(tmp_path), data_files="b.jsonl"), tmp_path) == ["b.jsonl"]
    assert names(Source(path=str(tmp_path), data_files=["sub/*", "a*"]), tmp_path) == ["a.jsonl", "sub/c.jsonl"]
    with pytest.raises(ValueError, match=r"no file in the folder .* matches"):
        resolve_files(Source(path=str(tmp_path), data_files="d*"))


def test_a_glob_is_read_in_order(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.txt", "sub/d.jsonl"):
        write(tmp_path / name, CHAT)
    assert names(Source(path=f"{tmp_path}/*.jsonl"), tmp_path) == ["a.jsonl", "b.jsonl"]
    assert names(Source(path=f"{tmp_path}/**/*.jsonl"), tmp_path) == ["a.jsonl", "b.jsonl", "sub/d.jsonl"]
    with pytest.raises(ValueError, match="no file matches this pattern"):
        resolve_files(Source(path=f"{tmp_path}/*.parquet"))


def test_a_relative_path_and_a_name_with_brackets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows[1].jsonl", CHAT)
    assert [row.location for row in iter_rows(Source(path="rows[1].jsonl"))] == ["rows[1].jsonl:1"]
    assert [file.name for file in resolve_files(Source(path="*.jsonl"))] == ["rows[1].jsonl"]


def test_saved_data_sets_are_read_in_their_order(tmp_path):
    rows = datasets.Dataset.from_list([{"text": f"row {index}"} for index in range(7)])
    rows.save_to_disk(tmp_path / "one", num_shards=3)
    assert items(Source(path=str(tmp_path / "one"))) == [PlainText(f"row {index}") for index in range(7)]
    splits = datasets.DatasetDict({"train": rows.select([0, 1]), "test": rows.select([5])})
    splits.save_to_disk(tmp_path / "splits")
    assert items(Source(path=str(tmp_path / "splits"))) == [PlainText("row 0"), PlainText("row 1")]
    assert items(Source(path=str(tmp_path / "splits"), split="test")) == [PlainText("row 5")]
    with pytest.raises(ValueError, match=r"no split 'valid'; it has \['test', 'train'\]"):
        resolve_files(Source(path=str(tmp_path / "splits"), split="valid"))


def test_any_suffix_is_text_on_request_only(tmp_path):
    path = write(tmp_path / "notes.log", "a line\n")
    with pytest.raises(ValueError, match=r"notes\.log: cannot tell its format"):
        items(Source(path=str(path)))
    assert items(Source(path=str(path), format="text")) == [PlainText("a line\n")]


@pytest.mark.parametrize(
    "path", ["absent.jsonl", "absent.txt", "./absent", "/absent/folder", "a/b/c", "~/absent/", ".."]
)
def test_what_is_not_there_is_one_line(tmp_path, monkeypatch, path):
    monkeypatch.chdir(write(tmp_path / "empty" / "x.png", "").parent)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ValueError, match=r"no such file or folder|no file in the folder") as error:
        items(Source(path=path))
    assert "\n" not in str(error.value)


def test_an_unreadable_file_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "rows.jsonl", CHAT)

    def refuse(self: Path, *args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"cannot read .*rows\.jsonl: Permission denied"):
        items(Source(path=str(path)))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"path": ""}, "path is empty"),
        ({"path": "  "}, "path is empty"),
        ({"limit": 0}, "limit=0 .* at least 1"),
        ({"weight": 0.0}, "weight=0.0 .* positive"),
        ({"weight": -1.0}, "weight=-1.0"),
        ({"weight": float("inf")}, "weight=inf"),
        ({"weight": float("nan")}, "weight=nan"),
        ({"columns": {"question": "prompt"}}, r"columns of x names \['question'\]"),
        ({"response_remove": "<<(.*?>>"}, r"response_remove='<<\(\.\*\?>>' of x is no regular expression"),
    ],
)
def test_wrong_options_are_refused_when_the_source_is_made(options, message):
    with pytest.raises(ValueError, match=message):
        Source(**{"path": "x", **options})


class Consumer:
    def __init__(self, sources: list[Source]) -> None:
        self.sources = sources


def test_the_yaml_form_is_typed_and_refuses_unknown_keys():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Consumer, "data")
    first = {"path": "a.jsonl", "columns": {"prompt": "q"}, "limit": 5, "data_files": ["b"]}
    parsed = parser.parse_object({"data": {"sources": [first, {"path": "b/c"}]}})
    assert parser.instantiate(parsed).data.sources == [Source(**first), Source(path="b/c")]
    for wrong in (
        {"path": "a", "colums": {"prompt": "q"}},
        {"path": "a", "format": "csv"},
        {"path": "a", "limit": "all"},
        {},
    ):
        with pytest.raises(ArgumentError):
            parser.parse_object({"data": {"sources": [wrong]}})


def test_reading_does_not_hold_a_file_in_memory(tmp_path):
    import tracemalloc

    path = tmp_path / "rows.jsonl"
    line = json.dumps({"text": "x" * 10_000}) + "\n"
    path.write_text(line * 3000)
    tracemalloc.start()
    assert sum(1 for _ in iter_rows(Source(path=str(path)))) == 3000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


def test_gsm8k_is_read_as_the_recipe_says(shared_dir):
    source = Source(
        path=str(shared_dir / "data" / "gsm8k" / "train.jsonl"),
        limit=1500,
        columns={"prompt": "question", "response": "answer"},
        response_remove="<<.*?>>",
    )
    rows = list(iter_rows(source))
    assert len(rows) == 1500
    assert all(row.drop is None for row in rows)
    assert all("<<" not in row.item.messages[1].content and "\n#### " in row.item.messages[1].content for row in rows)
