"""What travels between ranks, as fixed-size tensors: a control record, stamped messages, draft laws; and requests.

Knows neither processes nor how tensors are sent.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Literal

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.schedule import Verdict
from spd_lightning.inference.verify import DraftProposal

Method = Literal["pipelined", "plain"]


@dataclass(frozen=True)
class Request:
    """What the lead asks all ranks to decode.

    Attributes:
        number: of this request, from 1.
        method: `pipelined` decodes with the drafter, `plain` one token after the other.
        prompt: token ids.
        params: with a seed if they sample.
    """

    number: int
    method: Method
    prompt: tuple[int, ...]
    params: SamplingParams

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
    """

    request: int
    epoch: int
    cycle: int
    newest: int
    draft: int = -1
    verdict: int = -1
    token: int = -1
    abandoned: int = 0

    @property
    def state(self) -> tuple[int, int, int, int]:
        """What every rank must agree on."""
        return self.request, self.epoch, self.cycle, self.newest

    def write(self, row: Int64[Tensor, " fields"]) -> None:
        """Fills one row of `NUM_FIELDS` integers."""
        row.copy_(torch.tensor(astuple(self)))

    @classmethod
    def read(cls, values: Sequence[int]) -> "CycleRecord":
        return cls(*values)

    def to_verdict(self) -> Verdict | None:
        """The judgement, if this rank made one."""
        return Verdict(bool(self.verdict), self.token) if self.verdict in (0, 1) else None


NUM_FIELDS = 8
DRAWN = 2
"""`CycleRecord.verdict` of a token that was drawn without judging a draft: after a prompt, and in plain decoding."""


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
        indices, bits = message.payload[1:].view(2, -1)
        indices.fill_(-1)
        if proposal.probs is not None:
            drawn = proposal.probs.nonzero().flatten()
            indices[: len(drawn)] = drawn
            bits[: len(drawn)] = proposal.probs[drawn].view(torch.int64)
        message.seal(stamp)
        return message

    def read(self, stamp: Stamp) -> DraftProposal:
        """The proposal for a position."""
        entries = self.at(stamp.position).open(stamp)
        indices, bits = entries[1:].view(2, -1)
        if not len(indices):
            return DraftProposal(int(entries[0]))
        used = int((indices >= 0).sum())
        probs = torch.zeros(self.vocab_size, dtype=torch.float64, device=entries.device)
        probs[indices[:used]] = bits[:used].view(torch.float64)
        return DraftProposal(int(entries[0]), probs)
