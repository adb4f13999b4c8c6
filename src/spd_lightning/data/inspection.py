"""Encoded rows as text in which the supervised tokens stand out. Knows a tokenizer; reads no files."""

import os
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GREEN, _RESET = "\x1b[32m", "\x1b[0m"


@runtime_checkable
class Stream(Protocol):
    """What text is printed to."""

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        ...


def has_colour(stream: Stream) -> bool:
    """Whether ANSI colours are wanted: on a terminal, unless `NO_COLOR` is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def render_row(
    tokenizer: "PreTrainedTokenizerBase", input_ids: Sequence[int], loss_mask: Sequence[int], colour: bool = False
) -> str:
    """The row's text with its answer tokens in green, or between `[[` and `]]` without colour.

    Control characters of the text, escape sequences included, are shown escaped; newlines and tabs stay.
    """
    before, after = (_GREEN, _RESET) if colour else ("[[", "]]")
    pieces = []
    position = 0
    for is_answer, run in groupby(loss_mask):
        end = position + len(list(run))
        ids = [int(token_id) for token_id in input_ids[position:end]]
        text = _printable(str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)))
        pieces.append(f"{before}{text}{after}" if is_answer else text)
        position = end
    return "".join(pieces)


def _printable(text: str) -> str:
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode("ascii") for char in text
    )
