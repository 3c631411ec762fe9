"""Workers: a function called in other processes, where it may raise, hang or crash at the cost of one call."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from postlude.rollout import worker
from postlude.user_code import describe, load_callable

Failure: TypeAlias = Literal["raised", "invalid", "timed_out", "died"]
FAILURES: tuple[Failure, ...] = ("raised", "invalid", "timed_out", "died")

LARGEST_PARCEL = 64  # calls sent at once
PARCEL = 0.02  # seconds that the calls sent at once may take together: what is slow holds up no more than that
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


class Crew(ABC):
    """Calls that wait to be made, and those who wait for what comes of them, behind `changed`.

    Who makes the calls, and where, is a subclass's: it takes tickets from `waiting` and puts outcomes into `done`.
    """

    lost: int | None = None
    """How many workers went with no fault of a call's, so that others did what they were at. None: none can."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: dict[int, bytes] = {}  # not answered yet
        self.waiting: deque[int] = deque()
        self.done: dict[int, Outcome] = {}
        self.unwanted: set[int] = set()
        self.pace = PARCEL  # seconds a call, of late; until that is known, each is sent by itself
        self.broken: BaseException | None = None
        self.closed = False
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None  # the subclass's, which hands out calls

    def give(self, ticket: int, call: bytes) -> None:
        """Have a call made."""
        with self.changed:
            self.calls[ticket] = call
            self.waiting.append(ticket)
            self._wake()

    def take(self, timeout: float | None, of: Collection[int] | None) -> dict[int, Outcome]:
        """What has come of all, or of some."""

        def there() -> list[int]:
            return [ticket for ticket in (list(self.done) if of is None else of) if ticket in self.done]

        with self.changed:
            self.changed.wait_for(lambda: self.broken or self.closed or there(), timeout)
            if self.broken is not None:
                raise self.broken
            if self.closed and not there():
                raise WorkerError(f"the workers of {self.name} were closed. Make new ones.")
            return {ticket: self.done.pop(ticket) for ticket in there()}

    def forget(self, tickets: Iterable[int]) -> None:
        """Nobody wants these any more."""
        with self.changed:
            self.unwanted |= {ticket for ticket in tickets if ticket in self.calls}
            for ticket in tickets:
                self.done.pop(ticket, None)
            self._wake()

    def close(self) -> None:
        """Hand out nothing more, tell whoever waits, and end every worker."""
        with self.changed:
            if self.closed:
                return
            self.closed = True
            self._wake()
            self.changed.notify_all()
        thread = self.thread
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join()  # else it is this one, as garbage is found anywhere
        self._end()

    @abstractmethod
    def _end(self) -> None:
        """End every worker. Nobody else touches them any more."""

    @abstractmethod
    def _wake(self) -> None:
        """Let whoever hands out calls look again; with `changed` held."""

    def _parcel(self, workers: int) -> list[int]:
        """The next calls for one of so many workers; with `changed` held."""
        share = len(self.waiting) // (2 * workers)  # the last are small
        size = max(1, min(LARGEST_PARCEL, share, int(PARCEL / self.pace)))
        return [self.waiting.popleft() for _ in range(min(size, len(self.waiting)))]

    def _answered(self, outcomes: Mapping[int, Outcome]) -> None:
        """Put down what has come of calls; with `changed` held."""
        for ticket, outcome in outcomes.items():
            del self.calls[ticket]
            if ticket in self.unwanted:
                self.unwanted.discard(ticket)
            else:
                self.done[ticket] = outcome


class Hire(Protocol):
    """Finds workers for a function, which `start` tells them how to load; each call has `timeout` seconds."""

    def __call__(self, start: bytes, name: str, count: int, timeout: float) -> Crew:
        """`count` workers. `name` is what the function is called in sentences."""


class Nobody(Crew):
    """No workers, for a rank that has nothing judged."""

    def __init__(self, start: bytes, name: str, count: int, timeout: float) -> None:
        super().__init__(name)

    def close(self) -> None:
        """There is nobody to tell."""

    def _end(self) -> None:
        """There is nobody to end."""

    def _wake(self) -> None:
        raise WorkerError(f"this rank has no workers for {self.name}: the first one has answers judged.")


