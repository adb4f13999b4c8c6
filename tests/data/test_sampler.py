import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spd_lightning.data.sampler import LengthBucketedSampler, TokenBudgetSampler, resolve_batch_size

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=120).map(np.array)
RANKS = {"num_replicas": st.integers(1, 4), "seed": st.integers(0, 2**63), "shuffle": st.booleans()}
row_cases = st.fixed_dictionaries(
    {"lengths": LENGTHS, "batch_size": st.integers(1, 5), "window": st.integers(1, 5), **RANKS}
)
token_cases = st.fixed_dictionaries({"lengths": LENGTHS, "tokens_per_batch": st.integers(300, 2400), **RANKS})
cases = row_cases | token_cases


def make(case, rank=0):
    return (TokenBudgetSampler if "tokens_per_batch" in case else LengthBucketedSampler)(rank=rank, **case)


def ranks(case):
    return [make(case, rank) for rank in range(case["num_replicas"])]


def seen(batches):
    return [row for batch in batches for row in batch.rows if not batch.is_filler]


def padded(lengths, batch):
    """Tokens of a batch with its padding."""
    return 0 if batch.is_filler else len(batch.rows) * int(lengths[list(batch.rows)].max())


@given(cases, st.integers(0, 3))
@settings(max_examples=300, deadline=None)
def test_every_row_appears_once_over_all_ranks(case, epoch):
    rows = []
    for sampler in ranks(case):
        sampler.set_epoch(epoch)
        rows += seen(sampler)
    assert sorted(rows) == list(range(len(case["lengths"])))


