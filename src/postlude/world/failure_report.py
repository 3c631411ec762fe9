"""Reports the failure of a rank to the others, through the rendezvous store.

A rank that fails leaves its status there. So every other rank stops with one message that names the cause, not with
"connection closed by peer".

A rank may also wait for its GPU without end, because another rank does not come to a collective. Over gloo such a wait
ends with an exception. Over NCCL it is a kernel that spins, so the host hangs in whatever waits for the GPU and cannot
raise. A thread notices that neither the host nor the GPU has moved for a while.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from postlude.checks import USER_ERRORS
from postlude.world.devices import list_ranks

GRACE = 5.0  # seconds that a stopping rank gives the others to report
CLEANUP = 1.0  # seconds that a rank outside a collective may take to report its own error
VERDICT = GRACE + 3.0  # seconds that a stopping rank waits for the verdict of the one that investigates
CONNECTION_LOST = re.compile(
    r"gloo/(transport|rendezvous)|connectFullMesh|connection (closed|reset)|timed out waiting|NCCL", re.I
)
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # the variable that torchrun sets
FINISHED = "finished without coming to this collective"
UNRESPONSIVE = "does not answer any more: it was killed or lost"
Result = TypeVar("Result")
SAMPLES = 20  # how often the host's position is read in the time after which it counts as stalled
GPU_SECONDS = 5.0  # the time that a GPU has to pass one event


class RankError(RuntimeError):
    """A rank failed or was lost. The message names it; `traceback` is the rank's own, if it could report one.

    `user_error` is whether the rank raised one of `USER_ERRORS`.
    """

    def __init__(self, message: str, traceback: str = "", *, user_error: bool = False) -> None:
        super().__init__(message)
        self.traceback, self.user_error = traceback, user_error
        if traceback:
            self.add_note(traceback)


@dataclass(frozen=True)
class RankStatus:
    """The state of a rank: "running", "failed" (by its own error), "stopped" (waiting for another) or "finished"."""

    state: str
    text: str = ""
    traceback: str = ""
    time: float = field(default_factory=time.time)
    user_error: bool = False

    @classmethod
    def of(cls, error: BaseException) -> RankStatus:
        if isinstance(error, SystemExit) and not error.code:
            return cls("finished")
        state = "stopped" if isinstance(error, RankError) or _is_from_collective(error) else "failed"
        text = str(error) if isinstance(error, RankError) else f"{type(error).__name__}: {error}"
        trace = getattr(error, "traceback", "") or "".join(traceback.format_exception(error))
        return cls(state, text, trace, user_error=isinstance(error, USER_ERRORS))


class FailureReporter:
    """One rank's reports through the store, with a number of operations that does not grow with the ranks.

    Keys: `status/R` is the status of rank R, and `first_failure` the first of all. The first rank to stop sets every
    `event/R`. A listener thread of each rank waits for its own event, appends its rank's location to `locations`, and
    remembers who failed in case the store ends with rank 0. Of all ranks that stop because they waited, one
    investigates and writes the `verdict` for the others. `answered`, `informed` and `closed` count ranks.
    """

    def __init__(self, rank: int, size: int, timeout: float, store: Store, hosts: bool = False) -> None:
        self.rank, self.size, self.timeout, self.store, self.hosts = rank, size, timeout, store, hosts
        self.responsive = size  # ranks that can still answer, this one included
        self.known: dict[int, RankStatus] = {}
        self.failed = self.store_lost = self.closing = False
        self.counted: set[str] = set()
        self.lock = threading.Lock()
        self.reported = threading.Event()  # the status says how this rank ends
        self.listener: threading.Thread | None = None
        self.gpu_is_stuck: Callable[[float], bool] = lambda seconds: False
        self.set_status(RankStatus("running"))

    def set_status(self, status: RankStatus) -> None:
        self.store.set(f"status/{self.rank}", json.dumps(asdict(status)))
        if status.state != "running":
            self.reported.set()

    def start_listener(self, store: Store) -> None:
        """Starts the thread that waits for the event. It needs its own connection: a waiting one is blocked."""
        thread = threading.get_ident()

        def wait() -> None:
            with suppress(RuntimeError):  # the store is gone; a collective will notice
                store.wait([f"event/{self.rank}"], timedelta(days=365))
                self.answer(store, thread)

        self.listener = threading.Thread(target=wait, daemon=True)
        self.listener.start()

    def answer(self, store: Store, thread: int) -> None:
        """Answers the event: reads who failed, and appends where this rank's `thread` is.

        A rank whose collective has just failed is outside it, and reports that soon. Then its status counts.
        """
        if self.closing:
            return
        waits = self.gpu_is_stuck(1.0)  # then the host is at any line, and waits for another rank
        location = "" if waits else _location(sys._current_frames().get(thread))
        rank0 = {0: RankStatus(**json.loads(store.get("status/0")))} if store.check(["status/0"]) else {}
        self.known = rank0 | self._first_failure(store)
        self._count("informed", store)
        if location:
            self.reported.wait(CLEANUP)
        store.append("locations", json.dumps([self.rank, location]) + "\n")  # type: ignore[attr-defined]
        self._count("answered", store)

    def report(self, error: BaseException) -> RankError | None:
        """Reports that `error` ends this rank. Returns the error that names the cause if other ranks caused it."""
        status = RankStatus.of(error)
        self.failed = status.state == "failed"
        if status.state != "stopped":
            run_with_timeout(lambda: self._publish(status))
            return None
        verdict = run_with_timeout(self._find_cause, VERDICT + 1)
        if verdict is None:
            self.store_lost = True
            return self._verdict_without_store()
        return verdict

    def close(self) -> None:
        """Ends this rank's part. The rank that hosts the store waits a little, so that the others can read it."""
        self.closing = True
        for name in ("answered", "informed"):
            self._count(name, self.store)
        self.store.add("closed", 1)
        self.store.set(f"event/{self.rank}", "")
        if self.listener is not None:
            self.listener.join(GRACE)  # a thread that wakes while Python exits takes the process with it
        if self.hosts:
            _wait_until(lambda: self.store.add("informed" if self.failed else "closed", 0) >= self.responsive)
            self._set_events()  # the store closes: running ranks must read it now
            _wait_until(lambda: self.store.add("informed", 0) >= self.responsive, 0.5)

    def _set_events(self) -> None:
        keys = [f"event/{rank}" for rank in range(self.size)]
        self.store.multi_set(keys, [""] * self.size)  # type: ignore[attr-defined]

    def _count(self, name: str, store: Store) -> None:
        """Counts this rank once: among those `informed`, or `answered` (no answer is to come from them)."""
        with self.lock:
            counted = name in self.counted
            self.counted.add(name)
        if not counted:
            store.add(name, 1)

    def _publish(self, status: RankStatus) -> None:
        self.set_status(status)
        if status.state == "failed":
            self.store.compare_set("first_failure", "", json.dumps([self.rank, asdict(status)]))
        if int(self.store.compare_set("notifier", "", str(self.rank))) == self.rank:
            self._set_events()

    def _first_failure(self, store: Store) -> dict[int, RankStatus]:
        if not store.check(["first_failure"]):
            return {}
        rank, status = json.loads(store.get("first_failure"))
        return {rank: RankStatus(**status)}

    def _find_cause(self) -> RankError:
        """Returns what stopped this rank: the first failure, or else what one rank finds out for all."""
        self._publish(RankStatus("stopped"))
        if error := first_failure(self._first_failure(self.store), self.size):
            return error
        investigator = int(self.store.compare_set("investigator", "", str(self.rank)))
        if investigator != self.rank:
            try:
                self.store.wait(["verdict"], timedelta(seconds=VERDICT))
            except dist.DistError:
                return RankError(f"rank {investigator} of {self.size} {UNRESPONSIVE}.")
            text, trace, user_error, self.responsive = json.loads(self.store.get("verdict"))
            return RankError(text, trace, user_error=user_error)
        self._set_events()  # the notifier may have been killed before it set all
        _wait_until(lambda: self.store.add("answered", 0) >= self.size)
        lines = self.store.get("locations").decode().splitlines() if self.store.check(["locations"]) else []
        locations = dict(json.loads(line) for line in lines)
        statuses = self._statuses() | self._first_failure(self.store)
        verdict = self._verdict(statuses, locations)
        self.responsive = sum(rank in locations or status.state != "running" for rank, status in statuses.items())
        entry = [str(verdict), verdict.traceback, verdict.user_error, self.responsive]
        self.store.set("verdict", json.dumps(entry))
        return verdict

    def _statuses(self) -> dict[int, RankStatus]:
        keys = [f"status/{rank}" for rank in range(self.size)]
        if not self.store.check(keys):  # some ranks never arrived
            keys = [key for key in keys if self.store.check([key])]
        entries = zip(keys, self.store.multi_get(keys), strict=True)
        return {int(key.removeprefix("status/")): RankStatus(**json.loads(entry)) for key, entry in entries}

    def _verdict(self, statuses: dict[int, RankStatus], locations: dict[int, str]) -> RankError:
        if first := first_failure(statuses, self.size):
            return first
        ranks_by_problem: dict[str, list[int]] = {}
        for rank in range(self.size):
            state = statuses[rank].state if rank in statuses else "absent"
            if state == "absent":
                problem = f"never arrived within {self.timeout:g} s"
            elif state == "finished":
                problem = FINISHED
            elif state == "running" and rank not in locations:
                problem = UNRESPONSIVE
            elif state == "running" and locations[rank]:
                problem = f"did not come: it is {locations[rank]}"
            else:
                continue
            ranks_by_problem.setdefault(problem, []).append(rank)
        if ranks_by_problem:
            problems = (
                f"rank {list_ranks(ranks)} of {self.size} {problem}" for problem, ranks in ranks_by_problem.items()
            )
            return RankError("; ".join(problems) + ".")
        return RankError(f"all {self.size} ranks waited for one another; do they call the same collectives?")

    def _verdict_without_store(self) -> RankError:
        if first := first_failure(self.known, self.size):
            return first
        if 0 in self.known and self.known[0].state == "finished":
            return RankError(f"rank 0 of {self.size} {FINISHED}.")
        host = "the launcher" if agent_hosts_store() else f"rank 0 of {self.size}"
        return RankError(f"{host} {UNRESPONSIVE}, and with it the store of failure reports.")


