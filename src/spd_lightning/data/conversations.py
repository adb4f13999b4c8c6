"""Rows of dialogue data sets in their many shapes -> `Conversation`, or `DropRow` with the reason.

Knows row shapes, roles and reasoning; knows no tokenizer, no chat template and no files.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant"]

# Any spelling of these: letter case, spaces, hyphens and underscores do not count.
_ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
}
_TOOL_ROLES = frozenset(
    "tool tools function functioncall functionresponse functionresult observation ipython "
    "toolcall toolcalls tooluse toolresponse toolresult toolresults tooloutput".split()
)
_MEDIA_PARTS = frozenset("image imageurl inputimage video videourl inputvideo audio audiourl inputaudio file".split())
_REASONING_PARTS = frozenset("thinking redactedthinking reasoning reasoningcontent".split())
_TEXT_PARTS = frozenset("text inputtext outputtext".split())

_THINK_BLOCK = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
_THINK_TAG = re.compile(r"</?think>")
_SURROGATE = re.compile("[\ud800-\udfff]")


class DropRow(Exception):
    """A row that cannot be used, which is counted and never ends a run.

    Attributes:
        reason: a fixed snake_case name, for counting.
        detail: what in this row is at fault.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


@dataclass(frozen=True)
class Message:
    """One turn, reasoning removed."""

    role: Role
    content: str

    @property
    def is_answer(self) -> bool:
        """Whether there is something to supervise: an assistant turn with text."""
        return self.role == "assistant" and bool(self.content.strip())


@dataclass(frozen=True)
class Conversation:
    """A dialogue in the one normal form.

    At most one system turn, which comes first; then a user turn; no two assistant turns in a row. It may lack an
    answer: prompts without one serve `spd-data regenerate`.
    """

    messages: tuple[Message, ...]


def parse_conversation(
    row: Mapping[str, Any],
    columns: Mapping[str, str] | None = None,
    *,
    system: str | None = None,
    response_remove: re.Pattern[str] | None = None,
) -> Conversation:
    """The dialogue in `row`.

    A turn is `{role, content}` or `{from, value}`, in a list under `messages` or `conversations`; or the row has a
    `prompt` and a `response`. A top-level `system` comes before the turns. Other keys are ignored, reasoning fields
    among them.

    Args:
        row: one row of a data set.
        columns: this data set's names for `messages`, `prompt`, `response` and `system`.
        system: the system prompt of a dialogue that has none.
        response_remove: matches are removed from every answer, before anything else is looked at.

    Raises:
        DropRow: with one of the reasons `unknown_schema`, `empty_conversation`, `bad_turn`, `unknown_role`,
            `role_order`, `system_not_first`, `no_user_turn`, `tool_turns_unsupported`, `multimodal_unsupported`,
            `think_tag_in_content` and `invalid_unicode`.
    """
    _refuse_unsupported_columns(row)
    turns = [_parse_turn(turn, number) for number, turn in enumerate(_raw_turns(row, columns or {}), start=1)]
    if response_remove is not None:
        turns = [
            Message(turn.role, response_remove.sub("", turn.content)) if turn.role == "assistant" else turn
            for turn in turns
        ]
    head, body = _split_system(turns)
    column = _system_column(row, columns or {})
    if column and column not in head:
        head.insert(0, column)
    if not head and system:
        head = [system]
    if body and body[0].role == "assistant":
        del body[0]  # a greeting: no prompt leads to it
    if not any(turn.role == "user" for turn in body):
        raise DropRow("no_user_turn", "no user turn leads to an answer")
    for number, (earlier, later) in enumerate(zip(body, body[1:], strict=False), start=1):
        if earlier.role == later.role == "assistant":
            raise DropRow("role_order", f"two assistant turns in a row after {number} turns")
    opening = [Message("system", "\n\n".join(head))] if head else []
    messages = (*opening, *(_without_reasoning(turn) for turn in body))
    for message in messages:
        check_unicode(message.content, f"the {message.role} turn")
    return Conversation(messages)


def _refuse_unsupported_columns(row: Mapping[str, Any]) -> None:
    """Drops rows that say beside their turns that they need tools or media, which the turns alone do not show."""
    for key in ("tools", "functions"):
        if not _is_empty(row.get(key)):
            raise DropRow("tool_turns_unsupported", f"the row has {key!r}")
    for key in ("image", "images", "video", "videos", "audio", "audios"):
        if not _is_empty(row.get(key)):
            raise DropRow("multimodal_unsupported", f"the row has {key!r}")


def _is_empty(value: Any) -> bool:
    """Whether a column says nothing, also as JSON text or as a struct that Arrow filled with nulls."""
    if isinstance(value, Mapping):
        return all(_is_empty(entry) for entry in value.values())
    return value in (None, "", "[]", "{}", "null", [], ())


def _raw_turns(row: Mapping[str, Any], columns: Mapping[str, str]) -> list[Any]:
    """The turns as the row holds them, whichever shape it has."""
    pair = (columns.get("prompt", "prompt"), columns.get("response", "response"))
    lists = (columns["messages"],) if "messages" in columns else ("messages", "conversations")
    if "prompt" in columns or "response" in columns:
        lists = ()
    present = [key for key in lists if key in row]
    for key in present:
        if not _is_empty(row[key]):
            return _turn_list(row[key], key)
    if present:
        raise DropRow("empty_conversation", f"{present[0]!r} is empty")
    if all(key in row for key in pair):
        return [*_as_turns(row[pair[0]], "user"), *_as_turns(row[pair[1]], "assistant")]
    wanted = " or ".join(repr(key) for key in lists) or " and ".join(repr(key) for key in pair)
    raise DropRow(
        "unknown_schema",
        f"the row has the columns {sorted(map(str, row))} and no {wanted}; `columns` maps other names "
        "(such as {prompt: question, response: answer}), `format: text` reads plain text",
    )


