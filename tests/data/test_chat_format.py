import copy
import gc
import weakref

import pytest
from tokenizers.processors import TemplateProcessing

from spd_lightning.data.chat_format import Segment, chat_format
from spd_lightning.data.conversations import Conversation, DropRow, Message
from spd_lightning.data.encoding import encode
from spd_lightning.data.rows import PlainText, PretokenisedRow

QUESTION = Message("user", "q")
ANSWER = Message("assistant", " a \n")


def with_template(tokenizer, user: str, assistant: str, generation: str = "", after: str = ""):
    """A tokenizer whose template writes turns as given; `X` stands for the text of the turn."""
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}"
        + user.replace("X", "{{ m.content }}")
        + "{% else %}"
        + assistant.replace("X", "{{ m.content }}")
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}"
        + generation
        + "{% else %}"
        + after
        + "{% endif %}"
    )
    return chat_format(tokenizer)


def test_chatml_closes_an_answer_with_its_control_token(tiny_tokenizer):
    chat = chat_format(tiny_tokenizer)
    assert (chat.closing, chat.end_of_turn) == ("<|im_end|>\n", "<|im_end|>")
    prompt = chat.prompt([QUESTION])
    assert prompt == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert chat.answer([QUESTION, ANSWER], prompt) == " a \n<|im_end|>"


def test_what_the_template_puts_between_prompt_and_answer_is_the_targets_to_write(tiny_tokenizer):
    chat = with_template(
        tiny_tokenizer, "<|im_start|>X<|im_end|>", "<|im_start|>final: X<|im_end|>", generation="<|im_start|>"
    )
    assert chat.answer([QUESTION, ANSWER], chat.prompt([QUESTION])) == "final:  a \n<|im_end|>"


def test_a_prompt_that_says_more_than_the_dialogue_still_gets_the_answer(tiny_tokenizer):
    chat = with_template(
        tiny_tokenizer, "<|im_start|>X<|im_end|>", "<|im_start|>X<|im_end|>", generation="<|im_start|>(think)"
    )
    prompt = chat.prompt([QUESTION])
    assert prompt == "<|im_start|>q<|im_end|><|im_start|>(think)"
    assert chat.answer([QUESTION, ANSWER], prompt) == " a \n<|im_end|>"
    assert chat.answer([QUESTION, Message("assistant", "  a")], prompt) == "  a<|im_end|>"
    assert chat.history_differs
    trimming = with_template(
        tiny_tokenizer, "<|im_start|>X<|im_end|>", "{{ m.content | trim }}<|im_end|>", generation="<|im_start|>(think)"
    )
    assert trimming.answer([QUESTION, ANSWER], prompt) == "a<|im_end|>"


def test_only_the_first_closing_token_is_the_targets(tiny_tokenizer):
    chat = with_template(
        tiny_tokenizer, "<|im_start|>X<|im_end|>", "X<|im_end|>\n", generation="", after="<|endoftext|>"
    )
    assert chat.closing == "<|im_end|>\n<|endoftext|>"
    assert chat.end_of_turn == "<|im_end|>"
    assert chat.joined_segments([QUESTION, ANSWER, QUESTION, ANSWER]) == [
        Segment("<|im_start|>q<|im_end|>", supervised=False),
        Segment(" a \n<|im_end|>", supervised=True),
        Segment("\n<|im_start|>q<|im_end|>", supervised=False),
        Segment(" a \n<|im_end|>", supervised=True),
    ]


def test_a_template_without_a_closing_token_is_warned_about(tiny_tokenizer):
    chat = with_template(tiny_tokenizer, "Q: X\n", "A: X\n", generation="A: ")
    assert chat.end_of_turn == ""
    with pytest.warns(UserWarning, match="without a control token"):
        (row,) = encode(Conversation((QUESTION, Message("assistant", "yes"))), tiny_tokenizer)
    assert tiny_tokenizer.decode(row.input_ids) == "Q: q\nA: yes"


