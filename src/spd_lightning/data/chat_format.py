"""How one tokenizer's chat template writes a turn: where answers begin and end, and what must not be in them.

Knows the tokenizer; knows no files, no masks and no lengths.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

from jinja2.exceptions import TemplateError

from spd_lightning.data.conversations import DropRow, Message
from spd_lightning.modules.tokenizer import control_tokens, render_dialogue, render_prompt, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANSWER_MARK = "spdanswer{}mark"


@dataclass(frozen=True)
class Segment:
    """A stretch of rendered text that is supervised as a whole or not at all."""

    text: str
    supervised: bool


class ChatFormat:
    """What a tokenizer's template does to answers. It is usable as long as its tokenizer is alive.

    Attributes:
        template: the chat template that this was made from.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._alive = ref(tokenizer)  # not the tokenizer itself, which is the key of the cache below
        self.template = tokenizer.chat_template
        self._control = re.compile("|".join(map(re.escape, control_tokens(tokenizer))) or r"(?!)")
        self.num_tokens = len(tokenizer)

    @property
    def _tokenizer(self) -> "PreTrainedTokenizerBase":
        tokenizer = self._alive()
        assert tokenizer is not None
        return tokenizer

    @cached_property
    def closing(self) -> str:
        """The template's text after the last answer, to the end: `<|im_end|>` and a newline in ChatML."""
        mark = _ANSWER_MARK.format("")
        messages = [Message("user", "question"), Message("assistant", mark)]
        try:
            text = render_dialogue(self._tokenizer, _as_dicts(messages))
        except TemplateError as error:
            raise ValueError(f"the chat template refuses a question and an answer: {error}") from error
        if mark not in text:
            raise ValueError("the chat template leaves the answer out: it cannot be trained on")
        return text[text.rindex(mark) + len(mark) :]

    @cached_property
    def end_of_turn(self) -> str:
        """The part of `closing` that the target itself writes: up to its first control token; may be empty."""
        control = self._control.search(self.closing)
        return self.closing[: control.end()] if control else ""

    @cached_property
    def history_differs(self) -> bool:
        """Whether an earlier answer stands in a later prompt otherwise than behind the prompt that asked for it."""
        question = Message("user", "question")
        answer = Message("assistant", _ANSWER_MARK.format(""))
        prompt = self.prompt([question])
        later = self.prompt([question, answer, question])
        return not later.startswith(prompt + answer.content)

    @cached_property
    def text_prefix(self) -> list[int]:
        """Ids that the tokenizer puts before a plain text: the beginning-of-sequence token of the Llama family."""
        with_special = list(self._tokenizer("x", verbose=False)["input_ids"])  # pyright: ignore[reportArgumentType]
        bare = self.ids("x")
        at = next((i for i in range(len(with_special)) if with_special[i : i + len(bare)] == bare), 0)
        return with_special[:at]

    @cached_property
    def _adds_prefix(self) -> str:
        """A control token, if the tokenizer puts a space before a text that does not follow one; else nothing."""
        control = next(iter(control_tokens(self._tokenizer)), "")
        return control if control and self.ids(control + "x")[1:] != self.ids("x") else ""

    def ids(self, text: str) -> list[int]:
        """Ids of a text that starts a sequence."""
        return token_ids(self._tokenizer, text)

    def continuation_ids(self, text: str) -> list[int]:
        """Ids of a text that continues a sequence."""
        return self.ids(self._adds_prefix + text)[1:] if self._adds_prefix else self.ids(text)

    def refuse_control_tokens(self, text: str, where: str) -> None:
        """Drops a text that the tokenizer would turn into control tokens."""
        if control := self._control.search(text):
            raise DropRow("special_token_in_content", f"{where} has {control[0]!r}, a control token of the tokenizer")

    def prompt(self, messages: list[Message]) -> str:
        """The prompt that asks for the next answer, as in serving."""
        try:
            return render_prompt(self._tokenizer, _as_dicts(messages))
        except TemplateError as error:
            raise DropRow("template_error", str(error)) from error

    def answer(self, messages: list[Message], prompt: str) -> str:
        """What the target would write after `prompt` to give the last turn of `messages`: its text, turn closed."""
        rendered = self._dialogue(messages)
        if not rendered.endswith(self.closing):
            raise DropRow("template_mismatch", "the template does not close this answer as it closes others")
        rendered = rendered[: len(rendered) - len(self.closing)]
        if rendered.startswith(prompt):
            return rendered[len(prompt) :] + self.end_of_turn
        content = messages[-1].content
        for text in (content, content.strip()):  # the prompt has more than the dialogue, such as an opened think block
            if rendered.endswith(text):
                return text + self.end_of_turn
        raise DropRow("template_mismatch", "the template changes the text of this answer")

    def joined_segments(self, messages: list[Message]) -> list[Segment]:
        """One render of all `messages`, cut where answers begin and end; the last message must be an answer."""
        marks = [_ANSWER_MARK.format(index) for index, message in enumerate(messages) if message.is_answer]
        answers = [message.content for message in messages if message.is_answer]
        remaining = iter(marks)
        skeleton = self._dialogue([Message(m.role, next(remaining)) if m.is_answer else m for m in messages])
        between = re.split("|".join(marks), skeleton)  # template text before, between and after the answers
        rendered = self._dialogue(messages)
        if len(between) != len(answers) + 1:
            raise DropRow("template_mismatch", "the template repeats an answer or leaves one out")
        segments = [Segment(between[0], supervised=False)]
        start = len(between[0])
        for content, after in zip(answers, between[1:], strict=True):
            end = rendered.find(after, start) if after is not between[-1] else len(rendered) - len(after)
            if end < start or rendered[start:end].strip() != content.strip():
                raise DropRow("template_mismatch", "the template changes the text of an answer")
            closed = self.end_of_turn if after.startswith(self.end_of_turn) else ""
            segments.append(Segment(rendered[start:end] + closed, supervised=True))
            segments.append(Segment(after[len(closed) :], supervised=False))
            start = end + len(after)
        assert "".join(segment.text for segment in segments) == rendered
        return segments[:-1]

    def _dialogue(self, messages: list[Message]) -> str:
        try:
            return render_dialogue(self._tokenizer, _as_dicts(messages))
        except TemplateError as error:
            raise DropRow("template_error", str(error)) from error


_FORMATS: "WeakKeyDictionary[PreTrainedTokenizerBase, ChatFormat]" = WeakKeyDictionary()


def chat_format(tokenizer: "PreTrainedTokenizerBase") -> ChatFormat:
    """The format of this tokenizer, made once; anew when its chat template was replaced."""
    known = _FORMATS.get(tokenizer)
    if known is None or known.template != tokenizer.chat_template or known.num_tokens != len(tokenizer):
        known = _FORMATS[tokenizer] = ChatFormat(tokenizer)
    return known


def _as_dicts(messages: list[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]
