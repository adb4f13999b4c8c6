import json
from collections import Counter

import numpy as np
import pytest

from spd_lightning.data import vocabulary
from spd_lightning.data.corpus import join_sources, split_off
from spd_lightning.data.preparation import EncodingOptions, prepare
from spd_lightning.data.sources import Source
from spd_lightning.data.vocabulary import cached_counts, count_supervised, coverage_table, vocabulary_from_counts


@pytest.fixture
def rows(tmp_path, tiny_tokenizer):
    rng = np.random.default_rng(0)
    sources = []
    for number in range(2):
        path = tmp_path / f"{number}.jsonl"
        with path.open("w") as file:
            for _ in range(300):
                size = int(rng.integers(2, 12))
                ids, mask = rng.integers(3, 60, size).tolist(), rng.integers(0, 2, size).tolist()
                mask[-1] = 1
                file.write(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n")
        sources.append(Source(str(path)))
    prepared = prepare(sources, tiny_tokenizer, EncodingOptions(), tmp_path / "cache")
    return join_sources(prepared, [1.5, 2.0])


def counted_by_hand(rows, positions):
    counts = Counter()
    for ids, mask in zip(*rows.read(positions), strict=True):
        counts.update(
            token for token, is_answer in list(zip(ids.tolist(), mask.tolist(), strict=True))[1:] if is_answer
        )
    return counts


def test_counts_are_of_predicted_answer_tokens_as_often_as_an_epoch_shows_them(rows):
    counts = count_supervised(rows, 400)
    assert {token: int(count) for token, count in enumerate(counts) if count} == counted_by_hand(rows, range(len(rows)))
    assert counts.sum() == rows.num_supervised()


def test_validation_rows_are_not_counted(rows):
    training, _ = split_off(rows, 50)
    counts = count_supervised(training, 400)
    assert {t: int(c) for t, c in enumerate(counts) if c} == counted_by_hand(training, range(len(training)))


def test_counts_are_kept_by_tokenizer_and_data(rows, tmp_path, monkeypatch):
    first = cached_counts(rows, "hash", 400, tmp_path)
    calls = []
    monkeypatch.setattr(vocabulary, "count_supervised", lambda *arguments: calls.append(arguments) or first)
    assert np.array_equal(cached_counts(rows, "hash", 400, tmp_path), first)
    assert not calls
    cached_counts(rows, "other", 400, tmp_path)
    cached_counts(split_off(rows, 50)[0], "hash", 400, tmp_path)
    assert len(calls) == 2
    assert all(path.suffix == ".npy" for path in (tmp_path / "counts").iterdir())


def test_damaged_counts_say_what_to_delete(rows, tmp_path):
    cached_counts(rows, "hash", 400, tmp_path)
    (path,) = (tmp_path / "counts").iterdir()
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"damaged.*delete this file"):
        cached_counts(rows, "hash", 400, tmp_path)
    np.save(path, np.zeros(3))
    with pytest.raises(ValueError, match="400 are expected: delete this file"):
        cached_counts(rows, "hash", 400, tmp_path)


def test_vocabulary_says_where_it_comes_from():
    counts = np.array([0, 5, 2, 0])
    vocab = vocabulary_from_counts(counts, 2, [3], "some/model", tokenizer_hash="t", data_hash="d")
    assert vocab.token_ids == (1, 3)
    assert vocab.to_json() == {
        "tokenizer_name": "some/model",
        "tokenizer_hash": "t",
        "vocab_size": 4,
        "data_hash": "d",
        "total_positions_counted": 7,
        "draft_vocab_size": 2,
        "token_ids": [1, 3],
        "counts": [5, 0],
    }


def test_coverage_is_measured_on_all_counts_for_vocabularies_of_the_first():
    training, held_out = np.array([6, 3, 1, 0]), np.array([0, 1, 1, 2])
    table = coverage_table((training, held_out), [1, 2, 99, 3], eos_token_ids=[])
    assert table == [(1, 0.6, 0.0), (2, 0.9, 0.25), (3, 1.0, 0.5), (4, 1.0, 1.0)]
