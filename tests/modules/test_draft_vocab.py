import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spd_lightning.modules.draft_vocab import DraftVocab

GOOD = {"tokenizer_name": "some/model", "vocab_size": 90, "draft_vocab_size": 3, "token_ids": [1, 5, 95], "mix": ["a"]}


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_eos_then_counts_then_ties_by_id_then_unseen_ids():
    counts = np.array([0, 7, 0, 3, 3, 9, 3, 0, 0, 0])
    by_size = {
        size: DraftVocab.from_counts(counts, size, num_tokens=10, always=[8]).token_ids for size in (1, 2, 3, 5, 7, 8)
    }
    assert by_size == {
        1: (8,),
        2: (5, 8),
        3: (1, 5, 8),
        5: (1, 3, 4, 5, 8),
        7: (0, 1, 3, 4, 5, 6, 8),
        8: (0, 1, 2, 3, 4, 5, 6, 8),
    }


def test_counter_and_array_give_the_same():
    array = np.array([0, 7, 0, 3])
    counter = Counter({1: 7, 3: 3})
    first, second = (DraftVocab.from_counts(c, 2, num_tokens=4, always=[2]) for c in (array, counter))
    assert first == second
    assert first.counts == (7, 0)
    assert first.coverage(array) == second.coverage(counter) == 0.7


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.data())
def test_counted_vocabulary_keeps_its_promises(counts, data):
    num_tokens = len(counts)
    always = data.draw(st.sets(st.integers(0, num_tokens - 1), max_size=3))
    size = data.draw(st.integers(max(1, len(always)), num_tokens))
    vocab = DraftVocab.from_counts(np.array(counts), size, num_tokens, always)
    assert len(vocab) == size
    assert always <= set(vocab.token_ids)
    inside = [counts[i] for i in vocab.token_ids if i not in always]
    outside = [counts[i] for i in range(num_tokens) if i not in vocab.token_ids]
    assert not inside or not outside or min(inside) >= max(outside)


def test_size_is_capped_with_a_warning():
    with pytest.warns(UserWarning, match="draft_vocab_size=99 is more than the tokenizer's 4"):
        vocab = DraftVocab.from_counts(np.ones(4, int), 99, num_tokens=4)
    assert vocab.token_ids == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("size", "always", "message"),
    [(0, [], "at least 1"), (1, [0, 1], "at least 2"), (3, [7], "EOS ids"), (3, [-1], "EOS ids")],
)
def test_impossible_sizes_and_eos_ids_are_refused(size, always, message):
    with pytest.raises(ValueError, match=message):
        DraftVocab.from_counts(np.ones(4, int), size, num_tokens=4, always=always)


def test_counts_beyond_the_tokenizer_are_refused():
    with pytest.raises(ValueError, match="token id 5"):
        DraftVocab.from_counts(np.array([0, 0, 0, 0, 0, 1]), 2, num_tokens=4)
    with pytest.raises(ValueError, match="token id 5"):
        DraftVocab.from_counts(Counter({5: 1}), 2, num_tokens=4)


def test_file_of_the_design_is_read_and_its_further_keys_travel(tmp_path):
    vocab = DraftVocab.load(write(tmp_path / "v.json", GOOD), num_tokens=96)
    assert vocab.token_ids == (1, 5, 95)
    assert vocab.provenance == {"tokenizer_name": "some/model", "vocab_size": 90, "mix": ["a"]}
    vocab.save(tmp_path / "deep" / "copy.json")
    assert DraftVocab.load(tmp_path / "deep" / "copy.json", num_tokens=96) == vocab
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["copy.json"]


def test_counts_survive_a_round_trip(tmp_path):
    vocab = DraftVocab.from_counts(np.array([4, 0, 2]), 2, num_tokens=3, provenance={"tokenizer_hash": "h"})
    vocab.save(tmp_path / "v.json")
    assert DraftVocab.load(tmp_path / "v.json", num_tokens=3, tokenizer_hash="h") == vocab


def test_drafter_folder_is_accepted(tmp_path):
    write(tmp_path / "config.json", {"tokenizer_hash": "h", "draft_vocab": {"token_ids": [2, 3]}})
    assert DraftVocab.load(tmp_path, num_tokens=4, tokenizer_hash="h").token_ids == (2, 3)
    with pytest.raises(ValueError, match="another tokenizer"):
        DraftVocab.load(tmp_path, num_tokens=4, tokenizer_hash="other")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "not JSON"),
        ("[1, 2]", "JSON list"),
        ("{}", "no list `token_ids`"),
        ({**GOOD, "token_ids": "1,5"}, "no list `token_ids`"),
        ({**GOOD, "draft_vocab_size": 2}, "draft_vocab_size=2, but 3"),
        ({"token_ids": []}, "empty"),
        ({"token_ids": [1, 1]}, "listed twice"),
        ({"token_ids": [5, 1]}, "must ascend"),
        ({"token_ids": [-1, 1]}, "-1 is not a non-negative integer"),
        ({"token_ids": [1, 2.0]}, "2.0 is not a non-negative integer"),
        ({"token_ids": [False, True]}, "False is not"),
        ({"token_ids": ["1"]}, "'1' is not"),
        ({"token_ids": [1, 96]}, "token id 96 is out of range, the target's tokenizer has 96 tokens"),
        ({**GOOD, "tokenizer_hash": "another"}, "another tokenizer"),
        ({**GOOD, "counts": [1, 2]}, "2 counts for 3"),
        ({**GOOD, "counts": {"1": 2}}, "`counts` must be a list"),
        ({"draft_vocab": [1, 2]}, "draft_vocab is list"),
        ({"draft_vocab": {}}, "no list `token_ids`"),
    ],
)
def test_malformed_or_foreign_files_are_refused_with_their_name_and_the_way_out(tmp_path, content, message):
    path = write(tmp_path / "bad.json", content)
    with pytest.raises(ValueError, match=message) as error:
        DraftVocab.load(path, num_tokens=96, tokenizer_hash="ours")
    assert str(path) in str(error.value)
    assert "spd-data vocab" in str(error.value)


def test_missing_file_is_an_error_never_the_first_ids(tmp_path):
    with pytest.raises(ValueError, match="there is no draft vocabulary here"):
        DraftVocab.load(tmp_path / "absent.json", num_tokens=96)
    with pytest.raises(ValueError, match="there is no draft vocabulary here"):
        DraftVocab.load(tmp_path, num_tokens=96)


def test_coverage_of_nothing_counted_is_zero():
    assert DraftVocab((0, 1)).coverage(np.zeros(3, int)) == 0
    assert DraftVocab((0, 9)).coverage(np.array([1, 1])) == 0.5


def test_published_vocabulary_loads(shared_dir):
    vocab = DraftVocab.load(shared_dir / "data/draft_vocab/qwen3.5_4b_top_32k.json", num_tokens=248077)
    assert len(vocab) == 32000
    assert 248046 in vocab.token_ids
    with pytest.raises(ValueError, match="out of range"):
        DraftVocab.load(shared_dir / "data/draft_vocab/qwen3.5_4b_top_32k.json", num_tokens=248044)
