"""Records, stamped messages and draft laws come out as they went in, at addresses that do not change."""

import dataclasses
import math
import random

import pytest
import torch

from spd_lightning.inference.runtime.rank import law_slots
from spd_lightning.inference.runtime.wire import (
    DRAWN,
    RECORD_FIELDS,
    CycleRecord,
    LawSlots,
    LevelLaws,
    Message,
    Request,
    Stamp,
    record_fields,
)
from spd_lightning.inference.sampling import SamplingParams, warp
from spd_lightning.inference.schedule import PipelineSchedule, Verdict
from spd_lightning.inference.token_scores import TokenScore
from spd_lightning.inference.tree.schedule import Draft
from spd_lightning.inference.verify import DraftProposal

CPU = torch.device("cpu")
RECORD = CycleRecord(request=2, epoch=3, cycle=5, newest=7, draft=11, verdict=1, token=13, abandoned=1)


def test_a_record_comes_out_of_its_row_as_it_went_in() -> None:
    rows = torch.zeros(2, record_fields(0), dtype=torch.int64)
    empty = CycleRecord(2**62 + 1, 0, -1, 2**53 + 1)
    RECORD.write(rows[0])
    empty.write(rows[1])
    assert rows[0].tolist() == [2, 3, 5, 7, 11, 1, 13, 1, 0, 0]
    assert [CycleRecord.read(row) for row in rows.tolist()] == [RECORD, empty]
    assert (empty.draft, empty.verdict, empty.token, empty.abandoned) == (-1, -1, -1, 0)


def test_a_record_carries_the_candidates_of_a_level_and_a_score_bit_for_bit() -> None:
    drafts = (Draft(7, 2**40, -0.1), Draft(8, 3, -math.pi), Draft(9, 3, -1e300))
    bare, whole = TokenScore(13, -0.1, ()), TokenScore(13, -math.inf, ((2**40, -1 / 3), (0, -1e-300)))
    for width, candidates, num_top, score in (
        (3, drafts, None, None), (5, drafts, 2, None), (3, drafts[:1], 2, whole), (2, (), 0, bare), (0, (), 4, whole),
    ):  # fmt: skip
        record = dataclasses.replace(RECORD, draft=-1, candidates=candidates, score=score)
        row = torch.full((record_fields(width, num_top),), 99)
        record.write(row)
        assert CycleRecord.read(row.tolist()) == record
        assert row.tolist().count(99) == 0, "every field is written"


def test_laws_of_a_level_come_out_as_they_went_in() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 50, generator=generator)
    found = [warp(row, 0.7, top_k, 0.9) for row, top_k in zip(logits, (20, 5, 1), strict=True)]
    laws, arrived = LevelLaws(20, 50, CPU), LevelLaws(20, 50, CPU)
    arrived.of(3).data.copy_(laws.write(found, Stamp(1, 2, 3)).data)
    assert all(torch.equal(a, b) for a, b in zip(arrived.read(3, Stamp(1, 2, 3)), found, strict=True))
    with pytest.raises(RuntimeError, match="came in place of"):
        arrived.read(3, Stamp(1, 2, 4))


@pytest.mark.parametrize("field", RECORD_FIELDS)
def test_ranks_must_agree_on_request_epoch_cycle_and_newest_and_on_nothing_else(field: str) -> None:
    other = dataclasses.replace(RECORD, **{field: 99})
    assert (other.state == RECORD.state) == (field not in ("request", "epoch", "cycle", "newest"))


def test_only_a_judgement_is_a_verdict() -> None:
    accepted, rejected = CycleRecord(1, 0, 4, 9, -1, 1, 65), CycleRecord(1, 0, 4, 9, -1, 0, 66)
    assert accepted.to_verdict() == Verdict(True, 65)
    assert rejected.to_verdict() == Verdict(False, 66)
    assert CycleRecord(1, 0, -1, 9, -1, DRAWN, 67).to_verdict() is None
    assert CycleRecord(1, 0, 0, 9, 65).to_verdict() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("shape", [(1, 1, 3), (2, 1, 8), (3, 5, 7)])
