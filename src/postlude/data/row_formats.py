"""Rows in the formats that datasets have: ShareGPT, Alpaca, messages as JSON text, and conversations as text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

ExampleFormat: TypeAlias = Literal["messages", "sharegpt", "completion", "alpaca", "text"]
SHAREGPT = ("conversations",)
ALPACA = ("instruction", "output")
"""The columns that a row of Alpaca has. "input" and "system" are optional."""
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
"""The role of each speaker of ShareGPT."""
ASSISTANT = "\n\nAssistant:"  # how conversations as text begin the assistant's turn


def recognised_format(
    name: str, columns: Sequence[str], formats: Mapping[ExampleFormat, Sequence[str]]
) -> ExampleFormat | None:
    """Returns the only one of `formats` all of whose columns a dataset has; None if there is none.

    Raises ValueError if there are several. Where one of the columns of a prompt and a completion is missing, and there
    are no messages, they are counted too: the dataset may lack them by mistake.
    """
    found = {kind: needed for kind, needed in formats.items() if set(needed) <= set(columns)}
    pair = formats["completion"]
    if not found.keys() & {"messages", "sharegpt"} and set(pair) & set(columns):
        found["completion"] = pair
    if len(found) > 1:
        listed = "; ".join(f"{kind} ({', '.join(needed)})" for kind, needed in found.items())
        raise ValueError(
            f"dataset {name} has the columns of several formats: {listed}. Set data.format to one of them."
        )
    return next(iter(found), None)


def read_messages(value: Any, location: str) -> Any:
    """Returns messages of role and content, given those of ShareGPT, JSON text of messages, or one message alone.

    Any other value is returned unchanged.
    """
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            return value
        if not _is_messages(parsed):
            return value
        value = parsed
    if not _is_messages(value):
        return value
    messages = [value] if isinstance(value, Mapping) else value
    return [message if "role" in message else _from_sharegpt(message, location) for message in messages]


def read_cells(form: str, cells: Sequence[Any], location: str) -> list[Any]:
    """Returns the arguments of the encoder's method `form`, given the columns of a row.

    JSON text is read as messages where what it belongs to is messages too. A pair of texts without a prompt, both of
    which begin with the same turns up to the assistant's, has these as its prompt.
    """
    if form == "conversation":
        return [read_messages(cells[0], location)]
    prompt = read_messages(cells[0], location)
    is_text = isinstance(cells[0], list) or (form == "completion" and isinstance(prompt, str))
    completions = [cell if is_text and isinstance(cell, str) else read_messages(cell, location) for cell in cells[1:]]
    if prompt is None and all(isinstance(completion, str) for completion in completions):
        first, second = completions
        ends = [turn.end() for turn in re.finditer(ASSISTANT, first) if second.startswith(first[: turn.end()])]
        if ends:
            return [first[: ends[-1]], first[ends[-1] :], second[ends[-1] :]]
    return [prompt, *completions]


def alpaca_prompt(row: Mapping[str, Any], location: str) -> list[dict[str, str]]:
    """Returns the prompt of a row of Alpaca: its system message, and its instruction and input as a user's message."""
    if row.get("history"):
        raise ValueError(f"{location} has a history, which is not read. Write earlier turns as messages.")
    parts = [row["instruction"], row.get("input") or ""]
    if not all(isinstance(part, str) for part in parts):
        raise ValueError(f"{location} has an instruction or an input that is not text. Write it as text.")
    system = row.get("system")
    messages = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": "\n".join(part for part in parts if part)}]


def with_system_column(messages: Any, row: Mapping[str, Any], location: str) -> Any:
    """Returns the messages of a row of ShareGPT, after the system message that its column "system" has."""
    if not row.get("system") or not isinstance(messages, list):
        return messages
    if messages[0].get("role") == "system":
        raise ValueError(f'{location} has a system message in its messages and another in column "system". Leave one.')
    return [{"role": "system", "content": row["system"]}, *messages]


def _is_messages(value: Any) -> bool:
    messages = [value] if isinstance(value, Mapping) else value
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(message, Mapping) and ("role" in message or "from" in message) for message in messages)
    )


def _from_sharegpt(message: Mapping[str, Any], location: str) -> dict[str, Any]:
    speaker, text = message["from"], message.get("value")
    if speaker not in ROLES or not isinstance(text, str):
        raise ValueError(
            f"{location} has a message from {speaker!r} with the value {str(text)[:40]!r}, but ShareGPT has "
            f"text from {', '.join(ROLES)}. Write it as messages of role and content."
        )
    others = {name: value for name, value in message.items() if name not in ("from", "value")}
    return {"role": ROLES[speaker], "content": text, **others}
