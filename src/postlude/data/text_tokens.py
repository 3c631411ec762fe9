"""TextTokens: tokenizes many texts in one call, and no piece of text twice. TokenBytes: the bytes of single tokens.

A tokenizer splits text at its special tokens first and encodes the pieces separately. The texts of one conversation
(up to each turn, and whole) consist of the same pieces, so each piece is encoded once.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from postlude.data.chat_tokenizer import ChatTokenizer

ANCHORS = ("\n", "=", ".", "a")
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # of SentencePiece vocabularies
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how they write one


class BosText(str):
    """Text at the start of a sequence: the tokenizer's beginning-of-sequence token goes before it."""


class ContinuationText(str):
    """Text that continues other text: a tokenizer that puts a space before every text puts none before it."""


class TextTokens:
    """Returns tokens of texts without an end token, and with a beginning-of-sequence token for a `BosText`."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        fast = getattr(tokenizer, "is_fast", False)  # others take special tokens out in ways of their own
        self._pieces = PiecewiseTokenizer(self._encode, list(tokenizer.added_tokens_decoder.values()) if fast else ())

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        anchor = self._anchors[0][0] if self._anchors else ""
        plain = self._pieces([anchor + text if isinstance(text, ContinuationText) else str(text) for text in texts])
        starts = [str(text) for text in texts if isinstance(text, BosText)]
        with_bos = iter(self.tokenizer(starts, add_special_tokens=True)["input_ids"] if starts else ())
        results = []
        for text, tokens in zip(texts, plain, strict=True):
            if isinstance(text, ContinuationText):
                results.append(self._without_anchor(text, tokens) if anchor else tokens)
            else:
                full = self._without_end(list(next(with_bos)), tokens) if isinstance(text, BosText) else tokens
                results.append(self.single_bos(full))
        return results

    def _without_anchor(self, text: str, anchored: list[int]) -> list[int]:
        """Returns the tokens of text after an anchor. Tries other anchors where their tokens do not stay apart."""
        for anchor, tokens in self._anchors:
            if anchor != self._anchors[0][0]:
                (anchored,) = self._encode([anchor + text])
            if anchored[: len(tokens)] == tokens:
                return anchored[len(tokens) :]
        return self._encode([text])[0]

    @cached_property
    def _anchors(self) -> list[tuple[str, list[int]]]:
        """Texts, with their tokens, to put before a continuation, for tokenizers that put a space before every text.

        Empty for other tokenizers.
        """
        (alone,) = self._encode(["b"])
        anchors = []
        for anchor in ANCHORS:
            tokens, longer = self._encode([anchor, f"{anchor}b"])
            if tokens and longer[: len(tokens)] == tokens:
                if longer[len(tokens) :] == alone:
                    return []
                anchors.append((anchor, tokens))
        return anchors

    def single_bos(self, tokens: list[int]) -> list[int]:
        """Removes one of two beginning-of-sequence tokens: the template's, where the tokenizer adds one too."""
        bos = getattr(self.tokenizer, "bos_token_id", None)
        return tokens[1:] if bos is not None and tokens[:2] == [bos, bos] else tokens

    def _without_end(self, tokens: list[int], plain: list[int]) -> list[int]:
        end = self.tokenizer.eos_token_id
        ended = len(tokens) > len(plain) and tokens[-1] == end
        return tokens[:-1] if ended and plain[-1:] != tokens[-1:] else tokens

    def _encode(self, texts: list[str]) -> list[list[int]]:
        tokens: list[list[int]] = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return tokens


class PiecewiseTokenizer:
    """Tokenizes texts piece by piece: `added` are the tokens at which text may be split.

    The first split text is also encoded whole. If the tokens differ, texts are never split again.
    """

    def __init__(self, encode: Callable[[list[str]], list[list[int]]], added: Sequence[Any] = ()) -> None:
        self.encode, self.added = encode, added
        self._splits: bool | None = None  # unknown until it is tried

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        split = [self._pieces(text) for text in texts]
        if self._splits is None:
            longest = max(split, key=len, default=[])
            if len(longest) > 1:
                self._splits = self._joined(longest, self._encoded(longest)) == self.encode(["".join(longest)])[0]
                if not self._splits:
                    split = [[text] for text in texts]
        known = self._encoded([piece for pieces in split for piece in pieces])
        return [self._joined(pieces, known) for pieces in split]

    def _encoded(self, pieces: Sequence[str]) -> dict[str, list[int]]:
        different = list(dict.fromkeys(pieces))
        return dict(zip(different, self.encode(different), strict=True)) if different else {}

    def _joined(self, pieces: Sequence[str], known: dict[str, list[int]]) -> list[int]:
        return [token for piece in pieces for token in known[piece]]

    def _pieces(self, text: str) -> list[str]:
        if self._splits is False or self._special is None:
            return [text]
        starts = [match.start() for match in self._special.finditer(text) if match[0] in self._borders]
        ends = [0, *(start for start in starts if start), len(text)]
        return [text[start:end] for start, end in itertools.pairwise(ends)]

    @cached_property
    def _borders(self) -> frozenset[str]:
        """Tokens whose match does not depend on the text before them."""
        return frozenset(
            token.content for token in self.added if not (token.normalized or token.lstrip or token.single_word)
        )

    @cached_property
    def _special(self) -> re.Pattern[str] | None:
        """The tokens that the tokenizer matches first, the longest before others."""
        contents = sorted((token.content for token in self.added if not token.normalized), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, contents))) if self._borders else None


def mask_of_spans(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[int]:
    """Returns 1 for each token that overlaps one of `spans`, given the offsets of tokens in the text."""
    marks = [0] * len(offsets)
    token = 0
    for start, end in spans:
        while token < len(offsets) and offsets[token][1] <= start:
            token += 1
        # Some tokenizers leave a space out of a token's offsets: it starts where the token before it ends. And the
        # bytes of one character all have the character's offsets.
        while start < end and token < len(offsets) and min(offsets[token][0], offsets[max(token, 1) - 1][1]) < end:
            marks[token] = 1
            token += 1
    return marks


def _byte_characters() -> dict[str, int]:
    """Returns the character that byte-level vocabularies, since GPT-2's, write for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_CHARACTERS = _byte_characters()
BYTE_SPACE = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"  # one of them, that no vocabulary leaves out


class TokenBytes:
    """The bytes of a tokenizer's tokens. Those of a completion, joined, are its text in UTF-8, special tokens included.

    A SentencePiece tokenizer leaves out the space that begins a text.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        space = tokenizer.get_vocab().get(BYTE_SPACE)
        self._byte_level = space is not None and tokenizer.decode([space]) == " "

    def of(self, token: int) -> bytes:
        """Returns the bytes of a token; none for an id that is no token."""
        written = self._tokenizer.convert_ids_to_tokens(token)
        if written is None or token in self._tokenizer.added_tokens_decoder:
            return (written or "").encode()
        if self._byte_level and BYTE_CHARACTERS.keys() >= set(written):
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