def test_a_message_holds_its_parts_bit_for_bit_behind_an_aligned_header(
    dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    message, stamp = Message(shape, dtype, CPU), Stamp(2**40, 3, 17)
    parts = torch.randn(shape[0], 1, *shape[1:], generator=torch.Generator().manual_seed(0)).mul(100).to(dtype)
    message.fill(stamp, *parts)
    size = parts.numel() * dtype.itemsize
    assert message.data.dtype == torch.uint8
    assert message.data.shape == (Message.HEADER_BYTES + size,)
    # The bytes are all that travels.
    arrived = Message(shape, dtype, CPU)
    arrived.data.copy_(message.data)
    payload = arrived.open(stamp)
    assert payload.dtype == dtype and payload.shape == shape
    assert payload.data_ptr() % 16 == 0
    assert payload.data_ptr() == arrived.data.data_ptr() + Message.HEADER_BYTES
    assert bytes(payload.view(torch.uint8).flatten().tolist()) == bytes(parts.view(torch.uint8).flatten().tolist())


def test_a_message_takes_exactly_as_many_parts_as_it_has() -> None:
    message = Message((2, 1, 3), torch.float32, CPU)
    for count in (1, 3):
        with pytest.raises(ValueError):
            message.fill(Stamp(1, 0, 0), *torch.zeros(count, 1, 1, 3))


@pytest.mark.parametrize("field", ["request", "epoch", "position"])
def test_a_message_of_another_request_epoch_or_position_is_refused(field: str) -> None:
    message, stamp = Message((1, 1, 3), torch.float32, CPU), Stamp(4, 5, 6)
    message.fill(stamp, torch.ones(1, 1, 3))
    with pytest.raises(RuntimeError) as raised:
        message.open(dataclasses.replace(stamp, **{field: 7}))
    assert "[4, 5, 6, 3]" in str(raised.value), "what came"
    assert "7" in str(raised.value).split("in place of")[1], "what was wanted"
    assert message.open(stamp).tolist() == [[[1.0] * 3]]


def test_a_message_shorter_than_its_buffer_is_refused() -> None:
    """Gloo lets it pass and leaves the end of the buffer as it was."""
    short, long = Message((1, 1, 3), torch.float32, CPU), Message((1, 2, 3), torch.float32, CPU)
    short.fill(Stamp(1, 0, 0), torch.ones(1, 3))
    long.data[: len(short.data)] = short.data
    with pytest.raises(RuntimeError, match="in place of"):
        long.open(Stamp(1, 0, 0))


def test_an_unwritten_message_is_no_message() -> None:
    with pytest.raises(RuntimeError):
        Message((1, 1, 3), torch.float32, CPU).open(Stamp(1, 0, 0))


def test_messages_stay_at_their_addresses() -> None:
    message, slots = Message((2, 1, 4), torch.bfloat16, CPU), LawSlots(3, 5, 9, CPU)
    addresses = [message.data.data_ptr()] + [slot.data.data_ptr() for slot in slots.messages]
    assert len(set(addresses)) == 4
    for cycle in range(8):
        stamp = Stamp(1, 0, cycle)
        message.fill(stamp, *torch.full((2, 1, 4), float(cycle), dtype=torch.bfloat16))
        assert message.open(stamp).data_ptr() == addresses[0] + Message.HEADER_BYTES
        written = slots.write(DraftProposal(cycle, torch.full((9,), 0.2).double() * (torch.arange(9) < 5)), stamp)
        assert written.data.data_ptr() == addresses[1 + cycle % 3]
    assert [message.data.data_ptr()] + [slot.data.data_ptr() for slot in slots.messages] == addresses


def send(sender: LawSlots, receiver: LawSlots, proposal: DraftProposal, stamp: Stamp) -> DraftProposal:
    message = sender.write(proposal, stamp)
    receiver.at(stamp.position).data.copy_(message.data)
    return receiver.read(stamp)


@pytest.mark.parametrize("vocab_size", [1, 7, 300])
@pytest.mark.parametrize("top_k", [1, 5, 0])
def test_a_law_comes_out_bit_for_bit(vocab_size: int, top_k: int) -> None:
    num_entries = min(top_k, vocab_size) if top_k else vocab_size
    sender, receiver = LawSlots(2, num_entries, vocab_size, CPU), LawSlots(2, num_entries, vocab_size, CPU)
    generator = torch.Generator().manual_seed(vocab_size)
    for position in range(12):
        # A law that has many zeros, or none, after one that had more or fewer.
        probs = warp(torch.randn(vocab_size, generator=generator) * 4, 0.8, top_k, (0.6, 1.0)[position % 2])
        came = send(sender, receiver, DraftProposal(position, probs), Stamp(1, 0, position))
        assert came.token == position
        assert came.probs is not None and came.probs.dtype == torch.float64
        assert torch.equal(came.probs.view(torch.int64), probs.view(torch.int64))


def test_the_smallest_and_oddest_probabilities_come_out_bit_for_bit() -> None:
    probs = torch.tensor([0.0, 5e-324, 1 / 3, 0.0, 1.0, 2.0**-1074, 0.1 + 0.2], dtype=torch.float64)
    slots = LawSlots(1, 7, 7, CPU)
    came = send(slots, slots, DraftProposal(2**40, probs), Stamp(1, 0, 0))
    assert came.token == 2**40
    assert came.probs is not None
    assert torch.equal(came.probs.view(torch.int64), probs.view(torch.int64))


def test_without_entries_only_the_token_travels() -> None:
    slots = LawSlots(2, 0, 40, CPU)
    came = send(slots, LawSlots(2, 0, 40, CPU), DraftProposal(77), Stamp(1, 2, 3))
    assert (came.token, came.probs) == (77, None)
    with pytest.raises(RuntimeError):
        slots.read(Stamp(1, 2, 5))


@pytest.mark.parametrize("num_stages", [1, 2, 5, 16])
@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
def test_laws_of_open_positions_do_not_overwrite_each_other(num_stages: int, accuracy: float) -> None:
    """Every judged position finds the draft that was made for it, however many laws have been written since."""
    params = SamplingParams(temperature=1.0, top_k=2, seed=1)
    slots = law_slots(Request(1, "pipelined", (65,), params), num_stages, 3, CPU)
    assert slots is not None
    schedule, chance, judged = PipelineSchedule(num_stages, [65], 1), random.Random(num_stages), 0
    while judged < 60:
        plan = schedule.plan()
        draft = 1000 * plan.epoch + plan.drafted
        law = torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64)
        slots.write(DraftProposal(draft, law), Stamp(1, plan.epoch, plan.drafted))
        verdict = None
        if plan.judged is not None:
            token = slots.read(Stamp(1, plan.epoch, plan.judged)).token
            assert token == (draft if plan.judged == plan.drafted else schedule.tokens[plan.judged])
            accepted = chance.random() < accuracy
            verdict, judged = Verdict(accepted, token if accepted else 7), judged + 1
        schedule.advance(draft, verdict)


