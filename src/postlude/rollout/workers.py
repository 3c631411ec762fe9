"""Workers: a function called in other processes, where it may raise, hang or crash at the cost of one call."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, TypeAlias

from postlude.rollout import worker
from postlude.user_code import describe, load_callable

Failure: TypeAlias = Literal["raised", "invalid", "timed_out", "died"]
FAILURES: tuple[Failure, ...] = ("raised", "invalid", "timed_out", "died")

LARGEST_PARCEL = 64  # calls sent at once
START_LIMIT = 120.0  # seconds for a worker to load its function
INSIDE = "POSTLUDE_WORKER"  # in the environment of a worker
SCRIPT = "import sys; sys.path.insert(0, sys.argv[1]); from postlude.rollout.worker import main; main()"


class WorkerError(ValueError):
    """The function cannot be called at all: what was named, or handed to it, cannot be meant."""


@dataclass(frozen=True)
class Outcome:
    """What came of one call: a value of numbers, text, lists and dicts, or a failure and a sentence about it."""

    value: Any = None
    failure: Failure | None = None
    error: str | None = None


class Workers:
    """`count` processes that call `function`, or with 0 this one, where nothing can be timed out.

    `function` is one that can be pickled, or is named path/to/file.py:name. If it has a method `prepare`, that is
    called before its first call is timed. It should depend on its arguments alone, since any worker may get any call;
    hashes are the same in all of them. A call of more than `timeout` seconds is ended with its process and whatever
    that has started, and so is every worker on `close`, at exit, and when this object is dropped.
    """

    def __init__(self, function: str | Callable[..., Any], *, count: int, timeout: float) -> None:
        if count < 0:
            raise ValueError(f"workers is {count}, but the least is 0: call the function in this process.")
        if not timeout > 0:
            raise ValueError(f"timeout is {timeout}, but a call needs some seconds, more than 0.")
        self.name = function if isinstance(function, str) else _name(function)
        self.timeout = timeout
        self._here: Callable[..., Any] | None = None
        self._processes: list[_Process] = []
        self._lock = threading.Lock()
        self._closed = False
        if count == 0:
            self._here = worker.prepare(load_callable(function) if isinstance(function, str) else function)
            return
        if INSIDE in os.environ:
            raise WorkerError(
                f"a worker process is about to start workers of its own for {self.name}. A file with a function for "
                f'workers is run in each: put what it does itself under `if __name__ == "__main__":`.'
            )
        self._start = _packed(function, self.name)
        self._finalizer = weakref.finalize(self, _end_all, self._processes)
        self._processes += [_Process(self._start, timeout) for _ in range(count)]
        try:
            for process in self._processes:
                process.answers.poll(START_LIMIT)
                process.greet(self.name)
        except BaseException:
            self.close()
            raise

    def call_all(self, calls: Sequence[tuple[Any, ...]]) -> list[Outcome]:
        """Call the function with each tuple of arguments. Outcomes come in the order of the calls."""
        if self._closed:
            raise WorkerError(f"the workers of {self.name} were closed. Make new ones.")
        if self._here is not None:
            return [_outcome(worker.answer(self._here, arguments)) for arguments in calls]
        with self._lock:
            try:
                return self._share_out(calls)
            except BaseException:
                for slot, process in enumerate(self._processes):
                    if process.at_work:  # what it still answers would be taken for the next call's
                        process.end()
                        self._processes[slot] = _Process(self._start, self.timeout)
                raise

    def close(self) -> None:
        """End every worker."""
        self._closed = True
        _end_all(self._processes)

    def _share_out(self, calls: Sequence[tuple[Any, ...]]) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        waiting = deque(range(len(calls)))
        while len(outcomes) < len(calls):
            for slot, process in enumerate(self._processes):
                if not waiting or process.at_work or not process.ready:
                    continue
                size = min(LARGEST_PARCEL, max(1, len(waiting) // (2 * len(self._processes))))  # the last are small
                if not process.give([waiting.popleft() for _ in range(size)], calls):
                    self._replace(slot, waiting)
            busy = {
                process.answers: slot
                for slot, process in enumerate(self._processes)
                if process.at_work or not process.ready
            }
            nearest = min((self._processes[slot].deadline for slot in busy.values()), default=0.0)
            heard = {busy[found] for found in wait(list(busy), max(0.0, nearest - time.monotonic()))}  # type: ignore[index]
            now = time.monotonic()
            for slot in busy.values():
                process = self._processes[slot]
                if not process.ready:
                    if slot in heard or now >= process.deadline:
                        process.greet(self.name)
                elif slot in heard:
                    if not process.collect(outcomes):
                        blamed = process.at_work.popleft()
                        outcomes[blamed] = Outcome(failure="died", error=f"{self.name} {process.last_words()}.")
                        self._replace(slot, waiting)
                elif now >= process.deadline:
                    blamed = process.at_work.popleft()
                    sentence = f"{self.name} took more than {self.timeout:g} s and was ended."
                    outcomes[blamed] = Outcome(failure="timed_out", error=sentence)
                    self._replace(slot, waiting)
        return [outcomes[index] for index in range(len(calls))]

    def _replace(self, slot: int, waiting: deque[int]) -> None:
        """Put a new worker in the place of one that is lost, and what it had not begun back in front."""
        lost = self._processes[slot]
        waiting.extendleft(reversed(lost.at_work))
        lost.end()
        self._processes[slot] = _Process(self._start, self.timeout)


class _Process:
    """A worker process, and the calls it was given and has not answered."""

    def __init__(self, start: bytes, timeout: float) -> None:
        self.timeout = timeout
        self.at_work: deque[int] = deque()
        self.ready = False
        self.deadline = time.monotonic() + START_LIMIT
        calls_in, calls_out = os.pipe()
        answers_in, answers_out = os.pipe()
        self.calls = Connection(calls_out, readable=False)
        self.answers = Connection(answers_in, writable=False)
        home = str(Path(worker.__file__).parents[2])
        script = [sys.executable, "-P", "-c", SCRIPT, home, str(calls_in), str(answers_out), str(timeout)]
        try:
            self.process = subprocess.Popen(
                script,
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a function prints is no result of ours
                pass_fds=(calls_in, answers_out),
                env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONHASHSEED": "0", INSIDE: "1"},
                start_new_session=True,  # so that what it starts ends with it
            )
        finally:
            os.close(calls_in)
            os.close(answers_out)
        with contextlib.suppress(BrokenPipeError):  # then it is never ready
            self.calls.send_bytes(start)

    def greet(self, name: str) -> None:
        """Read whether the function is loaded."""
        try:
            if not self.answers.poll():
                raise WorkerError(
                    f"{name} was not loaded within {START_LIMIT:g} s. Its file does too much when it is run."
                )
            reply = json.loads(self.answers.recv_bytes())
        except EOFError as error:
            raise WorkerError(f"{name} cannot be loaded: it {self.last_words()}.") from error
        if "error" in reply:
            raise WorkerError(f"{name} cannot be loaded: {reply['error']}")
        self.ready = True

    def give(self, indices: list[int], calls: Sequence[tuple[Any, ...]]) -> bool:
        """Send calls. False if the process is lost."""
        try:
            # Each by itself, and as a plain tuple, so that a worker imports nothing of ours to read it.
            parcel = pickle.dumps([pickle.dumps(tuple(calls[index])) for index in indices])
        except Exception as error:
            raise WorkerError(
                f"the arguments of a call cannot be sent to a worker process ({describe(error)}). "
                f"Keep examples to plain data, or use workers=0."
            ) from error
        self.at_work.extend(indices)
        try:
            self.calls.send_bytes(parcel)
        except BrokenPipeError:
            return False
        self.deadline = time.monotonic() + self.timeout
        return True

    def collect(self, outcomes: dict[int, Outcome]) -> bool:
        """Take the answers that have come. False if the process is lost."""
        try:
            while self.at_work and self.answers.poll():
                reply = json.loads(self.answers.recv_bytes())
                outcomes[self.at_work.popleft()] = _outcome(reply)
                self.deadline = time.monotonic() + self.timeout
        except (EOFError, OSError, ValueError):
            return False
        return True

    def last_words(self) -> str:
        """How the process ended."""
        try:
            code = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "wrote to the pipe of its worker process"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended its process with exit code {code}"

    def end(self) -> None:
        """End the process and what it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.calls.close()
        self.answers.close()


