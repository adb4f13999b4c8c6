import pytest

from spd_lightning.data.conversations import Conversation, DropRow, Message
from spd_lightning.data.rows import PlainText, PretokenisedRow, parse_row

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
DIALOGUE = Conversation((Message("user", "q"), Message("assistant", "a")))


def reason(row, row_format="auto", columns=None) -> str:
    with pytest.raises(DropRow) as drop:
        parse_row(row, row_format, columns or {})
    return drop.value.reason


@pytest.mark.parametrize(
    "row, columns, item",
    [
        (CHAT, {}, DIALOGUE),
        ({"text": "t"}, {}, PlainText("t")),
        ({"body": "t", "id": 1}, {"text": "body"}, PlainText("t")),
        ({"input_ids": [1, 2], "loss_mask": [0, 1], "attention_mask": [1, 1]}, {}, PretokenisedRow((1, 2), (0, 1))),
        (
            {"ids": [1, 2], "mask": [False, True]},
            {"input_ids": "ids", "loss_mask": "mask"},
            PretokenisedRow((1, 2), (0, 1)),
        ),
        ({"text": "t", **CHAT}, {}, DIALOGUE),
        ({"input_ids": None, "loss_mask": None, **CHAT}, {}, DIALOGUE),
    ],
)
def test_the_kind_of_a_row_is_seen_by_its_columns(row, columns, item):
    assert parse_row(row, "auto", columns) == item


@pytest.mark.parametrize("row", [{"text": "t", "url": "u"}, {"input_ids": [1, 2]}, {"input_ids": [1], "labels": [1]}])
def test_an_unclear_row_is_not_guessed(row):
    assert reason(row) == "unknown_schema"


def test_a_given_format_is_not_second_guessed():
    assert parse_row({"text": "t", **CHAT}, "text", {}) == PlainText("t")
    assert reason({"text": "t"}, "chat") == "unknown_schema"
    assert reason(CHAT, "text") == "unknown_schema"
    assert reason(CHAT, "tokens") == "unknown_schema"


@pytest.mark.parametrize("row", [None, 3, "text", ["q", "a"], True])
def test_a_row_is_an_object(row):
    assert reason(row) == "not_an_object"


@pytest.mark.parametrize("ids", [None, "1 2", [1, "2"], [1.5], [[1]], {"a": 1}])
def test_tokens_are_whole_numbers(ids):
    assert reason({"input_ids": ids, "loss_mask": [1]}, "tokens") == "bad_tokens"


@pytest.mark.parametrize("text", [None, 3, ["t"]])
def test_text_is_text(text):
    assert reason({"text": text}, "text") == "unknown_schema"


def test_text_with_half_a_surrogate_pair_is_dropped():
    assert reason({"text": "cut \ud83d"}) == "invalid_unicode"