class Workers:
    """`count` processes that call `function`, or with 0 this one, where nothing can be timed out.

    `function` is one that can be pickled, or is named path/to/file.py:name. If it has a method `prepare`, that is
    called before its first call is timed. It should depend on its arguments alone, since any worker may get any call;
    hashes are the same in all of them. A call of more than `timeout` seconds is ended with its process and whatever
    that has started, and so is every worker on `close`, at exit, and when this object is dropped. `hire` finds them;
    without it, they are processes of this machine.

    `submit` and `poll` let the caller go on meanwhile; `call_all` waits.
    """

    def __init__(
        self, function: str | Callable[..., Any], *, count: int, timeout: float, hire: Hire | None = None
    ) -> None:
        if count < 0:
            raise ValueError(f"workers is {count}, but the least is 0: call the function in this process.")
        if not timeout > 0:
            raise ValueError(f"timeout is {timeout}, but a call needs some seconds, more than 0.")
        self.name = function if isinstance(function, str) else _name(function)
        self._here: Callable[..., Any] | None = None
        self._tickets = itertools.count()
        self._done: dict[int, Outcome] = {}  # what was called in this process
        self._crew: Crew | None = None
        self._closed = False
        if count == 0:
            self._here = worker.prepare(load_callable(function) if isinstance(function, str) else function)
            return
        if INSIDE in os.environ:
            raise WorkerError(
                f"a worker process is about to start workers of its own for {self.name}. A file with a function for "
                f'workers is run in each: put what it does itself under `if __name__ == "__main__":`.'
            )
        self._crew = (hire or Processes)(_packed(function, self.name), self.name, count, timeout)
        self._finalizer = weakref.finalize(self, self._crew.close)

    @property
    def lost(self) -> int | None:
        """How many workers went with no fault of a call's, so that others did what they were at. None: none can."""
        return None if self._crew is None else self._crew.lost

    def submit(self, arguments: tuple[Any, ...]) -> int:
        """Ask for a call, and go on. Returns the ticket by which its outcome will be known."""
        if self._closed:
            raise WorkerError(f"the workers of {self.name} were closed. Make new ones.")
        ticket = next(self._tickets)
        if self._here is not None:
            self._done[ticket] = _outcome(worker.answer(self._here, arguments))
        else:
            assert self._crew is not None
            self._crew.give(ticket, _parcelled(arguments))
        return ticket

    def poll(self, timeout: float | None = 0.0, of: Collection[int] | None = None) -> dict[int, Outcome]:
        """Outcomes that have come, by their tickets: waits up to `timeout` seconds for the first, for ever if None.

        Each is told once. `of` asks for these tickets alone.
        """
        if self._crew is not None:
            return self._crew.take(timeout, of)
        found = {ticket: self._done[ticket] for ticket in (list(self._done) if of is None else of)}
        for ticket in found:
            del self._done[ticket]
        return found

    def call_all(self, calls: Sequence[tuple[Any, ...]]) -> list[Outcome]:
        """Call the function with each tuple of arguments. Outcomes come in the order of the calls."""
        tickets: list[int] = []
        outcomes: dict[int, Outcome] = {}
        try:
            for call in calls:
                tickets.append(self.submit(call))
            while len(outcomes) < len(tickets):
                outcomes |= self.poll(None, set(tickets) - outcomes.keys())
        except BaseException:
            if self._crew is not None:
                self._crew.forget(tickets)  # what they still answer is nobody's
            raise
        return [outcomes[ticket] for ticket in tickets]

    def close(self) -> None:
        """End every worker."""
        self._closed = True
        if self._crew is not None:
            self._crew.close()


