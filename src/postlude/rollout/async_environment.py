"""AsyncEnvironment: episodes that are objects of the user, with coroutines that hold a state, a connection, a game.

    class Guess:
        def __init__(self, example, **settings): ...
        async def begin(self): ...                        # optional: before the first turn
        async def step(self, turn: AssistantTurn): ...    # the result of a completion
        async def close(self): ...                        # optional

`step` returns text or messages to read next; a number or a dict of numbers, which is the reward and ends the episode;
or both: (observation, reward) continues with a reward for the turn, (None, reward) ends. Hundreds of episodes share one
thread, so whatever takes long must be awaited. Heavy work belongs in `MultiTurn`, whose functions have processes.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from postlude.pool.worker_pool import CallResult
from postlude.rollout.coroutine_pool import CoroutinePool
from postlude.rollout.environments import Environment, TurnResult, check_max_turns, unfinished_score
from postlude.rollout.episode import AssistantTurn, Episode
from postlude.rollout.rewards import FailureCounter, is_reply, read_score
from postlude.rollout.tasks import Task, Tasks


class AsyncEnvironment(Environment):
    """Every episode is an object that `make(example)` returns, with an `async def step(turn)`. See above.

    An episode whose call raises, takes more than `timeout` seconds or returns an invalid value ends. It is counted in
    `failures`, and is excluded from training or earns `failed_reward` if that is a number. An episode that is not over
    after `max_turns` completions earns `unfinished_reward` besides its score so far.
    """

    def __init__(
        self,
        tasks: Tasks,
        make: Callable[[Mapping[str, Any]], Any],
        *,
        name: str,
        max_turns: int,
        unfinished_reward: float = 0.0,
        keep_reasoning: bool = False,
        timeout: float = 30.0,
        failed_reward: float | None = None,
    ) -> None:
        check_max_turns(max_turns)
        self.tasks, self.make, self.name = tasks, make, name
        self.max_turns, self.unfinished_reward, self.keep_reasoning = max_turns, unfinished_reward, keep_reasoning
        self.failures, self.failed_reward = FailureCounter(name, failed_reward), failed_reward
        self._coroutines = CoroutinePool(name, timeout)
        self._call_ids = itertools.count()
        self._waiting: dict[int, Episode] = {}

    def release(self, episode: Episode) -> None:
        """Ends an episode and starts its `close`."""
        super().release(episode)
        state, episode.state = episode.state, None
        if hasattr(state, "close"):
            self._coroutines.submit(next(self._call_ids), _close(state))  # its result is not polled

    def trial_call(self, task: Task, turn: AssistantTurn) -> None:
        """Takes one step before a run starts."""
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
            read_turn(result.value)
        except ValueError as error:
            raise ValueError(
                f"{self.name} failed on trial on {task.name}: {str(error).rstrip('.')}. It would fail all through the "
                "run. Fix it."
            ) from error

    def close(self) -> None:
        """Ends all episodes."""
        for episode in self._waiting.values():
            self.release(episode)
        self._coroutines.close()

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

    def _poll(self, timeout: float | None) -> list[tuple[Episode, TurnResult]]:
        results = []
        for call_id, result in self._coroutines.poll(timeout).items():
            if call_id in self._waiting:
                episode = self._waiting.pop(call_id)
                results.append((episode, self._turn_result(episode, result)))
        return results

    def _turn_result(self, episode: Episode, result: CallResult) -> TurnResult:
        if result.failure is not None:
            return TurnResult(self.failures.failed(result))
        try:
            turn = read_turn(result.value)
        except ValueError as error:
            return TurnResult(self.failures.invalid(error))
        if not turn.done and len(episode.turns) >= self.max_turns:
            unfinished = unfinished_score(self.unfinished_reward)
            return TurnResult(unfinished if turn.score is None else turn.score.plus(unfinished))
        return turn


def read_turn(value: Any) -> TurnResult:
    """Returns the result that an episode meant by its value, or raises ValueError."""
    if not isinstance(value, tuple):
        return TurnResult(observation=value) if is_reply(value) else TurnResult(read_score(value))
    if len(value) != 2 or not (value[0] is None or is_reply(value[0])):
        raise ValueError(f"returned {str(value)[:60]}, but of two things the first is text, messages or None.")
    observation, reward = value
    return TurnResult(None if reward is None and observation is not None else read_score(reward), observation)


async def _close(state: Any) -> None:
    await state.close()
