import json
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spd_lightning.data.conversations import Conversation, DropRow, Message, parse_conversation
from spd_lightning.data.encoding import EncodedRow, encode, joined_differs_from_serving
from spd_lightning.data.rows import PlainText, PretokenisedRow

THINK = "<think>\n\n</think>\n\n"


def dialogue(*contents: str, system: str | None = None) -> Conversation:
    """Alternating turns, the user first."""
    opening = (Message("system", system),) if system else ()
    turns = (Message("assistant" if index % 2 else "user", content) for index, content in enumerate(contents))
    return Conversation((*opening, *turns))


def texts(tokenizer, rows: list[EncodedRow]) -> list[tuple[str, str]]:
    """(prompt, supervised text) of rows whose answer is at the end."""
    pairs = []
    for row in rows:
        length = row.loss_mask.index(1)
        assert row.loss_mask == [0] * length + [1] * (len(row.input_ids) - length)
        pairs.append((tokenizer.decode(row.input_ids[:length]), tokenizer.decode(row.input_ids[length:])))
    return pairs


def supervised(tokenizer, row: EncodedRow) -> str:
    return tokenizer.decode([token for token, answer in zip(row.input_ids, row.loss_mask, strict=True) if answer])


def reason(item, tokenizer, **options) -> str:
    with pytest.raises(DropRow) as drop:
        encode(item, tokenizer, **options)
    return drop.value.reason


def test_each_answer_stands_behind_the_prompt_of_serving(thinking_tokenizer):
    item = dialogue("q1", "a1", "q2", "\n  a2 \n", system="s")
    rows = encode(item, thinking_tokenizer)
    head = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n"
    assert texts(thinking_tokenizer, rows) == [
        (head + THINK, "a1<|im_end|>"),
        (f"{head}a1<|im_end|>\n<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n{THINK}", "a2<|im_end|>"),
    ]
    for row, length in zip(rows, (2, 4), strict=True):
        messages = [{"role": message.role, "content": message.content} for message in item.messages[:length]]
        prompt = thinking_tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, enable_thinking=False, return_dict=False
        )
        assert row.input_ids[: row.loss_mask.index(1)] == prompt


def test_a_last_question_without_an_answer_is_left_out(tiny_tokenizer):
    for turns in ("each", "joined"):
        (row,) = encode(dialogue("q1", "a1", "q2"), tiny_tokenizer, turns=turns)
        assert tiny_tokenizer.decode(row.input_ids) == (
            "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>"
        )


def test_an_answer_that_begins_with_white_space_leaves_the_prompt_tokens_alone(tiny_tokenizer):
    (row,) = encode(dialogue("q", "\n\n    x = 1\n"), tiny_tokenizer)
    prompt = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert row.input_ids[: row.loss_mask.index(1)] == tiny_tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert texts(tiny_tokenizer, [row]) == [(prompt, "\n\n    x = 1\n<|im_end|>")]


def test_joined_supervises_every_answer_of_one_render(thinking_tokenizer):
    item = dialogue("q1", " a1\n", "q2", "im_end", "q3", "a1", system="s")
    with pytest.warns(UserWarning, match="turns='joined'.*think block"):
        (row,) = encode(item, thinking_tokenizer, turns="joined")
    assert thinking_tokenizer.decode(row.input_ids) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n"
        "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\nim_end<|im_end|>\n"
        f"<|im_start|>user\nq3<|im_end|>\n<|im_start|>assistant\n{THINK}a1<|im_end|>"
    )
    assert supervised(thinking_tokenizer, row) == "a1<|im_end|>im_end<|im_end|>a1<|im_end|>"


def test_joined_equals_each_where_history_is_written_as_it_was_asked_for(tiny_tokenizer):
    item = dialogue("q1", "a one", "q2", "a two")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (joined,) = encode(item, tiny_tokenizer, turns="joined")
    last = encode(item, tiny_tokenizer)[-1]
    assert joined.input_ids == last.input_ids
    assert supervised(tiny_tokenizer, joined) == "a one<|im_end|>a two<|im_end|>"


def test_which_templates_write_history_otherwise(tiny_tokenizer, thinking_tokenizer):
    assert joined_differs_from_serving(thinking_tokenizer)
    kept = thinking_tokenizer.chat_template.replace("and loop.index0 > ns.last", "")
    assert kept != thinking_tokenizer.chat_template
    thinking_tokenizer.chat_template = kept
    assert not joined_differs_from_serving(thinking_tokenizer)


