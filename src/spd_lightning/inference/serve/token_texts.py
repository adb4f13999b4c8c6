"""What single tokens spell, as text and as bytes: most bytes beyond ASCII are parts of characters."""

import re
from functools import cache
from typing import Any

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Looks tokens up.

    Args:
        tokenizer: the target's; no other thread may use it meanwhile.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def text(self, token: int) -> str:
        """A token's text; `bytes:` and escapes where it is a part of a character."""
        data = self.data(token)
        if data is None:
            return self._decoded(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def data(self, token: int) -> bytes | None:
        """A token's bytes; none if the tokenizer does not say."""
        text = self._decoded(token)
        if "\ufffd" not in text:
            return text.encode()
        spelled = self.tokenizer.convert_ids_to_tokens(token)
        if found := BYTE_TOKEN.fullmatch(spelled):
            return bytes([int(found[1], 16)])
        values = [byte_letters().get(letter) for letter in spelled]
        return None if None in values else bytes(value for value in values if value is not None)

    def num_characters(self, token: int) -> int:
        """Characters that begin in a token."""
        data = self.data(token)
        return len(self._decoded(token)) if data is None else sum(not 0x80 <= byte < 0xC0 for byte in data)

    def _decoded(self, token: int) -> str:
        return self.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)


@cache
def byte_letters() -> dict[str, int]:
    """The letter that byte-level BPE writes for each byte: printable ones stand for themselves, others from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
