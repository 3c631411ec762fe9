"""Messages, and what a tokenizer's chat template writes of them.

A template is a small program. One that was not written for a content of null, for tool calls or for tools leaves them
out, or writes their Python form, without a word. So each is tried on the template before it is believed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from postlude.data.chat_tokenizer import ChatTokenizer

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

ASKED: Message = {"role": "user", "content": "?"}
THOUGHT = "reasoning-probe"
THINKING: tuple[Message, ...] = (  # the ways in which templates are told what the assistant thought
    {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\n."},
    {"role": "assistant", "content": ".", "reasoning_content": THOUGHT},
    {"role": "assistant", "content": ".", "thinking": THOUGHT},
)
REASONING = ("reasoning_content", "reasoning", "thinking")
"""The keys under which a message may hold what the assistant thought."""
OPEN, CLOSE = "<think>", "</think>"
OPENED = re.compile(rf"{OPEN}(\s*)\Z")
NAME = "probe_function"
CALL = {"type": "function", "id": "call12345", "function": {"name": NAME, "arguments": {"probe": 1}}}
TOOL = {
    "type": "function",
    "function": {"name": NAME, "description": "?", "parameters": {"type": "object", "properties": {}}},
}


class EncodingError(Exception):
    """The template or the tokenizer failed. Whoever knows the row raises a ValueError that names it."""


@contextmanager
def as_encoding_error(what: str) -> Iterator[None]:
    """Within, whatever is raised becomes `EncodingError` with its reason."""
    try:
        yield
    except Exception as error:  # whatever templates, transformers and tokenizers raise
        kind = "" if type(error).__name__ == "TemplateError" else f"{type(error).__name__}: "
        raise EncodingError(f"{what}: {kind}{str(error).strip() or 'no reason given'}") from error


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template, called with `options`."""

    tokenizer: ChatTokenizer
    options: Mapping[str, Any]

    def render(self, messages: Sequence[Message], tools: Tools = None, *, header: bool = False) -> str:
        """The text of messages, with `header` followed by what the assistant's next turn begins with."""
        with as_encoding_error("the chat template fails"):
            text: str = self.tokenizer.apply_chat_template(
                list(messages),
                **self._settings(tools),
                chat_template=self.source(tools),
                tokenize=False,
                add_generation_prompt=header,
            )
        return text

    def render_marked(self, messages: Sequence[Message], tools: Tools = None) -> tuple[str, list[tuple[int, int]]]:
        """The text of messages, and where in it each part between generation marks begins and ends."""
        from transformers.utils.chat_template_utils import render_jinja_template

        with as_encoding_error("the chat template fails"):
            rendered: Any = render_jinja_template(
                [[dict(message) for message in messages]],
                chat_template=self.source(tools),
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **self._settings(tools)},
            )
        return rendered[0][0], list(rendered[1][0])

    def is_marked(self, tools: Tools = None) -> bool:
        """Whether it marks what the assistant generates, and the tokenizer can say which tokens that is."""
        return bool(GENERATION_MARK.search(self.source(tools))) and getattr(self.tokenizer, "is_fast", False)

    def source(self, tools: Tools = None) -> str:
        """The template's text. Of several by name, the one for tools where there are any."""
        template = self.tokenizer.chat_template
        if isinstance(template, Mapping):
            for_tools = template.get("tool_use") if self._settings(tools).get("tools") else None
            template = for_tools or template.get("default")
        return template or PLAIN_TEMPLATE

    def _settings(self, tools: Tools) -> dict[str, Any]:
        return {**self.options, "tools": list(tools)} if tools else dict(self.options)

    def checked(self, messages: Any, row: str, tools: Tools = None) -> list[Message]:
        """The messages as a list, if every one can be written as it is meant; else a ValueError that names it.

        Keys that are null are left out, and a content of several texts is joined into one.
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
        content, where = message.get("content"), f"message {index} ({message['role']}) of {row}"
        if isinstance(content, list):
            content = _joined(content, where)
        elif content is not None and not isinstance(content, str):
            raise ValueError(f"the content of {where} is {shorten(content)}, but a content is text.")
        if message.get("tool_calls"):
            content = self._beside_calls(content, where, tools)
        elif content is None:
            raise ValueError(f"the content of {where} is null. Give it text, or leave the row out.")
        return {name: value for name, value in message.items() if value is not None} | {"content": content}

    def _beside_calls(self, content: str | None, where: str, tools: Tools) -> str | None:
        """The content beside tool calls with which the template writes both. One that is empty may have to be null."""
        for tried in (content,) if content else ("", None):
            if self._writes_calls(tried, tools):
                return tried
        beside = " beside a text" if content else ""
        raise ValueError(
            f"{where} has tool calls, which the tokenizer's chat template does not write{beside}. Use a tokenizer "
            f"whose template does, or leave the row out."
        )

    def _writes_calls(self, content: str | None, tools: Tools) -> bool:
        key = (self.source(tools), content and "text")
        if key not in self._known:
            said = {"role": "assistant", "content": key[1], "tool_calls": [CALL]}
            text, asked = (self._attempt(messages, tools) for messages in ([ASKED, said], [ASKED]))
            self._known[key] = NAME in text and text.count("None") <= asked.count("None")
        return self._known[key]

    def checked_tools(self, tools: Any, row: str) -> Tools:
        """The tools of a row, from a list or its JSON; None where there are none. Else a ValueError."""
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
            self._known[key] = NAME in self._attempt([ASKED], [TOOL])
        if not self._known[key]:
            raise ValueError(
                f"{row} has tools, which the tokenizer's chat template does not write. Use a tokenizer whose template "
                f"does, or leave the column out."
            )
        return tools

    def before_turn(self, messages: Sequence[Message], index: int, tools: Tools = None) -> str:
        """What a model reads before message `index`, which is the assistant's: all before it, and the turn's header."""
        if index:
            return self.render(messages[:index], tools, header=True)
        asked, headed = (self.render([ASKED], tools, header=header) for header in (False, True))
        header, text = headed.removeprefix(asked), self.render(messages[:1], tools)
        return text[: text.find(header) + len(header)] if header != headed and header in text else header

    def turn(self, messages: Sequence[Message], index: int, tools: Tools = None) -> tuple[str, str] | None:
        """What a model reads before message `index`, which is the assistant's, and what it then writes.

        What it writes is the template's own text of the turn as the last one. A template may leave out what was thought
        even there (DeepSeek-R1), or begin the turn with a thought that the message does not have: then the thought is
        written as the model writes it, before what the template makes of the rest. None where the template writes
        what comes before the turn differently once the turn is there.
        """
        before, text = self.before_turn(messages, index, tools), self.render(messages[: index + 1], tools)
        message = messages[index]
        is_whole = reasoning_of(message) in text
        if text.startswith(before) and is_whole:
            return before, text[len(before) :]
        opened = OPENED.search(before)
        if is_whole and opened is None:
            return None
        start = before[: opened.start()] if opened else before
        thought, answer = _thought_and_answer(message)
        rest = text[len(start) :].lstrip()
        if not text.startswith(start) or not rest.startswith(answer):
            return None
        if opened:
            thought = thought.removeprefix(OPEN).removeprefix(opened[1])
        return before, thought + rest

    def drops_reasoning(self, heard: list[Message]) -> bool:
        """Whether what the assistant thought is written in its last turn, and no more once `heard` follows it."""
        return any(
            THOUGHT in self._attempt([ASKED, said]) and THOUGHT not in self._attempt([ASKED, said, *heard])
            for said in THINKING
        )

    def _attempt(self, messages: Sequence[Message], tools: Tools = None) -> str:
        """The text of messages, or none if the template does not know them."""
        try:
            return self.render(messages, tools)
        except EncodingError:
            return ""

    @cached_property
    def _known(self) -> dict[tuple[str, str | None], bool]:
        return {}


def reasoning_of(message: Message) -> str:
    """What the assistant thought before a message, by itself; empty if nothing is known of it."""
    for key in REASONING:
        if isinstance(message.get(key), str):
            return str(message[key]).strip()
    thought = (message.get("content") or "").rpartition(CLOSE)[0]
    return (thought.partition(OPEN)[2] if OPEN in thought else thought).strip()


def _thought_and_answer(message: Message) -> tuple[str, str]:
    """A message's thought as a model writes it, with the tags around it, and the answer after it."""
    content = message.get("content") or ""
    if CLOSE in content and not any(message.get(key) for key in REASONING):
        thought, _, answer = content.rpartition(CLOSE)
        gap = answer[: len(answer) - len(answer.lstrip())]
        opening = "" if thought.lstrip().startswith(OPEN) else f"{OPEN}\n"
        return f"{opening}{thought.lstrip()}{CLOSE}{gap}", answer.strip()
    return f"{OPEN}\n{reasoning_of(message)}\n{CLOSE}\n\n", content.strip()


