import io

import pytest

from spd_lightning.data.inspection import has_colour, render_row


def test_answer_tokens_stand_out(tiny_tokenizer):
    ids = tiny_tokenizer("<|im_start|>user\nq<|im_end|>\nanswer<|im_end|>\n")["input_ids"]
    tail = len(tiny_tokenizer("answer<|im_end|>\n")["input_ids"])
    mask = [0] * (len(ids) - tail) + [1] * (tail - 1) + [0]
    assert render_row(tiny_tokenizer, ids, mask) == "<|im_start|>user\nq<|im_end|>\n[[answer<|im_end|>]]\n"
    coloured = render_row(tiny_tokenizer, ids, mask, colour=True)
    assert coloured == "<|im_start|>user\nq<|im_end|>\n\x1b[32manswer<|im_end|>\x1b[0m\n"


def test_control_characters_of_the_text_never_reach_the_terminal(tiny_tokenizer):
    ids = tiny_tokenizer("a\x1b[31mb\x00\u202ec\té")["input_ids"]
    assert render_row(tiny_tokenizer, ids, [0] * len(ids)) == "a\\x1b[31mb\\x00\\u202ec\té"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "no_colour", "expected"),
    [(Terminal(), None, True), (Terminal(), "1", False), (Terminal(), "", True), (io.StringIO(), None, False)],
)
def test_colour_is_for_terminals_that_want_it(monkeypatch, stream, no_colour, expected):
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_colour is not None:
        monkeypatch.setenv("NO_COLOR", no_colour)
    assert has_colour(stream) is expected
