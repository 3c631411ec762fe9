"""Workers that judge as actors, wherever the cluster has CPUs to spare.

Code of the user's runs in a process beside the actor, under the limits that `pool/process_pool.py` sets it. So an
actor that is gone says nothing about the calls that it had: they are made again by another.
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

from postlude.pool.process_pool import ProcessPool
from postlude.pool.worker_pool import START_LIMIT, CallResult, WorkerError, WorkerPool

TRIES = 3  # workers that may be lost over one call
SAID = 60.0  # seconds without a place after which that is said, again and again
LOG = logging.getLogger("postlude")
FALSE_STARTS = 8  # workers in a row that may be lost before they have loaded the function


@dataclass(frozen=True)
class ActorPoolFactory:
    """Hires actors, each of so many CPUs, which the cluster may take `patience` seconds to have a place for."""

    cpus: float = 1.0
    patience: float = START_LIMIT

    def __call__(self, function: bytes, name: str, count: int, timeout: float) -> WorkerPool:
        """`count` workers, who are looked for when there is a call for them."""
        return ActorPool(function, name, count, timeout, self.cpus, self.patience)


class WorkerActor:
    """An actor with one worker process beside it."""

    def __init__(self) -> None:
        self.pool: ProcessPool | None = None

    def load(self, function: bytes, name: str, timeout: float, directory: str) -> str:
        """Starts the process, which loads its function. Returns why it cannot, or an empty text."""
        try:
            os.chdir(directory)  # the function may be named by a path from there
            self.pool = ProcessPool(function, name, 1, timeout)
        except (WorkerError, OSError) as error:
            return str(error)
        return ""

    def call(self, calls: Sequence[bytes]) -> list[CallResult]:
        """Makes pickled calls and returns their results in order."""
        assert self.pool is not None
        return self.pool.call_all(calls)


@dataclass(eq=False)
class _Hired:
    """A worker as the crew knows it: the actor, and the calls it was given and has not answered."""

    actor: Any
    ready: bool = False
    at_work: list[int] = field(default_factory=list)
    since: float = 0.0
    deadline: float = 0.0


class ActorPool(WorkerPool):
    """ActorPoolFactory, and a thread that hands calls out and hears answers.

    What it shares with callers is behind `changed`.

    The thread alone touches actors, and never while it holds `changed`: Ray may have to tell of an answer first. They
    are started with the first call: of a run's ranks one alone has calls.
    """

    lost: int

    def __init__(self, function: bytes, name: str, count: int, timeout: float, cpus: float, patience: float) -> None:
        super().__init__(name)
        self.function, self.count, self.timeout, self.cpus, self.lost = function, count, timeout, cpus, 0
        self.patience, self.say_at = patience, SAID
        self.tries: Counter[int] = Counter()
        self.false_starts = 0
        self.bell = threading.Event()
        self.heard: deque[tuple[_Hired, Any]] = deque()  # workers that have answered, and what
        self.hired: list[_Hired] = []
        self.idle_since: float | None = None  # while no worker is ready, and some are wanted
        self.thread = threading.Thread(target=self._run, name=f"workers of {name}", daemon=True)
        self.thread.start()

    def _stop_workers(self) -> None:
        for each in self.hired:
            _kill(each)

    def _wake(self) -> None:
        self.bell.set()

    def _hire(self) -> _Hired:
        import ray

        made = ray.remote(WorkerActor).options(num_cpus=self.cpus, max_restarts=0, scheduling_strategy="SPREAD")
        hired = _Hired(made.remote())
        self._expect(hired, hired.actor.load.remote(self.function, self.name, self.timeout, os.getcwd()))
        return hired

    def _expect(self, hired: _Hired, answer: Any) -> None:
        """Hear of an answer when it comes. A thread of Ray's tells it, and must not be held up."""

        def ring(found: Any) -> None:
            self.heard.append((hired, found))
            self.bell.set()

        answer.future().add_done_callback(ring)

    def _run(self) -> None:
        try:
            self.bell.wait()
            while not self.closed:
                while len(self.hired) < self.count:
                    self.hired.append(self._hire())
                for each, calls in self._hand_out():
                    self._expect(each, each.actor.call.remote(calls))
                self.bell.wait(self._limit())
                self.bell.clear()
                for each in self._hear():
                    _kill(each)
        except BaseException as error:  # whoever waits is told
            with self.changed:
                self.error = error
                self.changed.notify_all()

    def _limit(self) -> float | None:
        """Seconds until something is late, if anything can be."""
        now = time.monotonic()
        if any(each.ready for each in self.hired):
            self.idle_since = None
        elif self.idle_since is None:
            self.idle_since, self.say_at = now, SAID
        elif now - self.idle_since > self.patience:
            raise WorkerError(
                f"the cluster has had no place for a worker of {self.name} for {self.patience:g} s; each takes "
                f"{self.cpus:g} CPU(s). Add nodes, or lower cluster.cpus_per_worker or the environment's workers."
            )
        elif now - self.idle_since > self.say_at:
            self.say_at += SAID
            LOG.warning("no worker of %s has a place yet; each takes %g CPU(s) of the cluster.", self.name, self.cpus)
        ends = [each.deadline for each in self.hired if each.at_work]
        ends += [] if self.idle_since is None else [self.idle_since + min(self.patience, self.say_at)]
        return max(0.0, min(ends) - now) + 0.01 if ends else None

    def _hand_out(self) -> list[tuple[_Hired, list[bytes]]]:
        """The calls that workers who have none are to be sent."""
        parcels = []
        with self.changed:
            for ticket in [ticket for ticket in self.waiting if ticket in self.cancelled]:
                self.waiting.remove(ticket)
                self.cancelled.discard(ticket)
                del self.calls[ticket]
            for each in self.hired:
                if self.waiting and each.ready and not each.at_work:
                    each.at_work = self._next_calls(len(self.hired))
                    each.since = time.monotonic()
                    each.deadline = (
                        each.since + self.timeout * len(each.at_work) + START_LIMIT
                    )  # as one may start again
                    parcels.append((each, [self.calls[ticket] for ticket in each.at_work]))
        return parcels

    def _hear(self) -> list[_Hired]:
        """Put down what has been answered; returns workers that are lost, in whose place others are to come."""
        import ray

        lost = []
        with self.changed:
            while self.heard:
                hired, answer = self.heard.popleft()
                if hired not in self.hired or hired in lost:
                    continue  # it was given up before
                error = answer.exception()
                if isinstance(error, ray.exceptions.RayError) and not isinstance(error, ray.exceptions.RayTaskError):
                    lost.append(hired)
                elif error is not None:
                    raise error
                elif hired.ready:
                    outcomes = dict(zip(hired.at_work, answer.result(), strict=True))
                    self.seconds_per_call = 0.9 * self.seconds_per_call + 0.1 * (time.monotonic() - hired.since) / len(
                        outcomes
                    )
                    hired.at_work = []
                    self._record(outcomes)
                elif problem := answer.result():
                    raise WorkerError(problem)
                else:
                    hired.ready, self.false_starts = True, 0
            now = time.monotonic()
            lost += [each for each in self.hired if each.at_work and now > each.deadline and each not in lost]
            for each in lost:
                self._lose(each)
            self.changed.notify_all()
        return lost

    def _lose(self, hired: _Hired) -> None:
        """Have what a worker was at done again, unless that was tried often enough; with `changed` held."""
        self.hired.remove(hired)
        self.lost += 1
        self.false_starts += not hired.ready
        if self.false_starts > FALSE_STARTS:
            raise WorkerError(
                f"{self.false_starts} workers of {self.name} in a row were lost as they began. Ray's logs say why."
            )
        self.tries.update(hired.at_work)
        given_up = [ticket for ticket in hired.at_work if self.tries[ticket] >= TRIES]
        self.waiting.extendleft(ticket for ticket in reversed(hired.at_work) if ticket not in given_up)
        sentence = f"{self.name} was lost with its worker {TRIES} times."
        self._record({ticket: CallResult(failure="died", error=sentence) for ticket in given_up})

    def _record(self, outcomes: Mapping[int, CallResult]) -> None:
        for ticket in outcomes:
            self.tries.pop(ticket, None)
        super()._record(outcomes)


def _kill(hired: _Hired) -> None:
    import ray

    with suppress(Exception):  # the cluster may be gone already
        ray.kill(hired.actor)
