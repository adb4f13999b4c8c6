import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spd_lightning.data.replication import Replicator, draw_fill, judged_shares
from spd_lightning.modules.features import FeatureLayout, visible_depth


def layout(num_stages=4, rows="exact", schedule="pre_step"):
    return FeatureLayout.build(num_layers=8, num_stages=num_stages, rows=rows, schedule=schedule)


def collate(rows, fill, num_stages=4, is_filler=False, **options):
    ids, masks = ([np.array(entry, dtype=np.int32) for entry in column] for column in zip(*rows, strict=True))
    return Replicator(layout(num_stages), **options).collate(ids, masks, torch.tensor(fill), is_filler)


@pytest.mark.parametrize("num_stages", [2, 3, 8])
def test_half_of_the_rows_have_a_full_pipeline_and_the_rest_are_even(num_stages):
    fill = draw_fill(seed=1, epoch=0, rows=range(40000), num_stages=num_stages)
    shares = np.bincount(fill, minlength=num_stages + 1) / len(fill)
    assert shares[0] == 0
    assert shares[num_stages] == pytest.approx(0.5, abs=0.01)
    assert shares[1:num_stages] == pytest.approx(0.5 / (num_stages - 1), abs=0.01)


@pytest.mark.parametrize(("acceptance", "num_stages"), [(0.5, 3), (0.45, 6), (0.8, 8), (0.8, 2)])
def test_fills_come_as_often_as_decoding_judges_drafts_made_at_them(acceptance, num_stages):
    """Against verdicts drawn one after another: the fill rises by one after each accepted draft, and a miss flushes."""
    verdicts = np.random.default_rng(0).random(200_000) < acceptance
    judged, fill = [], 1
    for accepted in verdicts:
        judged.append(fill)
        fill = min(fill + 1, num_stages) if accepted else 1
    expected = np.bincount(judged, minlength=num_stages + 1) / len(judged)
    fills = draw_fill(seed=1, epoch=0, rows=range(40000), num_stages=num_stages, acceptance=acceptance)
    assert np.bincount(fills, minlength=num_stages + 1) / len(fills) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(("acceptance", "fill"), [(0.0, 1), (1.0, 8)])
def test_certain_verdicts_give_one_fill(acceptance, fill):
    assert set(draw_fill(0, 0, range(100), 8, acceptance).tolist()) == {fill}


@pytest.mark.parametrize(("p", "stages", "share"), [(0.8, 4, 0.51), (0.8, 8, 0.21), (0.8, 16, 0.04)])
def test_share_of_the_full_pipeline_at_the_acceptance_of_the_design(p, stages, share):
    assert judged_shares(p, stages)[-1] == pytest.approx(share, abs=0.005)
    assert judged_shares(p, stages).sum() == pytest.approx(1)


@pytest.mark.parametrize("acceptance", [None, 0.6])
def test_one_stage_always_has_fill_one(acceptance):
    assert draw_fill(0, 0, range(5), num_stages=1, acceptance=acceptance).tolist() == [1] * 5


@given(st.integers(0, 2**63), st.integers(0, 50), st.lists(st.integers(0, 10**7), min_size=1, max_size=9))
def test_fill_does_not_depend_on_the_batch(seed, epoch, rows):
    for acceptance in (None, 0.7):
        alone = [int(draw_fill(seed, epoch, [row], 8, acceptance)[0]) for row in rows]
        assert draw_fill(seed, epoch, rows, 8, acceptance).tolist() == alone


def test_fill_changes_with_the_epoch():
    assert draw_fill(0, 0, range(50), 8).tolist() != draw_fill(0, 1, range(50), 8).tolist()


def test_without_simulated_fill_the_pipeline_is_full():
    assert Replicator(layout(), fill_acceptance=1.0).fill(0, range(6)).tolist() == [4] * 6


def test_position_is_supervised_iff_the_next_token_is_an_answer_token():
    batch = collate([([5, 6, 7, 8, 9], [0, 0, 1, 1, 0]), ([5, 6], [1, 1])], fill=[4, 1], pad_token_id=3)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9], [5, 6, 3, 3, 3]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert batch.supervised.tolist() == [[False, True, True, False, False], [True, False, False, False, False]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_a_row_of_one_token_supervises_nothing():
    assert not collate([([5], [1])], fill=[1]).supervised.any()


def test_a_filler_supervises_nothing():
    batch = collate([([5, 6, 7], [0, 1, 1])], fill=[2], is_filler=True)
    assert not batch.supervised.any()
    assert batch.attention_mask.all()


@pytest.mark.parametrize(("schedule", "mask_fills"), [("pre_step", [1, 2, 3, 4]), ("post_step", [2, 3, 4, 4])])
@pytest.mark.parametrize("rows", ["exact", "shared"])
def test_structural_mask_is_that_of_each_sequences_fill(rows, schedule, mask_fills):
    features = layout(4, rows, schedule)
    ids = [np.array([1, 2])] * 4
    batch = Replicator(features).collate(ids, ids, torch.tensor([1, 2, 3, 4]))
    assert batch.row_depths.tolist() == list(features.row_depths)
    assert batch.fill.tolist() == [1, 2, 3, 4]
    for sequence, fill in enumerate(mask_fills):
        for row, depth in enumerate(features.row_depths):
            for distance in range(5):
                expected = features.row_of_depth(visible_depth(depth, distance, fill, 4))
                assert batch.visible_row[sequence, row, distance] == expected
