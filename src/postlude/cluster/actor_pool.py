"""ActorPool: a worker pool of Ray actors, on nodes that have free CPUs.

User code runs in a child process of the actor, under the limits of `pool/process_pool.py`. So a lost actor says nothing
about its calls, and another actor makes them again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from postlude.cluster.ray_cluster import leave_process_group
from postlude.pool.process_pool import ProcessPool
from postlude.pool.worker_pool import START_LIMIT, CallResult, WorkerError, WorkerPool

TRIES = 3  # actors that may be lost over one call
WARN_SECONDS = 60.0  # between two warnings that no worker has a node
MAX_FAILED_STARTS = 8  # actors in a row that may be lost before they have loaded the function
LOG = logging.getLogger("postlude")


class WorkerActor:
    def __init__(self) -> None:
        self.pool: ProcessPool | None = None

    def load(self, function: bytes, name: str, timeout: float, directory: str) -> str:
        """Starts the process, which loads the function. Returns why it cannot, or an empty text."""
        leave_process_group()
        try:
            os.chdir(directory)  # the function may be named by a relative path
            self.pool = ProcessPool(function, name, 1, timeout)
        except (ValueError, OSError) as error:  # also a WorkerError
            return str(error)
        return ""

    def call(self, calls: Sequence[bytes]) -> list[CallResult]:
        assert self.pool is not None
        return self.pool.call_all(calls)


@dataclass(eq=False)
class _Worker:
    actor: Any
    ready: bool = False
    running: list[int] = field(default_factory=list)
    started_at: float = 0.0
    deadline: float = 0.0


class ActorPool(WorkerPool):
    """Actors, and a thread that sends them calls and receives results. `changed` guards what it shares with callers.

    Only the thread touches actors, and never while it holds `changed`, since Ray may have to deliver a result first.
    Actors, with `cpus` each, start with the first call: of a run's ranks only one makes calls. The cluster may take
    `start_timeout` seconds to have room for one.
    """

    lost: int

    def __init__(
        self,
        function: bytes,
        name: str,
        count: int,
        timeout: float,
        *,
        cpus: float = 1.0,
        start_timeout: float = START_LIMIT,
    ) -> None:
        super().__init__(name)
        self.function, self.count, self.timeout, self.cpus, self.lost = function, count, timeout, cpus, 0
        self.start_timeout, self.next_warning = start_timeout, WARN_SECONDS
        self.tries: Counter[int] = Counter()
        self.failed_starts = 0
        self.wake_event = threading.Event()
        self.replies: deque[tuple[_Worker, Any]] = deque()
        self.workers: list[_Worker] = []
        self.idle_since: float | None = None  # since when no worker is ready
        self.thread.start()

    def _stop_workers(self) -> None:
        for worker in self.workers:
            _kill(worker)

    def _wake(self) -> None:
        self.wake_event.set()

    def _start_worker(self) -> _Worker:
        import ray

        actor = ray.remote(WorkerActor).options(num_cpus=self.cpus, max_restarts=0, scheduling_strategy="SPREAD")
        worker = _Worker(actor.remote())
        self._on_reply(worker, worker.actor.load.remote(self.function, self.name, self.timeout, os.getcwd()))
        return worker

    def _on_reply(self, worker: _Worker, reply: Any) -> None:
        """Queues a reply when it comes. Ray's thread does this and must not be blocked."""

        def receive(future: Any) -> None:
            self.replies.append((worker, future))
            self.wake_event.set()

        reply.future().add_done_callback(receive)

    def _run(self) -> None:
        self.wake_event.wait()  # for the first call
        super()._run()

    def _step(self) -> None:
        while len(self.workers) < self.count:
            self.workers.append(self._start_worker())
        for worker, calls in self._assign_calls():
            self._on_reply(worker, worker.actor.call.remote(calls))
        self.wake_event.wait(self._wait_seconds())
        self.wake_event.clear()
        for worker in self._receive_replies():
            _kill(worker)

    def _wait_seconds(self) -> float | None:
        """Returns the seconds until the next deadline; None if there is none. Raises if no node has room for long."""
        now = time.monotonic()
        if any(worker.ready for worker in self.workers):
            self.idle_since = None
        elif self.idle_since is None:
            self.idle_since, self.next_warning = now, WARN_SECONDS
        elif now - self.idle_since > self.start_timeout:
            raise WorkerError(
                f"the cluster has had no room for a worker of {self.name} for {self.start_timeout:g} s; each takes "
                f"{self.cpus:g} CPU(s). Add nodes, or lower cluster.cpus_per_worker or the environment's workers."
            )
        elif now - self.idle_since > self.next_warning:
            self.next_warning += WARN_SECONDS
            LOG.warning("no worker of %s has a node yet; each takes %g CPU(s) of the cluster.", self.name, self.cpus)
        deadlines = [worker.deadline for worker in self.workers if worker.running]
        if self.idle_since is not None:
            deadlines.append(self.idle_since + min(self.start_timeout, self.next_warning))
        return max(0.0, min(deadlines) - now) + 0.01 if deadlines else None

    def _assign_calls(self) -> list[tuple[_Worker, list[bytes]]]:
        assigned = []
        with self.changed:
            for call_id in [call_id for call_id in self.waiting if call_id in self.cancelled]:
                self.waiting.remove(call_id)
                self.cancelled.discard(call_id)
                del self.calls[call_id]
            for worker in self.workers:
                if self.waiting and worker.ready and not worker.running:
                    worker.running = self._next_calls(len(self.workers))
                    worker.started_at = time.monotonic()
                    seconds = self.timeout * len(worker.running) + START_LIMIT  # its process may have to start again
                    worker.deadline = worker.started_at + seconds
                    assigned.append((worker, [self.calls[call_id] for call_id in worker.running]))
        return assigned

    def _receive_replies(self) -> list[_Worker]:
        """Records results. Returns workers that are lost and have to be replaced."""
        import ray

        lost = []
        with self.changed:
            while self.replies:
                worker, reply = self.replies.popleft()
                if worker not in self.workers or worker in lost:
                    continue  # it was replaced
                error = reply.exception()
                if isinstance(error, ray.exceptions.RayError) and not isinstance(error, ray.exceptions.RayTaskError):
                    lost.append(worker)
                elif error is not None:
                    raise error
                elif worker.ready:
                    results = dict(zip(worker.running, reply.result(), strict=True))
                    seconds = (time.monotonic() - worker.started_at) / len(results)
                    self.seconds_per_call = 0.9 * self.seconds_per_call + 0.1 * seconds
                    worker.running = []
                    self._record(results)
                elif problem := reply.result():
                    raise WorkerError(problem)
                else:
                    worker.ready, self.failed_starts = True, 0
            now = time.monotonic()
            lost += [
                worker for worker in self.workers if worker.running and now > worker.deadline and worker not in lost
            ]
            for worker in lost:
                self._remove(worker)
            self.changed.notify_all()
        return lost

    def _remove(self, worker: _Worker) -> None:
        """Removes a lost worker. Its calls wait for another, unless they were tried `TRIES` times. Holds `changed`."""
        self.workers.remove(worker)
        self.lost += 1
        self.failed_starts += not worker.ready
        if self.failed_starts > MAX_FAILED_STARTS:
            raise WorkerError(
                f"{self.failed_starts} workers of {self.name} in a row were lost as they started. Ray's logs say why."
            )
        self.tries.update(worker.running)
        given_up = [call_id for call_id in worker.running if self.tries[call_id] >= TRIES]
        self.waiting.extendleft(call_id for call_id in reversed(worker.running) if call_id not in given_up)
        sentence = f"{self.name} was lost with its worker {TRIES} times."
        self._record({call_id: CallResult(failure="died", error=sentence) for call_id in given_up})

    def _record(self, results: Mapping[int, CallResult]) -> None:
        for call_id in results:
            self.tries.pop(call_id, None)
        super()._record(results)


def _kill(worker: _Worker) -> None:
    import ray

    with suppress(Exception):  # the cluster may be gone
        ray.kill(worker.actor)