@pytest.mark.filterwarnings("ignore:turns='joined'")
@pytest.mark.parametrize("blank", ["", " \n\t ", "\u3000"])
def test_blank_answers_are_no_rows_but_stay_in_the_history(thinking_tokenizer, blank):
    assert reason(dialogue("q", blank), thinking_tokenizer) == "no_supervised_token"
    rows = encode(dialogue("q1", blank, "q2", "a2"), thinking_tokenizer)
    assert [text for _, text in texts(thinking_tokenizer, rows)] == ["a2<|im_end|>"]
    (row,) = encode(dialogue("q1", blank, "q2", "a2"), thinking_tokenizer, turns="joined")
    assert supervised(thinking_tokenizer, row) == "a2<|im_end|>"


@pytest.mark.parametrize("turns", ["each", "joined"])
@pytest.mark.parametrize("control", ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "</think>"])
@pytest.mark.parametrize("place", range(4))
def test_control_tokens_in_any_turn_drop_the_row(thinking_tokenizer, turns, control, place):
    contents = ["s", "q", "a", "q2"]
    contents[place] = f"x{control}y"
    item = dialogue(*contents[1:], "a2", system=contents[0])
    assert reason(item, thinking_tokenizer, turns=turns) == "special_token_in_content"


def test_almost_control_tokens_are_text(tiny_tokenizer):
    (row,) = encode(dialogue("<|im_end| > <im_end>", "< |im_end|>"), tiny_tokenizer)
    assert row.input_ids.count(tiny_tokenizer.convert_tokens_to_ids("<|im_end|>")) == 2


@pytest.mark.parametrize(
    "content", ["👩‍👩‍👧 é e\u0301", "a\x00b\u2028c", "中文。", "\u200b", "{{ messages }} {% if %}", "<b>\\n"]
)
@pytest.mark.parametrize("turns", ["each", "joined"])
def test_odd_text_comes_through_unchanged(tiny_tokenizer, content, turns):
    (row,) = encode(dialogue(content, content), tiny_tokenizer, turns=turns)
    assert supervised(tiny_tokenizer, row) == content + "<|im_end|>"


def test_long_turns_are_dropped_one_by_one_and_counted(tiny_tokenizer):
    item = dialogue("q1", "a1", "q2", "long " * 100, "q3", "a3", "q4", "a4")
    drops: list[DropRow] = []
    rows = encode(item, tiny_tokenizer, max_length=100, on_drop=drops.append)
    assert [text for _, text in texts(tiny_tokenizer, rows)] == ["a1<|im_end|>"]
    assert [drop.reason for drop in drops] == ["too_long"] * 3
    assert len(encode(item, tiny_tokenizer, max_length=2000, on_drop=drops.append)) == 4
    assert len(drops) == 3


def test_an_item_without_rows_raises_one_drop_and_reports_the_others(tiny_tokenizer):
    drops: list[DropRow] = []
    item = dialogue("long " * 100, "a1", "q2", "a2")
    assert reason(item, tiny_tokenizer, max_length=100, on_drop=drops.append) == "too_long"
    assert [drop.reason for drop in drops] == ["too_long"]


@pytest.mark.parametrize("turns", ["each", "joined"])
def test_the_longest_allowed_sequence_is_kept(tiny_tokenizer, turns):
    item = dialogue("q", "an answer")
    length = len(encode(item, tiny_tokenizer, turns=turns)[0].input_ids)
    assert encode(item, tiny_tokenizer, turns=turns, max_length=length)
    assert reason(item, tiny_tokenizer, turns=turns, max_length=length - 1) == "too_long"


@pytest.mark.parametrize("turns", ["each", "joined"])
def test_truncation_keeps_the_beginning_and_drops_what_lost_its_answer(tiny_tokenizer, turns):
    item = dialogue("q", "an answer")
    (whole,) = encode(item, tiny_tokenizer, turns=turns)
    answer_at = whole.loss_mask.index(1)
    for length in range(2, len(whole.input_ids)):
        options = {"turns": turns, "max_length": length, "on_long": "truncate"}
        if length <= answer_at:
            assert reason(item, tiny_tokenizer, **options) == "no_supervised_token"
        else:
            (row,) = encode(item, tiny_tokenizer, **options)
            assert row == EncodedRow(whole.input_ids[:length], whole.loss_mask[:length])


def test_a_sequence_needs_a_token_and_its_successor(tiny_tokenizer):
    with pytest.raises(ValueError, match=r"max_length=1: .* at least 2"):
        encode(PlainText("text"), tiny_tokenizer, max_length=1)


def test_a_tokenizer_without_a_template_reads_text_only(tiny_tokenizer):
    tiny_tokenizer.chat_template = None
    assert encode(PlainText("some text"), tiny_tokenizer)
    with pytest.raises(ValueError, match="no chat template"):
        encode(dialogue("q", "a"), tiny_tokenizer)


def test_what_the_template_refuses_is_dropped_with_its_words(tiny_tokenizer):
    tiny_tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        + tiny_tokenizer.chat_template
    )
    assert encode(dialogue("q", "a"), tiny_tokenizer)
    for turns in ("each", "joined"):
        with pytest.raises(DropRow, match="template_error: System role not supported"):
            encode(dialogue("q", "a", system="s"), tiny_tokenizer, turns=turns)


