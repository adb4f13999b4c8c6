import json

import numpy as np
import pytest

from spd_lightning.data.corpus import join_sources, split_off, warn_of_overlap
from spd_lightning.data.preparation import EncodingOptions, prepare
from spd_lightning.data.sources import Source


@pytest.fixture
def make(tmp_path, tiny_tokenizer):
    """Prepared sources of pre-tokenised rows; each row is (prompt ids, answer ids)."""

    def prepared(*sources):
        written = []
        for number, rows in enumerate(sources):
            path = tmp_path / f"rows{number}.jsonl"
            content = [{"input_ids": [*p, *a], "loss_mask": [0] * len(p) + [1] * len(a)} for p, a in rows]
            path.write_text("".join(json.dumps(row) + "\n" for row in content))
            written.append(Source(str(path)))
        return prepare(written, tiny_tokenizer, EncodingOptions(), tmp_path / "cache")

    return prepared


def numbered(count, first=0):
    return [([3 + (first + n) // 100, 3 + (first + n) % 100], [7] * (1 + n % 5)) for n in range(count)]


def test_weight_says_how_often_an_epoch_shows_a_row(make):
    prepared = make(numbered(10), numbered(9, 100), numbered(8, 200))
    rows = join_sources(prepared, [1.0, 2.5, 0.25])
    shown = rows.multiplicity()
    assert shown[:10].tolist() == [1] * 10
    assert sorted(shown[10:19].tolist()) == [2] * 5 + [3] * 4
    assert sorted(shown[19:].tolist()) == [0] * 6 + [1] * 2
    assert len(rows) == 10 + 22 + 2
    again = join_sources(prepared, [1.0, 2.5, 0.25])
    assert np.array_equal(again.index, rows.index)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_that_mean_nothing_are_refused(make, weight):
    with pytest.raises(ValueError, match="weight"):
        join_sources(make(numbered(3)), [weight])


def test_rows_read_are_those_of_the_sources(make):
    rows = join_sources(make(numbered(4), numbered(3, 100)), [1.0, 1.0])
    ids, masks = rows.read([5, 0, 5])
    assert [entry.tolist() for entry in ids] == [[4, 4, 7, 7], [3, 3, 7], [4, 4, 7, 7]]
    assert [entry.tolist() for entry in masks] == [[0, 0, 1, 1], [0, 0, 1], [0, 0, 1, 1]]
    assert rows.location(5).endswith("rows1.jsonl:2")
    assert rows.lengths().tolist() == [3, 4, 5, 6, 3, 4, 5]
    assert rows.num_supervised() == 1 + 2 + 3 + 4 + 1 + 2 + 3


def test_split_is_disjoint_complete_and_the_same_again(make):
    rows = join_sources(make(numbered(40)), [1.0])
    training, validation = split_off(rows, 6)
    assert len(validation) == 6
    assert sorted([*training.index, *validation.index]) == list(range(40))
    again = split_off(rows, 6)[1]
    assert np.array_equal(again.index, validation.index)
    assert training.data_hash != validation.data_hash != rows.data_hash


def test_split_depends_on_what_rows_say_and_not_on_where_they_are(make):
    def held_out(*sources):
        _, validation = split_off(join_sources(make(*sources), [1.0] * len(sources)), 5)
        return {tuple(ids.tolist()) for ids in validation.read(range(len(validation)))[0]}

    rows = numbered(30)
    assert held_out(rows) == held_out(rows[::-1]) == held_out(rows[20:], rows[:20])


def test_rows_with_the_same_prompt_are_never_parted(make):
    same = [([9, 9, 9], [n]) for n in range(3, 9)] * 2
    for num_rows in range(1, 20):
        training, validation = split_off(join_sources(make(numbered(30, 200) + same), [1.0]), num_rows)
        sides = [
            sum(ids[:3].tolist() == [9, 9, 9] for ids in side.read(range(len(side)))[0])
            for side in (training, validation)
        ]
        assert sorted(sides) == [0, 12]
        assert len(validation) <= num_rows


def test_rows_of_one_dialogue_are_never_parted(tmp_path, tiny_tokenizer):
    path = tmp_path / "chat.jsonl"
    turns = [{"role": role, "content": f"{role} {k}"} for k in range(3) for role in ("user", "assistant")]
    dialogues = [
        [{"role": "user", "content": f"n {n}"}, {"role": "assistant", "content": "a"}, *turns] for n in range(9)
    ]
    path.write_text("".join(json.dumps({"messages": dialogue}) + "\n" for dialogue in dialogues))
    rows = join_sources(prepare([Source(str(path))], tiny_tokenizer, EncodingOptions(), tmp_path), [1.0])
    assert len(rows) == 36
    training, validation = split_off(rows, 9)
    assert len(validation) == 8
    held_out = {validation.location(position) for position in range(8)}
    assert len(held_out) == 2
    assert held_out.isdisjoint(training.location(position) for position in range(len(training)))


def test_validation_rows_are_shown_once_whatever_their_weight(make):
    training, validation = split_off(join_sources(make(numbered(20)), [3.0]), 5)
    assert len(validation) == len(set(validation.index.tolist())) == 5
    assert len(training) == 45
    assert not set(training.index) & set(validation.index)


@pytest.mark.parametrize(("count", "num_rows", "side"), [(4, 4, "training"), (4, 99, "training"), (1, 1, "training")])
def test_split_that_leaves_nothing_to_train_on_is_refused(make, count, num_rows, side):
    with pytest.raises(ValueError, match=f"data.val_rows={num_rows} of {count} rows .* leaves no {side} row"):
        split_off(join_sources(make(numbered(count)), [1.0]), num_rows)


def test_split_that_leaves_nothing_to_validate_on_is_refused(make):
    same = [([5, 6], [n]) for n in range(3, 9)]
    with pytest.raises(ValueError, match=r"6 rows \(1 different dialogues\) leaves no validation row"):
        split_off(join_sources(make(same), [1.0]), 3)


def test_overlap_of_training_and_validation_is_told(make, recwarn):
    training, validation, other = (
        join_sources([source], [1.0]) for source in make(*[numbered(9)], numbered(3), numbered(3, 50))
    )
    warn_of_overlap(training, other)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="3 of 3 validation rows share their prompt"):
        warn_of_overlap(training, validation)


def test_data_hash_tells_weights_and_sources_apart(make):
    one, two = make(numbered(3), numbered(3, 50))
    hashes = [join_sources([one], [1.0]), join_sources([one], [2.0]), join_sources([two], [1.0])]
    assert len({rows.data_hash for rows in hashes}) == 3
