"""What travels between ranks, as fixed-size tensors: a control record, stamped messages, draft laws; and requests.

Knows neither processes nor how tensors are sent.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace

import torch
from jaxtyping import Float64, Int64, Shaped
from torch import Tensor

from spd_lightning.inference.runtime.interface import Method
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.schedule import Verdict
from spd_lightning.inference.token_scores import TokenScore
from spd_lightning.inference.tree.schedule import Draft
from spd_lightning.inference.verify import DraftProposal


@dataclass(frozen=True)
class Request:
    """What the lead asks all ranks to decode.

    Attributes:
        number: of this request, from 1.
        method: see `Method`.
        prompt: token ids.
        params: with a seed if they sample.
        num_top: likeliest tokens to send with the score of each committed token; none where no scores are wanted.
    """

    number: int
    method: Method
    prompt: tuple[int, ...]
    params: SamplingParams
    num_top: int | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, data: bytes) -> "Request":
        values = json.loads(data)
        params = values.pop("params")
        return cls(
            prompt=tuple(values.pop("prompt")),
            params=SamplingParams(**params | {"stop": tuple(params["stop"])}),
            **values,
        )


@dataclass(frozen=True)
class CycleRecord:
    """One rank's part of the record that all ranks exchange at the end of a cycle.

    Attributes:
        request: number of the request.
        epoch: flushes so far; with `cycle` and `newest` it must be the same on every rank.
        cycle: number of the cycle; -1 in the prefill.
        newest: position of the newest token.
        draft: the drafted token, from the draft rank; -1 from others.
        verdict: from the verifier 0 or 1, or 2 for a token drawn without a judgement; -1 from others, or when none fell.
        token: the verdict's token, or -1.
        abandoned: 1 from the lead if nobody listens any more: the decode ends with this cycle.
        candidates: of a tree's level, from the draft rank; empty from others.
        score: of the token, from the verifier where the request wants scores.
    """

    request: int
    epoch: int
    cycle: int
    newest: int
    draft: int = -1
    verdict: int = -1
    token: int = -1
    abandoned: int = 0
    candidates: tuple[Draft, ...] = ()
    score: TokenScore | None = None

    @property
    def state(self) -> tuple[int, int, int, int]:
        """What every rank must agree on."""
        return self.request, self.epoch, self.cycle, self.newest

    def write(self, row: Int64[Tensor, " fields"]) -> None:
        """Fills a row of `record_fields` integers, of which those behind the last that is needed are -1."""
        drafted = [number for draft in self.candidates for number in (draft.token, draft.parent, bits_of(draft.score))]
        scored = [] if self.score is None else score_numbers(self.score)
        own = [getattr(self, name) for name in RECORD_FIELDS]
        numbers = [*own, len(self.candidates), len(scored), *drafted, *scored]
        row.fill_(-1)
        row[: len(numbers)] = torch.tensor(numbers)

    @classmethod
    def read(cls, values: Sequence[int]) -> "CycleRecord":
        own, first = values[: len(RECORD_FIELDS)], len(RECORD_FIELDS) + 2
        num_candidates, num_scored = values[first - 2 : first]
        end = first + DRAFT_FIELDS * num_candidates
        starts = range(first, end, DRAFT_FIELDS)
        drafts = tuple(Draft(values[i], values[i + 1], float_of(values[i + 2])) for i in starts)
        record = cls(*own, candidates=drafts)
        if not num_scored:
            return record
        return replace(record, score=score_of(record.token, values[end : end + num_scored]))

    def to_verdict(self) -> Verdict | None:
        """The judgement, if this rank made one."""
        return Verdict(bool(self.verdict), self.token) if self.verdict in (0, 1) else None


RECORD_FIELDS = tuple(field.name for field in fields(CycleRecord) if field.name not in ("candidates", "score"))
DRAFT_FIELDS = 3
DRAWN = 2
"""`CycleRecord.verdict` of a token that was drawn without judging a draft: after a prompt, and in plain decoding."""


def record_fields(max_width: int, num_top: int | None = None) -> int:
    """Integers of a record that has room for so many candidates, 0 without trees, and for a score if one is wanted."""
    return len(RECORD_FIELDS) + 2 + DRAFT_FIELDS * max_width + (0 if num_top is None else 1 + 2 * num_top)


def score_numbers(score: TokenScore) -> list[int]:
    """A score without its token, as integers: the bits of its log-probability, then each likely token and its bits."""
    return [bits_of(score.logprob), *(number for token, logprob in score.top for number in (token, bits_of(logprob)))]


def score_of(token: int, numbers: Sequence[int]) -> TokenScore:
    """The score that `score_numbers` was given."""
    top = zip(numbers[1::2], map(float_of, numbers[2::2]), strict=True)
    return TokenScore(token, float_of(numbers[0]), tuple(top))


def bits_of(number: float) -> int:
    """A float64 as the int64 with its bits."""
    (bits,) = struct.unpack("<q", struct.pack("<d", number))
    return bits


def float_of(bits: int) -> float:
    """The float64 that `bits_of` was given."""
    (number,) = struct.unpack("<d", struct.pack("<q", bits))
    return number


@dataclass(frozen=True)
class Stamp:
    """What a message belongs to; the receiver knows what must come and checks it.

    Attributes:
        request: number of the request.
        epoch: flushes so far.
        position: of the first token that it is about.
    """

    request: int
    epoch: int
    position: int


class Message:
    """A stamped tensor as bytes at a fixed address: `header` and `payload` are views of `data`.

    Args:
        shape: of the payload.
        dtype: of the payload.
        device: where it lies.
    """

    HEADER_BYTES = 32  # keeps the payload aligned

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        self.data = torch.zeros(self.HEADER_BYTES + num_bytes, dtype=torch.uint8, device=device)
        self.header = self.data[: self.HEADER_BYTES].view(torch.int64)
        self.payload = self.data[self.HEADER_BYTES :].view(dtype).view(*shape)

    def fill(self, stamp: Stamp, *parts: Shaped[Tensor, "..."]) -> None:
        """Writes the payload's entries along its first axis, and the stamp."""
        for slot, part in zip(self.payload, parts, strict=True):
            slot.copy_(part.view(slot.shape))
        self.seal(stamp)

    def seal(self, stamp: Stamp) -> None:
        """Writes the stamp."""
        self.header.copy_(torch.tensor([*astuple(stamp), self.payload.numel()]))

    def open(self, stamp: Stamp) -> Shaped[Tensor, "..."]:
        """The payload, if the message is what must come now.

        Raises:
            RuntimeError: if it is another one; a bug, or a message of a decode that was aborted.
        """
        wanted = [*astuple(stamp), self.payload.numel()]
        if (found := self.header.tolist()) != wanted:
            raise RuntimeError(f"a message of (request, epoch, position, size) {found} came in place of {wanted}")
        return self.payload


