import json
import warnings

import pytest

from spd_lightning.data.corpus import join_sources
from spd_lightning.data.loader import BatchLoader, ReplicatedRows
from spd_lightning.data.preparation import EncodingOptions, prepare
from spd_lightning.data.replication import Replicator
from spd_lightning.data.sampler import LengthBucketedSampler, TokenBudgetSampler
from spd_lightning.data.sources import Source
from spd_lightning.modules.features import FeatureLayout

ORDER = {"seed": 1, "global batch size": 2}


@pytest.fixture
def make(tmp_path, tiny_tokenizer):
    path = tmp_path / "rows.jsonl"
    rows = [{"input_ids": [n, 5, *[6] * (n % 4)], "loss_mask": [0, 1, *[1] * (n % 4)]} for n in range(3, 16)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared = prepare([Source(str(path))], tiny_tokenizer, EncodingOptions(), tmp_path / "cache")
    data = ReplicatedRows(join_sources(prepared, [1.0]), Replicator(FeatureLayout.build(8, 4), seed=1))

    def loader(position=lambda: (0, 0), order=None, num_workers=0, sampler=LengthBucketedSampler, size=2):
        sampler = sampler(data.rows.lengths(), size, seed=1)
        return BatchLoader(data, sampler, position, order or ORDER, num_workers)

    return loader


def seen(batches):
    return [(batch.input_ids[:, 0].tolist(), batch.fill.tolist()) for batch in batches]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_iteration_begins_where_the_position_says(make, num_workers):
    whole = seen(make(lambda: (2, 0)))
    assert len(whole) == 7
    resumed = make(lambda: (2, 3), num_workers=num_workers)
    assert seen(resumed) == whole[3:]
    assert len(resumed) == 7, "the length is that of the whole epoch"


def test_batches_of_a_token_budget_begin_there_too(make):
    budget = {"sampler": TokenBudgetSampler, "size": 8}
    whole = seen(make(lambda: (2, 0), **budget))
    resumed = make(lambda: (2, 3), **budget)
    assert 5 < len(whole) == len(resumed)
    assert len({len(rows) for rows, _ in whole}) > 1
    assert seen(resumed) == whole[3:]


def test_position_is_asked_when_the_first_batch_is_wanted(make):
    where = (0, 0)
    iterator = iter(make(lambda: where))
    where = (1, 4)
    assert seen(iterator) == seen(make(lambda: (1, 0)))[4:]


def test_fill_belongs_to_the_row_and_the_epoch(make):
    first, second = (
        {
            row: fill
            for rows, fills in seen(make(lambda epoch=epoch: (epoch, 0)))
            for row, fill in zip(rows, fills, strict=True)
        }
        for epoch in (0, 1)
    )
    assert first.keys() == second.keys()
    assert first != second


def test_resuming_in_another_order_is_told(make):
    loader = make(lambda: (0, 3), order={**ORDER, "global batch size": 4})
    loader.load_state_dict(make().state_dict())
    with pytest.warns(UserWarning, match="batch 3 of epoch 0 with other global batch size than before"):
        list(loader)


@pytest.mark.parametrize(("start", "order"), [(0, {**ORDER, "seed": 9}), (3, ORDER)])
def test_resuming_in_the_same_order_or_at_an_epochs_start_is_silent(make, start, order):
    loader = make(lambda: (0, start), order=order)
    loader.load_state_dict(ORDER)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader)
