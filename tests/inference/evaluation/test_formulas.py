"""The formulas of design §§4, 5 and 9 against cases worked out by hand and against the schedule itself."""

import random

import pytest

from spd_lightning.inference.evaluation.formulas import (
    adjusted_speedup,
    cycle_deviation,
    implied_by_counts,
    implied_by_rates,
    predicted_acceptance,
    wilson_interval,
)
from spd_lightning.inference.sampling import SamplingParams
from tests.inference.evaluation.synthetic import drafted


def deviation(verdicts: list[bool], num_stages: int, extra: int = 0) -> int:
    made = drafted(verdicts, num_stages)
    return cycle_deviation(num_stages, made.num_committed, made.num_cycles + extra, verdicts)


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
def test_the_schedule_keeps_the_identity(num_stages: int) -> None:
    draw = random.Random(num_stages)
    for length in range(30):
        assert deviation([draw.random() < 0.6 for _ in range(length)], num_stages) == 0


def test_the_identity_by_hand() -> None:
    # The table of design §5: five cycles, two tokens; the second is rejected and nothing follows.
    assert cycle_deviation(4, num_committed=2, num_cycles=5, verdicts=[True, False]) == 0
    # One more token costs a refill of four cycles.
    assert cycle_deviation(4, num_committed=3, num_cycles=9, verdicts=[True, False, True]) == 0
    # End-of-sequence at once: nothing happened.
    assert cycle_deviation(4, num_committed=0, num_cycles=0, verdicts=[]) == 0
    assert cycle_deviation(4, num_committed=1, num_cycles=4, verdicts=[False]) == 0


def test_a_miss_of_the_identity_is_counted_in_cycles() -> None:
    assert deviation([True, False, True], 4, extra=2) == 2
    assert deviation([True, False, True], 4, extra=-1) == -1
    assert cycle_deviation(4, num_committed=0, num_cycles=3, verdicts=[]) == 3


def test_adjusted_speedup_of_each_method() -> None:
    common = dict(s0=3.0, num_layers=32)
    assert adjusted_speedup(**common, method="spd", num_spec_layers=3, schedule="pre_step", num_stages=8) == 3.0
    post = adjusted_speedup(**common, method="spd_post", num_spec_layers=2, schedule="post_step", num_stages=8)
    assert post == pytest.approx(3 * 32 / (8 * 2 + 32))
    ppsd = adjusted_speedup(**common, method="ppsd", num_spec_layers=1, schedule="post_step", num_stages=16)
    assert ppsd == pytest.approx(3 * 32 / (16 + 32))
    eagle = adjusted_speedup(**common, method="eagle3", num_spec_layers=1, draft_length=7)
    assert eagle == pytest.approx(3 * 32 / (7 + 32))


@pytest.mark.parametrize(
    "lacking",
    [
        dict(method="medusa", num_spec_layers=1, num_stages=4, draft_length=4),
        dict(method="ppsd", num_spec_layers=1, schedule="post_step"),
        dict(method="spd", num_spec_layers=1, num_stages=4),
        dict(method="spd", num_spec_layers=1, schedule="post_step"),
        dict(method="spd", num_spec_layers=None, schedule="pre_step", num_stages=4),
        dict(method="eagle3", num_spec_layers=1, num_stages=4),
    ],
)
def test_a_method_whose_cost_is_not_known_is_refused(lacking: dict) -> None:
    with pytest.raises(ValueError, match="cost of drafting is not known"):
        adjusted_speedup(s0=2.0, num_layers=32, **lacking)


def test_implied_figures_of_constant_acceptance() -> None:
    implied = implied_by_rates([0.8] * 4)
    assert implied["p"] == pytest.approx(0.8)
    assert implied["alpha"] == pytest.approx(1 / (1 + 0.2 * 3)) and implied["s0"] == pytest.approx(4 / 1.6)


def test_implied_figures_need_the_fill_levels_that_matter() -> None:
    assert implied_by_counts({1: (3, 4), 2: (1, 2)}, 2) == implied_by_rates([0.75, 0.5])
    assert implied_by_counts({1: (3, 4)}, 2) is None
    assert implied_by_counts({}, 1) is None
    # Every draft fails: no other fill level is ever reached, and a token takes n cycles.
    assert implied_by_counts({1: (0, 9)}, 4) == {"p": 0.0, "alpha": 0.25, "s0": 1.0}
    # Nothing ever fails.
    assert implied_by_counts({1: (1, 1), 2: (9, 9)}, 2) == {"p": 1.0, "alpha": 1.0, "s0": 2.0}


def test_implied_figures_meet_those_of_a_long_decode() -> None:
    draw = random.Random(1)
    rates = [0.5, 0.6, 0.7, 0.8]
    # The fill of a draft follows from the verdicts before it: drawn here, checked against the schedule's below.
    verdicts, fills = [], []
    for _ in range(4000):
        fills.append(1 if not verdicts or not verdicts[-1] else min(4, fills[-1] + 1))
        verdicts.append(draw.random() < rates[fills[-1] - 1])
    made = drafted(verdicts, 4)
    assert [fill for _, fill, _ in made.judgements] == fills
    implied, stats = implied_by_counts(made.stats.acceptance_by_fill(), 4), made.stats
    assert implied is not None and implied["alpha"] == pytest.approx(stats.alpha, rel=5e-3)
    assert implied["p"] == pytest.approx(stats.acceptance, rel=5e-3)
    assert implied["s0"] == pytest.approx(stats.speedup, rel=5e-3)


def test_predictions_are_those_of_the_law_that_is_decoded_with() -> None:
    laws = {"": (0.1, 0.2), "_t1": (0.3, 0.4), "_t1_top50": (0.5, 0.6)}
    metrics = {f"val/p{law}_fill_{fill}": rate for law, rates in laws.items() for fill, rate in enumerate(rates, 1)}

    def by_fill(num_stages: int = 2, **law) -> list[float] | None:
        found = predicted_acceptance(metrics, num_stages, SamplingParams(**law))
        return None if found is None else found["by_fill"]

    assert by_fill() == [0.1, 0.2]
    assert by_fill(temperature=1.0) == [0.3, 0.4]
    assert by_fill(temperature=1.0, top_k=50) == [0.5, 0.6]
    assert by_fill(temperature=1.0, top_k=40) is None
    assert by_fill(temperature=1.0, top_p=0.9) is None
    assert by_fill(temperature=0.7) is None
    assert by_fill(temperature=1.0, verify="coupled") is None
    assert by_fill(num_stages=3) is None
    found = predicted_acceptance(metrics, 2, SamplingParams())
    assert found is not None and found == {"by_fill": [0.1, 0.2], **implied_by_rates([0.1, 0.2])}


def test_intervals_hold_the_rate_and_stay_within_bounds() -> None:
    low, high = wilson_interval(40, 100)
    assert (low, high) == pytest.approx((0.3094, 0.4980), abs=1e-4)  # R: prop.test(40, 100, correct=FALSE)
    for accepted in (0, 3):
        low, high = wilson_interval(accepted, 3)
        assert 0 <= low <= accepted / 3 <= high <= 1