def _turn_list(value: Any, key: str) -> list[Any]:
    """A list of turns, also when it is stored as JSON text or as a dict of columns."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value, strict=False)
        except (ValueError, RecursionError):
            raise DropRow("unknown_schema", f"{key!r} is text that is not a JSON list of turns") from None
    if isinstance(value, Mapping) and value and all(isinstance(column, list) for column in value.values()):
        if len({len(column) for column in value.values()}) == 1:
            return [dict(zip(value, turn, strict=True)) for turn in zip(*value.values(), strict=True)]
    if not isinstance(value, list | tuple):
        raise DropRow("unknown_schema", f"{key!r} holds a {type(value).__name__}, not a list of turns")
    return list(value)


def _as_turns(value: Any, role: Role) -> list[Any]:
    """A prompt or response column: text, or itself a list of turns."""
    return list(value) if isinstance(value, list | tuple) else [{"role": role, "content": value}]


def _parse_turn(turn: Any, number: int) -> Message:
    if not isinstance(turn, Mapping):
        raise DropRow("bad_turn", f"turn {number} is a {type(turn).__name__}, not a mapping with a role and a text")
    spelling = turn["role"] if turn.get("role") is not None else turn.get("from")
    if not isinstance(spelling, str):
        raise DropRow("bad_turn", f"turn {number} has no role: its keys are {sorted(map(str, turn))}")
    key = _plain_name(spelling)
    if key in _TOOL_ROLES:
        raise DropRow("tool_turns_unsupported", f"turn {number} has the role {spelling!r}")
    if key not in _ROLES:
        raise DropRow("unknown_role", f"turn {number} has the role {spelling!r}; known are {', '.join(_ROLES)}")
    for field in ("tool_calls", "function_call", "tool_call_id"):
        if not _is_empty(turn.get(field)):
            raise DropRow("tool_turns_unsupported", f"turn {number} has {field!r}")
    content = turn["content"] if turn.get("content") is not None else turn.get("value")
    if isinstance(content, list | tuple):
        content = "".join(_part_text(part, number) for part in content)
    if not isinstance(content, str):
        raise DropRow("bad_turn", f"turn {number} ({spelling}) has no text but a {type(content).__name__}")
    return Message(_ROLES[key], content)


def _part_text(part: Any, number: int) -> str:
    """The text of one part of a turn whose content is a list of typed parts."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise DropRow("bad_turn", f"turn {number} has a part of type {type(part).__name__}")
    kinds = {_plain_name(str(part["type"]))} if part.get("type") else {_plain_name(key) for key in part if part[key]}
    if kinds & _MEDIA_PARTS:
        raise DropRow("multimodal_unsupported", f"turn {number} has a part of type {sorted(kinds & _MEDIA_PARTS)[0]}")
    if any(kind.startswith(("tool", "function")) for kind in kinds):
        raise DropRow("tool_turns_unsupported", f"turn {number} has a part of type {sorted(kinds)[0]}")
    if kinds & _REASONING_PARTS and not kinds & _TEXT_PARTS:
        return ""
    if not isinstance(part.get("text"), str):
        raise DropRow("bad_turn", f"turn {number} has a part without text: its keys are {sorted(map(str, part))}")
    return part["text"]


def _plain_name(spelling: str) -> str:
    return re.sub(r"[\s_-]", "", spelling).casefold()


def _split_system(turns: list[Message]) -> tuple[list[str], list[Message]]:
    """System turns at the start, and the other turns; empty system turns are left out wherever they stand."""
    kept = [turn for turn in turns if turn.role != "system" or turn.content.strip()]
    first = next((index for index, turn in enumerate(kept) if turn.role != "system"), len(kept))
    if any(turn.role == "system" for turn in kept[first:]):
        raise DropRow("system_not_first", "a system turn comes after the dialogue began")
    return [turn.content for turn in kept[:first]], kept[first:]


def _system_column(row: Mapping[str, Any], columns: Mapping[str, str]) -> str | None:
    """The text of the top-level system prompt, if it has any."""
    keys = (columns["system"],) if "system" in columns else ("system", "system_prompt")
    for key in keys:
        value = row.get(key)
        if value is None or (isinstance(value, str) and not value.strip()):
            continue
        if not isinstance(value, str):
            raise DropRow("bad_turn", f"the top-level {key!r} holds a {type(value).__name__}, not text")
        return value
    return None


def _without_reasoning(turn: Message) -> Message:
    """The turn without the reasoning that its text begins with; a think tag anywhere else is ambiguous."""
    content = turn.content
    if turn.role == "assistant" and (block := _THINK_BLOCK.match(content)):
        if _THINK_TAG.search(block[1]):
            raise DropRow("think_tag_in_content", "the reasoning has a think tag inside: it may be unfinished")
        content = content[block.end() :]
    if tag := _THINK_TAG.search(content):
        raise DropRow("think_tag_in_content", f"the {turn.role} turn has {tag[0]} in its text")
    return Message(turn.role, content)


def check_unicode(text: str, where: str) -> None:
    """Drops a text that no tokenizer can read: one with half of a surrogate pair, usually from a cut emoji."""
    if surrogate := _SURROGATE.search(text):
        raise DropRow("invalid_unicode", f"{where} has the lone surrogate {surrogate[0]!r}")
