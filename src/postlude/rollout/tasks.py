"""Tasks: prompts and the data that scoring a completion needs, from reasoning-gym or from the rows of a dataset."""

from __future__ import annotations

import json
import weakref
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal, Protocol, TypeAlias

from postlude.data.chat import Prompt
from postlude.data.chat_template import Message, with_system
from postlude.data.datasets import HeldOutRows, Rows
from postlude.data.row_formats import read_messages
from postlude.data.task_identity import DIGEST_BYTES, digest, first_different, prompt_identity
from postlude.pool.process_pool import open_pool
from postlude.pool.worker_pool import WorkerError
from postlude.rollout.verifiers import GymEntries, GymReward, decode_entries

PAGE = 256  # entries per call
PAGE_TIMEOUT = 600.0  # seconds
ANSWER = "answer"  # column of the right answer, unless another is named
SplitBy: TypeAlias = Literal["prompt", "row"]
ANSWER_IN_TAG = "\nGive your final answer between <{tag}> and </{tag}>."


@dataclass(frozen=True)
class Task:
    """A prompt, as text or as messages, and the row that scoring a completion needs."""

    prompt: Prompt
    example: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    """Where it comes from, for reports and error messages."""
    content: Prompt | None = field(default=None, compare=False)
    """What identifies it: the prompt before a chat, a system message or a tag were put around it; None is `prompt`."""
    environment: str = field(default="", compare=False)
    """The name of its environment among several."""
    answer_column: str = field(default=ANSWER, compare=False)
    """The column of `example` with the right answer."""

    @property
    def answer(self) -> Any:
        """The right answer, or None where the row has none."""
        return self.example.get(self.answer_column)


class Tasks(Protocol):
    """Tasks by index. The same index gives the same task in every process."""

    def __len__(self) -> int:
        """Returns the number of tasks."""

    def __getitem__(self, index: int) -> Task:
        """Returns one task."""


@dataclass(frozen=True)
class TaskSubset:
    """The tasks at some indices of other tasks."""

    tasks: Tasks
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Task:
        return self.tasks[self.indices[check_index(index, len(self))]]


@dataclass(frozen=True)
class JoinedTasks:
    """The tasks of several environments, one after the other."""

    parts: Mapping[str, Tasks]

    def __len__(self) -> int:
        return sum(map(len, self.parts.values()))

    def __getitem__(self, index: int) -> Task:
        check_index(index, len(self))
        for name, tasks in self.parts.items():
            if index < len(tasks):
                return replace(tasks[index], environment=name)
            index -= len(tasks)
        raise AssertionError


def hold_out(tasks: Tasks, count: int, by: SplitBy = "prompt") -> HeldOutRows:
    """Returns the last `count` tasks with different prompts, and every task with one of their prompts."""
    fix = "Lower evaluation.tasks, give more prompts, or set evaluation.every and evaluation.tasks to 0."
    if by == "prompt":
        fix += " Where prompts are alike and the rest of a row makes the difference, set evaluation.split_by to row."
    return HeldOutRows(len(tasks), lambda index: task_identity(tasks[index], by), count, noun="tasks", fix=fix)


def last_tasks(tasks: Tasks, count: int, by: SplitBy = "prompt") -> TaskSubset:
    """Returns the `count` tasks that `hold_out` takes. Where different prompts are too few, repeated ones fill up."""
    last = reversed(range(len(tasks)))
    different, _ = first_different(((index, task_identity(tasks[index], by)) for index in last), count)
    repeated = (index for index in reversed(range(len(tasks))) if index not in different)
    return TaskSubset(tasks, sorted([*different, *islice(repeated, count - len(different))]))


def task_identity(task: Task, by: SplitBy = "prompt", columns: Container[str] | None = None) -> bytes:
    """Returns what identifies a task: its prompt, or its whole row, or these columns of it. See `prompt_identity`."""
    content = task.prompt if task.content is None else task.content
    identity = prompt_identity(content)
    if by == "prompt":
        return identity
    row = {name: value for name, value in task.example.items() if value != content}
    chosen = {name: value for name, value in row.items() if columns is None or name in columns}
    return digest([identity[:DIGEST_BYTES].hex(), chosen]) + identity[DIGEST_BYTES:]


