"""The text of a completion as its tokens are sampled: stop strings in it, and pieces to stream."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.generate.protocol import Completion

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # a tokenizer's text for a character with missing bytes


class _NewText:
    """Decodes the tokens of one completion as they are sampled."""

    def __init__(self, tokenizer: ChatTokenizer, *, skip_special_tokens: bool) -> None:
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        self._settled = 0  # tokens before this are no longer decoded
        self._decoded = 0  # the text of tokens before this was returned or is held back

    def after(self, tokens: Sequence[int]) -> str:
        """Returns the text of new tokens; `tokens` are all so far. A character with missing bytes is held back."""
        context, text = (
            self.tokenizer.decode(part, skip_special_tokens=self.skip_special_tokens)
            for part in (tokens[self._settled : self._decoded], tokens[self._settled :])
        )
        if text.endswith(UNFINISHED):
            return ""
        # The text of a token may depend on those before it, so the newest ones are decoded again as context.
        self._settled, self._decoded = self._decoded, len(tokens)
        return text[len(context) :]


class StopStrings:
    """Searches the text of one completion, special tokens included, for any of `stops`."""

    def __init__(self, tokenizer: ChatTokenizer, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._overlap = max(map(len, self.stops)) - 1  # characters before the newest that may belong to a stop string
        self._tail = ""
        self._new_text = _NewText(tokenizer, skip_special_tokens=False)

    def find(self, tokens: Sequence[int]) -> str | None:
        """Returns the stop string that the newest token completes, if any. `tokens` are all so far."""
        searched = self._tail + self._new_text.after(tokens)
        self._tail = searched[max(0, len(searched) - self._overlap) :]
        return min((stop for stop in self.stops if stop in searched), key=searched.find, default=None)


class TextStream:
    """Text without special tokens, in pieces whose concatenation is the text of the completion.

    It holds back characters with missing bytes, and text that may be the beginning of one of `stops`. `kept` are the
    special tokens that stay, by id.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, stops: Sequence[str] = (), kept: Mapping[int, str] | None = None
    ) -> None:
        self.text = ""
        """All text that was returned so far."""
        self._tokenizer, self._stops, self._kept = tokenizer, stops, kept or {}
        self._held_back = ""
        self._overlap = max(map(len, stops), default=1) - 1
        self._start_run()

    def add(self, tokens: Sequence[int], final_text: str | None = None) -> str:
        """Returns the new text after these tokens. `final_text` is the text of a finished completion."""
        if final_text is None:
            known = self._held_back + self._decoded(tokens)
            ends = [len(known) - self._overlap, *(known.find(stop) for stop in self._stops if stop in known)]
            end = max(0, min(ends))
            piece, self._held_back = known[:end], known[end:]
        else:
            piece = final_text[len(self.text) :]
        self.text += piece
        return piece

    def finish(self, completion: Completion) -> str:
        """Returns the rest of the text of a finished completion."""
        text = completion.text
        if text is None or self._kept:
            text = "".join(self._texts(completion.tokens))
            if completion.finish_reason == "stop":
                text = text[: min((text.find(stop) for stop in self._stops if stop in text), default=len(text))]
        return self.add((), text)

    def stop_string(self, completion: Completion) -> str | None:
        """Returns the one of `stops` that ended a completion, if any."""
        if completion.finish_reason != "stop" or not self._stops:
            return None
        text = self._tokenizer.decode(completion.tokens, skip_special_tokens=False)
        return min((stop for stop in self._stops if stop in text), key=text.find, default=None)

    def _decoded(self, tokens: Sequence[int]) -> str:
        """Returns the new text after these tokens."""
        text, start = "", 0
        for place, token in enumerate(tokens if self._kept else ()):
            if token in self._kept:
                self._run += tokens[start:place]
                text += (
                    self._tokenizer.decode(self._run, skip_special_tokens=True)[self._run_text :] + self._kept[token]
                )
                self._start_run()
                start = place + 1
        self._run += tokens[start:]
        new = self._new_text.after(self._run)
        self._run_text += len(new)
        return text + new

    def _start_run(self) -> None:
        """Begins a run of tokens without kept ones."""
        self._run: list[int] = []
        self._run_text = 0  # characters of it that were returned
        self._new_text = _NewText(self._tokenizer, skip_special_tokens=True)

    def _texts(self, tokens: Sequence[int]) -> Iterator[str]:
        """Yields the texts of the runs, and the kept tokens between them."""
        for is_kept, run in itertools.groupby(tokens, self._kept.__contains__):
            if is_kept:
                yield from map(self._kept.__getitem__, run)
            else:
                yield self._tokenizer.decode(list(run), skip_special_tokens=True)


def completion_text(tokenizer: ChatTokenizer, tokens: Sequence[int], stopped_by: str | None) -> str:
    """Returns the text of a completion without special tokens, up to the stop string that ended it."""
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return text if stopped_by is None else text.partition(stopped_by)[0]