def _end_all(processes: list[_Process]) -> None:
    while processes:
        processes.pop().end()


def _outcome(reply: dict[str, Any]) -> Outcome:
    return Outcome(reply.get("value"), reply.get("failure"), reply.get("error"))


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _packed(function: str | Callable[..., Any], name: str) -> bytes:
    """What a worker needs to have the function: pickled, by its file, or both."""
    where = function if isinstance(function, str) else _where(function)
    pickled: bytes | None = None
    if not isinstance(function, str) and getattr(function, "__module__", None) != "__main__":
        with contextlib.suppress(Exception):
            pickled = pickle.dumps(function)
    if pickled is None and where is None:
        raise WorkerError(
            f"{name} cannot be sent to a worker process. Put it at the top of a file and name it path/to/file.py:name, "
            f"or use workers=0."
        )
    return pickle.dumps(
        {"sys_path": [path or str(Path.cwd()) for path in sys.path], "pickled": pickled, "where": where}
    )


def _where(function: Callable[..., Any]) -> str | None:
    """The file and name of a function that stands at the top of a file."""
    file = getattr(sys.modules.get(getattr(function, "__module__", "")), "__file__", None)
    name = getattr(function, "__qualname__", "")
    return f"{file}:{name}" if file and str(file).endswith(".py") and name.isidentifier() else None