class ReasoningGym:
    """`size` tasks that reasoning-gym generates from `seed`, given the task's name and settings.

    Needs the package reasoning-gym. The question ends with a request to answer in <`tag`>, unless that is None. With
    `chat` it is a user's message, else text. A `template` is filled with the entry's fields and is the whole prompt;
    completions are scored without a tag. `reward()` returns the function that scores completions.
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
        template: str | None = None,
    ) -> None:
        if size < 1:
            raise ValueError(f"size is {size}, but there must be at least one task.")
        self.name, self.config, self.seed, self.size = name, dict(config or {}), seed, size
        self.tag, self.system, self.chat = None if template is not None else tag, system, chat
        self.template = template
        self.source = f"{name} {json.dumps(self.config, sort_keys=True, default=repr)} {seed} {size}"
        for reserved in ("seed", "size"):
            if reserved in self.config:
                raise ValueError(f'config has "{reserved}", which is an argument of its own. Move it there.')
        self._pages: dict[int, list[dict[str, Any]]] = {}
        self._pool = open_pool(GymEntries(name, self.config, seed, size), count=1, timeout=PAGE_TIMEOUT, limits=None)
        self._finalizer = weakref.finalize(self, self._pool.close)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Task:
        page, offset = divmod(check_index(index, self.size), PAGE)
        if page not in self._pages:
            stop = min(self.size, (page + 1) * PAGE)
            (result,) = self._pool.call_all([(page * PAGE, stop)])
            if result.error is not None:
                raise WorkerError(f'tasks {page * PAGE} to {stop - 1} of "{self.name}" were not made: {result.error}')
            self._pages[page] = decode_entries(result.value)
        entry, name = self._pages[page][offset], f"{self.name} {self.seed}:{index}"
        if self.template is not None:
            try:
                return Task(self.template.format(**entry), entry, name, entry["question"])
            except (KeyError, IndexError, AttributeError) as error:
                raise ValueError(
                    f"the template {self.template!r} asks for {error}, but {name} has: {', '.join(entry)}."
                ) from error
        question = entry["question"] + (ANSWER_IN_TAG.format(tag=self.tag) if self.tag else "")
        prompt = chat_prompt(question, self.system) if self.chat else question
        return Task(prompt, entry, name, entry["question"])

    def reward(self) -> GymReward:
        return GymReward(self.name, self.config, self.tag)

    def close(self) -> None:
        """Ends the process that generates tasks. Those generated stay."""
        self._pool.close()


class DatasetTasks:
    """Every row of a dataset as a task: column `prompt` is the prompt, and the reward function gets the whole row.

    Column `answer` is the right answer, for a warm start and for comparisons. Every row must have one with
    `needs_answer`, or if it is another column than by default. With `chat`, text becomes a user's message. Messages
    without a system message get `system`, if it is given.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        prompt: str = "prompt",
        answer: str = ANSWER,
        needs_answer: bool = False,
        chat: bool = False,
        system: str | None = None,
    ) -> None:
        self.rows = rows.require(prompt, *([answer] if needs_answer or answer != ANSWER else []))
        self.prompt, self.answer, self.chat, self.system = prompt, answer, chat, system
        if system is not None and not chat and isinstance(rows[0][prompt], str):
            raise ValueError("system is given, but chat is off, so prompts of text have no messages. Turn chat on.")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Task:
        row = self.rows[check_index(index, len(self))]
        prompt = content = read_messages(row[self.prompt], self.rows.location(index))
        if not isinstance(prompt, str | list):
            raise ValueError(
                f'column "{self.prompt}" in {self.rows.location(index)} holds a {type(prompt).__name__}, '
                f"but a prompt is text or a list of messages."
            )
        if isinstance(prompt, list) and prompt and prompt[-1].get("role") == "assistant":
            raise ValueError(
                f'the prompt in {self.rows.location(index)} (column "{self.prompt}") ends with a message of the '
                "assistant, so the model would read the answer. End it before that message, and give the answer in "
                "its own column. If the model is to continue it, give the prompt as text, as the chat template writes "
                "it."
            )
        if isinstance(prompt, str) and self.chat:
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, list):
            prompt = with_system(prompt, self.system)
        return Task(prompt, row, self.rows.location(index), content, answer_column=self.answer)


def chat_prompt(question: str, system: str | None) -> list[Message]:
    """Returns a question as a user's message, after a system message if there is one."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": question}]


def check_index(index: int, size: int) -> int:
    """Returns the index of a task, or raises IndexError if there is none."""
    if not 0 <= index < size:
        raise IndexError(f"there is no task {index}: they count from 0 to {size - 1}.")
    return index