@given(cases, st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_every_rank_runs_as_many_batches_as_the_length_says_in_every_epoch(case, epoch):
    lengths = set()
    for sampler in ranks(case):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        lengths |= {len(sampler), len(batches)}
        assert all(len(batch.rows) == 1 for batch in batches if batch.is_filler)
    assert len(lengths) == 1


@given(row_cases)
@settings(max_examples=100, deadline=None)
def test_no_batch_has_more_rows_than_asked_for(case):
    for sampler in ranks(case):
        assert all(1 <= len(batch.rows) <= case["batch_size"] for batch in sampler)


@given(token_cases, st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_no_batch_exceeds_the_budget(case, epoch):
    for sampler in ranks(case):
        sampler.set_epoch(epoch)
        assert all(padded(case["lengths"], batch) <= case["tokens_per_batch"] for batch in sampler)


@given(cases, st.integers(0, 3), st.data())
@settings(max_examples=300, deadline=None)
def test_a_resumed_epoch_is_the_rest_of_the_uninterrupted_one(case, epoch, data):
    for sampler in ranks(case):
        sampler.set_epoch(epoch)
        whole = list(sampler)
        start = data.draw(st.integers(0, len(whole)))
        resumed = make(case, sampler.rank)
        resumed.seek(epoch, start)
        iter(resumed)
        assert list(resumed) == whole[start:], "an iterator that is made and not used changes nothing"
        resumed.set_epoch(epoch)
        assert list(resumed) == whole


@given(row_cases)
@settings(max_examples=100, deadline=None)
def test_the_shares_of_a_batch_differ_by_one_row_at_most(case):
    for shares in zip(*ranks(case), strict=True):
        sizes = [0 if share.is_filler else len(share.rows) for share in shares]
        assert max(sizes) - min(sizes) <= 1


@given(token_cases)
@settings(max_examples=200, deadline=None)
def test_no_other_dealing_of_a_batch_in_order_of_length_makes_its_largest_share_smaller(case):
    """Against a naive twin that tries every place of the first cut, then of the second, and so on."""
    lengths = case["lengths"]

    def smallest(tokens, num_shares):
        if num_shares == 1 or not tokens:
            return len(tokens) * max(tokens, default=0)
        cuts = range(len(tokens) + 1)
        return min(max(cut * tokens[0], smallest(tokens[cut:], num_shares - 1)) for cut in cuts)

    batches = zip(*ranks(case), strict=True)
    for shares in (shares for shares in batches if sum(len(share.rows) for share in shares) <= 9):
        tokens = sorted((int(lengths[row]) for row in seen(shares)), reverse=True)
        assert max(padded(lengths, share) for share in shares) == smallest(tokens, len(shares))


def test_only_one_global_batch_is_smaller_than_the_others():
    sampler = LengthBucketedSampler(np.ones(103, int), batch_size=8)
    assert sorted(len(batch.rows) for batch in sampler) == [7] + [8] * 12


@pytest.mark.parametrize("size", [{"batch_size": 4}, {"tokens_per_batch": 400}], ids=["rows", "tokens"])
def test_epochs_and_seeds_have_orders_of_their_own(size):
    lengths = np.arange(1, 101)

    def order(seed, epoch):
        sampler = make({"lengths": lengths, "seed": seed, **size})
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
    sampler = TokenBudgetSampler(np.array([5, 3, 8, 1, 9, 2, 7, 6, 4, 4]), 12, seed=3)
    sampler.set_epoch(1)
    assert [batch.rows for batch in sampler] == [(5, 3), (9, 8, 1), (6,), (7, 0), (2,), (4,)]


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


def test_without_shuffling_a_budget_makes_the_same_batches_in_every_epoch():
    lengths = np.random.default_rng(0).integers(1, 50, 40)
    sampler = TokenBudgetSampler(lengths, 100, shuffle=False)
    batches = list(sampler)
    tokens = [sorted(lengths[list(batch.rows)]) for batch in batches]
    assert [length for rows in tokens for length in rows] == sorted(lengths)
    assert all(len(rows) == 100 // rows[-1] for rows in tokens[1:]), "all are full but that of the shortest rows"
    sampler.set_epoch(5)
    assert [batch.rows for batch in sampler] == [batch.rows for batch in batches]


@pytest.fixture(scope="module")
def realistic():
    """Lengths as dialogues have them: log-normal, 20 to 2048 tokens."""
    draws = np.random.default_rng(0).normal(np.log(300), 0.9, 5000)
    return np.clip(np.exp(draws).astype(int), 20, 2048)


def epochs_of_tokens(lengths, num_ranks, num_epochs=3):
    """For each epoch, the padded tokens of each step's shares, and the step of each row."""
    samplers = [TokenBudgetSampler(lengths, 16384, num_ranks, rank) for rank in range(num_ranks)]
    for epoch in range(num_epochs):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        steps = list(zip(*samplers, strict=True))
        step_of_row = np.full(len(lengths), -1)
        for index, shares in enumerate(steps):
            step_of_row[seen(shares)] = index
        assert step_of_row.min() == 0
        yield np.array([[padded(lengths, share) for share in shares] for shares in steps]), step_of_row


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_budget_batches_have_little_padding_and_are_of_even_size(realistic, num_ranks):
    for tokens, _ in epochs_of_tokens(realistic, num_ranks):
        assert realistic.sum() > 0.965 * tokens.sum()
        assert tokens.max() <= 16384
        assert tokens.mean() > 0.9 * 16384
        # all but the first and the last of the sorted rows
        assert (tokens.max(axis=1) < 0.85 * 16384).sum() <= 2
        assert (tokens.min(axis=1) < 0.8 * tokens.max(axis=1)).sum() <= 2


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_rows_meet_other_rows_in_another_epoch(realistic, num_ranks):
    (_, first), (_, second), _ = epochs_of_tokens(realistic, num_ranks)
    _, sizes = np.unique(np.stack([first, second]), axis=1, return_counts=True)
    _, sizes_before = np.unique(first, return_counts=True)
    again = (sizes * (sizes - 1)).sum() / (sizes_before * (sizes_before - 1)).sum()
    assert again < 0.75, "share of the pairs of rows in one batch that are so again"


def test_rows_within_a_sixteenth_of_each_other_swap_places():
    lengths = np.arange(993, 1025)
    batches = [lengths[list(batch.rows)] for batch in TokenBudgetSampler(lengths, 4096)]
    assert max(np.ptp(rows) for rows in batches) > 16, "of four neighbours it would be 3"


def test_ranks_take_neighbours_by_length_out_of_a_batch(realistic):
    """Also where rows count as equally long: dealt out in another order, a share is padded more than it need be."""
    samplers = [TokenBudgetSampler(realistic, 16384, 4, rank) for rank in range(4)]
    for shares in zip(*samplers, strict=True):
        rows = seen(shares)
        assert realistic[rows].tolist() == sorted(realistic[rows], reverse=True)


def test_rows_of_different_length_meet_others_too():
    """No two lengths count as equal here: the moving cuts alone change who meets whom."""
    sampler = TokenBudgetSampler(np.array([16 << n for n in range(12)]), 16 << 13)
    partners = set()
    for epoch in range(20):
        sampler.set_epoch(epoch)
        partners |= {batch.rows for batch in sampler if 11 in batch.rows}
    assert len(partners) > 1


def test_the_batch_size_is_resolved():
    assert resolve_batch_size(None, None, 2048) == 8
    assert resolve_batch_size(3, None, 2048) == 3
    assert resolve_batch_size(None, 2048, 2048) is None
