"""ServerLauncher: starts a `ServerCommand` on some machine. `LocalLauncher` starts it on this one.

Besides postlude.world it needs the standard library only.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from postlude.json_log import LOG_FORMAT
from postlude.world.ports import ReservedPort, is_own_listener

WATCHDOG = Path(__file__).with_name("watchdog.py")
STOP_TIMEOUT = 10.0  # seconds
TAIL_LINES = 6  # of a log, shown in an error
ERROR_LINE = re.compile(r"(?:^|\] )(\w*(?:Error|Exception): .+)")  # alone, or behind a logger's prefix
RANK_VARIABLES = re.compile("((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")


@dataclass(frozen=True)
class ServerCommand:
    """A server's command line and requirements. It can be pickled and sent to another machine."""

    command: tuple[str, ...]
    """The command line. {host} and {port} stand for the address to listen at."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Added to the machine's environment. It may hold keys, so it is not shown."""
    cpus: float = 1.0
    gpus: float = 0.0
    """GPUs that it has to itself; with 0 it sees those of the process that starts it."""
    start_timeout: float = 600.0
    """Seconds until it must reply at /health."""
    setup_requests: tuple[tuple[str, Any], ...] = ()
    """Paths and bodies that are posted once it is ready."""
    key_variable: str = ""
    """The environment variable in which the server reads the key of every request (`Authorization: Bearer KEY`); empty
    for none. Each start has a new key, which a process list does not show."""
    protected_path: str = ""
    """A path that must not reply without the key."""

    def arguments(self, host: str, port: int) -> list[str]:
        """Returns the command line for one address."""
        return [word.replace("{host}", host).replace("{port}", str(port)) for word in self.command]


class ServerProcess(Protocol):
    url: str
    """Its address; empty until it has a machine."""
    key: str
    """The key of its requests; empty for none."""

    def is_listening(self) -> bool:
        """Returns whether it listens at its address, and no process of another user does in its place."""

    def exit_reason(self) -> str | None:
        """Returns why it ended, as a clause that follows its address; None while it runs."""

    def stop(self) -> None:
        """Stops it, and frees its resources."""


class ServerLauncher(Protocol):
    def start(self, command: ServerCommand) -> ServerProcess:
        """Starts a server without waiting until it is ready."""


class LocalLauncher:
    """Starts servers on this machine. They end with this process, however it ends, and write to `logs`/N.log.

    `devices` are the GPUs to use, as CUDA_VISIBLE_DEVICES names them. `host` is the address to listen at; the default
    is reached from this machine only.
    """

    def __init__(self, logs: Path, devices: Sequence[str] = (), host: str = "127.0.0.1") -> None:
        self.logs, self.devices, self.host = logs, list(devices), host
        self._running: list[_LocalProcess] = []

    def start(self, command: ServerCommand) -> ServerProcess:
        self._running = [process for process in self._running if not process.stopped]
        used = {device for process in self._running for device in process.devices}
        free = [device for device in self.devices if device not in used]
        count = int(command.gpus)
        if count != command.gpus or count > len(free):
            raise ValueError(
                f"a server needs {command.gpus:g} GPUs, but {len(free)} are free here of those that the trainer leaves "
                f"({', '.join(self.devices) or 'none'}). Give rollout.gpus a whole number, or start fewer."
            )
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(free[:count])} if count else {}
        key = secrets.token_urlsafe(32) if command.key_variable else ""
        keys = {command.key_variable: key} if key else {}
        inherited = {name: value for name, value in os.environ.items() if not RANK_VARIABLES.fullmatch(name)}
        inherited.pop(LOG_FORMAT, None)  # its log is read by people, and quoted in errors
        self.logs.mkdir(parents=True, exist_ok=True)
        files = (self.logs / f"{number}.log" for number in itertools.count())
        log = next(file for file in files if not file.exists())  # a run that is resumed keeps its earlier logs
        port = ReservedPort(self.host)
        arguments = [sys.executable, "-I", str(WATCHDOG), str(os.getpid()), *command.arguments(self.host, port.number)]
        try:
            with log.open("x") as output:
                process = subprocess.Popen(
                    arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**inherited, **command.environment, **visible, **keys},
                    start_new_session=True,
                )
        except BaseException:
            port.release()
            raise
        url = f"http://{self.host}:{port.number}"
        self._running.append(_LocalProcess(url, key, process, log, free[:count], port))
        return self._running[-1]


class _LocalProcess:
    """A server on this machine; `process` is its watchdog."""

    def __init__(
        self,
        url: str,
        key: str,
        process: subprocess.Popen[bytes],
        log: Path,
        devices: Sequence[str],
        port: ReservedPort,
    ) -> None:
        self.url, self.key, self.process, self.log, self.devices, self.port = url, key, process, log, devices, port
        self.stopped = False

    def is_listening(self) -> bool:
        """Returns whether a process of this user listens at the port."""
        return is_own_listener(self.port.number)

    def exit_reason(self) -> str | None:
        """Returns its exit code and the last lines of its log."""
        code = self.process.poll()
        if code is None:
            return None
        exit_text = f"was ended by signal {code - 128}" if code > 128 else f"ended with code {code}"
        return f"{exit_text}; {log_tail(self.log)}"

    def stop(self) -> None:
        """Stops it, and releases its port and GPUs."""
        self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.port.release()
        self.stopped = True


def log_tail(log: Path) -> str:
    """Returns the last lines of a log as a clause, after the first error if that is further up."""
    try:
        text = log.read_text(errors="replace")
    except OSError as error:  # the run's directory may be gone
        return f"{log} cannot be read: {error.strerror or error}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return f"{log} is empty"
    tail = f"the last lines of {log}: {' | '.join(line[:200] for line in lines[-TAIL_LINES:])}"
    cause = next(filter(None, map(ERROR_LINE.search, lines[:-TAIL_LINES])), None)
    return f"{cause[1][:400]} ({tail})" if cause else tail
