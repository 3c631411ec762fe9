"""ProcessPool: workers that are processes on this machine. `open_pool` makes one of a function, or calls it here.

Written here because no library covers all of this: a call that hangs is ended with its process and every process it
started, in other sessions too (`supervisor.py`); what a function writes to the worker's pipe is not taken for a
result; results are JSON, so that code a model wrote cannot reach the trainer through pickle; hashes are equal in all
workers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import secrets
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from postlude.pool import worker
from postlude.pool.limits import DEFAULT_LIMITS, WorkerLimits
from postlude.pool.supervisor import TOO_MANY_PROCESSES
from postlude.pool.worker import prepare
from postlude.pool.worker_pool import START_LIMIT, CallResult, InlinePool, PoolFactory, WorkerError, WorkerPool
from postlude.user_code import UserCodeError, load_callable, pickle_function

LOG = logging.getLogger("postlude")
WORKER_VARIABLE = "POSTLUDE_WORKER"  # an environment variable of workers; processes they start inherit it
HEADER = struct.Struct("!i")  # the size before each reply, as Connection.send_bytes writes it
END_LIMIT = 30.0  # seconds for a supervisor to end all processes of its worker
SCRIPT = "import sys; sys.path.insert(0, sys.argv[1]); from postlude.pool.supervisor import main; main()"


class ProcessPool(WorkerPool):
    """Worker processes, and a thread that sends calls and receives replies. The thread alone touches the processes."""

    def __init__(self, function: bytes, name: str, count: int, timeout: float) -> None:
        super().__init__(name)
        self.function, self.timeout = function, timeout
        read, write = os.pipe()
        self.wake_receiver, self.wake_sender = Connection(read, writable=False), Connection(write, readable=False)
        self.processes: list[_WorkerProcess] = []
        try:
            for _ in range(count):
                self.processes.append(_WorkerProcess(function, timeout))
            for process in self.processes:
                while not process.ready:
                    wait([process.replies], max(0.0, process.deadline - time.monotonic()))
                    process.check_started(name)
        except BaseException:
            self.close()
            raise
        self.thread.start()

    def _wake(self) -> None:
        if not self.wake_receiver.closed and not self.wake_receiver.poll():
            self.wake_sender.send_bytes(b"")

    def _stop_workers(self) -> None:
        while self.processes:
            self.processes.pop().end()
        self.wake_receiver.close()
        self.wake_sender.close()

    def _step(self) -> None:
        """Sends calls to idle workers, then waits for replies, for the nearest deadline, or for `_wake`."""
        with self.changed:
            self._drop_cancelled()
            for index, process in enumerate(self.processes):
                if not self.waiting or process.sent or not process.ready:
                    continue
                if not process.send(self._next_calls(len(self.processes)), self.calls):
                    self._replace(index)
        busy = {
            process.replies: index for index, process in enumerate(self.processes) if process.sent or not process.ready
        }
        nearest = min((self.processes[index].deadline for index in busy.values()), default=None)
        limit = None if nearest is None else max(0.0, nearest - time.monotonic())
        readable = set(wait([*busy, self.wake_receiver], limit))
        now = time.monotonic()
        with self.changed:
            while self.wake_receiver.poll():
                self.wake_receiver.recv_bytes()
            for connection, index in busy.items():
                self._receive(index, connection in readable, now)
            self.changed.notify_all()

    def _receive(self, index: int, readable: bool, now: float) -> None:
        process = self.processes[index]
        if not process.ready:
            process.check_started(self.name)
            return
        results: dict[int, CallResult] = {}
        alive = not readable or process.collect(results)
        if results:
            for _ in results:
                self.seconds_per_call = 0.9 * self.seconds_per_call + 0.1 * (now - process.since) / len(results)
            process.since = now
        if not alive:
            if process.sent:
                message = f"{self.name} {process.end_description()}."
                results[process.sent.popleft()] = CallResult(failure="died", error=message)
            self._replace(index)
        elif process.sent and now >= process.deadline:
            message = f"{self.name} took more than {self.timeout:g} s and was ended."
            results[process.sent.popleft()] = CallResult(failure="timed_out", error=message)
            self._replace(index)
        self._record(results)

    def _drop_cancelled(self) -> None:
        for index, process in enumerate(self.processes):
            if self.cancelled.intersection(process.sent):
                self._replace(index)
        self.waiting = deque(call_id for call_id in self.waiting if call_id not in self.cancelled)
        for call_id in self.cancelled:
            del self.calls[call_id]
        self.cancelled.clear()

    def _replace(self, index: int) -> None:
        """Ends a worker and starts another. Calls that it had not begun go back to the front of the queue."""
        old = self.processes[index]
        self.waiting.extendleft(reversed(old.sent))
        old.end()
        self.processes[index] = _WorkerProcess(self.function, self.timeout)


class _WorkerProcess:
    """One process, and the ids of calls sent to it that have no reply yet, in order."""

    def __init__(self, function: bytes, timeout: float) -> None:
        self.timeout = timeout
        self.sent: deque[int] = deque()
        self.ready = False
        self.since = 0.0  # when its current call began
        self.deadline = time.monotonic() + START_LIMIT
        self.secret = secrets.token_hex()
        packed = pickle.loads(function)
        self.limits: WorkerLimits | None = packed["limits"]
        self.removed = frozenset() if self.limits is None else self.limits.removed(os.environ)
        self.max_reply_bytes = worker.max_reply_bytes(self.limits)
        max_processes = 0 if self.limits is None else self.limits.processes
        self.received = bytearray()  # the beginning of a reply that is not complete
        self.ended = self.forged = False
        calls_read, calls_write = os.pipe()
        replies_read, replies_write = os.pipe()
        self.calls = Connection(calls_write, readable=False)
        self.replies = Connection(replies_read, writable=False)
        os.set_blocking(replies_read, False)
        variables = {name: value for name, value in os.environ.items() if name not in self.removed}
        source = str(Path(worker.__file__).parents[2])
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", SCRIPT, source, str(calls_read), str(replies_write), str(max_processes)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a function prints is not ours to write to stdout
                pass_fds=(calls_read, replies_write),
                env={"OMP_NUM_THREADS": "1", **variables, "PYTHONHASHSEED": "0", WORKER_VARIABLE: "1"},
                start_new_session=True,  # Ctrl-C is for the trainer, which ends it
            )
        finally:
            os.close(calls_read)
            os.close(replies_write)
        with contextlib.suppress(BrokenPipeError):  # then it never becomes ready
            self.calls.send_bytes(pickle.dumps({**packed, "secret": self.secret}))

    def check_started(self, name: str) -> None:
        """Sets `ready` once the function is loaded. Raises if it cannot be."""
        for reply in self.receive():
            if "error" in reply:
                raise WorkerError(f"{name} cannot be loaded: {self._explained(reply['error'])}")
            self.ready = True
        if not self.ready and self.ended:
            raise WorkerError(f"{name} cannot be loaded: it {self.end_description()}.")
        if not self.ready and time.monotonic() >= self.deadline:
            raise WorkerError(f"{name} was not loaded within {START_LIMIT:g} s. Its file does too much when it is run.")

    def receive(self) -> list[dict[str, Any]]:
        """Returns the complete replies that have arrived, without waiting.

        Sets `ended` if the process has ended, or if something else than the worker wrote to the pipe.
        """
        try:
            while data := os.read(self.replies.fileno(), 1 << 16):
                self.received += data
            self.ended = True
        except BlockingIOError:
            pass  # nothing more for now
        replies: list[dict[str, Any]] = []
        while len(self.received) >= HEADER.size:
            (size,) = HEADER.unpack_from(self.received)
            end = HEADER.size + size
            plausible = 0 <= size <= self.max_reply_bytes
            if plausible and len(self.received) < end:
                break
            reply = _parse(bytes(self.received[HEADER.size : end])) if plausible else {}
            if not secrets.compare_digest(str(reply.pop("secret", "")).encode(), self.secret.encode()):
                self.ended = self.forged = True
                break
            replies.append(reply)
            del self.received[:end]
        return replies

    def send(self, call_ids: list[int], calls: Mapping[int, bytes]) -> bool:
        """Sends calls. Returns False if the process is lost."""
        self.sent.extend(call_ids)
        self.since = time.monotonic()
        if self.receive() or self.received or self.ended:  # an earlier call wrote to the pipe
            return False
        try:
            self.calls.send_bytes(pickle.dumps([(call_id, calls[call_id]) for call_id in call_ids]))
        except BrokenPipeError:
            return False
        self.deadline = time.monotonic() + self.timeout
        return True

    def collect(self, results: dict[int, CallResult]) -> bool:
        """Adds the results that have arrived. Returns False if the process is lost, or wrote an invalid result."""
        for reply in self.receive():
            if not self.sent or reply.get("id") != self.sent[0]:
                self.forged = True
                return False
            result = CallResult.of(reply)
            results[self.sent.popleft()] = replace(result, error=self._explained(result.error))
            self.deadline = time.monotonic() + self.timeout
        return not self.ended

    def _explained(self, error: str | None) -> str | None:
        """Returns an error with what to do if it names a variable that workers do not get."""
        missing = next((name for name in sorted(self.removed) if error and name in error), None)
        hint = f" (workers do not get {missing}, a secret, unless worker_limits.secrets names it)"
        return error if missing is None else f"{error}{hint}"

    def end_description(self) -> str:
        if self.forged:
            return "wrote to the pipe of its worker process"
        try:
            code = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "closed the pipe of its worker process"
        if code == TOO_MANY_PROCESSES and self.limits is not None:
            return f"had more than {self.limits.processes} processes (worker_limits.processes), and was ended"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended its process with exit code {code}"

    def end(self) -> None:
        """Ends the process and everything it started, in other sessions too."""
        self.calls.close()  # which its supervisor sees
        try:
            self.process.wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            LOG.warning("processes of a worker could not be ended in %g s, and may remain.", END_LIMIT)
            self.process.kill()
            self.process.wait()
        self.replies.close()


def _parse(frame: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(frame)
    except (ValueError, RecursionError):
        return {}
    return reply if isinstance(reply, dict) else {}


def open_pool(
    function: str | Callable[..., Any],
    *,
    count: int,
    timeout: float,
    pool_factory: PoolFactory | None = None,
    name: str | None = None,
    limits: WorkerLimits | None = DEFAULT_LIMITS,
) -> WorkerPool:
    """Opens a pool of `count` workers that call `function`. With count=0 this process calls it, without a time limit.

    `function` can be pickled, or is named path/to/file.py:name. Its method `prepare`, if it has one, is called once in
    each worker before the first call. It should depend on its arguments alone, since any worker may get any call;
    hashes are equal in all workers. A call that takes more than `timeout` seconds is ended with its process and all
    processes it started. `pool_factory` opens a pool elsewhere; by default workers are processes on this machine.
    `name` is what messages call the function; by default its own. `limits` is what workers may use; None, for code of
    ours, lets them use all that this process may, and gives them its whole environment.
    """
    if count < 0:
        raise ValueError(f"workers is {count}, but the minimum is 0: call the function in this process.")
    if not timeout > 0:
        raise ValueError(f"timeout is {timeout}, but a call needs some seconds, more than 0.")
    name = name or function_name(function)
    if count == 0:
        return InlinePool(prepare(load_callable(function) if isinstance(function, str) else function), name)
    if WORKER_VARIABLE in os.environ:
        raise WorkerError(
            f"a worker process is about to start workers of its own for {name}. A file with a function for "
            f'workers is run in each: put what it does itself under `if __name__ == "__main__":`.'
        )
    return (pool_factory or ProcessPool)(pack_function(function, name, limits), name, count, timeout)


def pack_function(
    function: str | Callable[..., Any], name: str | None = None, limits: WorkerLimits | None = DEFAULT_LIMITS
) -> bytes:
    """Packs a function for workers: pickled, by its file, or both, with this process's import path and their limits."""
    file = function if isinstance(function, str) else function_file(function)
    pickled: bytes | None = None
    if not isinstance(function, str) and getattr(function, "__module__", None) != "__main__":
        with contextlib.suppress(Exception):
            pickled = pickle.dumps(function)
    if pickled is None and file is None:
        try:
            pickled = pickle_function(function)
        except UserCodeError as error:
            raise WorkerError(f"{name or function_name(function)}: {error} Or use workers=0.") from error
    sys_path = [path or str(Path.cwd()) for path in sys.path]
    return pickle.dumps({"sys_path": sys_path, "pickled": pickled, "file": file, "limits": limits})


def function_name(function: str | Callable[..., Any]) -> str:
    if isinstance(function, str):
        return function
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def function_file(function: Callable[..., Any]) -> str | None:
    """Returns path/to/file.py:name of a function at the top of a file."""
    file = getattr(sys.modules.get(getattr(function, "__module__", "")), "__file__", None)
    name = getattr(function, "__qualname__", "")
    return f"{file}:{name}" if file and str(file).endswith(".py") and name.isidentifier() else None
