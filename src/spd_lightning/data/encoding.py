"""Dialogues, plain texts and pre-tokenised rows -> token ids and a mask of the answer tokens, exactly as in serving.

Pure: the tokenizer is passed in. Knows no files and no models.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from spd_lightning.data.chat_format import ChatFormat, chat_format
from spd_lightning.data.conversations import Conversation, DropRow
from spd_lightning.data.rows import PlainText, PretokenisedRow, SourceItem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Turns = Literal["each", "joined"]
OnLong = Literal["drop", "truncate"]

JOINED_WARNING = (
    "turns='joined': this chat template writes earlier answers otherwise than behind the prompt that asks for them "
    "(Qwen3.5 drops their think block), so only the last answer of a dialogue is trained on as it is served; "
    "turns='each' trains on all of them that way"
)


@dataclass(frozen=True)
class EncodedRow:
    """One training sequence.

    Attributes:
        input_ids: token ids, without padding.
        loss_mask: 1 at answer tokens, else 0; as long as `input_ids`. The first token has no predecessor, so its
            value is without effect.
    """

    input_ids: list[int]
    loss_mask: list[int]


def encode(
    item: SourceItem,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    turns: Turns = "each",
    max_length: int = 2048,
    on_long: OnLong = "drop",
    on_drop: Callable[[DropRow], None] | None = None,
) -> list[EncodedRow]:
    """The training sequences of one dialogue, text or pre-tokenised row.

    A prompt is `apply_chat_template(turns so far, add_generation_prompt=True, enable_thinking=False)`, byte for byte
    and token for token; supervised are the answer as the template writes it and the token that closes the turn. A
    plain text is supervised as a whole and cut into windows of `max_length`.

    Args:
        turns: `each` makes one sequence per assistant turn; `joined` one per dialogue, in which every answer is
            supervised as the template writes it into the history (a warning says where that is not serving's prompt).
        max_length: longest sequence, in tokens.
        on_long: `drop` longer sequences, or `truncate` them at the end.
        on_drop: called with the reason of every further answer that was dropped: of all of them when others of the
            dialogue are kept, else of all but the one that is raised.

    Raises:
        DropRow: if nothing of the item is left; reasons `no_supervised_token`, `special_token_in_content`,
            `too_long`, `template_error`, `template_mismatch`, `bad_tokens`, `token_out_of_range`.
        ValueError: if `max_length` is below 2, or, for a dialogue, the tokenizer has no usable chat template.
    """
    if max_length < 2:
        raise ValueError(f"max_length={max_length}: a sequence needs a token and its successor, so at least 2")
    chat = chat_format(tokenizer)
    if isinstance(item, PlainText):
        return _encode_text(item.text, chat, max_length)
    if isinstance(item, PretokenisedRow):
        return [_fit(_checked_tokens(item, chat.num_tokens), max_length, on_long)]
    for message in item.messages:
        chat.refuse_control_tokens(message.content, f"the {message.role} turn")
    answers = [index for index, message in enumerate(item.messages) if message.is_answer]
    if not answers:
        raise DropRow("no_supervised_token", "no assistant turn has text")
    if not chat.end_of_turn:
        warnings.warn(
            "the chat template closes an answer without a control token: the drafter will not learn where answers end",
            stacklevel=2,
        )
    if turns == "each":
        rows, drops = _encode_each(item, answers, chat, max_length, on_long)
        last = None if rows else drops.pop()
        if on_drop is not None:
            for drop in drops:
                on_drop(drop)
        if last is not None:
            raise last
        return rows
    if chat.history_differs:
        warnings.warn(JOINED_WARNING, stacklevel=2)
    return [_fit(_encode_joined(item, answers, chat), max_length, on_long)]


def joined_differs_from_serving(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether `turns="joined"` trains on other contexts than serving shows; `JOINED_WARNING` says so."""
    return chat_format(tokenizer).history_differs


def _encode_each(
    item: Conversation, answers: list[int], chat: ChatFormat, max_length: int, on_long: OnLong
) -> tuple[list[EncodedRow], list[DropRow]]:
    """One sequence per answer, each behind the prompt that serving would show."""
    rows: list[EncodedRow] = []
    drops: list[DropRow] = []
    for number, index in enumerate(answers):
        num_prompt_tokens = 0
        try:
            prompt = chat.prompt(list(item.messages[:index]))
            prompt_ids = chat.ids(prompt)
            num_prompt_tokens = len(prompt_ids)
            answer_ids = chat.continuation_ids(chat.answer(list(item.messages[: index + 1]), prompt))
            row = EncodedRow(prompt_ids + answer_ids, [0] * num_prompt_tokens + [1] * len(answer_ids))
            rows.append(_fit(row, max_length, on_long))
        except DropRow as drop:
            drops.append(drop)
            if num_prompt_tokens > max_length:  # and every later prompt is longer still
                drops.extend(DropRow(drop.reason, drop.detail) for _ in answers[number + 1 :])
                break
    return rows, drops


def _encode_joined(item: Conversation, answers: list[int], chat: ChatFormat) -> EncodedRow:
    """The whole dialogue up to its last answer, in one render."""
    row = EncodedRow([], [])
    for segment in chat.joined_segments(list(item.messages[: answers[-1] + 1])):
        ids = chat.continuation_ids(segment.text) if row.input_ids else chat.ids(segment.text)
        row.input_ids.extend(ids)
        row.loss_mask.extend([int(segment.supervised)] * len(ids))
    return row


def _encode_text(text: str, chat: ChatFormat, max_length: int) -> list[EncodedRow]:
    chat.refuse_control_tokens(text, "the text")
    prefix, ids = chat.text_prefix, chat.ids(text)
    width = max_length - len(prefix)
    windows = [ids[start : start + width] for start in range(0, len(ids), width)]
    rows = [EncodedRow(prefix + window, [0] * len(prefix) + [1] * len(window)) for window in windows]
    rows = [row for row in rows if any(row.loss_mask[1:])]
    if not rows:
        raise DropRow("no_supervised_token", "the text is shorter than two tokens")
    return rows


def _checked_tokens(item: PretokenisedRow, num_tokens: int) -> EncodedRow:
    ids, mask = list(item.input_ids), list(item.loss_mask)
    if len(ids) != len(mask):
        raise DropRow("bad_tokens", f"{len(ids)} input_ids but {len(mask)} entries in loss_mask")
    if wrong := [value for value in mask if value not in (0, 1)]:
        raise DropRow("bad_tokens", f"loss_mask has {wrong[0]!r}; its entries are 0 and 1")
    if wrong := [token for token in ids if not 0 <= token < num_tokens]:
        raise DropRow("token_out_of_range", f"input_ids has {wrong[0]}, the tokenizer has {num_tokens} ids")
    return EncodedRow(ids, [int(value) for value in mask])


def _fit(row: EncodedRow, max_length: int, on_long: OnLong) -> EncodedRow:
    """The row within `max_length`, if it then has a token to learn."""
    if len(row.input_ids) > max_length:
        if on_long == "drop":
            raise DropRow("too_long", f"{len(row.input_ids)} tokens, max_length is {max_length}")
        row = EncodedRow(row.input_ids[:max_length], row.loss_mask[:max_length])
    if not any(row.loss_mask[1:]):
        raise DropRow("no_supervised_token", f"no answer token among its {len(row.input_ids)} tokens")
    return row