def agent_hosts_store() -> bool:
    """Returns whether the launcher hosts the store, as torchrun's agent does and `launch`."""
    return os.environ.get(AGENT_STORE) == "True"


def first_failure(statuses: dict[int, RankStatus], size: int) -> RankError | None:
    """Returns the error of the rank that was the first to fail by its own error, if one did."""
    failed = [(status.time, rank) for rank, status in statuses.items() if status.state == "failed"]
    if not failed:
        return None
    _, rank = min(failed)
    status = statuses[rank]
    return RankError(f"rank {rank} of {size} failed: {status.text}", status.traceback, user_error=status.user_error)


def first_stopped(statuses: dict[int, RankStatus]) -> RankError | None:
    """Returns the error of the rank that was the first to stop because it waited for another, if one did."""
    stopped = sorted(
        (status.time, status.text, status.traceback) for status in statuses.values() if status.state == "stopped"
    )
    return RankError(*stopped[0][1:]) if stopped else None


def _is_from_collective(error: BaseException | None) -> bool:
    """Returns whether `error`, or its cause, says that another rank is missing."""
    while error is not None:
        if isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and CONNECTION_LOST.search(str(error))
        ):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _location(frame: FrameType | None) -> str:
    """Returns the line of the caller's code that a rank is in; empty while it waits inside torch.distributed."""
    library = str(Path(torch.__file__).parent)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(str(Path(dist.__file__).parent)):
            return ""
        if not path.startswith(library):
            return f"in {frame.f_code.co_name} ({path}:{frame.f_lineno})"
        frame = frame.f_back
    return "at an unknown place"


