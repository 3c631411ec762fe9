"""The supervisors of programs: they start one, keep its limits, and end every process that comes of it.

`main` is a process that forks two supervisors for each run, which is cheaper than starting an interpreter for each.
The inner one starts the program, keeps the end of what it prints, and watches its limits. The outer one waits for the
inner one, ends what is left, and removes what the run needed. Both end everything when the trainer cancels the run or
is gone, and each when the other is gone. This file needs the standard library alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from postlude.pool.process_tree import become_subreaper, end_descendants, end_with_parent, reap
from postlude.rollout.sandboxes.process import SOCKET_NAME
from postlude.rollout.sandboxes.proxy_forwarder import ProxyForwarder
from postlude.rollout.sandboxes.usage import ProcessUsage, directory_bytes

CHUNK = 1 << 16
COUNT_INTERVAL = 0.5  # seconds between two looks at processes and memory
DISK_INTERVAL = 2.0  # seconds between two looks at the work directory, or more if that takes long
END_GRACE = 30.0  # seconds that the inner supervisor has to end its program
CLEANUP_LIMIT = 60.0  # seconds for a command that removes what a run left
MESSAGE_LIMIT = 1 << 26  # bytes of a request
STARTED = b"."  # what supervisors send when they have a request, before the result
FILE_TOO_LARGE = (-signal.SIGXFSZ, 128 + signal.SIGXFSZ)  # exit codes: of a program, and of a shell that ran it


def main() -> None:
    """Forks supervisors for each socket that it is sent, until the trainer is gone. The argument is its own socket."""
    requests = socket.socket(fileno=int(sys.argv[-2]))
    trainer = _open_process(int(sys.argv[-1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the outer supervisors
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the trainer ends the runs
    poller = select.poll()
    for descriptor in (requests.fileno(), *trainer):
        poller.register(descriptor, select.POLLIN)
    while True:
        if not {descriptor for descriptor, _ in poller.poll()}.isdisjoint(trainer):
            return
        data, descriptors, _, _ = socket.recv_fds(requests, 1, 1)
        if not data:
            return
        control = socket.socket(fileno=descriptors[0])
        control.set_inheritable(False)
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _supervise_run(control, trainer)
        control.close()


def _open_process(pid: int) -> tuple[int, ...]:
    """Returns a descriptor that is readable when a process has ended; none where the kernel has no such thing."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        if os.getppid() != pid:
            raise SystemExit(0) from None
        return ()
    if os.getppid() != pid:
        raise SystemExit(0)
    return (descriptor,)


def _supervise_run(control: socket.socket, trainer: Sequence[int]) -> NoReturn:
    os.setsid()
    become_subreaper()
    try:
        request = _receive(control)
    except (OSError, ValueError):  # cancelled before it began
        os._exit(0)
    with contextlib.suppress(OSError):
        control.sendall(STARTED)
    outer_is_gone, open_while_outer_lives = os.pipe()
    inner = os.fork()
    if inner == 0:
        os.close(open_while_outer_lives)
        become_subreaper()
        ProgramRun(request, control, trainer, outer_is_gone).run()
        os._exit(0)
    os.close(outer_is_gone)
    exit_codes: dict[int, int] = {}
    deadline = time.monotonic() + request["limits"]["wall_seconds"] + END_GRACE
    wake = _wake_on_child()
    poller = select.poll()
    poller.register(wake, select.POLLIN)
    for descriptor in trainer:
        poller.register(descriptor, select.POLLIN)
    poller.register(control, select.POLLRDHUP)
    while reap(exit_codes) and inner not in exit_codes and time.monotonic() < deadline:
        for descriptor, _ in poller.poll(1000 * max(0.0, deadline - time.monotonic())):
            if descriptor == wake:
                os.read(wake, CHUNK)
            else:  # cancelled, or the trainer is gone: the inner supervisor ends everything
                poller.unregister(descriptor)
                deadline = min(deadline, time.monotonic() + END_GRACE)
    end_descendants(inner, exit_codes)
    clean_up(request)
    os._exit(0)


