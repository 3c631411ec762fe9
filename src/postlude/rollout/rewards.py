"""Scores: a reward function of your own, run where it may raise, hang or return nonsense at the cost of one sample."""

from __future__ import annotations

import ast
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from postlude.data.chat_template import Message
from postlude.pool.worker_pool import FAILURE_KINDS, CallResult, FailureKind, PoolFactory
from postlude.pool.workers import Workers

log = logging.getLogger(__name__)

TOTAL = "reward"
Reply: TypeAlias = "Score | str | list[Message]"
"""What a function says of a completion: what it earned, or something for the model to read."""


@dataclass(frozen=True)
class Score:
    """What a completion earned. With an `error` the call that scores it failed."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    excluded: bool = False
    """Whether there is no reward to learn from: the call failed, and no `failed_reward` is set for that."""

    def plus(self, other: Score) -> Score:
        """Both together: what turn after turn earned."""
        parts = {name: self.parts.get(name, 0.0) + other.parts.get(name, 0.0) for name in {**self.parts, **other.parts}}
        excluded = self.excluded or other.excluded
        return Score(self.reward + other.reward, parts, self.error or other.error, excluded)


class FailureCounter:
    """What failed, counted by kind; the first of each kind is logged.

    A failure earns `failed_reward`; with None it earns nothing, and its sample is excluded.
    """

    def __init__(self, name: str, failed_reward: float | None) -> None:
        if failed_reward is not None and not math.isfinite(failed_reward):
            raise ValueError(f"failed_reward is {failed_reward}, but a reward is a finite number.")
        self.name, self.failed_reward = name, failed_reward
        self.failures: Counter[FailureKind] = Counter(dict.fromkeys(FAILURE_KINDS, 0))
        self.scored = 0

    def failed(self, outcome: CallResult) -> Score:
        """What a call that failed earns."""
        assert outcome.failure is not None
        spoken = outcome.failure in ("timed_out", "died")  # then the sentence begins with its name
        return self._count(outcome.failure, str(outcome.error) if spoken else f"{self.name} failed: {outcome.error}")

    def invalid(self, fault: ValueError) -> Score:
        """What a call earns that returned something else than it may."""
        return self._count("invalid", f"{self.name} {fault}")

    def _count(self, failure: FailureKind, error: str) -> Score:
        self.scored += 1
        self.failures[failure] += 1
        if self.failures[failure] == 1:
            fate = "is left out" if self.failed_reward is None else f"gets reward {self.failed_reward:g}"
            log.warning("%s The sample %s; such failures are counted.", error, fate)
        return Score(self.failed_reward or 0.0, {failure: 1.0}, error, excluded=self.failed_reward is None)

    def report(self) -> dict[str, float]:
        """For the metrics: how many were scored, and how many failed in each way, since it began."""
        counts = {f"failed/{kind}": float(self.failures[kind]) for kind in FAILURE_KINDS}
        return {"scored": float(self.scored), "failed": float(self.failures.total()), **counts}


class RewardPool(FailureCounter):
    """Scores completions with `score`, a function or path/to/file.py:name, in `workers` processes.

    A sample whose call raises, takes more than `timeout` seconds, ends its process, or returns anything but finite
    numbers is excluded from training, or earns `failed_reward` where that is a number. It is counted in `failures` by
    kind, and the first of each kind is logged. What concerns all samples, such as a file that is not there, raises here
    at once. With `workers=0` calls are made in this process and nothing is timed out. `pool_factory` finds
    workers elsewhere. Use it as a context, or `close` it.
    """

    def __init__(
        self,
        score: str | Callable[..., Any],
        *,
        workers: int = 4,
        timeout: float = 30.0,
        failed_reward: float | None = None,
        pool_factory: PoolFactory | None = None,
    ) -> None:
        super().__init__(score if isinstance(score, str) else "", failed_reward)
        self._workers = Workers(score, count=workers, timeout=timeout, pool_factory=pool_factory)
        self.name = self._workers.name

    def submit(self, call: tuple[Any, ...]) -> int:
        """Ask for one call, and go on. Returns its ticket."""
        return self._workers.submit(call)

    def poll(self, timeout: float | None = 0.0, *, replies: bool = False) -> dict[int, Reply]:
        """What has come of calls that were submitted, by their tickets: scores, or `replies` as well.

        Waits up to `timeout` seconds for the first, for ever if None. Text and messages are given back as they are.
        """
        found: dict[int, Reply] = {}
        for ticket, outcome in self._workers.poll(timeout).items():
            found[ticket] = outcome.value if replies and is_reply(outcome.value) else self._score(outcome)
        return found

    def trial_call(self, call: tuple[Any, ...]) -> Reply:
        """Call the function once, outside all counts. A failure is a ValueError that says what went wrong."""
        (outcome,) = self._workers.call_all([call])
        if outcome.failure is not None:
            spoken = outcome.failure in ("timed_out", "died")  # then the sentence begins with its name
            raise ValueError(outcome.error if spoken else f"{self._workers.name} failed: {outcome.error}")
        if is_reply(outcome.value):
            reply: str | list[Message] = outcome.value
            return reply
        try:
            return read_score(outcome.value)
        except ValueError as fault:
            raise ValueError(f"{self._workers.name} {fault}") from fault

    @property
    def lost(self) -> int | None:
        """How many workers went with no fault of a call's, so that others did what they were at. None: none can."""
        return self._workers.lost

    def close(self) -> None:
        """End the workers."""
        self._workers.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _score(self, outcome: CallResult) -> Score:
        if outcome.failure is not None:
            return self.failed(outcome)
        try:
            score = read_score(outcome.value)
        except ValueError as fault:
            return self.invalid(fault)
        self.scored += 1
        return score


def check_reward_signature(reward: str | None) -> None:
    """Refuse path/to/file.py:name of a function that takes a batch, as TRL's do. The file is read and not run."""
    path, _, name = (reward or "").rpartition(":")
    try:
        body = ast.parse(Path(path).read_text()).body
    except (OSError, SyntaxError, ValueError):
        return  # what loads the function says what is wrong with its file
    for found in body:
        if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef) and found.name == name:
            parameters = [each.arg for each in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)]
            if {"completions", "prompts"} & set(parameters):
                raise ValueError(
                    f"{name}({', '.join(parameters)}, ...) in {path} takes all completions of a batch, as TRL calls it,"
                    f" but a reward here is called for one: write it as def {name}(prompt, completion, example) -> "
                    "float, where example is the row of the prompt."
                )


def is_reply(value: Any) -> bool:
    """Whether it is text or messages, for the model to read."""
    return isinstance(value, str) or (
        isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)
    )


def read_score(value: Any) -> Score:
    """The score that reward(prompt, completion, example) meant by what it returned.

    A number is the reward. Of a dict, "reward" is, and the rest its parts; without one, the reward is the sum of the
    parts. What it cannot have meant is a ValueError.
    """
    if not isinstance(value, Mapping):
        return Score(_number(value))
    if not value:
        raise ValueError("returned an empty dict, but a reward is a number or a dict of numbers.")
    numbers = {name: _number(each, f' for "{name}"') for name, each in value.items()}
    if TOTAL in numbers:
        return Score(numbers.pop(TOTAL), numbers)
    return Score(math.fsum(numbers.values()), numbers)


def _number(value: Any, of: str = "") -> float:
    if not isinstance(value, int | float):  # True and False are ints
        shown = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:37]}..."
        raise ValueError(f"returned {shown}{of}, but a reward is a number or a dict of numbers.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"returned {number}{of}, but a reward is finite.")
    return number