class LawSlots:
    """Draft proposals on their way to the verifier, one message per position in flight: token, and law if one is drawn from.

    The law is sent as its non-zero entries: index and probability, the latter bit for bit.

    Args:
        num_slots: positions that can be open at once.
        num_entries: non-zero entries of a law at most; 0 where no law is needed.
        vocab_size: of the draft vocabulary.
        device: where the messages lie.
    """

    def __init__(self, num_slots: int, num_entries: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.messages = [Message((1 + 2 * num_entries,), torch.int64, device) for _ in range(num_slots)]

    def at(self, position: int) -> Message:
        """The message of the draft for this position."""
        return self.messages[position % len(self.messages)]

    def write(self, proposal: DraftProposal, stamp: Stamp) -> Message:
        """Fills the position's message."""
        message = self.at(stamp.position)
        message.payload[0] = proposal.token
        if proposal.probs is not None:
            pack_law(proposal.probs, message.payload[1:])
        message.seal(stamp)
        return message

    def read(self, stamp: Stamp) -> DraftProposal:
        """The proposal for a position."""
        entries = self.at(stamp.position).open(stamp)
        if len(entries) == 1:
            return DraftProposal(int(entries[0]))
        return DraftProposal(int(entries[0]), unpack_law(entries[1:], self.vocab_size))


class LevelLaws:
    """The draft laws of a tree's newest level on their way to the verifier, one message a cycle.

    Args:
        num_entries: non-zero entries of a law at most.
        vocab_size: of the draft vocabulary.
        device: where the messages lie.
    """

    def __init__(self, num_entries: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self._make = lambda count: Message((count, 2 * num_entries), torch.int64, device)
        self._messages: dict[int, Message] = {}

    def of(self, count: int) -> Message:
        """The message for the laws of so many nodes."""
        if count not in self._messages:
            self._messages[count] = self._make(count)
        return self._messages[count]

    def write(self, laws: Sequence[Float64[Tensor, " draft_vocab"]], stamp: Stamp) -> Message:
        """Fills the message of these laws."""
        message = self.of(len(laws))
        for law, entries in zip(laws, message.payload, strict=True):
            pack_law(law, entries)
        message.seal(stamp)
        return message

    def read(self, count: int, stamp: Stamp) -> list[Float64[Tensor, " draft_vocab"]]:
        """The laws of so many nodes, in memory of their own."""
        return [unpack_law(entries, self.vocab_size) for entries in self.of(count).open(stamp)]


def pack_law(law: Float64[Tensor, " draft_vocab"], entries: Int64[Tensor, " numbers"]) -> None:
    """Writes a law's non-zero entries: indices, then probabilities bit for bit; unused ones have the index -1."""
    indices, bits = entries.view(2, -1)
    drawn = law.nonzero().flatten()
    indices.fill_(-1)
    indices[: len(drawn)] = drawn
    bits[: len(drawn)] = law[drawn].view(torch.int64)


def unpack_law(entries: Int64[Tensor, " numbers"], vocab_size: int) -> Float64[Tensor, " draft_vocab"]:
    """The law that `pack_law` wrote."""
    indices, bits = entries.view(2, -1)
    used = int((indices >= 0).sum())
    law = torch.zeros(vocab_size, dtype=torch.float64, device=entries.device)
    law[indices[:used]] = bits[:used].view(torch.float64)
    return law
