"""Splits of layers into stages: the balanced one against an exhaustive search, hand-worked cases, mistakes."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spd_lightning.modules.partition import balanced_stage_layers, check_stage_layers, even_stage_layers, stage_ends


def all_splits(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    cuts = combinations(range(1, num_layers), num_stages - 1)
    return [tuple(b - a for a, b in zip((0, *cut), (*cut, num_layers), strict=True)) for cut in cuts]


def slowest(layers: tuple[int, ...], costs: list[int], last_extra: int) -> int:
    ends = stage_ends(layers)
    stages = [sum(costs[a:b]) for a, b in zip(ends, ends[1:], strict=False)]
    stages[-1] += last_extra
    return max(stages)


@st.composite
def cases(draw) -> tuple[list[int], int, int]:
    costs = draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
    return costs, draw(st.integers(1, len(costs))), draw(st.integers(0, 30))


@settings(max_examples=400, deadline=None)
@given(cases())
def test_balanced_split_is_the_best_of_all_and_the_most_even_of_those(case):
    costs, num_stages, last_extra = case
    split = balanced_stage_layers(costs, num_stages, last_extra)

    def rank(layers: tuple[int, ...]):
        return slowest(layers, costs, last_extra), sum(count**2 for count in layers), tuple(-count for count in layers)

    assert split == min(all_splits(len(costs), num_stages), key=rank)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), st.data(), st.sampled_from([1, 3, 0.1, 1 / 3, 5.3e6]))
def test_equal_costs_without_a_head_give_the_even_split(num_layers, data, cost):
    num_stages = data.draw(st.integers(1, num_layers))
    assert balanced_stage_layers([cost] * num_layers, num_stages) == even_stage_layers(num_layers, num_stages)


@pytest.mark.parametrize(
    "num_stages, head, split",
    [
        (4, 0, (8, 8, 8, 8)),
        (4, 2, (9, 8, 8, 7)),  # 9 = 7 + 2
        (4, 4, (9, 9, 9, 5)),
        (8, 6, (5, 5, 5, 4, 4, 4, 4, 1)),  # the head and one layer cost 7; nothing else needs to be uneven
        (2, 100, (31, 1)),
        (1, 6, (32,)),
        (32, 6, (1,) * 32),
    ],
)
def test_a_head_takes_layers_from_the_last_stage(num_stages, head, split):
    assert balanced_stage_layers([1] * 32, num_stages, head) == split


def test_a_split_is_for_the_costs_not_for_the_number_of_layers():
    assert balanced_stage_layers([5, 1, 1, 1, 1, 1], 2) == (1, 5)
    assert balanced_stage_layers([0.2, 0.1, 0.2, 0.1, 0.2, 0.1], 3) == (2, 2, 2)


def test_a_target_of_64_layers_is_split_at_once():
    costs = [1.0, 1.0, 1.0, 0.9] * 16
    split = balanced_stage_layers(costs, 16, 5.3)
    assert (sum(split), len(split), split[-1]) == (64, 16, 1)


@pytest.mark.parametrize(
    "costs, num_stages, last_extra, words",
    [
        ([1, 1], 0, 0, "num_stages=0"),
        ([1, 1], 3, 0, "num_stages=3: a target of 2 layers"),
        ([1, -1], 2, 0, "cost -1"),
        ([1, float("nan")], 2, 0, "cost nan"),
        ([1, 1], 2, float("inf"), "cost inf"),
    ],
)
def test_impossible_splits_are_refused(costs, num_stages, last_extra, words):
    with pytest.raises(ValueError, match=words):
        balanced_stage_layers(costs, num_stages, last_extra)


def test_the_even_split_gives_the_remainder_to_the_first_stages():
    assert even_stage_layers(30, 4) == (8, 8, 7, 7)
    assert check_stage_layers([4, 3], 7, 2) == (4, 3)
