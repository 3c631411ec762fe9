"""Many texts to tokens in one call of the tokenizer, and no piece of text twice.

A tokenizer cuts text at its special tokens before anything else, so that what stands between them is encoded by itself.
The texts of one conversation (up to each turn, and whole) are made of the same pieces; cut there, each is encoded once.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any


class Pieces:
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
