"""A sample comes back from its line as it was; tokens fall into classes by their text."""

import json

import pytest

from spd_lightning.inference.evaluation.sample import TOKEN_CLASSES, Sample, token_class
from spd_lightning.inference.stats import Judgement
from tests.inference.evaluation.synthetic import PROMPT_TOKENS, drafted, sample


def test_a_sample_comes_back_from_its_line() -> None:
    difference = {"position": 6, "token": 1, "ar_token": 2, "margin": 1e-7}
    written = drafted([True, False, True], text="a\u2028b\ud83d", first_difference=difference, seed=3, num_devices=5)
    line = json.dumps(written.to_json())
    assert "\n" not in line and json.loads(line)["version"] == 1
    assert Sample.from_json(json.loads(line)) == written
    assert Sample.from_json(json.loads(json.dumps(sample().to_json()))) == sample()


def test_a_line_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match=r"version 2; this release reads version 1"):
        Sample.from_json(sample().to_json() | {"version": 2})
    with pytest.raises(ValueError, match="version None"):
        Sample.from_json({})


def test_missing_and_unknown_keys_are_named() -> None:
    values = sample().to_json() | {"extra": 1}
    del values["text"]
    with pytest.raises(ValueError, match=r"\['extra', 'text'\]"):
        Sample.from_json(values)


def test_each_judged_draft_has_a_token_class() -> None:
    with pytest.raises(ValueError, match="2 judgements but 1 token classes"):
        drafted([True, True], token_classes=("digit",))


def test_the_key_tells_answers_apart_and_nothing_else() -> None:
    one = drafted([True])
    assert drafted([False, True], text="other").key == one.key
    others = [dict(task="x"), dict(question_id="x"), dict(turn=1), dict(method="ppsd"), dict(drafter="x")]
    keys = {drafted([True], **changes).key for changes in [*others, dict(temperature=1.0)]} | {one.key}
    assert len(keys) == 7
    assert drafted([True], turn=1).prompt == ("gsm8k", "1", 1)


def test_the_counts_are_those_of_the_decode() -> None:
    stats = drafted([True, False]).stats
    assert stats.judgements == [Judgement(PROMPT_TOKENS + 1, 1, True), Judgement(PROMPT_TOKENS + 2, 2, False)]
    assert (stats.num_stages, stats.num_committed, stats.num_cycles) == (4, 2, 5)
    assert sample().stats.num_stages == 1


@pytest.mark.parametrize(
    "expected, texts",
    [
        ("word start", [" the", "\tx", "(foo", ".com", "_name", "\n\nThe", " 中", " \ufffd"]),
        ("word continuation", ["ing", "The", "'s", "’t", "é", "\u0301", "中文", "\ufffd", "x2"]),
        ("digit", ["7", " 42", "½", "٣"]),
        ("punctuation", [".", " (", "\n}", "```", "$", "€", "🙂", "<", "</", " <", "\x00"]),
        ("whitespace", [" ", "\n\n", "\t", "\u3000"]),
        ("special", ["", "<|im_end|>", "</s>", "<think>", "<0x0A>"]),
    ],
)
def test_classes_of_tokens(expected: str, texts: list[str]) -> None:
    assert {text: token_class(text) for text in texts} == dict.fromkeys(texts, expected)
    assert expected in TOKEN_CLASSES
