"""CompletionReader: splits a completion into thought, text and tool calls, also while its tokens are sampled.

Space around a thought and before calls belongs to the form in which they are written, and is in no part.
`ReplyWriter` writes the parts for an API.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from postlude.data.thoughts import ThoughtMarkers
from postlude.data.tool_calls import MalformedCall, ParameterTypes, ToolCall, ToolCallFormat, beginning_at_end
from postlude.generate.protocol import Completion
from postlude.generate.text_stream import TextStream
from postlude.serving.server.chat_calls import ScoredTokens, assistant_message

TurnEnd = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class Piece:
    """A piece of a completion's text, or of its thought."""

    text: str
    is_thought: bool = False


@dataclass(frozen=True)
class Turn:
    """A completion and its parts."""

    completion: Completion
    text: str
    reasoning: str = ""
    calls: Sequence[dict[str, Any]] = ()
    """As in messages that a chat template takes."""
    stop: str | None = None
    """The stop string that ended it."""

    @property
    def end(self) -> TurnEnd:
        reason = self.completion.finish_reason
        return "tool_calls" if self.calls and reason == "stop" else reason

    @property
    def message(self) -> dict[str, Any]:
        """The message as a chat template takes it."""
        return assistant_message(self.text, self.reasoning, self.calls)


class Reader(Protocol):
    def add(self, tokens: Sequence[int]) -> list[Piece]:
        """Returns the new pieces after these tokens."""

    def finish(self, completion: Completion) -> tuple[list[Piece], Turn]:
        """Returns the last pieces, and the whole turn. All pieces together are its text and its reasoning."""


class TextReader(Reader):
    """Leaves a completion as it is."""

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream

    def add(self, tokens: Sequence[int]) -> list[Piece]:
        text = self._stream.add(tokens)
        return [Piece(text)] if text else []

    def finish(self, completion: Completion) -> tuple[list[Piece], Turn]:
        text = self._stream.finish(completion)
        return [Piece(text)] if text else [], Turn(completion, self._stream.text)


@dataclass(frozen=True)
class CallableTools:
    """The tools of a request, and how calls of them are read."""

    format: ToolCallFormat
    types: ParameterTypes
    parallel: bool
    """Whether a completion may have several calls."""


class CompletionReader(Reader):
    """Splits one completion of a chat. `in_thought` says that the prompt ended inside a thought.

    A thought is at the beginning. A call that cannot be read stays text.
    """

    def __init__(
        self, stream: TextStream, thoughts: ThoughtMarkers, *, in_thought: bool, tools: CallableTools | None
    ) -> None:
        self._stream, self._thoughts, self._tools = stream, thoughts, tools
        self._in_thought = in_thought
        self._phase: Literal["start", "thought", "gap", "answer"] = "start"
        self._from = 0  # where the phase began in the text
        self._sent = 0  # where the text goes on that no piece has
        self._text: list[str] = []
        self._reasoning: list[str] = []

    def add(self, tokens: Sequence[int]) -> list[Piece]:
        """Returns the new pieces after these tokens. What may begin a call, or a marker of a thought, is held back."""
        self._stream.add(tokens)
        pieces = self._begin(final=False)
        if self._phase == "answer":
            answer = self._stream.text[self._from :]
            end = len(answer) if self._tools is None else len(answer[: self._tools.format.calls_from(answer)].rstrip())
            pieces += self._piece(self._from + end)
        return pieces

    def finish(self, completion: Completion) -> tuple[list[Piece], Turn]:
        self._stream.finish(completion)
        pieces, calls = self._begin(final=True), list[dict[str, Any]]()
        if self._phase == "answer":
            answer = self._stream.text[self._from :]
            calls, end = self._calls(answer), len(answer)
            if calls:
                assert self._tools is not None
                end = len(self._tools.format.text_before_calls(answer).rstrip())
            pieces += self._piece(self._from + end)
        stop = self._stream.stop_string(completion)
        return pieces, Turn(completion, "".join(self._text), "".join(self._reasoning), calls, stop)

    def _calls(self, answer: str) -> list[dict[str, Any]]:
        """Returns the calls in an answer; none if one of them cannot be read."""
        if self._tools is None:
            return []
        calls = self._tools.format.parse(answer, self._tools.types)
        if any(isinstance(call, MalformedCall) for call in calls):
            return []
        kept = calls if self._tools.parallel else calls[:1]
        return [_message_call(call) for call in kept if isinstance(call, ToolCall)]

    def _begin(self, *, final: bool) -> list[Piece]:
        """Returns the new pieces of a thought, and finds where the answer begins."""
        text, pieces = self._stream.text, list[Piece]()
        if self._phase == "start":
            space = len(text) - len(text.lstrip())
            if text.startswith(self._thoughts.open, space):
                self._enter("thought", space + len(self._thoughts.open))
            elif final or not self._thoughts.open.startswith(text[space:]):
                self._enter("thought" if self._in_thought else "answer", 0)
        if self._phase == "thought":
            if not self._reasoning:
                self._sent = _after_space(text, self._from)
            close = text.find(self._thoughts.close, self._from if not self._reasoning else self._sent)
            held = 0 if final else beginning_at_end(text, self._thoughts.close)
            end = close if close >= 0 else len(text) - held
            pieces += self._piece(self._sent + len(text[self._sent : end].rstrip()))
            if close >= 0:
                self._enter("gap", close + len(self._thoughts.close))
        if self._phase == "gap" and (final or _after_space(text, self._from) < len(text)):
            self._enter("answer", _after_space(text, self._from))
        return pieces

    def _enter(self, phase: Literal["thought", "gap", "answer"], start: int) -> None:
        self._phase, self._from, self._sent = phase, start, start

    def _piece(self, end: int) -> list[Piece]:
        """Returns the text up to `end` that no piece has yet."""
        text, is_thought = self._stream.text[self._sent : end], self._phase == "thought"
        if not text:
            return []
        self._sent = end
        (self._reasoning if is_thought else self._text).append(text)
        return [Piece(text, is_thought)]


def _after_space(text: str, start: int) -> int:
    return len(text) - len(text[start:].lstrip())


def _message_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {"type": "function", "function": function, "id": f"call_{secrets.token_hex(12)}"}


def written_call(call: dict[str, Any]) -> dict[str, Any]:
    """Returns a call of a message as OpenAI writes it: with its arguments as JSON."""
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {"name": function["name"], "arguments": arguments}}


@dataclass(frozen=True)
class TokenUsage:
    prompt: int
    completion: int = 0


class ReplyWriter(Protocol):
    """Writes the reply to one request. Completions are numbered over all prompts."""

    def reply(self, turns: Sequence[Turn], usage: TokenUsage) -> Any:
        """Returns the whole reply."""

    def begin(self, usage: TokenUsage) -> Iterable[Any]:
        """Yields the first events of a stream, once sampling has begun."""

    def progress(self, index: int, pieces: Sequence[Piece], tokens: ScoredTokens, turn: Turn | None) -> Iterable[Any]:
        """Yields the events of new pieces of a completion, and of the tokens since its last ones.

        `turn` is the whole completion, with its last pieces.
        """

    def end(self, usage: TokenUsage) -> Iterable[Any]:
        """Yields the last events."""
