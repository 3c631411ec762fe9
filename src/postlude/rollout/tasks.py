"""Tasks: what a model is asked, and what its answer is judged by. From reasoning-gym, or from a dataset's rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from postlude.data.chat import Prompt
from postlude.data.chat_template import Message
from postlude.data.datasets import HeldOutRows, Rows
from postlude.pool.worker_pool import WorkerError
from postlude.pool.workers import Workers
from postlude.rollout.verifiers import GymEntries, GymReward, decode_entries

PAGE = 256  # entries asked for at once
PAGE_LIMIT = 600.0  # seconds for a page
SplitBy: TypeAlias = Literal["prompt", "row"]
ANSWER_IN_TAG = "\nGive your final answer between <{tag}> and </{tag}>."


@dataclass(frozen=True)
class Task:
    """A prompt, as text or as messages, and all that judging an answer needs."""

    prompt: Prompt
    example: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    """Where it comes from, for reports and errors."""


class Tasks(Protocol):
    """Tasks by index. The same index gives the same task in every process."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def __getitem__(self, index: int) -> Task:
        """One of them."""
        ...


@dataclass(frozen=True)
class TaskSubset:
    """Some of others, by their indices."""

    tasks: Tasks
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Task:
        return self.tasks[self.indices[checked(index, len(self))]]


def hold_out(tasks: Tasks, count: int, by: SplitBy = "prompt") -> HeldOutRows:
    """The last `count` tasks with different prompts, and every task with one of their prompts."""
    fix = "Lower evaluation.tasks, give more prompts, or set evaluation.every to 0."
    if by == "prompt":
        fix += " Where prompts are alike and the rest of a row makes the difference, set evaluation.split_by to row."
    return HeldOutRows(len(tasks), lambda index: task_digest(tasks[index], by), count, what="tasks", fix=fix)


def last_tasks(tasks: Tasks, count: int) -> TaskSubset:
    """The `count` tasks that `hold_out` takes. Where prompts do not suffice, others with the same prompts as well."""
    known: set[bytes] = set()
    first: list[int] = []
    copies: list[int] = []
    for index in reversed(range(len(tasks))):
        if len(first) == count:
            break
        content = task_digest(tasks[index])
        (copies if content in known else first).append(index)
        known.add(content)
    return TaskSubset(tasks, sorted([*first, *copies][:count]))


def task_digest(task: Task, by: SplitBy = "prompt") -> bytes:
    """A digest of a task's prompt, or of its whole row. It is the same in every process."""
    return digest([task.prompt] if by == "prompt" else [task.prompt, dict(task.example)])


def digest(value: Any) -> bytes:
    """A digest of plain data, which no process's own hashes have a part in."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=_in_order).encode()).digest()


def _in_order(value: Any) -> Any:
    return sorted(map(repr, value)) if isinstance(value, set | frozenset) else repr(value)


class ReasoningGym:
    """`size` tasks that reasoning-gym makes from `seed`, by the task's name and its settings.

    Needs the package reasoning-gym. The question is followed by a request to answer in <`tag`>, unless that is None;
    `chat` makes it a user's message, else it is text. `reward()` is the function that scores answers.
    """

    def __init__(
        self,
        name: str,
        config: Mapping[str, Any] | None = None,
        *,
        seed: int = 0,
        size: int = 1000,
        tag: str | None = "answer",
        system: str | None = None,
        chat: bool = True,
    ) -> None:
        if size < 1:
            raise ValueError(f"size is {size}, but there must be at least one task.")
        self.name, self.config, self.seed, self.size = name, dict(config or {}), seed, size
        self.tag, self.system, self.chat = tag, system, chat
        for reserved in ("seed", "size"):
            if reserved in self.config:
                raise ValueError(f'config has "{reserved}", which is an argument of its own. Move it there.')
        self._pages: dict[int, list[dict[str, Any]]] = {}
        self._source = Workers(GymEntries(name, self.config, seed, size), count=1, timeout=PAGE_LIMIT)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Task:
        page, place = divmod(checked(index, self.size), PAGE)
        if page not in self._pages:
            stop = min(self.size, (page + 1) * PAGE)
            (outcome,) = self._source.call_all([(page * PAGE, stop)])
            if outcome.error is not None:
                raise WorkerError(f'tasks {page * PAGE} to {stop - 1} of "{self.name}" were not made: {outcome.error}')
            self._pages[page] = decode_entries(outcome.value)
        entry = self._pages[page][place]
        question = entry["question"] + (ANSWER_IN_TAG.format(tag=self.tag) if self.tag else "")
        prompt = question if not self.chat else messages(question, self.system)
        return Task(prompt, entry, f"{self.name} {self.seed}:{index}")

    def reward(self) -> GymReward:
        """What scores an answer; hand it to `RewardPool`."""
        return GymReward(self.name, self.config, self.tag)

    def close(self) -> None:
        """End the process that makes the tasks. Those made stay."""
        self._source.close()


class DatasetTasks:
    """Every row of a dataset as a task: its prompt in column `prompt`, and the whole row to judge by.

    A prompt of messages is taken as it is. One of text is too, unless `chat` makes it a user's message, after `system`
    if there is one.
    """

    def __init__(self, rows: Rows, *, prompt: str = "prompt", chat: bool = False, system: str | None = None) -> None:
        self.rows = rows.require(prompt)
        self.prompt, self.chat, self.system = prompt, chat, system
        if system is not None and not chat:
            raise ValueError("system is given, but chat is off, so prompts of text have no messages. Turn chat on.")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Task:
        row = self.rows[checked(index, len(self))]
        prompt = row[self.prompt]
        if not isinstance(prompt, str | list):
            raise ValueError(
                f'column "{self.prompt}" in {self.rows.location(index)} holds a {type(prompt).__name__}, '
                f"but a prompt is text or a list of messages."
            )
        if isinstance(prompt, str) and self.chat:
            prompt = messages(prompt, self.system)
        return Task(prompt, row, self.rows.location(index))


def messages(question: str, system: str | None) -> list[Message]:
    """A question as messages, after a system message if there is one."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": question}]


def checked(index: int, size: int) -> int:
    """An index that there is a task for, or an IndexError."""
    if not 0 <= index < size:
        raise IndexError(f"there is no task {index}: they count from 0 to {size - 1}.")
    return index
