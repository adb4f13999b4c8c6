"""What a dialogue asks, and that its id depends on that alone."""

import pytest

from spd_lightning.data.conversations import Conversation, DropRow, Message
from spd_lightning.data.questions import questions_of
from spd_lightning.data.rows import PlainText


def dialogue(*turns: str) -> Conversation:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return Conversation(tuple(Message(roles[turn[0]], turn) for turn in turns))


def texts(conversation: Conversation, turns: str) -> list[list[str]]:
    return [[message.content for message in ask] for ask in questions_of(conversation, turns).asks]


def test_all_asks_for_every_answer_and_for_a_last_user_turn() -> None:
    assert texts(dialogue("s", "u1", "a1", "u2", "u3", "a2", "u4"), "all") == [["s", "u1"], ["u2", "u3"], ["u4"]]
    assert texts(dialogue("u1", "a1"), "all") == [["u1"]]
    assert texts(dialogue("u1"), "all") == [["u1"]]


def test_last_asks_once_after_the_history_of_the_data() -> None:
    assert texts(dialogue("s", "u1", "a1", "u2", "a2"), "last") == [["s", "u1", "a1", "u2"]]
    assert texts(dialogue("u1", "a1", "u2"), "last") == [["u1", "a1", "u2"]]


def test_the_id_is_of_what_is_asked() -> None:
    first = questions_of(dialogue("u1", "a1", "u2", "a2"), "all")
    assert questions_of(dialogue("u1", "a other", "u2", "a also other"), "all").id == first.id
    assert questions_of(dialogue("u1", "u2", "a2"), "all").id != first.id
    assert questions_of(dialogue("u1", "a1", "u other", "a2"), "all").id != first.id
    assert first.with_repeat(1) is first
    assert first.with_repeat(2).id == f"{first.id}-2"
    # Stable across versions of this program: journals of earlier runs would be lost otherwise.
    assert first.id == "614ec588f1c2642e"


def test_plain_text_asks_nothing() -> None:
    with pytest.raises(DropRow, match="not_a_dialogue"):
        questions_of(PlainText("text"), "all")
