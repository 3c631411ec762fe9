"""TextStream: the text of a completion whose tokens come a few at a time."""

from __future__ import annotations

from collections.abc import Sequence

from postlude.generate.stop_strings import UNFINISHED, Detokenizer


class TextStream:
    """Text without special tokens, in pieces that together are the completion's.

    Held back are letters whose bytes have not all come, and what may be the beginning of one of `stops`.
    """

    def __init__(self, tokenizer: Detokenizer, stops: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.text = ""
        """All text that was returned."""
        self._held = ""
        self._reach = max(map(len, stops), default=1) - 1
        self._tokens: list[int] = []
        self._settled = 0  # tokens before this are no longer decoded
        self._read = 0  # tokens before this have given their text

    def add(self, tokens: Sequence[int], whole: str | None = None) -> str:
        """Returns the text that is certain after these tokens. `whole` is the whole text, once there is one."""
        self._tokens += tokens
        piece = self._settle() if whole is None else whole[len(self.text) :]
        self.text += piece
        return piece

    def _settle(self) -> str:
        context = self._decode(self._tokens[self._settled : self._read])
        text = self._decode(self._tokens[self._settled :])
        if text.endswith(UNFINISHED):
            return ""
        # A tokenizer may write a token by what stands before it, so the newest ones are decoded again as context.
        self._settled, self._read = self._read, len(self._tokens)
        known = self._held + text[len(context) :]
        end = len(known) - self._reach if self._reach else len(known)
        self._held = known[max(0, end) :]
        return known[: max(0, end)]

    def _decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)
