"""The journal keeps what was written, survives a stop at any byte, and refuses what it did not write."""

import json
from pathlib import Path

import pytest

from spd_lightning.data.answer_journal import AnswerJournal

SETTINGS = {"target": "t", "eos_token_ids": (2, 3)}


def record(number: int) -> dict:
    return {"id": f"id{number}", "text": f"line\u2028 {number} äöü \x00"}


def write(path: Path, numbers: list[int]) -> None:
    with AnswerJournal(path, SETTINGS) as journal:
        journal.append([record(number) for number in numbers])


def test_records_come_back_in_a_later_session_and_are_written_once(tmp_path: Path) -> None:
    path = tmp_path / "out.journal"
    write(path, [1, 2])
    with AnswerJournal(path, SETTINGS) as journal:
        assert len(journal) == 2
        assert "id2" in journal
        assert "id3" not in journal
        assert journal["id2"] == record(2)
        assert journal.append([{"id": "id2", "text": "other"}, record(3)]) == 1
        assert journal["id2"] == record(2)
        assert journal["id3"] == record(3)
    assert len(path.read_bytes().splitlines()) == 4  # the settings and three records


def test_a_stop_at_any_byte_loses_the_last_record_only(tmp_path: Path) -> None:
    path = tmp_path / "out.journal"
    write(path, [1, 2])
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        complete = sum(sum(map(len, lines[: n + 1])) <= size for n in range(1, 3))
        with AnswerJournal(path, SETTINGS) as journal:
            assert len(journal) == complete
            journal.append([record(1), record(2)])
        assert path.read_bytes() == whole


def test_other_settings_are_named(tmp_path: Path) -> None:
    path = tmp_path / "out.journal"
    write(path, [1])
    before = path.read_bytes()
    with pytest.raises(ValueError, match="target 't' -> 'u'"):
        AnswerJournal(path, SETTINGS | {"target": "u"})
    with pytest.raises(ValueError, match="top_k None -> 5"):
        AnswerJournal(path, SETTINGS | {"top_k": 5})
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", r":2: not a line of a journal"),
        ('{"text": "no id"}', r":2: not a line of a journal \(no 'id'\)"),
        ('{"id": "id1"}\n{"id": "id1"}', r":3: the id 'id1' is there twice"),
    ],
)
def test_a_broken_line_within_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "out.journal"
    write(path, [])
    path.write_bytes(path.read_bytes() + f"{line}\n".encode() + json.dumps(record(9)).encode() + b"\n")
    with pytest.raises(ValueError, match=message):
        AnswerJournal(path, SETTINGS)


def test_another_file_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "out.journal"
    path.write_text("a text of somebody\n")
    with pytest.raises(ValueError, match=r"out\.journal:1: not a line of a journal"):
        AnswerJournal(path, SETTINGS)
    assert path.read_text() == "a text of somebody\n"
