"""When an answer ends, and which of its text may be shown. Knows token ids and a tokenizer; knows no model."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

StopReason = Literal["eos", "length", "stop"]

REPLACEMENT = "\ufffd"
"""What a tokenizer decodes a character to whose bytes have not all come yet, and bytes that make no character."""


@dataclass(frozen=True)
class Stop:
    """The end of an answer.

    Attributes:
        reason: an end-of-sequence token, the limit of new tokens, or a stop string.
        num_kept: how many of the tokens fed are the answer's ids. An end-of-sequence token is one of them; a token
            that spells any part of the stop string is not.
        text: the answer's text, without the end-of-sequence token and up to the stop string. Where a token spells the
            last characters before the stop string and the first of it, the text has those that the ids lack.
    """

    reason: StopReason
    num_kept: int
    text: str


class IncrementalText:
    """Committed token ids to text that no later token changes: whole characters, and nothing of a stop string.

    A stop string is found as soon as its last character is there; of several, the one that is complete first counts.
    All increments joined are `tokenizer.decode` of all tokens (byte-level BPE), special tokens left out.

    Attributes:
        text: the increments so far, joined.
        is_cut: whether a stop string was found; `text` then ends before it, and no more tokens are taken.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", stop_strings: Iterable[str] = ()) -> None:
        self.text = ""
        self.is_cut = False
        self._tokenizer = tokenizer
        self._stop_strings = tuple(stop_strings)
        if not all(self._stop_strings):
            raise ValueError(f"stop strings {list(self._stop_strings)}: an empty one would stop at once, leave it out")
        self._ids: list[int] = []
        # Tokens from `_start` on are decoded together: up to `_middle` as context, since some tokenizers drop a leading
        # space; then those with characters that are not settled. Of the text, `_num_settled` characters are.
        self._start = self._middle = self._num_settled = 0
        self._held = ""  # settled, but perhaps the beginning of a stop string

    def push(self, token_id: int) -> str:
        """Takes one more token; returns what may be shown after what was shown before."""
        assert not self.is_cut, "the text was cut at a stop string"
        self._ids.append(token_id)
        decoded = self._decode(self._ids[self._start :])
        settled = decoded.rstrip(REPLACEMENT)
        new = settled[self._num_settled :]
        self._num_settled += len(new)
        if new and settled == decoded:
            self._start, self._middle = self._middle, len(self._ids)
            self._num_settled = len(self._decode(self._ids[self._start :]))
        return self._show(new)

    def finish(self) -> str:
        """No more tokens come: returns what was held back, incomplete characters as the tokenizer decodes them."""
        if self.is_cut:
            return ""
        shown = self._held + self._decode(self._ids[self._start :])[self._num_settled :]
        self.text += shown
        self._held = ""
        return shown

    def count_kept(self) -> int:
        """How many of the tokens spell nothing beyond `text`."""
        num_kept = len(self._ids)
        while not self.text.startswith(self._decode(self._ids[:num_kept])):
            num_kept -= 1
        return num_kept

    def _decode(self, ids: list[int]) -> str:
        decode = cast(Any, self._tokenizer).decode
        return decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _show(self, new: str) -> str:
        """Adds settled text; returns the part of all held text that is shown now."""
        candidate = self._held + new
        found = [(at + len(stop), at) for stop in self._stop_strings if (at := candidate.find(stop)) >= 0]
        if found:
            self.is_cut = True
            num_shown = min(found)[1]
        else:
            num_shown = len(candidate) - self._length_of_beginning(candidate)
        self._held = "" if self.is_cut else candidate[num_shown:]
        self.text += candidate[:num_shown]
        return candidate[:num_shown]

    def _length_of_beginning(self, text: str) -> int:
        """Of the longest end of `text` that a stop string begins with."""
        longest = max(map(len, self._stop_strings), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop_strings):
                return length
        return 0


class StopCondition:
    """Fed one answer's committed tokens, the prefill's first, one by one; says when and where the answer ends.

    Attributes:
        text: `text.text` is what may be shown after each token.
        end: why and where the answer ended; none until then.
        max_new_tokens: the limit.
    """

    def __init__(
        self,
        eos_token_ids: Iterable[int],
        max_new_tokens: int,
        stop_strings: Iterable[str],
        tokenizer: "PreTrainedTokenizerBase",
    ) -> None:
        """The conditions of one answer.

        Args:
            eos_token_ids: each of them ends the answer; none to go on beyond them.
            max_new_tokens: the answer has at most as many tokens.
            stop_strings: the text ends before the first of them.
            tokenizer: the target's.

        Raises:
            ValueError: for a limit below 1 or an empty stop string.
        """
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; an answer has at least one token")
        self.text = IncrementalText(tokenizer, stop_strings)
        self._eos_token_ids = frozenset(eos_token_ids)
        self.max_new_tokens = max_new_tokens
        self.end: Stop | None = None
        self._num_tokens = 0

    def push(self, token_id: int) -> Stop | None:
        """The end of the answer, if it ends with this token. An end-of-sequence token comes before the limit."""
        assert self.end is None, "the answer has ended"
        self._num_tokens += 1
        self.end = self._judged(token_id)
        return self.end

    def _judged(self, token_id: int) -> Stop | None:
        if token_id in self._eos_token_ids:
            return self._end("eos")
        self.text.push(token_id)
        if self.text.is_cut:
            return Stop("stop", self.text.count_kept(), self.text.text)
        return self._end("length") if self._num_tokens == self.max_new_tokens else None

    def _end(self, reason: StopReason) -> Stop:
        self.text.finish()
        return Stop(reason, self._num_tokens, self.text.text)
