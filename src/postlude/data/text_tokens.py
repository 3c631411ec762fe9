"""Texts to tokens, many in one call of the tokenizer, and no piece of text twice.

A tokenizer cuts text at its special tokens before anything else, so that what stands between them is encoded by itself.
The texts of one conversation (up to each turn, and whole) are made of the same pieces; cut there, each is encoded once.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from postlude.data.chat_tokenizer import ChatTokenizer

ANCHORS = ("\n", "=", ".", "a")


class BosText(str):
    """Text that begins a sequence, so that the tokenizer's own opening token comes before it."""


class ContinuationText(str):
    """Text that goes on from other text: a tokenizer that puts a space before every text puts none before this."""


class TextTokens:
    """The tokens of texts, without an end token, and with an opening token where a text is an `BosText`."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        fast = getattr(tokenizer, "is_fast", False)  # others take special tokens out in ways of their own
        self._pieces = PiecewiseTokenizer(self._plain, list(tokenizer.added_tokens_decoder.values()) if fast else ())

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text."""
        before = self._anchors[0][0] if self._anchors else ""
        found = self._pieces([before + text if isinstance(text, ContinuationText) else str(text) for text in texts])
        openings = [str(text) for text in texts if isinstance(text, BosText)]
        opened = iter(self.tokenizer(openings, add_special_tokens=True)["input_ids"] if openings else ())
        made = []
        for text, tokens in zip(texts, found, strict=True):
            if isinstance(text, ContinuationText):
                made.append(self._continued(text, tokens) if before else tokens)
            else:
                whole = self._unended(list(next(opened)), tokens) if isinstance(text, BosText) else tokens
                made.append(self.single_bos(whole))
        return made

    def _continued(self, text: str, anchored: list[int]) -> list[int]:
        """The tokens of text after an anchor, which must begin `anchored`; else another anchor is tried."""
        for anchor, tokens in self._anchors:
            if anchor != self._anchors[0][0]:
                (anchored,) = self._plain([anchor + text])
            if anchored[: len(tokens)] == tokens:
                return anchored[len(tokens) :]
        return self._plain([text])[0]

    @cached_property
    def _anchors(self) -> list[tuple[str, list[int]]]:
        """Texts, with their tokens, that a tokenizer which puts a space before every text puts it before.

        None are needed of one that does not.
        """
        (alone,) = self._plain(["b"])
        anchors = []
        for anchor in ANCHORS:
            tokens, longer = self._plain([anchor, f"{anchor}b"])
            if tokens and longer[: len(tokens)] == tokens:
                if longer[len(tokens) :] == alone:
                    return []
                anchors.append((anchor, tokens))
        return anchors

    def single_bos(self, tokens: list[int]) -> list[int]:
        """Tokens without the opening token that a text, or a template, brings in addition to the tokenizer's."""
        bos = getattr(self.tokenizer, "bos_token_id", None)
        return tokens[1:] if bos is not None and tokens[:2] == [bos, bos] else tokens

    def _unended(self, tokens: list[int], plain: list[int]) -> list[int]:
        end = self.tokenizer.eos_token_id
        ended = len(tokens) > len(plain) and tokens[-1] == end
        return tokens[:-1] if ended and plain[-1:] != tokens[-1:] else tokens

    def _plain(self, texts: list[str]) -> list[list[int]]:
        tokens: list[list[int]] = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return tokens


class PiecewiseTokenizer:
    """Calls a tokenizer without its own opening and end tokens. `borders` are tokens at which text may be cut.

    That cutting changes nothing is tried on the first text that is cut, and otherwise not done again.
    """

    def __init__(self, encode: Callable[[list[str]], list[list[int]]], added: Sequence[Any] = ()) -> None:
        self.encode, self.added = encode, added
        self._cuts: bool | None = None  # unknown until it is tried

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text."""
        cut = [self._pieces(text) for text in texts]
        if self._cuts is None:
            longest = max(cut, key=len, default=[])
            if len(longest) > 1:
                self._cuts = self._joined(longest, self._encoded(longest)) == self.encode(["".join(longest)])[0]
                if not self._cuts:
                    cut = [[text] for text in texts]
        known = self._encoded([piece for pieces in cut for piece in pieces])
        return [self._joined(pieces, known) for pieces in cut]

    def _encoded(self, pieces: Sequence[str]) -> dict[str, list[int]]:
        different = list(dict.fromkeys(pieces))
        return dict(zip(different, self.encode(different), strict=True)) if different else {}

    def _joined(self, pieces: Sequence[str], known: dict[str, list[int]]) -> list[int]:
        return [token for piece in pieces for token in known[piece]]

    def _pieces(self, text: str) -> list[str]:
        """The text, cut before each border."""
        if self._cuts is False or self._special is None:
            return [text]
        starts = [found.start() for found in self._special.finditer(text) if found[0] in self._borders]
        places = [0, *(start for start in starts if start), len(text)]
        return [text[place:end] for place, end in itertools.pairwise(places)]

    @cached_property
    def _borders(self) -> frozenset[str]:
        """Those that take nothing of the text before them, whatever it is."""
        return frozenset(
            token.content for token in self.added if not (token.normalized or token.lstrip or token.single_word)
        )

    @cached_property
    def _special(self) -> re.Pattern[str] | None:
        """What the tokenizer looks for first: of those that begin at one place, the longest."""
        contents = sorted((token.content for token in self.added if not token.normalized), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, contents))) if self._borders else None


def mask_of_spans(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[int]:
    """1 for each token of which a part lies in one of `spans`, given where each begins and ends in the text."""
    marks = [0] * len(offsets)
    token = 0
    for start, end in spans:
        while token < len(offsets) and offsets[token][1] <= start:
            token += 1
        # Some tokenizers leave a space out of where a token begins: it begins where the one before it ends. And the
        # bytes of one character all begin and end where the character does.
        while start < end and token < len(offsets) and min(offsets[token][0], offsets[max(token, 1) - 1][1]) < end:
            marks[token] = 1
            token += 1
    return marks
