"""One answer: as it is decoded, and as it came out. Knows neither how tokens are made nor files."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
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

    Attributes:
        token_ids: committed so far.
        prefill_seconds: until the prefill's token was there.
        seconds: from then on.

    Args:
        prompt: token ids.
        committed: the decode: yields committed token ids.
        stop: what the decode feeds with them.
        stats: what it counts in; none for plain decoding.
        clock: gives the seconds of the decode phase; the prefill is always measured by the wall clock.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        committed: Generator[int],
        stop: StopCondition,
        stats: DecodeStats | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.prompt = tuple(prompt)
        self._committed = committed
        self.stop = stop
        self.stats = stats
        self.clock = clock
        self.token_ids: list[int] = []
        self.prefill_seconds = self.seconds = self._began = 0.0

    def tokens(self) -> Iterator[int]:
        """Committed token ids."""
        asked = time.perf_counter()
        for token in self._committed:
            now = self.clock()
            if not self.token_ids:
                self.prefill_seconds, self._began = time.perf_counter() - asked, now
            self.seconds = now - self._began
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
