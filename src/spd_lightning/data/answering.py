"""A batch of dialogues and a target -> one record per dialogue: the answers, and how the last one ended.

Knows prompts, padding and seeds; knows no files and no sources.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from spd_lightning.data.chat_format import ChatFormat, chat_format
from spd_lightning.data.conversations import DropRow, Message
from spd_lightning.data.questions import Questions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GREEDY_BELOW = 1e-5


@runtime_checkable
class AnsweringTarget(Protocol):
    """What continues left-padded prompts."""

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        max_new_tokens: int,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        eos_token_ids: Sequence[int] = (),
        pad_token_id: int = 0,
    ) -> Tensor:
        """Prompts of `batch seq`, each followed by its answer, its EOS and padding."""
        ...


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn.

    Args:
        max_new_tokens: longest answer, its EOS included.
        temperature: 0 (anything below 1e-5) takes the most probable token.
        top_k: draw from so many tokens; 0 for all.
        top_p: draw from the most probable tokens that together have this probability.
        seed: first of all seeds.
    """

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature}: must be 0 (greedy) or positive")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: must be positive, or 0 for all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must be above 0 and at most 1")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


@dataclass
class _Dialogue:
    """A dialogue while it is answered: what was said, the last prompt, and why it ended."""

    questions: Questions
    messages: list[Message] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    num_answers: int = 0
    num_tokens: int = 0
    ended: str = ""
    unfinished: dict[str, list[int]] | None = None


def first_prompt(questions: Questions, chat: ChatFormat) -> list[int]:
    """The ids of the prompt that asks for the first answer.

    Raises:
        DropRow: if a turn has a control token of the tokenizer, or the template refuses it.
    """
    return _prompt_ids(list(questions.asks[0]), chat)


def answer_batch(
    batch: Sequence[Questions],
    target: AnsweringTarget,
    tokenizer: "PreTrainedTokenizerBase",
    eos_token_ids: Sequence[int],
    sampling: Sampling,
    *,
    max_length: int,
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """Answers all turns of the dialogues in `batch`, turn by turn, each seeing the target's earlier answers.

    Returns:
        Per dialogue, in the order of `batch`, a record of JSON values: `id`, `messages` up to its last finished
        answer, `finish_reason` (`stop` if all were answered, `length` if an answer has no end, or why it was left),
        `num_tokens` answered, `seed` of its last batch, and `unfinished` tokens if there are any.
    """
    chat = chat_format(tokenizer)
    dialogues = [_Dialogue(questions) for questions in batch]
    seed = 0
    for turn in range(max(len(questions.asks) for questions in batch)):
        asking = [d for d in dialogues if not d.ended and turn < len(d.questions.asks)]
        asking = [d for d in asking if _ask(d, turn, chat, max_length - sampling.max_new_tokens)]
        if not asking:
            continue
        seed = _batch_seed(sampling.seed, turn, batch)
        answers = _generate(asking, target, tokenizer, eos_token_ids, sampling, seed, device)
        for dialogue, answer_ids in zip(asking, answers, strict=True):
            _take(dialogue, answer_ids, tokenizer, chat, eos_token_ids)
    return [_record(dialogue, seed) for dialogue in dialogues]


def _prompt_ids(messages: list[Message], chat: ChatFormat) -> list[int]:
    for message in messages:
        chat.refuse_control_tokens(message.content, f"the {message.role} turn")
    return chat.ids(chat.prompt(messages))


def _ask(dialogue: _Dialogue, turn: int, chat: ChatFormat, max_prompt_length: int) -> bool:
    """Sets the prompt for the next answer; a prompt that cannot be used ends the dialogue."""
    messages = [*dialogue.messages, *dialogue.questions.asks[turn]]
    try:
        prompt_ids = _prompt_ids(messages, chat)
        if len(prompt_ids) > max_prompt_length:
            raise DropRow("prompt_too_long", f"{len(prompt_ids)} tokens")
    except DropRow as drop:
        dialogue.ended = drop.reason
        return False
    dialogue.messages, dialogue.prompt_ids = messages, prompt_ids
    return True


def _batch_seed(seed: int, turn: int, batch: Sequence[Questions]) -> int:
    text = f"{seed}/{turn}/" + "/".join(questions.id for questions in batch)
    return int.from_bytes(hashlib.sha256(text.encode("ascii")).digest()[:4], "big")


def _generate(
    dialogues: Sequence[_Dialogue],
    target: AnsweringTarget,
    tokenizer: "PreTrainedTokenizerBase",
    eos_token_ids: Sequence[int],
    sampling: Sampling,
    seed: int,
    device: str,
) -> list[list[int]]:
    """The ids after each prompt, up to and including the first EOS; padding is cut off."""
    width = max(len(dialogue.prompt_ids) for dialogue in dialogues)
    pad = tokenizer.pad_token_id if isinstance(tokenizer.pad_token_id, int) else min(eos_token_ids)
    padding = [width - len(dialogue.prompt_ids) for dialogue in dialogues]
    prompts = [[pad] * left + d.prompt_ids for left, d in zip(padding, dialogues, strict=True)]
    mask = [[0] * left + [1] * (width - left) for left in padding]
    with torch.random.fork_rng(enabled=not sampling.is_greedy):
        if not sampling.is_greedy:
            torch.manual_seed(seed)
        output = target.generate(
            torch.tensor(prompts, device=device),
            torch.tensor(mask, device=device),
            max_new_tokens=sampling.max_new_tokens,
            do_sample=not sampling.is_greedy,
            temperature=1.0 if sampling.is_greedy else sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            eos_token_ids=tuple(eos_token_ids),
            pad_token_id=pad,
        )
    ends = set(eos_token_ids)
    answers = []
    for row in output[:, width:].tolist():
        length = next((index + 1 for index, token in enumerate(row) if token in ends), len(row))
        answers.append(row[:length])
    return answers


def _take(
    dialogue: _Dialogue,
    answer_ids: list[int],
    tokenizer: "PreTrainedTokenizerBase",
    chat: ChatFormat,
    eos_token_ids: Sequence[int],
) -> None:
    """Adds an answer to the dialogue, or ends the dialogue with the reason why it has none."""
    dialogue.num_tokens += len(answer_ids)
    if answer_ids[-1] not in eos_token_ids:
        dialogue.ended = "length"
        dialogue.unfinished = {
            "input_ids": dialogue.prompt_ids + answer_ids,
            "loss_mask": [0] * len(dialogue.prompt_ids) + [1] * len(answer_ids),
        }
        return
    text = tokenizer.decode(answer_ids[:-1], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    if not text.strip():
        dialogue.ended = "empty_answer"
        return
    try:
        chat.refuse_control_tokens(text, "the answer")
    except DropRow as drop:
        dialogue.ended = drop.reason
        return
    dialogue.messages.append(Message("assistant", text))
    dialogue.num_answers += 1


def _record(dialogue: _Dialogue, seed: int) -> dict[str, Any]:
    """What the journal keeps: turns after the last finished answer are left out."""
    messages = dialogue.messages if dialogue.num_answers else []
    while messages and messages[-1].role != "assistant":
        messages = messages[:-1]
    record: dict[str, Any] = {
        "id": dialogue.questions.id,
        "messages": [{"role": message.role, "content": message.content} for message in messages],
        "finish_reason": dialogue.ended or "stop",
        "num_tokens": dialogue.num_tokens,
        "seed": seed,
    }
    if dialogue.unfinished:
        record["unfinished"] = dialogue.unfinished
    return record
