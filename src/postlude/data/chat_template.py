"""ChatTemplate: renders messages with a tokenizer's chat template, and checks what the template can render.

A template that was not written for a content of null, for tool calls or for tools omits them, or writes their Python
form, without an error. So each is tried on the template first.
"""

from __future__ import annotations

import ctypes
import difflib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.data.thoughts import DEFAULT_MARKERS, KNOWN_MARKERS, ThoughtMarkers

Message: TypeAlias = Mapping[str, Any]
"""{"role": "user", "content": "..."}"""
Tools: TypeAlias = Sequence[Mapping[str, Any]] | None
"""The functions that a conversation may call, as JSON schemas."""

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\b")

RENDER_SECONDS = 20.0  # for one short message, which takes milliseconds
QUESTION: Message = {"role": "user", "content": "?"}
PLACEHOLDER = "what was said."  # stands for an answer where the template's text around one is looked at
PROBE = "reasoning-probe"
SYSTEM_ROLES = ("system", "developer")
RESERVED = ("messages", "tools", "add_generation_prompt", "chat_template")
"""Variables of a template that are no options of it."""
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
NAME = "probe_function"
ARGUMENTS = {"probe": 1}
CALL = {"type": "function", "id": "call12345", "function": {"name": NAME, "arguments": ARGUMENTS}}
TOOL = {
    "type": "function",
    "function": {"name": NAME, "description": "?", "parameters": {"type": "object", "properties": {}}},
}


class EncodingError(Exception):
    """The template or the tokenizer failed. The caller raises a ValueError that names the row."""


