"""One row of a data set -> a dialogue, a plain text or a pre-tokenised row. Knows no files and no tokenizer."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from spd_lightning.data.conversations import Conversation, DropRow, check_unicode, parse_conversation

RowFormat = Literal["auto", "chat", "text", "tokens"]


@dataclass(frozen=True)
class PlainText:
    """Text without roles: all of it is supervised."""

    text: str


@dataclass(frozen=True)
class PretokenisedRow:
    """Token ids made elsewhere; `loss_mask[i]` is 1 iff token `i` is an answer token."""

    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]


SourceItem = Conversation | PlainText | PretokenisedRow


@dataclass(frozen=True)
class SourceRow:
    """One row of a source: exactly one of `item` and `drop` is set.

    Attributes:
        location: `file:line`, `file row k` or `hub id row k`, for messages.
        item: what the row holds.
        drop: why the row cannot be used; it was not raised.
    """

    location: str
    item: SourceItem | None = None
    drop: DropRow | None = None


def parse_row(
    row: object,
    row_format: RowFormat,
    columns: Mapping[str, str],
    *,
    system: str | None = None,
    response_remove: re.Pattern[str] | None = None,
) -> SourceItem:
    """What `row` holds, in the normal form of its kind.

    With `auto` a row is pre-tokenised if it has `input_ids` and `loss_mask`, plain text if `text` is its only column
    or `columns` names one for it, and else a dialogue.

    Raises:
        DropRow: `not_an_object`, `unknown_schema`, `bad_tokens`, `invalid_unicode`, or one of `parse_conversation`.
    """
    if not isinstance(row, Mapping):
        raise DropRow("not_an_object", f"the row is a {type(row).__name__}, not a mapping of columns")
    if row_format == "auto":
        row_format = _guess_format(row, columns)
    if row_format == "tokens":
        return PretokenisedRow(
            _token_list(row, columns.get("input_ids", "input_ids")),
            _token_list(row, columns.get("loss_mask", "loss_mask")),
        )
    if row_format == "text":
        return PlainText(_text(row, columns.get("text", "text")))
    return parse_conversation(row, columns, system=system, response_remove=response_remove)


def _guess_format(row: Mapping[str, Any], columns: Mapping[str, str]) -> RowFormat:
    if "text" in columns or set(row) == {"text"}:
        return "text"
    keys = [columns.get(key, key) for key in ("input_ids", "loss_mask")]
    return "tokens" if all(row.get(key) is not None for key in keys) else "chat"


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        found = f"holds a {type(value).__name__}" if key in row else f"is missing among {sorted(map(str, row))}"
        raise DropRow("unknown_schema", f"the column {key!r}, which should be the text, {found}")
    check_unicode(value, f"the column {key!r}")
    return value


def _token_list(row: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = row.get(key)
    if key not in row:
        raise DropRow("unknown_schema", f"the column {key!r} is missing among {sorted(map(str, row))}")
    if not isinstance(value, list | tuple) or not all(isinstance(entry, int) for entry in value):
        raise DropRow("bad_tokens", f"the column {key!r} is not a list of whole numbers")
    return tuple(map(int, value))
