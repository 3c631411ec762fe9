"""The formats in which models write tool calls: one class each. A new format is one more class, here or of yours.

A format returns the calls of a completion in their order. A call that it cannot read is a `MalformedCall`, whose text
the model reads in place of a result, so that it may correct the call. A completion without a call is an answer.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from postlude.data.chat_template import CALL, NAME, QUESTION, TOOL, ChatTemplate, EncodingError
from postlude.user_code import load_callable

ParameterTypes: TypeAlias = Mapping[str, Mapping[str, str]]
"""The JSON type of each parameter of each tool, such as {"add": {"a": "integer"}}."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool by its name."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MalformedCall:
    """A call that cannot be read, and what the model reads about it."""

    message: str


class ToolCallFormat(ABC):
    """Reads the calls of a completion."""

    form: ClassVar[str]
    """How a call is written, for messages to models and users."""
    openings: ClassVar[tuple[str, ...]] = ()
    """What a call may begin with; without any, a completion with calls has no other text."""
    closings: ClassVar[tuple[str, ...]] = ()
    """What a call ends with: the first of these that the template writes."""

    @abstractmethod
    def parse(self, completion: str, types: ParameterTypes) -> list[ToolCall | MalformedCall]:
        """Returns the calls of a completion without its reasoning. `types` are those of the tools' parameters."""

    def text_before_calls(self, completion: str) -> str:
        """Returns the text of a completion that has calls, up to the first of them."""
        starts = [completion.find(opening) for opening in self.openings if opening in completion]
        return completion[: min(starts, default=0)]

    def calls_from(self, text: str) -> int:
        """Returns where calls may begin in a text that may go on: before this, it is text in any case."""
        if not self.openings:
            return 0
        known = [text.find(opening) for opening in self.openings if opening in text]
        begun = [len(text) - beginning_at_end(text, opening) for opening in self.openings]
        return min(known + begun)

    def _malformed(self, reason: str = "") -> MalformedCall:
        return MalformedCall(f"a call is {self.form}{reason}")

    def _from_json(self, call: Any, key: str) -> ToolCall | MalformedCall:
        arguments = call.get(key) if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return self._malformed()
        if not (arguments is None or isinstance(arguments, dict)):
            return self._malformed()
        return ToolCall(call["name"], arguments or {})


class Hermes(ToolCallFormat):
    """JSON in tags, as Hermes, Qwen2.5, Qwen3 and many others write it. The last tag may lack its end."""

    form = '{"name": "...", "arguments": {...}}'
    openings, closings = ("<tool_call>",), ("</tool_call>",)
    CALL: ClassVar = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)

    def parse(self, completion: str, types: ParameterTypes) -> list[ToolCall | MalformedCall]:
        return [self._call(text) for text in self.CALL.findall(completion)]

    def _call(self, text: str) -> ToolCall | MalformedCall:
        try:
            return self._from_json(json.loads(text), "arguments")
        except (ValueError, RecursionError):
            return self._malformed()


class Llama3(ToolCallFormat):
    """JSON after <|python_tag|>, or as the whole completion, as Llama 3 writes it. Several are separated by ";".

    A whole completion is a call if it is an object with a "name" and "parameters", or if it starts as one and is cut
    off. Any other JSON is an answer.
    """

    form = '{"name": "...", "parameters": {...}}'
    TAG: ClassVar = "<|python_tag|>"
    openings, closings = (TAG,), ("}",)
    ENDS: ClassVar = re.compile(r"(?:<\|eom_id\|>|<\|eot_id\|>|\s)+\Z")
    START: ClassVar = re.compile(r'\s*\{\s*"name"\s*:\s*"')

    def calls_from(self, text: str) -> int:
        """Returns 0 for a text that may be an object as a whole."""
        return 0 if text.lstrip()[:1] in ("", "{") else super().calls_from(text)

    def parse(self, completion: str, types: ParameterTypes) -> list[ToolCall | MalformedCall]:
        """Returns the calls after the tag, or those that the completion consists of."""
        text, tag, tagged = self.ENDS.sub("", completion).partition(self.TAG)
        calls = list(self._calls(tagged if tag else text))
        if tag:
            return calls or [self._malformed()]
        starts_as_call = self.START.match(text) is not None
        is_call = isinstance(calls[0], ToolCall) if calls else False
        return calls if is_call or (starts_as_call and len(calls) == 1) else []

    def _calls(self, text: str) -> Iterator[ToolCall | MalformedCall]:
        position, decoder = 0, json.JSONDecoder()
        while remaining := text[position:].lstrip("; \t\r\n"):
            position = len(text) - len(remaining)
            try:
                call, position = decoder.raw_decode(text, position)
            except (ValueError, RecursionError):
                yield self._malformed()
                return
            key = "parameters" if isinstance(call, dict) and "parameters" in call else "arguments"
            yield self._from_json(call if isinstance(call, dict) and key in call else None, key)