@contextmanager
def as_encoding_error(action: str) -> Iterator[None]:
    """Turns any exception into an `EncodingError` with its reason."""
    try:
        yield
    except Exception as error:  # whatever templates, transformers and tokenizers raise
        kind = "" if type(error).__name__ == "TemplateError" else f"{type(error).__name__}: "
        raise EncodingError(f"{action}: {kind}{str(error).strip() or 'no reason given'}") from error


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer, with `options` for it."""

    tokenizer: ChatTokenizer
    options: Mapping[str, Any]

    def render(self, messages: Sequence[Message], tools: Tools = None, *, header: bool = False) -> str:
        """Returns the text of messages; with `header`, followed by the header of the assistant's next turn."""
        return self._render(messages, tools, add_generation_prompt=header)[0]

    def render_marked(self, messages: Sequence[Message], tools: Tools = None) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of messages, and the spans between generation marks in it."""
        return self._render(messages, tools, return_assistant_tokens_mask=True)

    def _render(self, messages: Sequence[Message], tools: Tools, **options: bool) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of messages, and the spans between generation marks if they are asked for.

        A tokenizer's `apply_chat_template` is not used: it drops a content of None, which some templates test for.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        source = self.source(tools)
        check_template_ends(source)
        with as_encoding_error("the chat template fails"):
            rendered: Any = render_jinja_template(
                [[_with_reasoning_key(message, source) for message in messages]],
                chat_template=source,
                **{**self.tokenizer.special_tokens_map, **self._settings(tools), **options},
            )
        (text,), spans = rendered
        return text, list(spans[0]) if spans else []

    def is_marked(self, tools: Tools = None) -> bool:
        """Whether it has generation marks, and the tokenizer can map them to tokens."""
        return bool(GENERATION_MARK.search(self.source(tools))) and getattr(self.tokenizer, "is_fast", False)

    def source(self, tools: Tools = None) -> str:
        """Returns the template's source. Of several named ones, the one for tools if there are tools."""
        template = self.tokenizer.chat_template
        if isinstance(template, Mapping):
            for_tools = template.get("tool_use") if self._settings(tools).get("tools") else None
            template = for_tools or template.get("default")
        return template or PLAIN_TEMPLATE

    def _settings(self, tools: Tools) -> dict[str, Any]:
        return {**self.options, "tools": list(tools)} if tools else dict(self.options)

    def checked(self, messages: Any, row: str, tools: Tools = None) -> list[Message]:
        """Returns the messages as a list, or raises a ValueError that names one that the template cannot render.

        Keys that are null are left out, and a content of several texts is joined.
        """
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
            raise ValueError(f"{row} holds {shorten(messages)}, but messages are a list of at least one.")
        return [self._checked(message, index, row, tools) for index, message in enumerate(messages)]

    def _checked(self, message: Any, index: int, row: str, tools: Tools) -> Message:
        is_message = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not is_message or not ("content" in message or message.get("tool_calls")):
            raise ValueError(
                f"message {index} of {row} is {shorten(message)}, but a message has a role and a content. "
                f'Write it as {{"role": "user", "content": "..."}}.'
            )
        content, location = message.get("content"), f"message {index} ({message['role']}) of {row}"
        if isinstance(content, list):
            content = _joined(content, location)
        elif content is not None and not isinstance(content, str):
            raise ValueError(f"the content of {location} is {shorten(content)}, but a content is text.")
        checked = {name: value for name, value in message.items() if value is not None} | {"content": content}
        if message.get("tool_calls"):
            checked |= self._as_rendered(content, message["tool_calls"], location, tools)
        elif content is None:
            raise ValueError(f"the content of {location} is null. Give it text, or leave the row out.")
        return checked

    def _as_rendered(self, content: str | None, calls: Any, location: str, tools: Tools) -> dict[str, Any]:
        """Returns content and tool calls in the form that the template renders.

        An empty content may have to be null. Arguments are objects, or JSON text for a template that writes only text.
        """
        if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
            raise ValueError(
                f"the tool calls of {location} are {shorten(calls)}, but tool calls are a list of objects."
            )
        for as_text in (False, True):
            for candidate in (content,) if content else ("", None):
                if self._renders_calls(candidate, tools, as_text=as_text):
                    numbered = enumerate(calls)
                    return {
                        "content": candidate,
                        "tool_calls": [_call(call, f"call {i} of {location}", as_text=as_text) for i, call in numbered],
                    }
        condition = " beside a text" if content else ""
        raise ValueError(
            f"{location} has tool calls, which the tokenizer's chat template does not write{condition}. Use a "
            f"tokenizer whose template does, or leave them out."
        )

    def _renders_calls(self, content: str | None, tools: Tools, *, as_text: bool) -> bool:
        key = (self.source(tools), content and "text", as_text)
        if key not in self._known:
            call = _call(CALL, "the probe", as_text=as_text)
            turn = {"role": "assistant", "content": key[1], "tool_calls": [call]}
            text, question = (self.try_render(messages, tools) for messages in ([QUESTION, turn], [QUESTION]))
            writes_arguments = json.dumps(ARGUMENTS) in text if as_text else str(ARGUMENTS) not in text
            self._known[key] = NAME in text and writes_arguments and text.count("None") <= question.count("None")
        return self._known[key]

    def checked_tools(self, tools: Any, row: str) -> Tools:
        """Returns the tools of a row, given as a list or its JSON; None if there are none. Raises ValueError."""
        if isinstance(tools, str) and tools.strip():
            try:
                tools = json.loads(tools)
            except json.JSONDecodeError as error:
                raise ValueError(f"the tools of {row} are text that is not JSON: {error}. Give a list.") from error
        if not tools:
            return None
        if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
            raise ValueError(f"the tools of {row} are {shorten(tools)}, but tools are a list of JSON schemas.")
        key = (self.source(tools), "tools")
        if key not in self._known:
            self._known[key] = NAME in self.try_render([QUESTION], [TOOL])
        if not self._known[key]:
            raise ValueError(
                f"{row} has tools, which the tokenizer's chat template does not write. Use a tokenizer whose template "
                f"does, or leave them out."
            )
        return tools

    def before_turn(self, messages: Sequence[Message], index: int, tools: Tools = None) -> str:
        """Returns what a model reads before the assistant's message `index`: all before it, and the turn's header."""
        if index:
            return self.render(messages[:index], tools, header=True)
        without, with_header = (self.render([QUESTION], tools, header=header) for header in (False, True))
        header, text = with_header.removeprefix(without), self.render(messages[:1], tools)
        return text[: text.find(header) + len(header)] if header != with_header and header in text else header

    def turn(self, messages: Sequence[Message], index: int, tools: Tools = None) -> tuple[str, str] | None:
        """Returns what a model reads before the assistant's message `index`, and what it then writes.

        What it writes is the template's text of the turn as the last one. A template may remove reasoning even there
        (DeepSeek-R1), or start the turn with reasoning that the message does not have. Then the reasoning is written as
        the model writes it, before what the template makes of the rest. Returns None if the template renders what comes
        before the turn differently once the turn is there.
        """
        before, text = self.before_turn(messages, index, tools), self.render(messages[: index + 1], tools)
        message = messages[index]
        is_whole = self.reasoning_of(message) in text
        if text.startswith(before) and is_whole:
            return before, text[len(before) :]
        opened = self.thoughts.opened(before)
        if is_whole and opened is None:
            return None
        start = before[: opened.start()] if opened else before
        reasoning, answer = self._reasoning_and_answer(message)
        turn_text = text[len(start) :].lstrip()
        if not text.startswith(start) or not turn_text.startswith(answer):
            return None
        if opened:
            reasoning = reasoning.removeprefix(self.thoughts.open).removeprefix(opened[1])
        return before, reasoning + turn_text

    def drops_reasoning(self, roles: Sequence[str]) -> bool:
        """Whether the reasoning of the last turn is rendered, but no more once messages of these roles follow it."""
        key = ("reasoning", " ".join(roles))
        if key not in self._known:
            inline = f"{self.thoughts.open}\n{PROBE}\n{self.thoughts.close}\n\n."
            turns: list[Message] = [  # the ways in which templates take reasoning
                {"role": "assistant", "content": inline},
                {"role": "assistant", "content": ".", "reasoning_content": PROBE},
                {"role": "assistant", "content": ".", "thinking": PROBE},
            ]
            after = [{"role": role, "content": "."} for role in roles]
            self._known[key] = any(
                PROBE in self.try_render([QUESTION, turn]) and PROBE not in self.try_render([QUESTION, turn, *after])
                for turn in turns
            )
        return self._known[key]

    @cached_property
    def thoughts(self) -> ThoughtMarkers:
        """What marks a thought: as the template writes one, else what it or the vocabulary has of the known markers."""
        turn = {"role": "assistant", "content": PLACEHOLDER, "reasoning_content": PROBE}
        opening, _, rest = self.try_render([QUESTION, turn]).partition(PROBE)
        close, found, _ = rest.partition(PLACEHOLDER)
        close, header = close.strip(), self.try_render([QUESTION], header=True)
        if found and close:
            if known := [markers for markers in KNOWN_MARKERS if markers.close == close]:
                return known[0]
            opened = opening.removeprefix(header).strip() if opening.startswith(header) else ""
            if not opened and header.rstrip().endswith(close.replace("/", "", 1)):
                opened = close.replace("/", "", 1)  # the header begins the thought
            if opened:
                return ThoughtMarkers(opened, close)
        text = "\n".join([self.source(), *self.tokenizer.get_added_vocab()])
        return next((markers for markers in KNOWN_MARKERS if markers.is_in(text)), DEFAULT_MARKERS)

    def reasoning_of(self, message: Message) -> str:
        """Returns the reasoning of a message without its markers; empty if there is none."""
        for key in REASONING_KEYS:
            if isinstance(message.get(key), str):
                return str(message[key]).strip()
        reasoning = (message.get("content") or "").rpartition(self.thoughts.close)[0]
        return (reasoning.partition(self.thoughts.open)[2] if self.thoughts.open in reasoning else reasoning).strip()

    def _reasoning_and_answer(self, message: Message) -> tuple[str, str]:
        """Returns a message's reasoning as a model writes it, with its markers, and the answer after it."""
        content, thoughts = message.get("content") or "", self.thoughts
        if thoughts.close in content and not any(message.get(key) for key in REASONING_KEYS):
            reasoning, _, answer = content.rpartition(thoughts.close)
            gap = answer[: len(answer) - len(answer.lstrip())]
            opening = "" if reasoning.lstrip().startswith(thoughts.open) else f"{thoughts.open}\n"
            return f"{opening}{reasoning.lstrip()}{thoughts.close}{gap}", answer.strip()
        return f"{thoughts.open}\n{self.reasoning_of(message)}\n{thoughts.close}\n\n", content.strip()

    def try_render(self, messages: Sequence[Message], tools: Tools = None, *, header: bool = False) -> str:
        """Returns the text of messages, or an empty one if the template refuses them."""
        try:
            return self.render(messages, tools, header=header)
        except EncodingError:
            return ""

    @cached_property
    def _known(self) -> dict[tuple[str | bool | None, ...], bool]:
        return {}


