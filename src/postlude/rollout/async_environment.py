"""AsyncEnvironment: episodes that are objects of the user, with coroutines that hold a state, a connection, a game.

    class Guess:
        def __init__(self, example, **settings): ...
        async def begin(self): ...                        # optional: before the first turn
        async def step(self, turn: AssistantTurn): ...    # the result of a completion
        async def close(self): ...                        # optional

`step` returns text or messages to read next; a number or a dict of numbers, which is the reward and ends the episode;
or both: (observation, reward) continues with a reward for the turn, (None, reward) ends. With a reward of the
environment, which is added, None ends it too. Hundreds of episodes share one
thread, so whatever takes long must be awaited. Heavy work belongs in `MultiTurn`, whose functions have processes.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from postlude.pool.worker_pool import CallResult
from postlude.rollout.coroutine_pool import CoroutinePool
from postlude.rollout.environments import TurnEnvironment, read_turn
from postlude.rollout.episode import AssistantTurn, Episode
from postlude.rollout.tasks import Task, Tasks


class AsyncEnvironment(TurnEnvironment):
    """Every episode is an object that `make(example)` returns, with an `async def step(turn)`. See above.

    A call that takes more than `timeout` seconds fails. `turns` are the settings of a `TurnEnvironment`.
    """

    def __init__(
        self, tasks: Tasks, make: Callable[[Mapping[str, Any]], Any], *, name: str, timeout: float = 30.0, **turns: Any
    ) -> None:
        super().__init__(tasks, name, **turns)
        self.make = make
        self._coroutines = CoroutinePool(name, timeout)
        self._call_ids = itertools.count()

    def release(self, episode: Episode) -> None:
        super().release(episode)
        state, episode.state = episode.state, None
        if hasattr(state, "close"):
            self._coroutines.submit(next(self._call_ids), _close(state))  # its result is not polled

    def _trial_turn(self, task: Task, turn: AssistantTurn) -> None:
        episode = Episode(task, [turn])
        self._coroutines.submit(call_id := next(self._call_ids), self._step(episode))
        results: dict[int, CallResult] = {}
        while call_id not in results:
            results = self._coroutines.poll(None)
        result = results[call_id]
        self.release(episode)
        try:
            if result.failure is not None:
                raise ValueError(result.error)
            read_turn(result.value, scored=self.reward is not None)
        except ValueError as error:
            raise ValueError(
                f"{self.name} failed on trial on {task.name}: {str(error).rstrip('.')}. It would fail all through the "
                "run. Fix it."
            ) from error

    def close(self) -> None:
        for episode in (*self._waiting.values(), *self._ended):
            self.release(episode)
        self._coroutines.close()
        super().close()

    def _submit(self, episode: Episode) -> None:
        call_id = next(self._call_ids)
        self._waiting[call_id] = episode
        self._coroutines.submit(call_id, self._step(episode))

    async def _step(self, episode: Episode) -> Any:
        if episode.state is None:
            episode.state = self.make(episode.task.example)
            if not inspect.iscoroutinefunction(getattr(episode.state, "step", None)):
                raise TypeError(f"{self.name} has no `async def step(self, turn)`")
            if hasattr(episode.state, "begin"):
                await episode.state.begin()
        return await episode.state.step(episode.turns[-1])

    def _poll_calls(self, timeout: float | None) -> Mapping[int, CallResult]:
        return self._coroutines.poll(timeout)


async def _close(state: Any) -> None:
    await state.close()
