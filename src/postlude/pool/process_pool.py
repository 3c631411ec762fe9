"""ProcessPool: workers that are processes of this machine, each ended with its call where that takes too long."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from postlude.pool import worker
from postlude.pool.worker_pool import START_LIMIT, CallResult, WorkerError, WorkerPool

INSIDE = "POSTLUDE_WORKER"  # in the environment of a worker: a name of its own, by which what it starts is found
HEADER = struct.Struct("!i")  # before each answer: its size, as Connection.send_bytes writes it
LARGEST = 1 << 30  # bytes of an answer; more is no answer
SCRIPT = "import sys; sys.path.insert(0, sys.argv[1]); from postlude.pool.worker import main; main()"


class ProcessPool(WorkerPool):
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
                while not process.ready:
                    wait([process.answers], max(0.0, process.deadline - time.monotonic()))
                    process.greet(name)
        except BaseException:
            self.close()
            raise
        self.thread.start()

    def _stop_workers(self) -> None:
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
                self.error = error
                self.changed.notify_all()

    def _round(self) -> None:
        with self.changed:
            self._drop_unwanted()
            for slot, process in enumerate(self.processes):
                if not self.waiting or process.at_work or not process.ready:
                    continue
                if not process.give(self._next_calls(len(self.processes)), self.calls):
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
        outcomes: dict[int, CallResult] = {}
        if not process.ready:
            process.greet(self.name)
            return
        whole = not heard or process.collect(outcomes)
        if outcomes:
            for _ in outcomes:
                self.seconds_per_call = 0.9 * self.seconds_per_call + 0.1 * (now - process.since) / len(outcomes)
            process.since = now
        if not whole:
            if process.at_work:
                blamed = process.at_work.popleft()
                outcomes[blamed] = CallResult(failure="died", error=f"{self.name} {process.last_words()}.")
            self._replace(slot)
        elif process.at_work and now >= process.deadline:
            blamed = process.at_work.popleft()
            sentence = f"{self.name} took more than {self.timeout:g} s and was ended."
            outcomes[blamed] = CallResult(failure="timed_out", error=sentence)
            self._replace(slot)
        self._record(outcomes)

    def _drop_unwanted(self) -> None:
        for slot, process in enumerate(self.processes):
            if self.cancelled.intersection(process.at_work):
                self._replace(slot)
        self.waiting = deque(ticket for ticket in self.waiting if ticket not in self.cancelled)
        for ticket in self.cancelled:
            del self.calls[ticket]
        self.cancelled.clear()

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
        self.secret, self.label = secrets.token_hex(), secrets.token_hex()
        self.received = bytearray()  # of an answer that has not come whole
        self.ended = self.forged = False
        calls_in, calls_out = os.pipe()
        answers_in, answers_out = os.pipe()
        self.calls = Connection(calls_out, readable=False)
        self.answers = Connection(answers_in, writable=False)
        os.set_blocking(answers_in, False)
        home = str(Path(worker.__file__).parents[2])
        script = [sys.executable, "-P", "-c", SCRIPT, home, str(calls_in), str(answers_out), str(timeout)]
        try:
            self.process = subprocess.Popen(
                script,
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a function prints is no result of ours
                pass_fds=(calls_in, answers_out),
                env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONHASHSEED": "0", INSIDE: self.label},
                start_new_session=True,  # so that what it starts ends with it
            )
        finally:
            os.close(calls_in)
            os.close(answers_out)
        with contextlib.suppress(BrokenPipeError):  # then it is never ready
            self.calls.send_bytes(pickle.dumps({**pickle.loads(start), "secret": self.secret}))

    def greet(self, name: str) -> None:
        """Read whether the function is loaded, if that is known."""
        for reply in self.receive():
            if "error" in reply:
                raise WorkerError(f"{name} cannot be loaded: {reply['error']}")
            self.ready = True
        if not self.ready and self.ended:
            raise WorkerError(f"{name} cannot be loaded: it {self.last_words()}.")
        if not self.ready and time.monotonic() >= self.deadline:
            raise WorkerError(f"{name} was not loaded within {START_LIMIT:g} s. Its file does too much when it is run.")

    def receive(self) -> list[dict[str, Any]]:
        """The whole answers that have come, without waiting for more.

        Sets `ended` where the process has, or where what came next is no answer of the worker's.
        """
        try:
            while part := os.read(self.answers.fileno(), 1 << 16):
                self.received += part
            self.ended = True
        except BlockingIOError:
            pass  # that is all for now
        replies: list[dict[str, Any]] = []
        while len(self.received) >= HEADER.size:
            (size,) = HEADER.unpack_from(self.received)
            end = HEADER.size + size
            if 0 <= size <= LARGEST and len(self.received) < end:
                break
            reply = _read(bytes(self.received[HEADER.size : end])) if 0 <= size <= LARGEST else {}
            if not secrets.compare_digest(str(reply.pop("secret", "")).encode(), self.secret.encode()):
                self.ended = self.forged = True
                break
            replies.append(reply)
            del self.received[:end]
        return replies

    def give(self, tickets: list[int], calls: Mapping[int, bytes]) -> bool:
        """Send calls. False if the process is lost."""
        self.at_work.extend(tickets)
        self.since = time.monotonic()
        if self.receive() or self.received or self.ended:  # what an earlier call left behind
            return False
        try:
            self.calls.send_bytes(pickle.dumps([(ticket, calls[ticket]) for ticket in tickets]))
        except BrokenPipeError:
            return False
        self.deadline = time.monotonic() + self.timeout
        return True

    def collect(self, outcomes: dict[int, CallResult]) -> bool:
        """Take the answers that have come. False if the process is lost, or wrote what is no answer to its calls."""
        for reply in self.receive():
            if not self.at_work or reply.get("id") != self.at_work[0]:
                self.forged = True
                return False
            outcomes[self.at_work.popleft()] = CallResult.of(reply)
            self.deadline = time.monotonic() + self.timeout
        return not self.ended

    def last_words(self) -> str:
        """How the process ended."""
        if self.forged:
            return "wrote to the pipe of its worker process"
        try:
            code = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "closed the pipe of its worker process"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended its process with exit code {code}"

    def end(self) -> None:
        """End the process and what it has started, in sessions of their own too."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        while others := _labelled(self.label, self.process.pid):
            for other in others:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(other, signal.SIGKILL)
        self.process.wait()
        self.calls.close()
        self.answers.close()


def _pipe() -> tuple[Connection, Connection]:
    """The two ends of a pipe within this process: to hear, and to be heard."""
    heard, spoken = os.pipe()
    return Connection(heard, writable=False), Connection(spoken, readable=False)


def _read(frame: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(frame)
    except ValueError:
        return {}
    return reply if isinstance(reply, dict) else {}


def _labelled(label: str, worker: int) -> list[int]:
    """Processes that run with a worker's label in their environment, but for the worker; none where no /proc tells."""
    mark = f"{INSIDE}={label}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) != worker:
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found
