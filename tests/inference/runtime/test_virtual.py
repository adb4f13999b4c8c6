"""The virtual clock against cycles worked out by hand."""

from pathlib import Path
from typing import Any

import pytest

from spd_lightning.inference.decoder import PipelineDecoder
from spd_lightning.inference.runtime.virtual import Link, MessageSizes, VirtualClock
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.schedule import CyclePlan
from spd_lightning.inference.timing import PDM, VERIFY, CycleTimes
from spd_lightning.inference.tree.schedule import TreeShape
from tests.inference.folders import save_folders

LINK = Link(latency=0.5, bytes_per_second=100.0, record=0.25)


def clock(num_stages: int, drafts_first: bool, anchors: tuple[int, ...]) -> VirtualClock:
    return VirtualClock(num_stages, drafts_first, MessageSizes(hidden=100, anchors=anchors), LINK)


@pytest.mark.parametrize(
    ("times", "pre_step", "post_step"),
    [
        # Stage 2 ends at 4 and judges for 1; stage 1's state is there at 2 + 1.5, stage 2's anchor message, 25 bytes, at
        # 4 + 0.75. The drafter ends at 3, or 4.75 + 3.
        (CycleTimes(2, spans={PDM: 3.0, "stage 1": 2.0, "stage 2": 4.0, VERIFY: 1.0}), 5.25, 8.0),
        # A slow drafter.
        (CycleTimes(2, spans={PDM: 9.0, "stage 1": 2.0, "stage 2": 4.0, VERIFY: 1.0}), 9.25, 14.0),
        # Filling: only stage 1 runs. Its anchor message, 200 bytes, takes 2.5, the state for stage 2 takes 1.5.
        (CycleTimes(1, spans={PDM: 3.0, "stage 1": 2.0}), 4.75, 7.75),
    ],
)
def test_ranks_run_side_by_side(times: CycleTimes, pre_step: float, post_step: float) -> None:
    anchors = (200, 0) if times.fill == 1 else (100, 25)
    assert clock(2, True, anchors).cycle_seconds(times) == pre_step
    assert clock(2, False, anchors).cycle_seconds(times) == post_step


def test_post_step_drafting_waits_only_for_stages_that_send_something() -> None:
    """PPSD: stage 1 is there at 1 + 1.5, the drafter ends at 2.5 + 2; stage 2 ends at 5 and judges for 0.5."""
    times = CycleTimes(2, spans={PDM: 2.0, "stage 1": 1.0, "stage 2": 5.0, VERIFY: 0.5})
    assert clock(2, False, (100, 0)).cycle_seconds(times) == 5.5 + 0.25


def test_with_one_stage_the_verifier_waits_for_the_draft() -> None:
    times = CycleTimes(1, spans={PDM: 3.0, "stage 1": 2.0, VERIFY: 1.0})
    for drafts_first, begun in ((True, 0.0), (False, 2.0 + 1.5)):
        virtual = clock(1, drafts_first, (100,))
        virtual.law_bytes = 50
        assert virtual.cycle_seconds(times) == begun + 3.0 + (0.5 + 0.5) + 1.0 + 0.25


def test_the_law_of_a_draft_travels_within_the_cycle() -> None:
    times = CycleTimes(2, spans={PDM: 3.0, "stage 1": 2.0, "stage 2": 4.0, VERIFY: 1.0})
    virtual = clock(2, True, (100, 0))
    virtual.law_bytes = 200
    assert virtual.cycle_seconds(times) == 3.0 + 2.5 + 0.25


def test_the_clock_sums_what_cycles_took() -> None:
    virtual, now = clock(2, True, (0, 0)), iter([0.0, 0.0, 3.0, 3.0, 5.0, 5.0])
    virtual.now = lambda: next(now)
    with virtual.cycle(CyclePlan(0, 0, fill=1, newest=5, num_stages=2)):
        with virtual.span(PDM):
            pass
        with virtual.span("stage 1"):
            pass
    assert virtual.cycles[0].spans == {PDM: 3.0, "stage 1": 2.0}
    assert virtual.seconds == virtual.cycles[0].seconds == 2.0 + 1.5 + 0.25


@pytest.mark.parametrize("link", [{"latency": -1.0}, {"record": -1.0}, {"bytes_per_second": 0.0}])
def test_a_link_that_cannot_be_is_refused(link: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"link {next(iter(link))}="):
        Link(**link)


def test_messages_of_a_level_grow_with_its_nodes() -> None:
    """Stage 1 sends 3 states, 32 + 3 * 68 bytes, which are there at 2 + 0.5 + 2.36; laws of 400 bytes each from 1 on."""
    virtual = clock(2, True, (0, 0))
    times = CycleTimes(2, spans={PDM: 1.0, "stage 1": 2.0})
    assert virtual.cycle_seconds(times, {1: 3, 2: 0}) == pytest.approx(4.86 + 0.25)
    assert virtual.cycle_seconds(times, {1: 1, 2: 0}) == 3.5 + 0.25
    virtual.law_bytes = 432
    assert virtual.cycle_seconds(times, {1: 1}, num_leaves=2) == pytest.approx(1.0 + 0.5 + 8.32 + 0.25)
    assert virtual.cycle_seconds(times, {1: 1}, num_leaves=1) == pytest.approx(1.0 + 0.5 + 4.32 + 0.25)


def test_only_laws_that_the_verifier_needs_are_on_the_clock(tmp_path: Path) -> None:
    """A chain's message brings the drafted token as well; a tree's brings a law a leaf, and the record the tokens."""
    drafter, _ = save_folders(tmp_path)
    decoder = PipelineDecoder.from_pretrained(drafter, runtime="virtual", max_length=64, shape=TreeShape(2, 2))
    runtime: Any = decoder.runtime
    sampled = SamplingParams(2, temperature=1.0, top_k=3, seed=0)
    wider = SamplingParams(2, temperature=1.0, top_k=4, seed=0)
    sizes = {}
    for name, start in (
        ("chain", decoder.start_chain),
        ("tree", decoder.start),
        ("plain", decoder.start_autoregressive),
    ):
        for params in (SamplingParams(2), sampled, wider):
            list(start([65, 66], params).tokens())
            sizes.setdefault(name, []).append(runtime.virtual.law_bytes)
    assert [chain[0] for chain in sizes.values()] == [0, 0, 0] and sizes["plain"] == [0, 0, 0]
    assert 0 < sizes["chain"][1] < sizes["chain"][2] and 0 < sizes["tree"][1] < sizes["tree"][2]
    assert sizes["chain"][1] > sizes["tree"][1]
