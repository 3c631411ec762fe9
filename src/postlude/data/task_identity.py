"""What makes two rows the same task: the content of their prompts, before a template, a chat or a system message is put
around it. Every command splits rows into trained and held-out ones by it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from postlude.data.chat_template import SYSTEM_ROLES
from postlude.options import TrainedTurns

if TYPE_CHECKING:
    from postlude.data.chat import RowFormat

DIGEST_BYTES = 16
IDENTITY_BYTES = 2 * DIGEST_BYTES
"""An identity is a digest of the content, and one of the row's own system messages; zeros if it has none."""
Place = TypeVar("Place")
_Messages: TypeAlias = list[dict[str, Any]]


def prompt_identity(prompt: Any, completion: Any = None) -> bytes:
    """Returns the identity of a prompt. Text is the same task as a user's message of this text.

    A prompt without content, as of a conversation that the assistant begins, is identified by its completion as well.
    """
    messages = _messages(prompt)
    system = [message["content"] for message in messages if message["role"] in SYSTEM_ROLES]
    content = [message for message in messages if message["role"] not in SYSTEM_ROLES]
    if not any(message["content"] or "tool_calls" in message for message in content):
        content += [{"completion": completion}]
    return digest(content) + (digest(system) if system else bytes(DIGEST_BYTES))


def row_identity(form: RowFormat, values: Sequence[Any], turns: TrainedTurns = "all") -> bytes:
    """Returns the identity of a dataset's row: that of its prompt. `values` are the arguments of the encoder's method.

    The prompt of a conversation is what comes before the first turn that is trained on.
    """
    if form == "conversation":
        messages = list(values[0])
        assistant = [index for index, message in enumerate(messages) if message["role"] == "assistant"] or [0]
        first = assistant[-1 if turns == "last" else 0]
        return prompt_identity(messages[:first], _messages(messages[first:]))
    prompt, *completions = values[: 3 if form == "preference" else 2]
    sides = [_messages(completion) for completion in completions]
    if form == "preference" and all(
        isinstance(completion, list | tuple) and side[0]["role"] != "assistant"
        for completion, side in zip(completions, sides, strict=True)
    ):
        prompt = _shared_start(*sides)  # the completions are whole conversations
    return prompt_identity(prompt, sides)


def digest(value: Any) -> bytes:
    """Returns a digest of plain data. It does not depend on the hash seed of the process."""
    text = json.dumps(value, sort_keys=True, default=_ordered_repr)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


class TaskSet:
    """A set of tasks, by their identities.

    It contains a task of the same content and the same system messages. If one of the two has no system message of its
    own, the content decides: a config may have added the other's.
    """

    def __init__(self, identities: Iterable[bytes] = ()) -> None:
        self.identities: set[bytes] = set()
        self._systems: dict[bytes, set[bytes]] = {}  # by content
        self.update(identities)

    def update(self, identities: Iterable[bytes]) -> None:
        for identity in identities:
            self.identities.add(identity)
            self._systems.setdefault(identity[:DIGEST_BYTES], set()).add(identity[DIGEST_BYTES:].strip(b"\0"))

    def __contains__(self, identity: bytes) -> bool:
        systems, system = self._systems.get(identity[:DIGEST_BYTES]), identity[DIGEST_BYTES:].strip(b"\0")
        return systems is not None and (not system or b"" in systems or system in systems)

    def __bool__(self) -> bool:
        return bool(self.identities)


def first_different(candidates: Iterable[tuple[Place, bytes]], count: int) -> tuple[list[Place], TaskSet]:
    """Returns the first `count` candidates that are different tasks, fewer if there are no more, and their identities.

    It is the one way in which tasks are chosen to be held out. Candidates are read no further than needed.
    """
    places: list[Place] = []
    tasks = TaskSet()
    if count > 0:
        for place, identity in candidates:
            if identity not in tasks:
                places.append(place)
                tasks.update([identity])
                if len(places) == count:
                    break
    return places, tasks


def _messages(prompt: Any) -> _Messages:
    """Returns a prompt as messages of role, content and calls, as a template reads them."""
    if not isinstance(prompt, list | tuple):
        prompt = [{"role": "user", "content": prompt}]
    return [_message(message) for message in prompt]


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):  # a turn of a completion of several texts
        message = {"role": "", "content": message}
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(str(part.get("text") if isinstance(part, Mapping) else part) for part in content)
    calls = {"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {}
    return {"role": message.get("role"), "content": content.strip() if isinstance(content, str) else content} | calls


def _shared_start(first: _Messages, second: _Messages) -> _Messages:
    shared = next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), -1)
    return first[:shared]  # of equal conversations, all but the last message


def _ordered_repr(value: Any) -> Any:
    return sorted(map(repr, value)) if isinstance(value, set | frozenset) else repr(value)