def clean_up(request: Mapping[str, Any]) -> None:
    """Removes what a run needed and may have left, as often as it is called."""
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": CLEANUP_LIMIT}
    for command in request["cleanup"]:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(command, env=request["environment"], check=False, **options)


def _receive(control: socket.socket) -> dict[str, Any]:
    """Returns the request of a run: its size in 4 bytes, then JSON."""
    data, size = bytearray(), 4
    while len(data) < size:
        received = control.recv(CHUNK)
        if not received:
            raise ValueError("the request is incomplete")
        data += received
        if size == 4 and len(data) >= 4:
            size += int.from_bytes(data[:4], "big")
            if size > MESSAGE_LIMIT:
                raise ValueError("the request is too large")
    request: dict[str, Any] = json.loads(data[4:])
    return request


def _wake_on_child() -> int:
    """Returns a descriptor that is readable when a child has ended."""
    receiver, sender = os.pipe()
    os.set_blocking(receiver, False)
    os.set_blocking(sender, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    return receiver


class Tail:
    """The last part of what a program prints to one stream."""

    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 0
        self.printed = 0
        self._chunks = deque[bytes]()

    def add(self, data: bytes) -> None:
        """Adds data, and drops what is further from the end than the limit."""
        self._chunks.append(data)
        self.printed += len(data)
        self.size += len(data)
        while self.size - len(self._chunks[0]) >= self.limit:
            self.size -= len(self._chunks.popleft())

    def content(self) -> bytes:
        """Returns what is kept."""
        return b"".join(self._chunks)[-self.limit :]


class ProgramRun:
    """The inner supervisor: one program, until it ends, reaches a limit, or is cancelled."""

    def __init__(self, request: dict[str, Any], control: socket.socket, trainer: Sequence[int], outer: int) -> None:
        self.request, self.control = request, control
        self.limits: dict[str, Any] = request["limits"]
        self.selector = selectors.DefaultSelector()
        self.exit_codes: dict[int, int] = {}
        self.reason: str | None = None
        self.cancelled = self.alone = False
        self.forwarder: ProxyForwarder | None = None
        self.tails = (Tail(self.limits["output_bytes"]), Tail(self.limits["output_bytes"]))
        self.outputs: dict[int, Tail] = {}
        for descriptor in (control.fileno(), *trainer):
            self._watch(descriptor, self._cancel)
        self._watch(outer, self._be_alone)
        wake = _wake_on_child()
        self._watch(wake, lambda: os.read(wake, CHUNK))

    def run(self) -> None:
        """Starts the program, waits for its end, and sends the result."""
        since = time.monotonic()
        if error := self._prepare_proxy():
            self._send(None, 0.0, error)
            return
        child, error = self._start()
        if not error:
            self._wait(child, since)
        end_descendants(child, self.exit_codes)
        if self.forwarder is not None:
            self.forwarder.close()
        for descriptor in self.outputs:
            while self._read(descriptor):
                pass
        seconds = time.monotonic() - since
        if self.alone:
            clean_up(self.request)
        elif not self.cancelled:
            self._send(self.exit_codes.get(child), seconds, error)

    def _watch(self, descriptor: int, function: Callable[[], object]) -> None:
        self.selector.register(descriptor, selectors.EVENT_READ, function)

    def _cancel(self) -> None:
        self.cancelled = True

    def _be_alone(self) -> None:
        self.cancelled = self.alone = True

    def _prepare_proxy(self) -> str:
        """Prepares to connect the sandbox to the proxy. Returns why that cannot be done."""
        if self.request["proxy"]:
            try:
                self.forwarder = ProxyForwarder(self.request["workdir"], self.request["proxy"])
            except OSError as error:
                return f"{error.strerror}: {SOCKET_NAME}"
            self._watch(self.forwarder.handover.fileno(), self._receive_socket)
        return ""

    def _receive_socket(self) -> None:
        assert self.forwarder is not None
        self.selector.unregister(self.forwarder.handover.fileno())
        self.forwarder.receive()

    def _start(self) -> tuple[int, str]:
        """Starts the program. Returns its process, and why it cannot be started."""
        ends: list[int] = []
        for tail in self.tails:
            read, write = os.pipe()
            os.set_blocking(read, False)
            self.outputs[read] = tail
            self._watch(read, lambda read=read: self._read(read))  # type: ignore[misc]
            ends.append(write)
        errors, error_end = os.pipe()
        supervisor = os.getpid()
        child = os.fork()
        if child == 0:
            try:
                self._become_program(supervisor, ends)
            except BaseException as error:
                os.write(error_end, str(error.strerror if isinstance(error, OSError) else error).encode())
            os._exit(127)
        for descriptor in (*ends, error_end):
            os.close(descriptor)
        with open(errors, "rb") as file:
            return child, file.read().decode(errors="replace")

    def _become_program(self, supervisor: int, outputs: Sequence[int]) -> NoReturn:
        """Makes this new process the program."""
        os.setsid()  # so that a signal to its own group does not reach the supervisors
        end_with_parent()
        if os.getppid() != supervisor:
            os._exit(127)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        for target, descriptor in enumerate(outputs, 1):
            os.dup2(descriptor, target)
        os.chdir(self.request["workdir"])
        _limit(resource.RLIMIT_CORE, 0)
        if self.limits["file_bytes"]:
            _limit(resource.RLIMIT_FSIZE, self.limits["file_bytes"])
        if self.limits["memory_bytes"]:
            _limit(resource.RLIMIT_DATA, self.limits["memory_bytes"])
        argv, environment = self.request["argv"], self.request["environment"]
        os.execvpe(argv[0], argv, environment)

    def _wait(self, child: int, since: float) -> None:
        """Waits until the program ends, sets the reason if a limit ends it, or sets `cancelled`."""
        deadline = since + self.limits["wall_seconds"]
        usage = ProcessUsage(os.getpid(), self.limits["processes"], self.limits["memory_bytes"])
        next_count = since + COUNT_INTERVAL / 10 if usage.limited else deadline
        next_disk = since + DISK_INTERVAL if self.limits["disk_bytes"] else deadline
        while not self.reason and not self.cancelled and reap(self.exit_codes) and child not in self.exit_codes:
            now = time.monotonic()
            for key, _ in self.selector.select(max(0.0, min(deadline, next_count, next_disk) - now)):
                key.data()
            now = time.monotonic()
            if now >= deadline:
                self.reason = "timed out"
            elif now >= next_count:
                self.reason = usage.exceeded()
                next_count = time.monotonic() + COUNT_INTERVAL
            elif now >= next_disk:
                if directory_bytes(self.request["workdir"], self.limits["disk_bytes"]) > self.limits["disk_bytes"]:
                    self.reason = "disk limit"
                next_disk = time.monotonic() + max(DISK_INTERVAL, 20 * (time.monotonic() - now))

    def _read(self, descriptor: int) -> bool:
        """Reads from an output. Returns whether there may be more now."""
        try:
            data = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            with contextlib.suppress(KeyError):  # unregistered before
                self.selector.unregister(descriptor)
            return False
        self.outputs[descriptor].add(data)
        limit = self.limits["printed_bytes"]
        if limit is not None and sum(tail.printed for tail in self.tails) > limit:
            self.reason = self.reason or "output limit"
            return False
        return True

    def _send(self, code: int | None, seconds: float, error: str) -> None:
        """Sends the result: a line of JSON, then the kept outputs. Then the socket is closed."""
        if self.reason is None and code in FILE_TOO_LARGE:
            self.reason = "file limit"
        if self.reason or code is None:
            exit_code = ending = None
        else:
            exit_code, ending = (code, None) if code >= 0 else (None, -code)
        contents = [tail.content() for tail in self.tails]
        header = {
            "exit_code": exit_code,
            "signal": ending,
            "reason": self.reason or "exited",
            "seconds": seconds,
            "error": error,
            "sizes": [len(content) for content in contents],
        }
        self.control.setblocking(True)
        with contextlib.suppress(OSError):  # the trainer is gone
            self.control.sendall(b"".join([json.dumps(header).encode(), b"\n", *contents]))


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))