class Qwen3Coder(ToolCallFormat):
    """Tags for the function and for each parameter, as Qwen3-Coder writes them. The tag around them may be missing.

    Parameters are text without quotes. They become the types that the tool declares; text stays text.
    """

    form = "<function=name><parameter=key>value</parameter></function>"
    openings, closings = ("<tool_call>", "<function="), ("</tool_call>", "</function>")
    FUNCTION: ClassVar = re.compile(r"<function=(.*?)(</function>|(?=<function=)|\Z)", re.DOTALL)
    PARAMETER: ClassVar = re.compile(r"<parameter=([^>]*)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
    OUTER: ClassVar = re.compile(r"<tool_call>(?:(?!<tool_call>).)*?(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)

    def parse(self, completion: str, types: ParameterTypes) -> list[ToolCall | MalformedCall]:
        """Returns the call of each function tag. A <tool_call> without a function tag is malformed."""
        calls = [(tag.start(), self._call(tag[1], bool(tag[2]), types)) for tag in self.FUNCTION.finditer(completion)]
        calls += [
            (tag.start(), self._malformed())
            for tag in self.OUTER.finditer(completion)
            if not self.FUNCTION.search(tag[0])
        ]
        return [call for _, call in sorted(calls, key=lambda pair: pair[0])]

    def _call(self, text: str, ended: bool, types: ParameterTypes) -> ToolCall | MalformedCall:
        name, bracket, body = text.partition(">")
        if not ended or not bracket or not name.strip():
            return self._malformed()
        known, arguments = types.get(name.strip(), {}), {}
        for key, value in self.PARAMETER.findall(body):
            text = value.removeprefix("\n").removesuffix("\n")
            try:
                arguments[key.strip()] = _typed(text, known.get(key.strip(), "string"))
            except (ValueError, RecursionError):
                return self._malformed(f", and {key.strip()} is of type {known[key.strip()]}, unlike {text[:60]!r}")
        return ToolCall(name.strip(), arguments)


def _typed(text: str, kind: str) -> Any:
    """Returns a parameter's text as a value of a JSON type. Raises ValueError if it is none."""
    if kind == "string":
        return text
    value = json.loads(text.strip().lower() if kind == "boolean" else text)
    types: dict[str, type | tuple[type, ...]] = {
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "array": list,
        "object": dict,
    }
    is_boolean = isinstance(value, bool)
    if not isinstance(value, types[kind]) or is_boolean != (kind == "boolean"):
        raise ValueError(f"{text!r} is not of type {kind}")
    return value


def beginning_at_end(text: str, marker: str) -> int:
    """Returns the length of the longest beginning of a marker, but not all of it, at the end of a text."""
    longest = min(len(marker) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(marker[:length])), 0)


FORMATS: dict[str, type[ToolCallFormat]] = {"hermes": Hermes, "llama3": Llama3, "qwen3_coder": Qwen3Coder}


def load_format(name: str) -> ToolCallFormat:
    """Returns a format by its name in `FORMATS`, or path/to/file.py:Class of yours."""
    if name in FORMATS:
        return FORMATS[name]()
    if ":" not in name:
        raise ValueError(
            f"there is no tool-call format {name!r}; there are {', '.join(FORMATS)}. Or write path/to/file.py:Class."
        )
    instance = load_callable(name, kind="tool-call format")()
    if not isinstance(instance, ToolCallFormat):
        raise ValueError(f"{name} makes a {type(instance).__name__}, but a tool-call format is a ToolCallFormat.")
    return instance


def detect_format(template: ChatTemplate) -> ToolCallFormat:
    """Returns the format in which a chat template writes calls. Raises ValueError if it is none of `FORMATS`."""
    written = written_call(template)
    for kind in FORMATS.values():
        if kind().parse(written, {NAME: {"probe": "integer"}}) == [ToolCall(NAME, {"probe": 1})]:
            return kind()
    raise ValueError(
        f"tools: the model's chat template writes calls in a format that is not known here ({written.strip()[:80]!r}); "
        f"there are {', '.join(FORMATS)}."
    )


def written_call(template: ChatTemplate) -> str:
    """Returns what a chat template writes of an answer that calls `NAME` with {"probe": 1}."""
    try:
        tools = template.checked_tools([TOOL], "the request")
        messages = template.checked([QUESTION, {"role": "assistant", "tool_calls": [CALL]}], "the request", tools)
        turn = template.turn(messages, 1, tools)
    except EncodingError as error:
        raise ValueError(f"tools: {error}") from error
    return template.thoughts.answer(turn[1]) if turn is not None else ""
