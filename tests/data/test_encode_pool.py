import os

import pytest

from spd_lightning.data import encode_pool
from spd_lightning.data.conversations import Conversation, DropRow, Message
from spd_lightning.data.encode_pool import encode_chunk, encode_chunks, supervised_tokens
from spd_lightning.data.rows import PlainText, PretokenisedRow, SourceRow

OPTIONS = {"turns": "each", "max_length": 100, "on_long": "drop"}


def tokens(ids, mask, location="f:1"):
    return SourceRow(location, item=PretokenisedRow(tuple(ids), tuple(mask)))


def dialogue(*answers, question="q"):
    turns = [Message("user", question)]
    for answer in answers:
        turns += [Message("assistant", answer), Message("user", "next")]
    return SourceRow("f:1", item=Conversation(tuple(turns)))


def test_chunk_tells_rows_from_drops(tiny_tokenizer):
    rows = [
        dialogue("a", "b"),
        SourceRow("f:2", drop=DropRow("unknown_role", "narrator")),
        tokens([3, 4, 5], [0, 1, 1], "f:3"),
        tokens([3, 400], [0, 1], "f:4"),
    ]
    chunk = encode_chunk(rows, tiny_tokenizer, OPTIONS)
    assert (chunk.read, chunk.kept) == (4, 2)
    assert chunk.locations == ["f:1", "f:1", "f:3"]
    assert [(reason, location) for reason, location, _ in chunk.drops] == [
        ("unknown_role", "f:2"),
        ("token_out_of_range", "f:4"),
    ]
    assert chunk.input_ids[2].tolist() == [3, 4, 5]
    assert chunk.loss_masks[2].tolist() == [0, 1, 1]


def test_groups_are_equal_for_the_same_dialogue_or_question_only(tiny_tokenizer):
    rows = [dialogue("a", "b"), dialogue("c"), dialogue("a", question="other")]
    groups = encode_chunk(rows, tiny_tokenizer, OPTIONS).groups
    assert groups[0] == groups[1] == groups[2]
    assert groups[3] != groups[0]


def test_rows_without_a_prompt_have_groups_of_their_own(tiny_tokenizer):
    texts = [SourceRow("f:1", item=PlainText(text)) for text in ("first text", "second text", "first text")]
    first, second, third = encode_chunk(texts, tiny_tokenizer, OPTIONS).groups
    assert first == third != second


def test_a_first_token_is_never_counted_as_supervised(tiny_tokenizer):
    chunk = encode_chunk([tokens([3, 4, 5], [1, 0, 1])], tiny_tokenizer, OPTIONS)
    assert supervised_tokens(chunk.loss_masks[0]) == 1


def test_sources_of_few_chunks_are_encoded_in_this_process(tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(encode_pool, "ProcessPoolExecutor", None)
    rows = [tokens([n, 4], [0, 1]) for n in range(3, 100)]
    (chunk,) = encode_chunks(rows, tiny_tokenizer, OPTIONS, num_proc=2)
    assert [ids[0] for ids in chunk.input_ids] == list(range(3, 100))


class Bomb:
    """Ends the process that unpickles it, as one ends that runs out of memory."""

    def __reduce__(self):
        return os._exit, (9,)


def test_a_process_that_dies_is_an_error_and_no_hang(tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(encode_pool, "_CHUNK_ROWS", 2)
    rows = [tokens([n, 4], [0, 1]) for n in range(3, 40)]
    drop = DropRow("unknown_role", "narrator")
    drop.bomb = Bomb()
    rows.insert(30, SourceRow("f:9", drop=drop))
    with pytest.raises(ValueError, match=r"a process that encodes rows died.*lower data.num_proc \(2\)"):
        list(encode_chunks(rows, tiny_tokenizer, OPTIONS, num_proc=2))