def shared_prompt(one: Sequence[Message], other: Sequence[Message], row: str) -> int:
    """How many messages two conversations begin with before the assistant's answers differ."""
    both = min(len(one), len(other))
    shared = next((i for i in range(both) if dict(one[i]) != dict(other[i])), both)
    if shared == len(one) == len(other) and one[-1]["role"] == "assistant":
        return shared - 1
    if shared in (0, both):
        fault = "is the beginning of the other" if shared else "begins unlike the other"
        raise ValueError(f"one answer of {row} {fault}. Give two answers to one prompt.")
    roles = one[shared]["role"], other[shared]["role"]
    if roles != ("assistant", "assistant"):
        raise ValueError(
            f"the prompts of {row} differ at message {shared} ({roles[0]} and {roles[1]}). Give two answers of the "
            f"assistant to one prompt."
        )
    return shared


def _joined(parts: list[Any], where: str) -> str:
    other = next((part for part in parts if not _is_text(part)), None)
    if other is not None or not parts:
        raise ValueError(
            f"the content of {where} has the part {shorten(other)}, but models here read text alone. "
            'Keep parts such as {"type": "text", "text": "..."}, or leave the row out.'
        )
    return "".join(part["text"] for part in parts)


def shorten(value: Any) -> str:
    """A value as an error shows it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
