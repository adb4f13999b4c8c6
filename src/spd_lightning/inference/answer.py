"""One answer: as it is decoded, and as it came out. Knows neither how tokens are made nor files."""

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from spd_lightning.inference.stats import DecodeStats
from spd_lightning.inference.stopping import StopCondition


@dataclass(frozen=True)
class DecodeResult:
    """One answer.

    Attributes:
        token_ids: what was committed, up to and with an end-of-sequence token, up to and without a stop string.
        text: the answer's text.
        finish_reason: `eos`, `length` or `stop`.
        stats: counts of the decode phase; none for plain decoding.
        seconds: wall clock of the decode phase, without the prefill.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    stats: DecodeStats | None
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The result as `spd-infer generate --json` prints it."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            **({} if self.stats is None else self.stats.to_json()),
            "seconds": self.seconds,
            "finish_reason": self.finish_reason,
        }


class Run:
    """An answer as it is decoded; `tokens` or `texts` drives it, once. The clock runs from the prefill's token on.

    Args:
        committed: the decode: yields committed token ids.
        stop: what the decode feeds with them.
        stats: what it counts in; none for plain decoding.
    """

    def __init__(self, committed: Generator[int], stop: StopCondition, stats: DecodeStats | None) -> None:
        self._committed = committed
        self.stop = stop
        self.stats = stats
        self.token_ids: list[int] = []
        self.seconds = 0.0

    def tokens(self) -> Iterator[int]:
        """Committed token ids."""
        began = None
        for token in self._committed:
            now = time.perf_counter()
            began = now if began is None else began
            self.seconds = now - began
            self.token_ids.append(token)
            yield token

    def texts(self) -> Iterator[str]:
        """Increments of the text."""
        shown = 0
        for _ in self.tokens():
            text = self.stop.text.text
            if len(text) > shown:
                yield text[shown:]
                shown = len(text)

    def close(self) -> None:
        """Ends the decode where it is, on all ranks; what has been committed stays in `token_ids`."""
        self._committed.close()

    def result(self) -> DecodeResult:
        """Decodes what is left and returns what came out.

        Raises:
            ValueError: if the decode was cancelled, by `close` or because the decoder began another one.
        """
        for _ in self.tokens():
            pass
        end = self.stop.end
        if end is None:
            raise ValueError("this answer was cancelled before its end; a decoder makes one answer at a time")
        return DecodeResult(self.token_ids[: end.num_kept], end.text, end.reason, self.stats, self.seconds)
