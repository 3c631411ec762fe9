"""Finds stop strings in text that arrives token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer shows for a letter whose bytes have not all come


class Detokenizer(Protocol):
    """The part of a transformers tokenizer that a generator uses."""

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a sequence."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str:
        """Text of tokens."""
        ...


class StopStrings:
    """Searches the text of one completion, special tokens included, for any of `stops`."""

    def __init__(self, tokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.stops = tuple(stops)
        self._reach = max(map(len, self.stops)) - 1  # letters before the newest that may belong to a stop string
        self._tail = ""
        self._settled = 0  # tokens before this are no longer decoded
        self._read = 0  # tokens before this have given their text

    def found(self, tokens: Sequence[int]) -> str | None:
        """Returns the stop string that the newest token completes, if any. `tokens` are all so far."""
        context = self.tokenizer.decode(tokens[self._settled : self._read], skip_special_tokens=False)
        text = self.tokenizer.decode(tokens[self._settled :], skip_special_tokens=False)
        if text.endswith(UNFINISHED):
            return None  # and wait for the letter's other bytes
        searched = self._tail + text[len(context) :]
        # A tokenizer may write a token by what stands before it, so the newest ones are decoded again as context.
        self._settled, self._read = self._read, len(tokens)
        self._tail = searched[max(0, len(searched) - self._reach) :]
        return min((stop for stop in self.stops if stop in searched), key=searched.find, default=None)


def completion_text(tokenizer: Detokenizer, tokens: Sequence[int], stopped_by: str | None) -> str:
    """Returns the text of a completion without special tokens, up to the stop string that ended it."""
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return text if stopped_by is None else text.partition(stopped_by)[0]