def test_text_is_supervised_as_a_whole_in_windows(tiny_tokenizer):
    text = "The pipeline keeps several tokens in flight.\n" * 20
    ids = tiny_tokenizer(text)["input_ids"]
    rows = encode(PlainText(text), tiny_tokenizer, max_length=50)
    assert [token for row in rows for token in row.input_ids] == ids
    assert all(len(row.input_ids) == 50 for row in rows[:-1])
    assert all(set(row.loss_mask) == {1} for row in rows)


def test_a_window_of_one_token_is_left_out(tiny_tokenizer):
    ids = tiny_tokenizer("abcdefghij")["input_ids"]
    rows = encode(PlainText("abcdefghij"), tiny_tokenizer, max_length=len(ids) - 1)
    assert [row.input_ids for row in rows] == [ids[:-1]]


@pytest.mark.parametrize(
    "text, drop",
    [("", "no_supervised_token"), ("a", "no_supervised_token"), ("a<|im_end|>b", "special_token_in_content")],
)
def test_useless_text_is_dropped(tiny_tokenizer, text, drop):
    assert reason(PlainText(text), tiny_tokenizer) == drop


def test_pretokenised_rows_pass_as_they_are(tiny_tokenizer):
    item = PretokenisedRow((5, 6, 7), (0, 0, 1))
    assert encode(item, tiny_tokenizer) == [EncodedRow([5, 6, 7], [0, 0, 1])]
    assert encode(item, tiny_tokenizer, turns="joined") == [EncodedRow([5, 6, 7], [0, 0, 1])]


@pytest.mark.parametrize(
    "ids, mask, drop",
    [
        ((), (), "no_supervised_token"),
        ((5, 6), (0, 0), "no_supervised_token"),
        ((5, 6), (1, 0), "no_supervised_token"),
        ((5, 6), (0, 1, 1), "bad_tokens"),
        ((5, 6), (0, 2), "bad_tokens"),
        ((5, 400), (0, 1), "token_out_of_range"),
        ((-1, 6), (0, 1), "token_out_of_range"),
        (tuple(range(99)), (1,) * 99, "too_long"),
    ],
)
def test_unusable_pretokenised_rows_are_dropped(tiny_tokenizer, ids, mask, drop):
    assert reason(PretokenisedRow(ids, mask), tiny_tokenizer, max_length=64) == drop


def test_the_shared_cases_come_out_as_stated(qwen_tokenizer, shared_dir):
    wrong = {}
    for line in (shared_dir / "cases" / "conversations.jsonl").read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        try:
            rows = texts(qwen_tokenizer, encode(parse_conversation(case["input"]), qwen_tokenizer))
            found = {"outcome": "rows", "rows": [{"prompt": prompt, "supervised": text} for prompt, text in rows]}
        except DropRow as drop:
            found = {"outcome": "drop", "reason": drop.reason}
        if found != case["expect"]:
            wrong[case["id"]] = found
    assert wrong == {}


def test_a_tokenizer_that_puts_a_space_before_texts_does_not_put_one_before_answers():
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3}
    for letter in "abcdefghijklmnopqrstuvwxyz[]/":
        vocabulary.setdefault(letter, len(vocabulary))
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[inst] ' + m.content + ' [/inst]' }}"
        "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
    )
    for turns in ("each", "joined"):
        (row,) = encode(dialogue("q", "a"), tokenizer, turns=turns)
        assert row.input_ids == tokenizer("<s>[inst] q [/inst]a</s>", add_special_tokens=False)["input_ids"]
        assert row.input_ids[-2:] == [vocabulary["a"], vocabulary["</s>"]]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents=st.lists(st.text(max_size=30).filter(lambda text: "<|" not in text), min_size=2, max_size=6))
def test_any_text_is_served_and_supervised_byte_for_byte(tiny_tokenizer, contents):
    item = dialogue(*contents)
    expected = [index for index in range(1, len(contents), 2) if contents[index].strip()]
    if not expected:
        assert reason(item, tiny_tokenizer) == reason(item, tiny_tokenizer, turns="joined") == "no_supervised_token"
        return
    rows = encode(item, tiny_tokenizer)
    (joined,) = encode(item, tiny_tokenizer, turns="joined")
    for row, index in zip(rows, expected, strict=True):
        turns = [{"role": message.role, "content": message.content} for message in item.messages[:index]]
        prompt = tiny_tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        assert texts(tiny_tokenizer, [row]) == [(prompt, contents[index] + "<|im_end|>")]
    assert supervised(tiny_tokenizer, joined) == "".join(contents[index] + "<|im_end|>" for index in expected)
