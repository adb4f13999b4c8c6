"""What all ranks of a decoder have in common: the request they are at, and the record that keeps them in step.

Each rank drives its own copy of the schedule and does, in every cycle, the transfers that the plan implies, then
exchanges one record with all others. Knows neither processes nor files.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from spd_lightning.inference.coordinator import CycleOutcome, Schedule
from spd_lightning.inference.runtime.distributed import Transport
from spd_lightning.inference.runtime.wire import DRAWN, CycleRecord, LawSlots, LevelLaws, Message, Request
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.schedule import CyclePlan, Verdict
from spd_lightning.inference.token_scores import TokenScore, TokenScores
from spd_lightning.inference.tree.schedule import Draft

LEAD = 0
"""Rank that takes requests and shows answers; it has the first stage."""


class Abandoned(Exception):
    """The lead has ended the request before its end: nobody listens any more."""


class Mailbox:
    """Two messages of each shape, in turn, so that one can be read while the next one comes in.

    Args:
        num_parts: tensors in a message.
        dim: width of a state.
        dtype: of the states.
        device: where they lie.
        max_count: tokens of a message, of those that are kept.
    """

    def __init__(self, num_parts: int, dim: int, dtype: torch.dtype, device: torch.device, max_count: int = 1) -> None:
        self._make = lambda count: Message((num_parts, count, dim), dtype, device)
        self._pools = [(self._make(count), self._make(count)) for count in range(1, max_count + 1)]
        self._turn = 0
        self.last = self._pools[0][0]

    def next(self, count: int = 1) -> Message:
        """The next message to fill or to receive; one for a whole prompt is made for the occasion."""
        self._turn ^= 1
        self.last = self._pools[count - 1][self._turn] if count <= len(self._pools) else self._make(count)
        return self.last


class Rank(ABC):
    """What all ranks have in common: the request that they are at, and the record.

    Args:
        transport: to the other ranks.
        num_stages: `n`; stage `j` is rank `j - 1`, the drafter rank `n`.
    """

    def __init__(self, transport: Transport, num_stages: int) -> None:
        self.transport = transport
        self.num_stages = num_stages
        self.is_lead = transport.rank == LEAD
        self.is_leaving = False
        self.request = 0
        self.scores: TokenScores | None = None
        """On the lead: takes the scores of committed tokens, where the request wants them."""
        self.laws: LawSlots | None = None
        self.posted = transport.post(())

    def begin(self, request: Request) -> None:
        """Readies the rank for a request."""
        self.request = request.number
        self.is_leaving = False
        self.transport.expect_scores(request.num_top)
        self.settle()

    def settle(self) -> None:
        """Waits for the transfers of the last cycle."""
        self.posted.wait()

    def _announce(self, what: str) -> None:
        self.transport.liveness.activity = f"{what} of request {self.request}"

    def _exchange(self, mine: CycleRecord, position: int | None) -> list[CycleRecord]:
        """All ranks' records, in which the token of a position is committed, or none."""
        records = self.transport.exchange(mine)
        for rank, record in enumerate(records):
            if record.state != mine.state:
                raise AssertionError(
                    f"ranks are out of step: (request, epoch, cycle, newest) is {record.state} on rank {rank}, "
                    f"{mine.state} here"
                )
        if records[LEAD].abandoned:
            raise Abandoned
        if self.scores is not None and (score := records[self.num_stages - 1].score) is not None:
            assert position is not None
            self.scores.by_position[position] = score
        return records

    def _end_cycle(self, plan: CyclePlan, draft: int = -1, verdict: Verdict | None = None) -> CycleOutcome:
        records = self._exchange(self._record(plan, verdict, draft=draft), plan.judged)
        return CycleOutcome(records[self.num_stages].draft, records[self.num_stages - 1].to_verdict())

    def _end_tree_cycle(
        self, plan: CyclePlan, candidates: tuple[Draft, ...] = (), verdict: Verdict | None = None
    ) -> CycleOutcome:
        records = self._exchange(self._record(plan, verdict, candidates=candidates), plan.judged)
        return CycleOutcome(records[self.num_stages].candidates, records[self.num_stages - 1].to_verdict())

    def _record(self, plan: CyclePlan, verdict: Verdict | None, **drafted: Any) -> CycleRecord:
        fields = (-1, -1) if verdict is None else (int(verdict.accepted), verdict.token)
        return CycleRecord(
            self.request, plan.epoch, plan.cycle, plan.newest,
            verdict=fields[0], token=fields[1], abandoned=int(self.is_leaving), score=self._score(plan.judged), **drafted,
        )  # fmt: skip

    def _end_block(self, newest: int, token: int | None = None) -> int:
        """Closes a prefill or a step of plain decoding; the token behind `newest`."""
        fields = (-1, -1) if token is None else (DRAWN, token)
        mine = CycleRecord(
            self.request, 0, -1, newest, -1, *fields, int(self.is_leaving), score=self._score(newest + 1)
        )
        return self._exchange(mine, newest + 1)[self.num_stages - 1].token

    def _score(self, position: int | None) -> TokenScore | None:
        """This rank's score of the token that is committed at a position: the verifier's, if scores are wanted."""
        return None

    def abandon_plain(self, token: int, position: int) -> None:
        """On the lead: lets all ranks run one more token of plain decoding, and tells them that it was the last."""
        self.is_leaving = True
        with suppress(Abandoned):
            self.forward([token], position)

    def abandon(self, schedule: Schedule) -> None:
        """On the lead: lets all ranks run one more cycle, and tells them in its record that it was the last."""
        self.is_leaving = True
        with suppress(Abandoned):
            self.cycle(schedule)

    @abstractmethod
    def prefill(self, prompt: Sequence[int]) -> int:
        """This rank's part of taking a prompt in; the token behind it."""

    def cycle(self, schedule: Any) -> CycleOutcome:
        """This rank's part of a cycle."""
        plan = schedule.plan()
        self._announce(f"cycle {plan.cycle}")
        with self.transport.timer.cycle(plan):
            self.settle()
            return self._run_cycle(plan, schedule)

    @abstractmethod
    def _run_cycle(self, plan: Any, schedule: Any) -> CycleOutcome:
        """What the plan implies for this rank, and the exchange of records."""

    @abstractmethod
    def rollback(self, rollback: Any) -> None:
        """Undoes what a verdict made void."""

    @abstractmethod
    def forward(self, tokens: Sequence[int], position: int) -> int:
        """This rank's part of plain decoding: a prompt or one more token; the token behind it."""


def law_slots(request: Request, num_stages: int, vocab_size: int, device: torch.device) -> LawSlots | None:
    """Where drafts and their laws travel; none where the token in the record is all that the verifier needs.

    With one stage the verifier needs the draft before the cycle's record, which would bring it too late.
    """
    if request.method == "plain":
        return None
    if num_entries := law_entries(request.params, vocab_size):
        return LawSlots(num_stages + 1, num_entries, vocab_size, device)
    return LawSlots(num_stages + 1, 0, vocab_size, device) if num_stages == 1 else None


def level_laws(params: SamplingParams, vocab_size: int, device: torch.device) -> LevelLaws | None:
    """Messages for the draft laws of a tree's levels; none where the verifier needs none."""
    num_entries = law_entries(params, vocab_size)
    return LevelLaws(num_entries, vocab_size, device) if num_entries else None


def law_entries(params: SamplingParams, vocab_size: int) -> int:
    """Non-zero entries at most of the draft laws that the verifier needs; 0 where it needs none."""
    if params.is_greedy or params.verify == "coupled":
        return 0
    return min(params.top_k, vocab_size) if params.top_k else vocab_size
