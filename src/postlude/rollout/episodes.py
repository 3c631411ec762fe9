"""Episodes that are objects of their own: coroutines that hold a state, a connection, a game.

    class Guess:
        def __init__(self, example, **settings): ...
        async def begin(self): ...                # optional: before the first turn
        async def step(self, said: Said): ...     # what comes of a completion
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

from postlude.rollout.coroutines import Coroutines
from postlude.rollout.crew import Outcome
from postlude.rollout.environments import Environment, Episode, Said, Turn, check_turns, unfinished
from postlude.rollout.rewards import FailureTally, is_reply, read_score
from postlude.rollout.tasks import Task, Tasks


class Episodes(Environment):
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
        check_turns(max_turns)
        self.tasks, self.make, self.name = tasks, make, name
        self.max_turns, self.unfinished_reward = max_turns, unfinished_reward
        self.tally, self.failed_reward = FailureTally(name, failed_reward), failed_reward
        self._coroutines = Coroutines(name, timeout)
        self._tickets = itertools.count()
        self._waiting: dict[int, Episode] = {}

    def release(self, episode: Episode) -> None:
        """Let go of an episode, and have it close what it holds."""
        super().release(episode)
        held, episode.state = episode.state, None
        if hasattr(held, "close"):
            self._coroutines.submit(next(self._tickets), _closed(held))  # nobody waits to hear how it went

    def attempt(self, task: Task, completion: str) -> None:
        """Hear one completion on trial."""
        episode = Episode(task, [Said(completion)])
        self._coroutines.submit(ticket := next(self._tickets), self._step(episode))
        found: dict[int, Outcome] = {}
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

    def _poll(self, timeout: float | None) -> list[tuple[Episode, Turn]]:
        found = []
        for ticket, outcome in self._coroutines.poll(timeout).items():
            if ticket in self._waiting:
                episode = self._waiting.pop(ticket)
                found.append((episode, self._turn(episode, outcome)))
        return found

    def _turn(self, episode: Episode, outcome: Outcome) -> Turn:
        if outcome.failure is not None:
            return Turn(self.tally.failed(outcome))
        try:
            turn = read_turn(outcome.value)
        except ValueError as fault:
            return Turn(self.tally.invalid(fault))
        self.tally.scored += turn.done
        if not turn.done and len(episode.said) >= self.max_turns:
            late = unfinished(self.unfinished_reward)
            return Turn(late if turn.score is None else turn.score.plus(late))
        return turn


def read_turn(value: Any) -> Turn:
    """The turn that an episode meant by what it returned. What it cannot have meant is a ValueError."""
    if not isinstance(value, tuple):
        return Turn(observation=value) if is_reply(value) else Turn(read_score(value))
    if len(value) != 2 or not (value[0] is None or is_reply(value[0])):
        raise ValueError(f"returned {str(value)[:60]}, but of two things the first is text, messages or None.")
    observation, reward = value
    return Turn(None if reward is None and observation is not None else read_score(reward), observation)


async def _closed(held: Any) -> None:
    await held.close()
