"""RewardPool: scores completions with a function in worker processes. Tests of pools, failures and scores use it."""

import weakref
from collections.abc import Callable
from typing import Any

from postlude.pool.process_pool import open_pool
from postlude.pool.worker_pool import CallResult, PoolFactory
from postlude.rollout.rewards import FailureCounter, Score, read_score


class RewardPool(FailureCounter):
    """Scores completions with `function`, or with path/to/file.py:name, in `workers` processes.

    A sample whose call raises, takes more than `timeout` seconds, ends its process, or returns anything but finite
    numbers is excluded from training, or earns `failed_reward` if that is a number. Failures are counted by kind. A
    function that cannot be loaded raises here. With workers=0 this process makes the calls, without a time limit.
    `pool_factory` opens the pool elsewhere.
    """

    def __init__(
        self,
        function: str | Callable[..., Any],
        *,
        workers: int = 4,
        timeout: float = 30.0,
        failed_reward: float | None = None,
        pool_factory: PoolFactory | None = None,
    ) -> None:
        super().__init__(function if isinstance(function, str) else "", failed_reward)
        self.pool = open_pool(function, count=workers, timeout=timeout, pool_factory=pool_factory)
        self.name = self.pool.name
        self._finalizer = weakref.finalize(self, self.pool.close)

    def submit(self, arguments: tuple[Any, ...]) -> int:
        """Queues a call and returns its id."""
        return self.pool.submit(arguments)

    def poll(self, timeout: float | None = 0.0) -> dict[int, Score]:
        """Returns the scores of finished calls by call id. Waits up to `timeout` seconds for the first one."""
        return {call_id: self._score(result) for call_id, result in self.pool.poll(timeout).items()}

    def close(self) -> None:
        """Ends the workers."""
        self.pool.close()

    def _score(self, result: CallResult) -> Score:
        if result.failure is not None:
            return self.failed(result)
        try:
            return read_score(result.value)
        except ValueError as error:
            return self.invalid(error)