def read_chat_template(file: str | os.PathLike[str]) -> str:
    """Returns the chat template in a file. Raises if there is none, or if it is not Jinja."""
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    path = Path(file).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"there is no chat template {path}; give the path of a .jinja file.")
    try:
        source = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the chat template {path} is not UTF-8 text: {error.reason} at byte {error.start}."
        ) from error
    if not source.strip():
        raise ValueError(f"the chat template {path} is empty.")
    try:
        check_template_ends(source)
        render_jinja_template([[dict(QUESTION)]], chat_template=source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template {path} is not Jinja: {error.message} in line {error.lineno}.") from error
    except TemplateTimeout:
        raise
    except Exception:
        pass
    return source


class TemplateTimeout(ValueError):
    """A chat template takes too long."""


@lru_cache
def check_template_ends(source: str) -> None:
    """Raises `TemplateTimeout` if a template does not render one short message in time: its loops may take days."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def render() -> None:
        with suppress(Exception):  # what it cannot render is reported where it is rendered
            render_jinja_template([[dict(QUESTION)]], chat_template=source)

    thread = threading.Thread(target=render, name="chat template", daemon=True)
    thread.start()
    thread.join(RENDER_SECONDS)
    if thread.is_alive():
        assert thread.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(TemplateTimeout))
        raise TemplateTimeout(
            f"the chat template does not render one short message in {RENDER_SECONDS:g} s; its loops are too long. "
            "Give another one."
        )


def with_system(messages: Sequence[Message], system: str | None) -> list[Message]:
    """Returns the messages, after a system message if there is one to add and they have none."""
    has_one = any(isinstance(message, Mapping) and message.get("role") in SYSTEM_ROLES for message in messages)
    return list(messages) if system is None or has_one else [{"role": "system", "content": system}, *messages]


def check_variables(tokenizer: ChatTokenizer, variables: Mapping[str, Any]) -> None:
    """Refuses variables that no chat template of the tokenizer reads: it would ignore them."""
    template = tokenizer.chat_template or PLAIN_TEMPLATE
    source = "\n".join(template.values()) if isinstance(template, Mapping) else template
    for name in variables:
        if name in RESERVED:
            raise ValueError(f"template_variables has {name!r}, which is not for a config to set. Leave it out.")
        if not re.search(rf"\b{re.escape(name)}\b", source):
            near = difflib.get_close_matches(name, set(re.findall(r"\w+", source)), 1)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out, or give another chat_template."
            raise ValueError(
                f"template_variables has {name!r}, which the tokenizer's chat template does not read; {hint}"
            )


def _with_reasoning_key(message: Message, source: str) -> dict[str, Any]:
    """Returns a message whose reasoning is under a key that the template reads. transformers before 5.23 adds none."""
    keys = [key for key in REASONING_KEYS if re.search(rf"\b{key}\b", source)]
    own = next((key for key in REASONING_KEYS if isinstance(message.get(key), str)), None)
    return {**message} if own is None or not keys or own in keys else {**message, keys[0]: message[own]}


def shared_prompt(first: Sequence[Message], second: Sequence[Message], row: str) -> int:
    """Returns the number of messages that two conversations share before the assistant's completions differ."""
    shorter = min(len(first), len(second))
    shared = next((i for i in range(shorter) if dict(first[i]) != dict(second[i])), shorter)
    if shared == len(first) == len(second) and first[-1]["role"] == "assistant":
        return shared - 1
    if shared in (0, shorter):
        fault = "is the beginning of the other" if shared else "begins unlike the other"
        raise ValueError(f"one completion of {row} {fault}. Give two completions of one prompt.")
    roles = first[shared]["role"], second[shared]["role"]
    if roles != ("assistant", "assistant"):
        raise ValueError(
            f"the prompts of {row} differ at message {shared} ({roles[0]} and {roles[1]}). Give two completions "
            f"of one prompt."
        )
    return shared


def _joined(parts: list[Any], location: str) -> str:
    not_text = next((part for part in parts if not _is_text(part)), None)
    if not_text is not None or not parts:
        raise ValueError(
            f"the content of {location} has the part {shorten(not_text)}, but models here read only text. "
            'Keep parts such as {"type": "text", "text": "..."}, or leave the row out.'
        )
    return "".join(part["text"] for part in parts)


def _call(call: Mapping[str, Any], location: str, *, as_text: bool) -> dict[str, Any]:
    """Returns a tool call with its arguments as an object, or as JSON. OpenAI's format has JSON in a string."""
    function = call.get("function", call)
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if isinstance(arguments, Mapping) and as_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif isinstance(arguments, str) and not as_text:
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"the arguments of {location} are {shorten(arguments)}, which is not JSON: {error}. Fix the call, or "
                "leave the row out."
            ) from error
        if not isinstance(parsed, dict):
            raise ValueError(f"the arguments of {location} are {shorten(arguments)}, but arguments are an object.")
        arguments = parsed
    else:
        return dict(call)
    changed = {**function, "arguments": arguments}
    return {**call, "function": changed} if "function" in call else changed


def shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
