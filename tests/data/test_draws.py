import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spd_lightning.data.draws import random_bits, random_order


def test_draws_are_frozen():
    """The values of SplitMix64's finaliser, so that a draw is the same on every machine and version."""
    assert random_bits(0, "fill", 0, [0, 1, 2]).tolist() == [
        18350327972147807862,
        7026777483868359374,
        18105361600763652660,
    ]


@given(st.integers(0, 2**64 - 1), st.integers(0, 100), st.lists(st.integers(0, 10**9), min_size=1, max_size=20))
def test_a_draw_depends_on_its_own_keys_alone(seed, epoch, rows):
    together = random_bits(seed, "fill", epoch, rows)
    assert together.tolist() == [int(random_bits(seed, "fill", epoch, row)[0]) for row in rows]


def test_seed_purpose_and_every_key_change_the_draw():
    draws = {
        int(random_bits(seed, purpose, first, second)[0])
        for seed in range(4)
        for purpose in ("rows", "fill")
        for first in range(4)
        for second in range(4)
    }
    assert len(draws) == 4 * 2 * 4 * 4


def test_every_bit_is_set_half_of_the_time():
    bits = random_bits(7, "rows", np.arange(20000))
    shares = [(bits >> np.uint64(place) & np.uint64(1)).mean() for place in range(64)]
    assert min(shares) > 0.48
    assert max(shares) < 0.52


@given(st.integers(0, 1000), st.integers(0, 200))
def test_an_order_is_a_permutation(seed, size):
    assert sorted(random_order(seed, "rows", size, 3).tolist()) == list(range(size))