def test_laws_travel_where_the_verifier_needs_them() -> None:
    """One stage: a draft is judged in its own cycle, before the record could bring it."""
    greedy, coupled = SamplingParams(), SamplingParams(temperature=1.0, verify="coupled")
    rejection, truncated = SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=7)

    def num_entries(params: SamplingParams, num_stages: int) -> int | None:
        slots = law_slots(Request(1, "pipelined", (65,), params), num_stages, 40, CPU)
        return None if slots is None else (slots.messages[0].payload.numel() - 1) // 2

    assert [num_entries(params, 3) for params in (greedy, coupled, rejection, truncated)] == [None, None, 40, 7]
    assert [num_entries(params, 1) for params in (greedy, coupled, rejection, truncated)] == [0, 0, 40, 7]
    assert num_entries(SamplingParams(temperature=1.0, top_k=50), 3) == 40
    assert law_slots(Request(1, "plain", (65,), rejection), 1, 40, CPU) is None


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(7, 0.1 + 0.2, 30, 0.95, 2**63 - 1, "coupled", ("\n\n", 'é"\\\ud83d'), ignore_eos=True),
        SamplingParams(temperature=1e-300, seed=2**53 + 1, stop=("a",)),
    ],
    ids=["greedy", "everything", "a seed that no float holds"],
)
def test_a_request_survives_json(params: SamplingParams) -> None:
    request = Request(3, "plain", (0, 5, 2**31), params, num_top=4)
    came = Request.from_json(request.to_json().encode())
    assert came == request
    assert isinstance(came.prompt, tuple) and isinstance(came.params.stop, tuple)
    assert isinstance(came.params.seed, int | None)
