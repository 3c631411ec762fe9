"""What a message may hold: text, or what the tokenizer's chat template itself knows how to write.

A template is a small program, and one that was not written for a list of parts or for a content of null writes their
Python form into the text without a word. So each is tried on the template before it is believed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

Message: TypeAlias = Mapping[str, Any]
"""{"role": "user", "content": "..."}"""

WORD = "probe"
ASKED: Message = {"role": "user", "content": "?"}
THOUGHT = "reasoning-probe"
THINKING: tuple[Message, ...] = (  # the ways in which templates are told what the assistant thought
    {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\n."},
    {"role": "assistant", "content": ".", "reasoning_content": THOUGHT},
    {"role": "assistant", "content": ".", "thinking": THOUGHT},
)
CALL = {"type": "function", "function": {"name": WORD, "arguments": {WORD: 1}}}


@dataclass(frozen=True)
class Template:
    """A chat template, asked what it can write. `render` gives the text of messages."""

    render: Callable[[list[Message]], str]

    def checked(self, messages: Any, row: str) -> list[Message]:
        """The messages as a list, if every one can be written as it is meant; else a ValueError that names it."""
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
            raise ValueError(f"{row} holds {short(messages)}, but messages are a list of at least one.")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
                raise ValueError(
                    f"message {index} of {row} is {short(message)}, but a message has a role and a content. "
                    f'Write it as {{"role": "user", "content": "..."}}.'
                )
            content = message["content"]
            if not isinstance(content, str):
                self._check_content(content, message, f"message {index} ({message['role']}) of {row}")
        return list(messages)

    def _check_content(self, content: Any, message: Message, where: str) -> None:
        if content is None:
            if not message.get("tool_calls"):
                raise ValueError(f"the content of {where} is null. Give it text, or leave the row out.")
            if not self.writes_calls:
                raise ValueError(
                    f"the content of {where} is null beside tool calls, which the tokenizer's chat template does not "
                    "write. Give it text, or a tokenizer whose template knows tool calls."
                )
        elif isinstance(content, list):
            other = next((part for part in content if not _is_text(part)), None)
            if other is not None or not content:
                raise ValueError(
                    f"the content of {where} has the part {short(other)}, but models here read text alone. "
                    'Keep parts such as {"type": "text", "text": "..."}, or leave the row out.'
                )
            if not self.writes_parts:
                raise ValueError(
                    f"the content of {where} is a list of parts, which the tokenizer's chat template does not write. "
                    "Join its texts into one."
                )
        else:
            raise ValueError(f"the content of {where} is {short(content)}, but a content is text.")

    @cached_property
    def writes_parts(self) -> bool:
        """Whether a list of one text is written as that text is."""
        return self._same(
            [{"role": "user", "content": [{"type": "text", "text": WORD}]}], [{"role": "user", "content": WORD}]
        )

    @cached_property
    def writes_calls(self) -> bool:
        """Whether tool calls are written, and a content of null beside them as nothing."""
        called, empty = [{"role": "assistant", "content": text, "tool_calls": [CALL]} for text in (None, "")]
        silent = {"role": "assistant", "content": ""}
        return self._same([ASKED, called], [ASKED, empty]) and not self._same([ASKED, called], [ASKED, silent])

    def drops_reasoning(self, heard: list[Message]) -> bool:
        """Whether what the assistant thought is written in its last turn, and no more once `heard` follows it."""
        return any(self._thinks([ASKED, said]) and not self._thinks([ASKED, said, *heard]) for said in THINKING)

    def _thinks(self, messages: list[Message]) -> bool:
        try:
            return THOUGHT in self.render(messages)
        except Exception:  # whatever a template raises: it does not know them
            return False

    def _same(self, one: list[Message], other: list[Message]) -> bool:
        try:
            return self.render(one) == self.render(other)
        except Exception:  # whatever a template raises: it does not know them
            return False


def short(value: Any) -> str:
    """A value as an error shows it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
