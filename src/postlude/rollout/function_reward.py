"""FunctionReward: a function of the user as a reward, called in worker processes or as a coroutine."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from postlude.pool.limits import DEFAULT_LIMITS, WorkerLimits
from postlude.pool.process_pool import function_file, function_name, open_pool
from postlude.pool.worker import to_json
from postlude.pool.worker_pool import CallResult, PoolFactory, WorkerPool
from postlude.rollout.coroutine_pool import CoroutinePool
from postlude.rollout.episode import AssistantTurn, Episode
from postlude.rollout.reward import WAIT_SECONDS, Reward, Scored, name_rows, trial_failure
from postlude.rollout.reward_call import RewardCall
from postlude.rollout.rewards import FailureCounter, Score, failure_message, read_score

if TYPE_CHECKING:
    from postlude.rollout.tasks import Task


class FunctionReward(FailureCounter, Reward):
    """The values of `function`, or of path/to/file.py:name. It gets what it names: see `reward_call.py`.

    A function that names `completion` is called for each completion. One that names `completions` is called with up to
    `batch_size` that wait together, or with all completions of one prompt if `group` is true. It returns one value for
    each, as `read_score` reads them. Functions are called in `workers` processes; coroutine
    functions in a thread of this process, at most `concurrency` calls concurrently. A call that raises, takes more than
    `timeout` seconds or returns the wrong number of values fails its completions, an invalid value only its own: they
    are excluded from training, or earn `failed_reward` if that is a number.
    """

    def __init__(
        self,
        function: str | Callable[..., Any],
        *,
        group: bool = False,
        batch_size: int = 64,
        workers: int = 4,
        concurrency: int = 64,
        timeout: float = 30.0,
        failed_reward: float | None = None,
        pool_factory: PoolFactory | None = None,
        worker_limits: WorkerLimits = DEFAULT_LIMITS,
    ) -> None:
        super().__init__(function_name(function), failed_reward)
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, but a call has at least one completion.")
        if getattr(function, "__module__", None) == "__main__" and workers:  # which is another module in a worker
            function = function_file(function) or function  # type: ignore[arg-type]
        self.needs_group, self.batch_size = group, batch_size
        self._call = RewardCall(function, group)
        self._pool: WorkerPool = open_pool(
            self._call,
            count=workers,
            timeout=timeout,
            pool_factory=pool_factory,
            name=self.name,
            limits=worker_limits,
        )
        self._coroutines = CoroutinePool(self.name, timeout, concurrency)
        self._call_ids = itertools.count()
        self._waiting: list[Episode] = []  # submitted, and not in a call
        self._calls: dict[int, list[Episode]] = {}  # by call id
        self._finalizer = weakref.finalize(self, self._pool.close)

    @property
    def lost_workers(self) -> int | None:
        return self._pool.lost

    def submit(self, episode: Episode) -> None:
        self._waiting.append(episode)
        if not self._signature["takes_list"]:
            self._start_calls()

    def poll(self, timeout: float | None = 0.0) -> Scored:
        """Starts the calls that can start, and returns the scores of those that ended."""
        self._start_calls()
        if not self._calls:  # such as groups that are not complete
            time.sleep(WAIT_SECONDS if timeout is None else min(timeout, WAIT_SECONDS))
            return []
        scored: Scored = []
        for call_id, result in self._results(timeout).items():
            episodes = self._calls.pop(call_id)
            scored += zip(episodes, self._scores([episode.task for episode in episodes], result), strict=True)
        return scored

    def trial_call(self, task: Task, turn: AssistantTurn) -> None:
        """Makes one call that is not counted: of a function of several completions, with two."""
        count = 2 if self._signature["takes_list"] else 1
        call_id = self._start([_sample(Episode(task, [turn]))] * count)
        results: dict[int, CallResult] = {}
        while call_id not in results:
            results |= self._results(None)
        result = results[call_id]
        try:
            if result.failure is not None:
                raise ValueError(failure_message(self.name, result))
            for value in self._values(result.value, [task] * count):
                self._read(value, task)
        except ValueError as error:
            begins = str(error).startswith(self.name)
            raise trial_failure(error if begins else f"{self.name} {error}", task, turn) from error

    def close(self) -> None:
        self._pool.close()
        self._coroutines.close()

    @cached_property
    def _signature(self) -> dict[str, bool]:
        """The signature, read by a worker, so that this process need not load the function. Raises if it cannot."""
        (result,) = self._pool.call_all([(None,)])
        if result.failure is not None:
            raise ValueError(failure_message(self.name, result))
        signature: dict[str, bool] = result.value
        if signature["is_async"]:
            self._pool.close()  # its calls are coroutines of this process
        return signature

    def _start_calls(self) -> None:
        """Starts calls with the episodes that wait."""
        waiting, self._waiting = self._waiting, []
        if self.needs_group:
            present = {id(episode) for episode in waiting}
            groups = {id(episode.group): episode.group for episode in waiting}
            batches = [group for group in groups.values() if all(id(episode) in present for episode in group)]
            started = {id(episode) for batch in batches for episode in batch}
            self._waiting = [episode for episode in waiting if id(episode) not in started]
        else:
            size = self.batch_size if self._signature["takes_list"] else 1
            by_state = [list(same) for _, same in itertools.groupby(waiting, lambda episode: episode.trainer_state)]
            batches = [same[start : start + size] for same in by_state for start in range(0, len(same), size)]
        for batch in batches:
            self._calls[self._start([_sample(episode) for episode in batch])] = batch

    def _start(self, samples: list[dict[str, Any]]) -> int:
        if not self._signature["is_async"]:
            return self._pool.submit((samples,))
        call_id = next(self._call_ids)
        self._coroutines.submit(call_id, self._await(samples))
        return call_id

    async def _await(self, samples: list[dict[str, Any]]) -> Any:
        return to_json(await self._call.call_async(samples))

    def _results(self, timeout: float | None) -> dict[int, CallResult]:
        return (self._coroutines if self._signature["is_async"] else self._pool).poll(timeout)

    def _scores(self, tasks: Sequence[Task], result: CallResult) -> list[Score]:
        """Returns the score of each completion of a call."""
        if result.failure is not None:
            return [self.failed(result, name_rows(tasks)) for _ in tasks]
        try:
            values = self._values(result.value, tasks)
        except ValueError as error:
            return [self.invalid(error) for _ in tasks]
        return [self._score(value, task) for value, task in zip(values, tasks, strict=True)]

    def _score(self, value: Any, task: Task) -> Score:
        try:
            return self._read(value, task)
        except ValueError as error:
            return self.invalid(error)

    def _read(self, value: Any, task: Task) -> Score:
        """Returns the score of a value. None in a list is TRL's "not applicable": the completion needs another one."""
        if value is None and self._signature["takes_list"]:
            message = f"{self.name} returned None for {task.name}, and there is no other reward of it."
            return Score(0.0, {}, message, excluded=True, applies=False)
        return read_score(value, task.name)

    def _values(self, value: Any, tasks: Sequence[Task]) -> list[Any]:
        """Returns one value for each completion, or raises ValueError if there are not as many."""
        if not isinstance(value, list):
            text = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:37]}..."
            raise ValueError(f"returned {text} for {name_rows(tasks)}, but it returns a list with a reward for each.")
        if len(value) != len(tasks):
            raise ValueError(
                f"returned {len(value)} rewards for {name_rows(tasks)}, but it returns a list with a reward for each."
            )
        return value


def _sample(episode: Episode) -> dict[str, Any]:
    """Returns what a reward function may ask for, besides the columns of the row."""
    task, turn = episode.task, episode.turns[-1]
    return {
        "prompt": task.prompt,
        "completion": turn.text,
        # As TRL gives it: messages where the row's prompt is messages.
        "conversation": [{"role": "assistant", "content": turn.text}] if isinstance(task.content, list) else turn.text,
        "raw_completion": turn.text if turn.raw_text is None else turn.raw_text,
        "answer_text": turn.answer_text,
        "transcript": episode.transcript(),
        "completion_ids": list(turn.tokens),
        "length": len(turn.tokens),
        "truncated": turn.truncated,
        "example": task.example,
        "trainer_state": episode.trainer_state,
        **({} if episode.workdir is None else {"workdir": str(episode.workdir)}),
    }