def _wait_until(ready: Callable[[], bool], seconds: float = GRACE) -> None:
    end = time.monotonic() + seconds
    while not ready() and time.monotonic() < end:
        time.sleep(0.02)


def run_with_timeout(work: Callable[[], Result], seconds: float = GRACE + 1) -> Result | None:
    """Returns what `work` returns; None if it fails or takes too long, as calls to a lost store do."""
    results: list[Result] = []

    def run() -> None:
        with suppress(Exception):
            results.append(work())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


class GPUProbe:
    """The default stream of a GPU, on which a rank computes.

    ctypes calls the driver without Python's lock: the call may hang behind the one that the host hangs in.
    """

    def __init__(self, index: int) -> None:
        self.index = index

    def is_stuck(self, seconds: float) -> bool:
        """Returns whether work that is already launched does not finish within so many seconds."""
        passed = threading.Event()
        threading.Thread(target=self._pass_an_event, args=(passed, seconds), daemon=True).start()
        return not passed.wait(seconds)

    def _pass_an_event(self, passed: threading.Event, seconds: float) -> None:
        driver = ctypes.CDLL("libcuda.so.1")
        context, event = ctypes.c_void_p(), ctypes.c_void_p()
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), ctypes.c_int(self.index))
        driver.cuCtxSetCurrent(context)
        driver.cuEventCreate(ctypes.byref(event), ctypes.c_uint(0))
        driver.cuEventRecord(event, None)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if driver.cuEventQuery(event) == 0:
                passed.set()
                return
            time.sleep(0.02)


class StallWatchdog:
    """Calls `on_stall` if the creating thread stays at one instruction for `seconds` while its GPU is stuck."""

    def __init__(self, seconds: float, is_stuck: Callable[[float], bool], on_stall: Callable[[], None]) -> None:
        self.seconds, self.is_stuck, self.on_stall = seconds, is_stuck, on_stall
        self.watched = threading.get_ident()
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="postlude-stall", daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.closed.set()
        self.thread.join(1.0)

    def _watch(self) -> None:
        position, since = None, time.monotonic()
        while not self.closed.wait(self.seconds / SAMPLES):
            frame = sys._current_frames().get(self.watched)
            current = (id(frame), frame.f_lasti) if frame is not None else None
            del frame
            if current != position:
                position, since = current, time.monotonic()
            elif time.monotonic() - since >= self.seconds:
                if self.is_stuck(GPU_SECONDS):
                    self.on_stall()
                    return
                since = time.monotonic()
