import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spd_lightning.data.sampler import LengthBucketedSampler

cases = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(1, 50), min_size=1, max_size=120).map(np.array),
        "batch_size": st.integers(1, 5),
        "num_replicas": st.integers(1, 4),
        "seed": st.integers(0, 2**63),
        "shuffle": st.booleans(),
        "window": st.integers(1, 5),
    }
)


def ranks(case):
    return [LengthBucketedSampler(rank=rank, **case) for rank in range(case["num_replicas"])]


def seen(batches):
    return [row for batch in batches for row in batch.rows if not batch.is_filler]


@given(cases, st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_every_row_appears_once_over_all_ranks(case, epoch):
    rows = []
    for sampler in ranks(case):
        sampler.set_epoch(epoch)
        rows += seen(sampler)
    assert sorted(rows) == list(range(len(case["lengths"])))


@given(cases)
@settings(max_examples=100, deadline=None)
def test_every_rank_runs_as_many_batches_as_the_length_says(case):
    for sampler in ranks(case):
        batches = list(sampler)
        assert len(batches) == len(sampler)
        assert all(1 <= len(batch.rows) <= case["batch_size"] for batch in batches)
        assert all(len(batch.rows) == 1 for batch in batches if batch.is_filler)


@given(cases, st.integers(0, 3), st.data())
@settings(max_examples=150, deadline=None)
def test_a_resumed_epoch_is_the_rest_of_the_uninterrupted_one(case, epoch, data):
    for sampler in ranks(case):
        sampler.set_epoch(epoch)
        whole = list(sampler)
        start = data.draw(st.integers(0, len(whole)))
        resumed = LengthBucketedSampler(rank=sampler.rank, **case)
        resumed.seek(epoch, start)
        iter(resumed)
        assert list(resumed) == whole[start:], "an iterator that is made and not used changes nothing"
        resumed.set_epoch(epoch)
        assert list(resumed) == whole


@given(cases)
@settings(max_examples=100, deadline=None)
def test_the_shares_of_a_batch_differ_by_one_row_at_most(case):
    for shares in zip(*ranks(case), strict=True):
        sizes = [0 if share.is_filler else len(share.rows) for share in shares]
        assert max(sizes) - min(sizes) <= 1


def test_only_one_global_batch_is_smaller_than_the_others():
    sampler = LengthBucketedSampler(np.ones(103, int), batch_size=8)
    assert sorted(len(batch.rows) for batch in sampler) == [7] + [8] * 12


def test_epochs_and_seeds_have_orders_of_their_own():
    lengths = np.arange(1, 101)

    def order(seed, epoch):
        sampler = LengthBucketedSampler(lengths, 4, seed=seed)
        sampler.set_epoch(epoch)
        return [batch.rows for batch in sampler]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)


def test_the_order_of_a_seed_never_changes():
    """Frozen values: a run that was interrupted before an update resumes after it."""
    sampler = LengthBucketedSampler(np.array([5, 3, 8, 1, 9, 2, 7]), 2, seed=3)
    sampler.set_epoch(1)
    assert [batch.rows for batch in sampler] == [(6, 2), (4,), (1, 0), (3, 5)]


def test_rows_of_a_batch_are_of_similar_length():
    lengths = np.random.default_rng(0).integers(1, 1000, 4000)
    sampler = LengthBucketedSampler(lengths, 8, window=50)
    padded = sum(len(batch.rows) * lengths[list(batch.rows)].max() for batch in sampler)
    assert padded < 1.03 * lengths.sum()
    unsorted = LengthBucketedSampler(lengths, 8, window=1)
    assert sum(len(batch.rows) * lengths[list(batch.rows)].max() for batch in unsorted) > 1.5 * lengths.sum()


def test_batches_are_not_shown_in_the_order_of_their_length():
    lengths = np.arange(1, 401)
    longest = [max(lengths[list(batch.rows)]) for batch in LengthBucketedSampler(lengths, 4)]
    rises = sum(later > earlier for earlier, later in zip(longest, longest[1:], strict=False))
    assert 30 < rises < 70


def test_without_shuffling_every_epoch_is_sorted_by_length():
    lengths = np.random.default_rng(0).integers(1, 50, 40)
    sampler = LengthBucketedSampler(lengths, 4, shuffle=False)
    order = [lengths[row] for batch in sampler for row in batch.rows]
    assert order == sorted(lengths)
    sampler.set_epoch(5)
    assert [lengths[row] for batch in sampler for row in batch.rows] == order
