"""Where an answer ends and what of it may be shown, against plain decoding of all tokens at once."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from spd_lightning.inference.stopping import IncrementalText, Stop, StopCondition
from spd_lightning.modules.tiny_target import byte_tokenizer
from spd_lightning.modules.tokenizer import token_ids
from tests.conftest import build_tiny_tokenizer

BYTES = byte_tokenizer()
MERGES = build_tiny_tokenizer()
EOS = BYTES.eos_token_id


def halves_tokenizer() -> PreTrainedTokenizerFast:
    """Tokens that spell a letter and half a character, half a character and a letter, and two letters twice."""
    letters = bytes_to_unicode()
    pairs = [("a", letters[0xC3]), (letters[0xA9], "b"), (letters[0xF0], letters[0x9F]), ("b", letters[0xE4])]
    merges = [*pairs, ("a", "b"), ("ab", "ab"), (letters[0xA0], "a")]
    words = [*letters.values(), *(first + second for first, second in merges)]
    backend = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


HALVES = halves_tokenizer()
ALL_TOKENIZERS = pytest.mark.parametrize("tokenizer", [BYTES, MERGES, HALVES], ids=["bytes", "merges", "halves"])
SETTINGS = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
# Few letters, so that stop strings are met by chance, in one to four bytes; U+FFFD is also a character of its own.
TEXT = st.text("ab é你🙂\ufffd", max_size=30) | st.text(max_size=20)
STOPS = st.lists(st.text("ab é你🙂", min_size=1, max_size=4), max_size=3)


def decoded(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def increments(tokenizer: PreTrainedTokenizerFast, ids: list[int], stops: tuple[str, ...] = ()) -> list[str]:
    text = IncrementalText(tokenizer, stops)
    return [*(text.push(token_id) for token_id in ids), text.finish()]


def run(ids: list[int], max_new_tokens: int = 1000, stops: tuple[str, ...] = (), tokenizer=BYTES) -> Stop | None:
    """The end, which must come with the last token fed if at all."""
    condition = StopCondition({EOS}, max_new_tokens, stops, tokenizer)
    for index, token_id in enumerate(ids):
        if stop := condition.push(token_id):
            assert index == len(ids) - 1, "it stopped early"
            return stop
    return None


def cut(text: str, stops: list[str]) -> str | None:
    """The text before the stop string that is complete first, by trying every beginning of the text."""
    for end in range(len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))]
    return None


@ALL_TOKENIZERS
@SETTINGS
@given(text=TEXT)
def test_increments_are_whole_characters_and_join_to_the_text(tokenizer, text: str) -> None:
    ids = token_ids(tokenizer, text)
    parts = increments(tokenizer, ids)
    assert "".join(parts) == text
    for index in range(len(ids)):  # nothing that is complete is held back but U+FFFD, which may be half a character
        assert "".join(parts[: index + 1]) == decoded(tokenizer, ids[: index + 1]).rstrip("\ufffd")


@ALL_TOKENIZERS
@SETTINGS
@given(data=st.data())
def test_any_ids_join_to_what_decoding_all_of_them_gives(tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    assert "".join(increments(tokenizer, ids)) == decoded(tokenizer, ids)


@SETTINGS
@given(text=TEXT)
def test_qwen_tokens_give_whole_characters(qwen_tokenizer, text: str) -> None:
    text = f"<think>\n{text} 🏳️‍🌈 ខ្មែរ</think><|im_end|>"
    ids = token_ids(qwen_tokenizer, text)
    parts = increments(qwen_tokenizer, ids)
    assert "".join(parts) == decoded(qwen_tokenizer, ids)
    assert not any("\ufffd" in part for part in parts) or "\ufffd" in text


def test_a_character_is_shown_with_its_last_byte() -> None:
    assert increments(BYTES, token_ids(BYTES, "a🙂b")) == ["a", "", "", "", "🙂", "b", ""]


def test_special_tokens_show_nothing_and_split_no_character() -> None:
    first, *rest = token_ids(BYTES, "é!")
    assert increments(BYTES, [first, 257, *rest, EOS]) == ["", "", "é", "!", "", ""]


def test_half_a_character_at_the_end_is_what_the_tokenizer_makes_of_it() -> None:
    assert increments(BYTES, token_ids(BYTES, "a🙂")[:-1]) == ["a", "", "", "", "\ufffd"]


def test_spaces_and_bytes_of_a_sentencepiece_vocabulary() -> None:
    vocab = {"▁a": 0, "▁b": 1, "<0xE4>": 2, "<0xBD>": 3, "<0xA0>": 4, "<unk>": 5}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    ids = [0, 1, 2, 3, 4, 2, 3, 4, 6, 6, 1, 0]
    assert increments(tokenizer, ids) == ["a", " b", "", "", "你", "", "", "你", "", "", " b", " a", ""]


@ALL_TOKENIZERS
@SETTINGS
@given(text=st.text("ab é你🙂", max_size=30), stops=STOPS)
def test_text_and_ids_end_before_the_stop_string_that_is_complete_first(tokenizer, text: str, stops) -> None:
    expected = cut(text, stops)
    ids = token_ids(tokenizer, text)
    condition = StopCondition((), 1000, stops, tokenizer)
    for num_fed, token_id in enumerate(ids, 1):
        stop = condition.push(token_id)
        settled = decoded(tokenizer, ids[:num_fed]).rstrip("\ufffd")
        if stop is None:
            assert cut(settled, stops) is None, "it stops late"
            begun = [n for n in range(len(settled) + 1) if any(stop.startswith(settled[n:]) for stop in stops)]
            assert condition.text.text == settled[: min(begun, default=len(settled))]
            continue
        assert cut(settled, stops) == expected, "it stops early"
        kept = [k for k in range(num_fed) if expected.startswith(decoded(tokenizer, ids[:k]))]
        assert stop == Stop("stop", max(kept), expected) and condition.text.text == expected
        return
    assert expected is None
    condition.text.finish()
    assert condition.text.text == text


def test_a_token_with_the_end_of_the_text_and_the_first_of_the_stop_string_is_not_kept() -> None:
    ids = token_ids(MERGES, "one pipeline")
    pieces = [decoded(MERGES, [token_id]) for token_id in ids]
    straddling = next(i for i, piece in enumerate(pieces) if i and len(piece) > 2)
    before = "".join(pieces[:straddling])
    stop = run(ids[: straddling + 1], stops=(pieces[straddling][1:],), tokenizer=MERGES)
    assert stop == Stop("stop", straddling, before + pieces[straddling][0])


def test_of_stop_strings_in_one_token_the_first_complete_one_counts() -> None:
    ids = token_ids(HALVES, "abab")
    assert len(ids) == 1
    assert run(ids, stops=("abab", "ba"), tokenizer=HALVES) == Stop("stop", 0, "a")
    assert run(ids, stops=("ba", "aba"), tokenizer=HALVES) == Stop("stop", 0, "")  # complete at the same letter


def test_a_beginning_that_turns_out_to_be_none_is_shown() -> None:
    assert increments(BYTES, token_ids(BYTES, "xababc"), ("abc",)) == ["x", "", "", "ab", "", "", ""]
    assert increments(BYTES, token_ids(BYTES, "xabd"), ("abc",)) == ["x", "", "", "abd", ""]
    assert increments(BYTES, token_ids(BYTES, "xab"), ("abc",)) == ["x", "", "", "ab"]


@pytest.mark.parametrize("num_before", [0, 1, 4])
def test_an_end_of_sequence_token_ends_the_answer_and_is_one_of_its_ids(num_before: int) -> None:
    ids = [*token_ids(BYTES, "word")[:num_before], EOS]
    assert run(ids) == Stop("eos", num_before + 1, "word"[:num_before])
    assert run(ids, max_new_tokens=num_before + 1) == Stop("eos", num_before + 1, "word"[:num_before])


def test_an_end_of_sequence_token_that_spells_something_is_not_shown() -> None:
    (letter,) = token_ids(BYTES, "a")
    condition = StopCondition({letter}, 9, (), BYTES)
    assert condition.push(token_ids(BYTES, "b")[0]) is None
    assert condition.push(letter) == Stop("eos", 2, "b")


def test_without_end_of_sequence_ids_the_answer_goes_on() -> None:
    condition = StopCondition((), 3, (), BYTES)
    ends = [condition.push(token_id) for token_id in (EOS, token_ids(BYTES, "a")[0], EOS)]
    assert ends == [None, None, Stop("length", 3, "a")]


@pytest.mark.parametrize("limit", range(1, 7))
def test_exactly_the_limit_of_tokens_comes_out(limit: int) -> None:
    ids = token_ids(BYTES, "abcdefgh")[:limit]
    assert run(ids, max_new_tokens=limit) == Stop("length", limit, "abcdefgh"[:limit])


def test_at_the_limit_what_was_held_back_belongs_to_the_text() -> None:
    assert run(token_ids(BYTES, "xST"), 3, ("STOP",)) == Stop("length", 3, "xST")
    assert run(token_ids(BYTES, "x🙂")[:-1], 4) == Stop("length", 4, "x\ufffd")
    assert run([*token_ids(BYTES, "xST"), EOS], 9, ("STOP",)) == Stop("eos", 4, "xST")


def test_a_stop_string_comes_before_the_limit() -> None:
    assert run(token_ids(BYTES, "xSTOP"), 5, ("STOP",)) == Stop("stop", 1, "x")
    assert run(token_ids(BYTES, "STOP"), 5, ("STOP",)) == Stop("stop", 0, "")


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        StopCondition((), 0, (), BYTES)
    with pytest.raises(ValueError, match="an empty one would stop at once"):
        StopCondition((), 1, ("a", ""), BYTES)