def test_answers_of_a_dialogue_are_found_by_their_place_not_their_text(tiny_tokenizer):
    chat = with_template(tiny_tokenizer, "Q: X\n", "A: X\n", generation="A: ")
    answer = Message("assistant", "\nQ: q\nA: \n")
    with pytest.raises(DropRow, match="template_mismatch"):
        chat.joined_segments([QUESTION, answer, QUESTION, answer])
    assert chat.joined_segments([QUESTION, answer])[1] == Segment(answer.content, supervised=True)


def test_a_template_that_changes_an_answer_drops_the_row(tiny_tokenizer):
    chat = with_template(tiny_tokenizer, "X<|im_end|>", "{{ m.content | upper }}<|im_end|>", generation="A")
    with pytest.raises(ValueError, match="leaves the answer out"):
        _ = chat.closing
    chat = with_template(tiny_tokenizer, "X<|im_end|>", "{{ m.content | replace('b', 'c') }}<|im_end|>", generation="A")
    changed = [QUESTION, Message("assistant", "xbx")]
    with pytest.raises(DropRow, match="template_mismatch"):
        chat.answer(changed, "another prompt")
    with pytest.raises(DropRow, match="template_mismatch"):
        chat.joined_segments(changed)


def test_a_template_that_closes_some_answers_otherwise_drops_those(tiny_tokenizer):
    chat = with_template(
        tiny_tokenizer, "X<|im_end|>", "X{% if 'b' not in m.content %}<|im_end|>{% else %}!{% endif %}", generation=""
    )
    assert chat.end_of_turn == "<|im_end|>"
    with pytest.raises(DropRow, match="template_mismatch"):
        chat.answer([QUESTION, Message("assistant", "b")], chat.prompt([QUESTION]))
    drops: list[DropRow] = []
    item = Conversation((QUESTION, Message("assistant", "b"), QUESTION, Message("assistant", "c")))
    (row,) = encode(item, tiny_tokenizer, on_drop=drops.append)
    assert tiny_tokenizer.decode(row.input_ids) == "q<|im_end|>b!q<|im_end|>c<|im_end|>"
    assert [drop.reason for drop in drops] == ["template_mismatch"]


def test_a_template_that_refuses_every_dialogue_is_an_error(tiny_tokenizer):
    tiny_tokenizer.chat_template = "{{ raise_exception('tools are required') }}"
    with pytest.raises(ValueError, match="refuses a question and an answer: tools are required"):
        _ = chat_format(tiny_tokenizer).closing


def test_text_begins_with_what_the_tokenizer_begins_with(tiny_tokenizer):
    assert chat_format(tiny_tokenizer).text_prefix == []
    tiny_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tiny_tokenizer.chat_template += " "
    rows = encode(PlainText("text in several tokens"), tiny_tokenizer, max_length=5)
    assert len(rows) > 1
    assert max(len(row.input_ids) for row in rows) == 5
    assert all(row.input_ids[0] == 0 and row.loss_mask[0] == 0 and set(row.loss_mask[1:]) == {1} for row in rows)
    (row,) = encode(Conversation((QUESTION, ANSWER)), tiny_tokenizer)
    assert 0 not in row.input_ids


def test_the_format_follows_the_template_and_the_vocabulary(tiny_tokenizer):
    first = chat_format(tiny_tokenizer)
    assert chat_format(tiny_tokenizer) is first
    tiny_tokenizer.add_special_tokens({"extra_special_tokens": ["<|new|>"]})
    with pytest.raises(DropRow, match="special_token_in_content"):
        chat_format(tiny_tokenizer).refuse_control_tokens("a <|new|>", "the text")
    tiny_tokenizer.chat_template = "{{ messages[0].content }}"
    assert chat_format(tiny_tokenizer).prompt([QUESTION]) == "q"
    assert encode(PretokenisedRow((5, 400), (0, 1)), tiny_tokenizer)


def test_a_tokenizer_is_not_kept_alive(tiny_tokenizer):
    other = copy.deepcopy(tiny_tokenizer)
    chat_format(other)
    alive = weakref.ref(other)
    del other
    gc.collect()
    assert alive() is None
