"""Cycle profiles: their arithmetic, and the command on a tiny target."""

import json
from pathlib import Path

import pytest

from spd_lightning.inference.cli import main
from spd_lightning.inference.profile import profile_by_fill, to_table
from spd_lightning.inference.schedule import CyclePlan
from spd_lightning.inference.timing import (
    COMMUNICATION,
    NO_TIMER,
    PDM,
    SYNCHRONISATION,
    VERIFY,
    CycleTimer,
    CycleTimes,
)
from tests.inference.folders import save_folders


def plan(fill: int) -> CyclePlan:
    return CyclePlan(0, 0, fill=fill, newest=9, num_stages=2)


def test_a_timer_sums_spans_of_one_name_and_ignores_those_outside_of_cycles() -> None:
    timer, now = CycleTimer(), iter([0.0, 1.0, 2.0, 5.0, 7.0, 10.0])
    timer.now = lambda: next(now)
    with timer.span("prefill"):
        pass
    with timer.cycle(plan(2)):
        with timer.span("stage 1"):
            pass
        with timer.span("stage 1"):
            pass
    assert timer.cycles == [CycleTimes(2, 10.0, {"stage 1": 3.0})]
    with NO_TIMER.cycle(plan(1)), NO_TIMER.span(PDM):
        pass


def test_a_cycle_that_was_not_ended_leaves_no_trace() -> None:
    timer = CycleTimer()
    with pytest.raises(KeyboardInterrupt), timer.cycle(plan(1)):
        raise KeyboardInterrupt
    with timer.span(PDM):
        pass
    assert timer.cycles == []


def test_one_process_has_a_rest_and_means_are_by_fill() -> None:
    times = [
        CycleTimes(1, 0.010, {PDM: 0.002, "stage 1": 0.006}),
        CycleTimes(2, 0.020, {PDM: 0.004, "stage 1": 0.006, "stage 2": 0.008, VERIFY: 0.001}),
        CycleTimes(1, 0.012, {PDM: 0.004, "stage 1": 0.006}),
    ]
    first, second = profile_by_fill([times], has_rest=True)
    assert (first.fill, first.num_cycles) == (1, 2) and (second.fill, second.num_cycles) == (2, 1)
    assert first.cycle_ms == pytest.approx(11) and first.parts_ms == pytest.approx({"PDM": 3, "stage 1": 6, "rest": 2})
    assert list(second.parts_ms) == ["PDM", "stage 1", "stage 2", "verification", "rest"]
    assert second.slowest_ms == pytest.approx(8) and second.slack_ms == pytest.approx(4)
    header, *rows = to_table([first, second]).splitlines()
    assert header.split() == [
        "fill",
        "cycles",
        "cycle",
        "PDM",
        "stage",
        "1",
        "stage",
        "2",
        "verification",
        "rest",
        "slack",
    ]
    assert rows[0].split() == ["1", "2", "11.00", "3.00", "6.00", "-", "-", "2.00", "3.00"]


def test_ranks_are_joined_and_what_all_have_is_a_mean_over_them() -> None:
    lead = [CycleTimes(2, 0.010, {"stage 1": 0.006, COMMUNICATION: 0.001, SYNCHRONISATION: 0.003})]
    last = [CycleTimes(2, 0.011, {"stage 2": 0.007, VERIFY: 0.002, COMMUNICATION: 0.003, SYNCHRONISATION: 0.001})]
    drafter = [CycleTimes(2, 0.010, {PDM: 0.004, COMMUNICATION: 0.005, SYNCHRONISATION: 0.002})]
    [profile] = profile_by_fill([lead, last, drafter], has_rest=False)
    assert profile.cycle_ms == pytest.approx(10)
    assert profile.parts_ms == pytest.approx(
        {"PDM": 4, "stage 1": 6, "stage 2": 7, "verification": 2, COMMUNICATION: 3, SYNCHRONISATION: 2}
    )


@pytest.mark.parametrize("runtime", ["local", "virtual"])
def test_the_command_shows_a_table_and_writes_a_page(runtime: str, tmp_path: Path, capsys) -> None:
    drafter, _ = save_folders(tmp_path, num_stages=2)
    main(
        ["profile", "--drafter", drafter, "--prompt", "Hello", "--max_new_tokens", "16", "--max_length", "64"]
        + ["--runtime", runtime, "--out", str(tmp_path / "out")]
    )
    assert "slack" in capsys.readouterr().out
    profile = json.loads((tmp_path / "out" / "profile.json").read_text())
    assert [level["fill"] for level in profile["fills"]] == [1, 2]
    for level in profile["fills"]:
        parts = level["parts_ms"]
        assert all(value > 0 for name, value in parts.items() if name != "rest")
        if runtime == "local":
            assert sum(parts.values()) == pytest.approx(level["cycle_ms"])
        else:
            longest = max(parts["PDM"], *(parts[name] for name in parts if name.startswith("stage ")))
            assert longest < level["cycle_ms"] < sum(parts.values()) + 1
    page = (tmp_path / "out" / "profile.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and "Cycle profile" in page
