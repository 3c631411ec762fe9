"""TokenBytes: the bytes of single tokens, which may be a part of a character."""

from __future__ import annotations

import re

from postlude.data.chat_tokenizer import ChatTokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # of SentencePiece vocabularies
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how they write one


def _byte_characters() -> dict[str, int]:
    """Returns the character that byte-level vocabularies, since GPT-2's, write for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_CHARACTERS = _byte_characters()


class TokenBytes:
    """The bytes of a tokenizer's tokens. Those of a completion, joined, are its text in UTF-8, special tokens included.

    A SentencePiece tokenizer leaves out the space that begins a text.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_level = BYTE_CHARACTERS.keys() <= tokenizer.get_vocab().keys()

    def of(self, token: int) -> bytes:
        """Returns the bytes of a token; none for an id that is no token."""
        written = self._tokenizer.convert_ids_to_tokens(token)
        if written is None or token in self._tokenizer.added_tokens_decoder:
            return (written or "").encode()
        if self._byte_level:
            return bytes(BYTE_CHARACTERS[character] for character in written)
        byte = BYTE_TOKEN.fullmatch(written)
        return bytes([int(byte[1], 16)]) if byte else written.replace(SPACE, " ").encode()

    def text(self, token: int) -> str:
        """Returns the text of a token, or of a part of a character its bytes, as OpenAI writes them: bytes:\\xe2."""
        value = self.of(token)
        try:
            return value.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in value)
