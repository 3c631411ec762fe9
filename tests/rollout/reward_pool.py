"""RewardPool: scores completions with a function in worker processes. Tests of pools, failures and scores use it."""

import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from postlude.pool.process_pool import open_pool
from postlude.pool.worker_pool import CallResult, PoolFactory, WorkerPool
from postlude.rollout.rewards import FailureCounter, Score, read_score
from tests.clock import Clock
from tests.conftest import PATIENCE


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


def score_past_hangs(
    pool: RewardPool, clock: Clock, directory: Path, calls: Sequence[tuple[str, str, dict[str, str]]]
) -> list[Score]:
    """Scores calls on one worker. Whenever one has begun to hang, its time limit passes.

    A call that hangs creates the file example["started"], named for its number.
    """
    call_ids = [
        pool.submit((prompt, completion, {**example, "started": str(directory / str(number))}))
        for number, (prompt, completion, example) in enumerate(calls)
    ]
    scores: dict[int, Score] = {}
    while len(scores) < len(call_ids):
        scores |= pool.poll(0.01)
        started = directory / str(len(scores))  # of the call that runs now, as one worker makes them in order
        if started.exists():
            started.unlink()
            pass_limit(pool.pool, clock)
    return [scores[call_id] for call_id in call_ids]


def wait_for_file(path: Path) -> None:
    """Waits until a process has created a file."""
    end = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def pass_limit(pool: WorkerPool, clock: Clock) -> None:
    """Lets the time limit of a pool's calls pass."""
    with pool.changed:
        clock.passed += 1000
        pool._wake()
