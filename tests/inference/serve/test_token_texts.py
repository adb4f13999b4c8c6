"""What single tokens spell."""

import pytest

from spd_lightning.inference.serve.token_texts import TokenTexts
from spd_lightning.modules.tiny_target import byte_tokenizer


@pytest.fixture(scope="module")
def texts() -> TokenTexts:
    return TokenTexts(byte_tokenizer())


def test_the_bytes_of_a_texts_tokens_are_the_texts(texts: TokenTexts) -> None:
    text = "aé €\n\x00😀" + bytes(range(128)).decode()
    ids = texts.tokenizer(text)["input_ids"]
    assert b"".join(texts.data(token) or b"?" for token in ids) == text.encode()
    assert sum(texts.num_characters(token) for token in ids) == len(text)


def test_all_256_bytes_are_told_apart(texts: TokenTexts) -> None:
    assert {texts.data(token) for token in range(256)} == {bytes([value]) for value in range(256)}


def test_a_part_of_a_character_is_named_by_its_bytes(texts: TokenTexts) -> None:
    first, second = texts.tokenizer("é")["input_ids"]
    assert [texts.text(first), texts.text(second)] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert texts.text(258) == "<|im_end|>"


def test_byte_tokens_of_sentence_piece_are_read_and_others_unknown() -> None:
    class Tokenizer:
        def decode(self, ids, **_):
            return "\ufffd"

        def convert_ids_to_tokens(self, token):
            return ["<0xC3>", "\u4e00"][token]

    assert [TokenTexts(Tokenizer()).data(token) for token in (0, 1)] == [b"\xc3", None]
    assert TokenTexts(Tokenizer()).text(1) == "\ufffd"
