"""The decode algorithm without tensors: any drafter gives the oracle's tokens, in bounded cycles."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spd_lightning.inference.schedule import PipelineSchedule, Rollback, Verdict

VOCAB = 50


def oracle(position: int, before: int) -> int:
    """A target whose next token depends on position and predecessor, so that a stale token shows."""
    return (position * 31 + before * 17 + 7) % VOCAB


class Stage:
    """Sees positions one by one; a rollback cuts what it has seen."""

    def __init__(self, prompt: list[int]) -> None:
        self.seen = list(prompt)

    def run(self, position: int, token: int) -> None:
        assert position == len(self.seen), "each position in order, once per epoch"
        self.seen.append(token)


@given(
    num_stages=st.integers(1, 16),
    prompt_length=st.integers(1, 19),
    accuracy=st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0]),
    max_new_tokens=st.integers(1, 40),
    eos_at=st.integers(1, 60),
    seed=st.integers(0, 10**6),
)
def test_any_drafter_gives_the_oracles_tokens(
    num_stages, prompt_length, accuracy, max_new_tokens, eos_at, seed
) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(VOCAB) for _ in range(prompt_length)]
    expected = list(prompt)
    for _ in range(min(max_new_tokens, eos_at)):
        expected.append(oracle(len(expected), expected[-1]))
    wanted = len(expected)
    schedule = PipelineSchedule(num_stages, prompt, expected[prompt_length])
    stages = [Stage(prompt) for _ in range(num_stages)]
    flushes_not_last = 0
    while schedule.num_verified < wanted:
        assert schedule.num_cycles < num_stages * (max_new_tokens + 1)
        plan = schedule.plan()
        for number, stage in enumerate(stages, start=1):
            if (position := plan.position_at(number)) is not None:
                stage.run(position, schedule.tokens[position])
        newest = schedule.tokens[plan.newest]
        right = oracle(plan.drafted, newest)
        draft = right if rng.random() < accuracy else (right + 1 + rng.randrange(VOCAB - 1)) % VOCAB
        verdict = None
        if plan.judged is not None:
            left = plan.position_at(num_stages)
            assert left is not None and plan.judged == left + 1
            truth = oracle(plan.judged, schedule.tokens[left])
            judged = draft if num_stages == 1 else schedule.tokens[plan.judged]
            verdict = Verdict(judged == truth, truth)
        undo = schedule.advance(draft, verdict)
        if undo is not None:
            assert undo == Rollback(schedule.num_verified - 1) and schedule.fill == 1
            assert all(
                stage.seen[: undo.length] == schedule.tokens[: len(stage.seen)][: undo.length] for stage in stages
            )
            for stage in stages:
                del stage.seen[undo.length :]
            flushes_not_last += schedule.num_verified < wanted
    assert schedule.verified == expected
    assert schedule.num_verified - prompt_length - 1 == schedule.num_judged
    rejections = schedule.num_judged - schedule.num_accepted
    assert rejections == schedule.num_flushes
    committed = schedule.num_judged
    # design §5: K = N + (n-1) * (prompts with N > 0 + rejections that are not a prompt's last token)
    assert schedule.num_cycles == committed + (num_stages - 1) * ((committed > 0) + flushes_not_last)


def test_the_worked_table_of_the_design() -> None:
    """n = 4, prompt 0..9; draft 12 is rejected in cycle 5."""
    schedule = PipelineSchedule(4, list(range(10)), 100)

    def state() -> list[tuple[int, int]]:
        plan = schedule.plan()
        return [(plan.newest - depth, depth) for depth in range(plan.fill - 1, -1, -1)]

    def stages_run() -> list[int]:
        return [stage for stage in range(1, 5) if schedule.plan().position_at(stage) is not None]

    for number, flight in enumerate([[(10, 0)], [(10, 1), (11, 0)], [(10, 2), (11, 1), (12, 0)]], start=1):
        assert state() == flight and stages_run() == list(range(1, number + 1))
        assert schedule.plan().judged is None
        assert schedule.advance(100 + number, None) is None
    assert state() == [(10, 3), (11, 2), (12, 1), (13, 0)] and stages_run() == [1, 2, 3, 4]
    assert schedule.plan().position_at(4) == 10 and schedule.plan().judged == 11
    assert schedule.advance(104, Verdict(True, 101)) is None
    assert state() == [(11, 3), (12, 2), (13, 1), (14, 0)]
    assert schedule.plan().position_at(4) == 11 and schedule.plan().judged == 12
    assert schedule.advance(105, Verdict(False, 7)) == Rollback(12)
    assert state() == [(12, 0)] and stages_run() == [1]
    assert schedule.tokens == [*range(10), 100, 101, 7] and schedule.plan().epoch == 1
    assert (schedule.num_cycles, schedule.num_judged, schedule.num_accepted) == (5, 2, 1)


def test_wrong_use_is_caught() -> None:
    with pytest.raises(ValueError, match="num_stages=0"):
        PipelineSchedule(0, [1], 2)
    with pytest.raises(ValueError, match="prompt is empty"):
        PipelineSchedule(2, [], 2)
    with pytest.raises(AssertionError, match="a verdict exactly when one is due"):
        PipelineSchedule(2, [1], 2).advance(3, Verdict(True, 3))
    schedule = PipelineSchedule(1, [1], 2)
    with pytest.raises(AssertionError, match="accepted draft is what is committed"):
        schedule.advance(3, Verdict(True, 4))
