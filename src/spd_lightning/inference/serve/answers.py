"""Events of an answer to OpenAI's objects, whole or in chunks. Knows token texts; knows no HTTP and no decoder."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.serve.engine import End, Piece
from spd_lightning.inference.serve.token_texts import TokenTexts
from spd_lightning.inference.token_scores import TokenScore

FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


@dataclass(frozen=True)
class Kinds:
    """What OpenAI calls the objects of an endpoint: prefix of their ids, whole answers, chunks."""

    prefix: str
    whole: str
    chunk: str


@dataclass
class Answer(ABC):
    """One answer in OpenAI's form.

    Attributes:
        model: name of what answers.
        num_prompt: tokens of the prompt.
        params: how tokens are drawn.
        token_texts: what tokens spell.
        has_scores: whether log-probabilities are wanted.
    """

    model: str
    num_prompt: int
    params: SamplingParams
    token_texts: TokenTexts
    has_scores: bool
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    kinds: ClassVar[Kinds]

    @abstractmethod
    def whole(self, pieces: Sequence[Piece], end: End) -> dict[str, Any]:
        """The object of an answer that is not streamed."""

    @abstractmethod
    def first(self) -> Iterator[dict[str, Any]]:
        """Chunks before the first piece."""

    @abstractmethod
    def chunk(self, piece: Piece) -> dict[str, Any]:
        """The chunk of a piece."""

    @abstractmethod
    def last(self, end: End) -> dict[str, Any]:
        """The chunk that says why the answer ended."""

    def usage_chunk(self, end: End) -> dict[str, Any]:
        """The chunk behind the last, with counts."""
        return self._chunk([]) | self._counts(end)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._object(choices, self.kinds.chunk)

    def _whole(self, choice: dict[str, Any], end: End) -> dict[str, Any]:
        return self._object([choice], self.kinds.whole) | self._counts(end)

    def _object(self, choices: list[dict[str, Any]], kind: str) -> dict[str, Any]:
        return {
            "id": f"{self.kinds.prefix}-{self.identity}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _counts(self, end: End) -> dict[str, Any]:
        usage = {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": end.num_tokens,
            "total_tokens": self.num_prompt + end.num_tokens,
        }
        decode: dict[str, Any] = {} if self.params.is_greedy else {"seed": self.params.seed}
        if end.stats is not None:
            decode |= {"cycles": end.stats.num_cycles, "tokens_per_cycle": end.stats.alpha}
            decode |= {"judged": end.stats.num_judged, "acceptance": end.stats.acceptance}
        return {"usage": usage, "spd": decode}


class ChatAnswer(Answer):
    """Of a chat request."""

    kinds = Kinds("chatcmpl", "chat.completion", "chat.completion.chunk")

    def whole(self, pieces: Sequence[Piece], end: End) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(piece.text for piece in pieces), "refusal": None}
        scores = [score for piece in pieces for score in piece.scores]
        return self._whole(self._choice(end, scores) | {"message": message}, end)

    def first(self) -> Iterator[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        yield self._chunk([self._choice(None, ()) | {"delta": delta, "logprobs": None}])

    def chunk(self, piece: Piece) -> dict[str, Any]:
        return self._chunk([self._choice(None, piece.scores) | {"delta": {"content": piece.text}}])

    def last(self, end: End) -> dict[str, Any]:
        return self._chunk([self._choice(end, ()) | {"delta": {}, "logprobs": None}])

    def _choice(self, end: End | None, scores: Sequence[TokenScore]) -> dict[str, Any]:
        logprobs = None
        if self.has_scores:
            content = [
                self._token(score.token_id, score.logprob) | {"top_logprobs": self._top(score)} for score in scores
            ]
            logprobs = {"content": content, "refusal": None}
        reason = None if end is None else FINISH_REASONS[end.reason]
        return {"index": 0, "finish_reason": reason, "logprobs": logprobs}

    def _top(self, score: TokenScore) -> list[dict[str, Any]]:
        return [self._token(token, logprob) for token, logprob in score.top]

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self.token_texts.data(token)
        return {
            "token": self.token_texts.text(token),
            "logprob": logprob,
            "bytes": None if data is None else list(data),
        }


@dataclass
class CompletionAnswer(Answer):
    """Of a completion request."""

    kinds = Kinds("cmpl", "text_completion", "text_completion")
    num_characters: int = 0
    """Of the tokens whose scores have been shown."""

    def whole(self, pieces: Sequence[Piece], end: End) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        scores = [score for piece in pieces for score in piece.scores]
        return self._whole(self._choice(text, scores, end), end)

    def first(self) -> Iterator[dict[str, Any]]:
        yield from ()

    def chunk(self, piece: Piece) -> dict[str, Any]:
        return self._chunk([self._choice(piece.text, piece.scores, None)])

    def last(self, end: End) -> dict[str, Any]:
        return self._chunk([self._choice("", (), end)])

    def _choice(self, text: str, scores: Sequence[TokenScore], end: End | None) -> dict[str, Any]:
        reason = None if end is None else FINISH_REASONS[end.reason]
        logprobs = self._logprobs(scores) if self.has_scores else None
        return {"index": 0, "text": text, "finish_reason": reason, "logprobs": logprobs}

    def _logprobs(self, scores: Sequence[TokenScore]) -> dict[str, Any]:
        texts, offsets = [self.token_texts.text(score.token_id) for score in scores], list[int]()
        for score in scores:
            offsets.append(self.num_characters)
            self.num_characters += self.token_texts.num_characters(score.token_id)
        return {
            "tokens": texts,
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": [{self.token_texts.text(token): value for token, value in score.top} for score in scores],
            "text_offset": offsets,
        }
