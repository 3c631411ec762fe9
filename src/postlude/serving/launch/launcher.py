"""Where servers are started (`ServerLauncher`): this machine (`LocalLauncher`), or others.

What is started is a `ServerCommand`.

Of others than Postlude it needs the standard library alone, as it may have to be at hand on other machines.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from postlude.world.ports import ReservedPort

WATCHDOG = Path(__file__).with_name("watchdog.py")
STOPPED_WITHIN = 10.0  # seconds
TAIL = 6  # lines of a log that a sentence shows
CAUSE = re.compile(r"(?:^|\] )(\w*(?:Error|Exception): .+)")  # by itself, or behind what a logger puts before it
A_RANKS = re.compile("((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")


@dataclass(frozen=True)
class ServerCommand:
    """A server to start: how, and what it needs. It can be sent to another machine."""

    command: tuple[str, ...]
    """In which {host} and {port} stand for where it is to listen."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Beside what the machine has already. It may hold keys, so nothing shows it."""
    cpus: float = 1.0
    gpus: float = 0.0
    """Those that it has for itself; with none it sees what whoever starts it sees."""
    start_timeout: float = 600.0
    """Seconds in which it answers at /health, or never will."""
    told: tuple[tuple[str, Any], ...] = ()
    """What it is told when it is ready: paths, and what is posted there."""
    key: str = field(default="", repr=False)
    """What it wants to be shown with every request (`Authorization: Bearer KEY`); it knows it by its environment, where
    a list of processes does not show it. Empty where it wants none."""
    guarded: str = ""
    """A path that must not be answered without the key."""

    def words(self, host: str, port: int) -> list[str]:
        """The command for one address."""
        return [word.replace("{host}", host).replace("{port}", str(port)) for word in self.command]


class ServerProcess(Protocol):
    """A server that was started."""

    url: str
    """Its address; empty until it has a place."""

    def ended(self) -> str | None:
        """Why it does not run any more, as a clause that follows its address; None while it does."""
        ...

    def stop(self) -> None:
        """End it, if it has not ended. What it had can then be given to another."""
        ...


class ServerLauncher(Protocol):
    """Somewhere to start servers."""

    def start(self, program: ServerCommand) -> ServerProcess:
        """Start one, without waiting until it is ready."""
        ...


class LocalLauncher:
    """This machine. Each server is a process that ends with this one, whatever ends it, and writes to `logs`/N.log.

    `devices` are the GPUs to give out, as CUDA_VISIBLE_DEVICES names them. `host` is this machine's address for those
    who ask; by itself it is reached from this machine alone.
    """

    def __init__(self, logs: Path, devices: Sequence[str] = (), host: str = "127.0.0.1") -> None:
        self.logs, self.devices, self.host = logs, list(devices), host
        self._started = 0
        self._running: list[_Process] = []

    def start(self, program: ServerCommand) -> ServerProcess:
        """Start one at a port that is free."""
        self._running = [each for each in self._running if not each.stopped]
        taken = {device for each in self._running for device in each.devices}
        free = [device for device in self.devices if device not in taken]
        count = int(program.gpus)
        if count != program.gpus or count > len(free):
            raise ValueError(
                f"a server wants {program.gpus:g} GPUs, but {len(free)} are free here of those that the trainer leaves "
                f"({', '.join(self.devices) or 'none'}). Give rollout.gpus a whole number, or start fewer."
            )
        given = {"CUDA_VISIBLE_DEVICES": ",".join(free[:count])} if count else {}
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{self._started}.log"
        self._started += 1
        port = ReservedPort(self.host)
        command = [sys.executable, "-I", str(WATCHDOG), str(os.getpid()), *program.words(self.host, port.number)]
        try:
            with log.open("w") as written:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=written,
                    stderr=subprocess.STDOUT,
                    env={**_surroundings(), **program.environment, **given},
                    start_new_session=True,
                )
        except BaseException:
            port.release()
            raise
        self._running.append(_Process(f"http://{self.host}:{port.number}", process, log, free[:count], port))
        return self._running[-1]


class _Process:
    """A server of this machine, by the process that keeps it."""

    def __init__(
        self, url: str, process: subprocess.Popen[bytes], log: Path, devices: Sequence[str], port: ReservedPort
    ) -> None:
        self.url, self.process, self.log, self.devices, self.port = url, process, log, devices, port
        self.stopped = False

    def ended(self) -> str | None:
        """By its exit code, and the last lines of its log."""
        code = self.process.poll()
        if code is None:
            return None
        how = f"was ended by signal {code - 128}" if code > 128 else f"ended with code {code}"
        return f"{how}; {tail(self.log)}"

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        try:
            self.process.wait(STOPPED_WITHIN)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.port.release()
        self.stopped = True


def tail(log: Path) -> str:
    """The last lines of a log, as a clause, and the first error in it, if that is further up: those after it follow."""
    try:
        text = log.read_text(errors="replace")
    except OSError as error:  # the run's directory may be gone; who asks has more to say than that
        return f"{log} cannot be read: {error.strerror or error}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return f"{log} is empty"
    said = f"the last lines of {log}: {' | '.join(line[:200] for line in lines[-TAIL:])}"
    cause = next(filter(None, map(CAUSE.search, lines[:-TAIL])), None)
    return f"{cause[1][:400]} ({said})" if cause else said


def _surroundings() -> dict[str, str]:
    """The environment of this process, but for what makes it a rank: a server is none."""
    return {name: value for name, value in os.environ.items() if not A_RANKS.fullmatch(name)}
