"""Supervisors: runs command lines of this machine under the supervisors of `supervisor.py`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import postlude.pool
from postlude.rollout.sandboxes.isolation import Launch
from postlude.rollout.sandboxes.process import ProcessLimits, ProcessResult, SandboxError
from postlude.rollout.sandboxes.supervisor import STARTED

LOG = logging.getLogger("postlude")
END_LIMIT = 120.0  # seconds for the supervisors to end all processes, after the limit of time or a cancellation
CHUNK = 1 << 16
HEADER_LIMIT = 1 << 16  # bytes of a result besides outputs
IN_CGROUP = {"memory_bytes": None, "processes": None, "file_bytes": None}
ATTEMPTS = 3  # to start supervisors
SCRIPT = "import sys; sys.path.insert(0, sys.argv[1]); from postlude.rollout.sandboxes.supervisor import main; main()"


class Supervisors:
    """A process that forks supervisors for each run. It is started with the first run, and again if it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    def close(self) -> None:
        """Ends the process. Supervisors of runs in progress go on."""
        with self._lock:
            self._stop()

    async def run(self, launch: Launch, limits: ProcessLimits) -> ProcessResult:
        """Runs a command line until it ends and all that it started is ended. Raises if it cannot be started."""
        request = {
            "argv": list(launch.argv),
            "environment": dict(launch.environment),
            "workdir": str(launch.workdir),
            "cleanup": [list(command) for command in launch.cleanup],
            "limits": asdict(limits) | (IN_CGROUP if launch.in_cgroup else {}),
            "proxy": launch.proxy,
        }
        data = json.dumps(request).encode()
        message = len(data).to_bytes(4, "big") + data
        for _ in range(ATTEMPTS):
            if result := await self._request(message, launch, limits):
                return _result(result, launch, limits)
        raise SandboxError(f"the process that starts supervisors was killed {ATTEMPTS} times in a row.")

    async def _request(self, message: bytes, launch: Launch, limits: ProcessLimits) -> bytes:
        """Returns what the supervisors of a run send; nothing if none received the request."""
        control, other_end = socket.socketpair()
        with control:
            control.setblocking(False)
            with other_end:
                self._fork(other_end)
            with contextlib.suppress(BrokenPipeError):
                await asyncio.get_running_loop().sock_sendall(control, message)
            reading = asyncio.ensure_future(_read_all(control, 2 * limits.output_bytes + HEADER_LIMIT))
            try:
                done, _ = await asyncio.wait([reading], timeout=limits.wall_seconds + END_LIMIT)
            finally:
                if not reading.done():
                    control.shutdown(socket.SHUT_WR)  # which the supervisors see as a cancellation
                    await asyncio.wait([reading], timeout=END_LIMIT)
                    reading.cancel()
            if done:
                return reading.result()
        LOG.warning("%s was not ended in %g s after its limit of time.", launch.argv[0], END_LIMIT)
        return STARTED

    def _fork(self, control: socket.socket) -> None:
        """Starts supervisors for a run."""
        with self._lock:
            try:
                if self._requests is None:
                    self._requests = self._start()
                socket.send_fds(self._requests, [b"r"], [control.fileno()])
            except BrokenPipeError:  # it was killed, and is started with the next attempt
                self._stop()

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        source = str(Path(postlude.pool.__file__).parents[2])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", SCRIPT, source, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(theirs.fileno(),),
                env={},  # a program may read the environment of its supervisors
                cwd="/",
                start_new_session=True,  # Ctrl-C is for the trainer, which ends the runs
            )
        return ours

    def _stop(self) -> None:
        if self._requests is not None:
            self._requests.close()
        if self._process is not None:
            self._process.wait()
        self._requests = self._process = None


async def _read_all(control: socket.socket, limit: int) -> bytes:
    """Returns what arrives until all supervisors of the run have ended."""
    loop, data = asyncio.get_running_loop(), bytearray()
    with contextlib.suppress(ConnectionResetError):  # they were killed before they read all of the request
        while received := await loop.sock_recv(control, CHUNK):
            if len(data) <= limit:
                data += received
    return bytes(data)


def _result(data: bytes, launch: Launch, limits: ProcessLimits) -> ProcessResult:
    line, _, outputs = data.removeprefix(STARTED).partition(b"\n")
    try:
        header: dict[str, Any] = json.loads(line)
    except ValueError:
        header = {}
    if not header or sum(header["sizes"]) != len(outputs):
        return ProcessResult(None, None, b"", b"", "lost", 0.0)
    if header["error"]:
        raise SandboxError(f"{launch.argv[0]} cannot be started in {launch.workdir}: {header['error']}.")
    split = header["sizes"][0]
    return ProcessResult(
        header["exit_code"], header["signal"], outputs[:split], outputs[split:], header["reason"], header["seconds"]
    )
