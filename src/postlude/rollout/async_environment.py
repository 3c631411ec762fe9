"""Episodes that are objects of their own: coroutines that hold a state, a connection, a game.

    class Guess:
        def __init__(self, example, **settings): ...
        async def begin(self): ...                # optional: before the first turn
        async def step(self, said: AssistantTurn): ...     # what comes of a completion
        async def close(self): ...                # optional

What `step` returns is text or messages to read; a number or a dict of numbers, which is the reward and the end; or
both: (observation, reward) goes on with a reward for the turn, (None, reward) ends. Hundreds wait at once in one
thread, so what takes long must be awaited. Work for a processor belongs in `MultiTurn`, whose functions have processes.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from postlude.pool.worker_pool import CallResult
from postlude.rollout.coroutine_pool import CoroutinePool
from postlude.rollout.environments import (
    AssistantTurn,
    Environment,
    Episode,
    TurnResult,
    check_max_turns,
    unfinished_score,
)
from postlude.rollout.rewards import FailureCounter, is_reply, read_score
from postlude.rollout.tasks import Task, Tasks


class AsyncEnvironment(Environment):
    """Every episode is one of `make(example)`, with an `async def step(said)`. See above.

    An episode whose call raises, takes more than `timeout` seconds or returns nonsense ends, is counted in `tally`, and
    is excluded from training, or earns `failed_reward` where that is a number. One without an end after `max_turns`
    completions ends with `unfinished_reward` besides what it earned.
    """

    def __init__(
        self,
        tasks: Tasks,
        make: Callable[[Mapping[str, Any]], Any],
        *,
        name: str,
        max_turns: int,
        unfinished_reward: float = 0.0,
        timeout: float = 30.0,
        failed_reward: float | None = None,
    ) -> None:
        check_max_turns(max_turns)
        self.tasks, self.make, self.name = tasks, make, name
        self.max_turns, self.unfinished_reward = max_turns, unfinished_reward
        self.tally, self.failed_reward = FailureCounter(name, failed_reward), failed_reward
        self._coroutines = CoroutinePool(name, timeout)
        self._tickets = itertools.count()
        self._waiting: dict[int, Episode] = {}

    def release(self, episode: Episode) -> None:
        """Let go of an episode, and have it close what it holds."""
        super().release(episode)
        held, episode.state = episode.state, None
        if hasattr(held, "close"):
            self._coroutines.submit(next(self._tickets), _closed(held))  # nobody waits to hear how it went

    def trial_call(self, task: Task, completion: str) -> None:
        """Hear one completion on trial."""
        episode = Episode(task, [AssistantTurn(completion)])
        self._coroutines.submit(ticket := next(self._tickets), self._step(episode))
        found: dict[int, CallResult] = {}
        while ticket not in found:
            found = self._coroutines.poll(None)
        outcome = found[ticket]
        self.release(episode)
        try:
            if outcome.failure is not None:
                raise ValueError(outcome.error)
            read_turn(outcome.value)
        except ValueError as error:
            raise ValueError(
                f"{self.name} failed on trial on {task.name}: {str(error).rstrip('.')}. It would fail all through the "
                "run. Mend it."
            ) from error

    def close(self) -> None:
        """End all episodes."""
        for episode in self._waiting.values():
            self.release(episode)
        self._coroutines.close()

    def _submit(self, episode: Episode) -> None:
        ticket = next(self._tickets)
        self._waiting[ticket] = episode
        self._coroutines.submit(ticket, self._step(episode))

    async def _step(self, episode: Episode) -> Any:
        if episode.state is None:
            episode.state = self.make(episode.task.example)
            if not inspect.iscoroutinefunction(getattr(episode.state, "step", None)):
                raise TypeError(f"{self.name} has no `async def step(self, said)`")
            if hasattr(episode.state, "begin"):
                await episode.state.begin()
        return await episode.state.step(episode.said[-1])

    def _poll(self, timeout: float | None) -> list[tuple[Episode, TurnResult]]:
        found = []
        for ticket, outcome in self._coroutines.poll(timeout).items():
            if ticket in self._waiting:
                episode = self._waiting.pop(ticket)
                found.append((episode, self._turn(episode, outcome)))
        return found

    def _turn(self, episode: Episode, outcome: CallResult) -> TurnResult:
        if outcome.failure is not None:
            return TurnResult(self.tally.failed(outcome))
        try:
            turn = read_turn(outcome.value)
        except ValueError as fault:
            return TurnResult(self.tally.invalid(fault))
        self.tally.scored += turn.done
        if not turn.done and len(episode.said) >= self.max_turns:
            late = unfinished_score(self.unfinished_reward)
            return TurnResult(late if turn.score is None else turn.score.plus(late))
        return turn


def read_turn(value: Any) -> TurnResult:
    """The turn that an episode meant by what it returned. What it cannot have meant is a ValueError."""
    if not isinstance(value, tuple):
        return TurnResult(observation=value) if is_reply(value) else TurnResult(read_score(value))
    if len(value) != 2 or not (value[0] is None or is_reply(value[0])):
        raise ValueError(f"returned {str(value)[:60]}, but of two things the first is text, messages or None.")
    observation, reward = value
    return TurnResult(None if reward is None and observation is not None else read_score(reward), observation)


async def _closed(held: Any) -> None:
    await held.close()