class Processes(Crew):
    """Processes of this machine, and a thread that hands calls out and hears answers while everybody else goes on.

    The thread alone touches the processes. What it shares with callers is behind `changed`.
    """

    def __init__(self, start: bytes, name: str, count: int, timeout: float) -> None:
        super().__init__(name)
        self.start, self.timeout = start, timeout
        self.bell, self.ring = _pipe()
        self.processes = [_Process(start, timeout) for _ in range(count)]
        self.thread = threading.Thread(target=self._run, name=f"workers of {name}", daemon=True)
        try:
            for process in self.processes:
                process.answers.poll(START_LIMIT)
                process.greet(name)
        except BaseException:
            self.close()
            raise
        self.thread.start()

    def _end(self) -> None:
        while self.processes:
            self.processes.pop().end()
        self.bell.close()
        self.ring.close()

    def _wake(self) -> None:
        """With `changed` held."""
        if not self.bell.closed and not self.bell.poll():
            self.ring.send_bytes(b"")

    def _run(self) -> None:
        try:
            while not self.closed:
                self._round()
        except BaseException as error:  # a new worker that cannot load the function: everyone who waits is told
            with self.changed:
                self.broken = error
                self.changed.notify_all()

    def _round(self) -> None:
        with self.changed:
            self._drop_unwanted()
            for slot, process in enumerate(self.processes):
                if not self.waiting or process.at_work or not process.ready:
                    continue
                if not process.give(self._parcel(len(self.processes)), self.calls):
                    self._replace(slot)
        busy = {
            process.answers: slot for slot, process in enumerate(self.processes) if process.at_work or not process.ready
        }
        nearest = min((self.processes[slot].deadline for slot in busy.values()), default=None)
        limit = None if nearest is None else max(0.0, nearest - time.monotonic())
        heard = set(wait([*busy, self.bell], limit))
        now = time.monotonic()
        with self.changed:
            while self.bell.poll():
                self.bell.recv_bytes()
            for answers, slot in busy.items():
                self._hear(slot, answers in heard, now)
            self.changed.notify_all()

    def _hear(self, slot: int, heard: bool, now: float) -> None:
        process = self.processes[slot]
        outcomes: dict[int, Outcome] = {}
        if not process.ready:
            if heard or now >= process.deadline:
                process.greet(self.name)
            return
        if heard:
            whole = process.collect(outcomes)
            for _ in outcomes:
                self.pace = 0.9 * self.pace + 0.1 * (now - process.since) / len(outcomes)
            process.since = now
            if not whole:
                blamed = process.at_work.popleft()
                outcomes[blamed] = Outcome(failure="died", error=f"{self.name} {process.last_words()}.")
                self._replace(slot)
        elif now >= process.deadline:
            blamed = process.at_work.popleft()
            sentence = f"{self.name} took more than {self.timeout:g} s and was ended."
            outcomes[blamed] = Outcome(failure="timed_out", error=sentence)
            self._replace(slot)
        self._answered(outcomes)

    def _drop_unwanted(self) -> None:
        for slot, process in enumerate(self.processes):
            if self.unwanted.intersection(process.at_work):
                self._replace(slot)
        self.waiting = deque(ticket for ticket in self.waiting if ticket not in self.unwanted)
        for ticket in self.unwanted:
            del self.calls[ticket]
        self.unwanted.clear()

    def _replace(self, slot: int) -> None:
        """Put a new worker in the place of one that is lost, and what it had not begun back in front."""
        lost = self.processes[slot]
        self.waiting.extendleft(reversed(lost.at_work))
        lost.end()
        self.processes[slot] = _Process(self.start, self.timeout)


class _Process:
    """A worker process, and the calls it was given and has not answered."""

    def __init__(self, start: bytes, timeout: float) -> None:
        self.timeout = timeout
        self.at_work: deque[int] = deque()
        self.ready = False
        self.since = 0.0  # when it began what it is at
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

    def give(self, tickets: list[int], calls: Mapping[int, bytes]) -> bool:
        """Send calls. False if the process is lost."""
        self.at_work.extend(tickets)
        self.since = time.monotonic()
        try:
            self.calls.send_bytes(pickle.dumps([calls[ticket] for ticket in tickets]))
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


def _pipe() -> tuple[Connection, Connection]:
    """The two ends of a pipe within this process: to hear, and to be heard."""
    heard, spoken = os.pipe()
    return Connection(heard, writable=False), Connection(spoken, readable=False)


def _parcelled(arguments: tuple[Any, ...]) -> bytes:
    """A call by itself, and as a plain tuple, so that a worker imports nothing of ours to read it."""
    try:
        return pickle.dumps(tuple(arguments))
    except Exception as error:
        raise WorkerError(
            f"the arguments of a call cannot be sent to a worker process ({describe(error)}). "
            f"Keep examples to plain data, or use workers=0."
        ) from error


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
