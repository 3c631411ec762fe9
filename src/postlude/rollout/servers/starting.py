"""Servers that Postlude starts: what (`Program`), where (`Machine`), and that they go on running (`Started`)."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from postlude.rollout.servers.engine import HTTPEngine
from postlude.rollout.servers.errors import ServerError

KEEPER = Path(__file__).with_name("keeper.py")
STOPPED_WITHIN = 10.0  # seconds
LOOKED = 0.2  # seconds between two looks at all servers
ANSWERED_WITHIN = 5.0
NOTICED_WITHIN = 10.0  # seconds after which it is known that a server ended, on a busy machine
TAIL = 6  # lines of a log that a sentence shows
A_RANKS = re.compile("((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")
LOG = logging.getLogger("postlude")


@dataclass(frozen=True)
class Program:
    """A server to start: how, and what it needs. It can be sent to another machine."""

    command: tuple[str, ...]
    """In which {host} and {port} stand for where it is to listen."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Beside what the machine has already."""
    cpus: float = 1.0
    gpus: float = 0.0
    """Those that it has for itself; with none it sees what whoever starts it sees."""
    ready_within: float = 600.0
    """Seconds in which it answers at /health, or never will."""
    told: tuple[tuple[str, Any], ...] = ()
    """What it is told when it is ready: paths, and what is posted there."""

    def words(self, host: str, port: int) -> list[str]:
        """The command for one address."""
        return [word.replace("{host}", host).replace("{port}", str(port)) for word in self.command]


class Running(Protocol):
    """A server that was started."""

    url: str

    def ended(self) -> str | None:
        """Why it does not run any more, as a clause that follows its address; None while it does."""
        ...

    def stop(self) -> None:
        """End it, if it has not ended. What it had can then be given to another."""
        ...


class Machine(Protocol):
    """Somewhere to start servers."""

    def start(self, program: Program) -> Running:
        """Start one, without waiting until it is ready."""
        ...


class Here:
    """This machine. Each server is a process that ends with this one, whatever ends it, and writes to `logs`/N.log.

    `devices` are the GPUs to give out, as CUDA_VISIBLE_DEVICES names them. `host` is this machine's address for those
    who ask; by itself it is reached from this machine alone.
    """

    def __init__(self, logs: Path, devices: Sequence[str] = (), host: str = "127.0.0.1") -> None:
        self.logs, self.devices, self.host = logs, list(devices), host
        self._started = 0
        self._running: list[_Process] = []

    def start(self, program: Program) -> Running:
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
        port = _free_port(self.host)
        command = [sys.executable, "-I", str(KEEPER), str(os.getpid()), *program.words(self.host, port)]
        with log.open("w") as written:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
                env={**_surroundings(), **program.environment, **given},
                start_new_session=True,
            )
        self._running.append(_Process(f"http://{self.host}:{port}", process, log, free[:count]))
        return self._running[-1]


class _Process:
    """A server of this machine, by the process that keeps it."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], log: Path, devices: Sequence[str]) -> None:
        self.url, self.process, self.log, self.devices = url, process, log, devices
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
        self.stopped = True


def tail(log: Path) -> str:
    """The last lines of a log, as a clause."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = " | ".join(line[:200] for line in lines[-TAIL:])
    return f"the last lines of {log}: {said}" if said else f"{log} is empty"


class Started:
    """`count` servers that are kept running: one that ends is started again, `restarts` times each."""

    def __init__(self, program: Program, count: int, machine: Machine, *, restarts: int = 3) -> None:
        self.program, self.machine = program, machine
        self.restarted = 0
        """How often a server was started again."""
        self._places = [_Place(restarts) for _ in range(count)]
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> list[str]:
        """Start all of them. Returns their addresses when all are ready; one that does not get there is a sentence."""
        try:
            for place in self._places:
                place.running, place.deadline = self.machine.start(self.program), self._deadline()
            while coming := [place for place in self._places if place.deadline is not None]:
                for place in coming:
                    if problem := self._problem(place):
                        assert place.running is not None
                        raise ServerError(f"a server that was started at {place.running.url} {problem}.")
                time.sleep(LOOKED)
        except BaseException:
            self.close()
            raise
        return [place.running.url for place in self._places if place.running is not None]

    def watch(self, engine: HTTPEngine) -> None:
        """From now on tell the engine who leaves and who joins."""
        self._thread = threading.Thread(target=self._watch, args=(engine,), name="postlude started", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all of them."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        stopping = [threading.Thread(target=place.running.stop) for place in self._places if place.running is not None]
        for each in stopping:
            each.start()
        for each in stopping:
            each.join()

    def _deadline(self) -> float:
        return time.monotonic() + self.program.ready_within

    def _problem(self, place: _Place) -> str | None:
        """What befell the server of a place; None if nothing. One that is ready is not waited for any more."""
        running = place.running
        assert running is not None
        if problem := running.ended():
            return problem
        if place.deadline is None:
            return None
        if _answers(f"{running.url}/health"):
            for path, body in self.program.told:
                if not _answers(f"{running.url}{path}", body):
                    return f"did not do what it was told at {path}"
            place.deadline = None
        elif time.monotonic() > place.deadline:
            running.stop()
            return f"was not ready within {self.program.ready_within:g} s: it {running.ended()}"
        return None

    def _watch(self, engine: HTTPEngine) -> None:
        while not self._closing.wait(LOOKED):
            for place in self._places:
                if place.running is None or self._closing.is_set():
                    continue
                coming = place.deadline is not None
                if problem := self._problem(place) or _given_up(engine, place.running.url):
                    self._replace(place, problem, engine, known=not coming)
                elif coming and place.deadline is None:
                    engine.join(place.running.url)

    def _replace(self, place: _Place, problem: str, engine: HTTPEngine, *, known: bool) -> None:
        """Start another in the place of one that ended, if that was not done too often."""
        assert place.running is not None
        url, again = place.running.url, place.restarts > 0
        what = "Another is started." if again else "It was started again often enough."
        LOG.warning("%s %s. %s", url, problem, what)
        if known:
            engine.leave(url, problem, another=True)
        place.running.stop()
        place.running = None
        if again:
            place.restarts -= 1
            try:
                place.running, place.deadline = self.machine.start(self.program), self._deadline()
                self.restarted += 1
                return
            except Exception as error:  # of whatever machine it is
                problem = f"{problem}; another could not be started: {error}"
        engine.give_up(f"{url} {problem}")


@dataclass
class _Place:
    """One of the servers there are to be."""

    restarts: int
    running: Running | None = None
    deadline: float | None = None
    """When it must be ready; None once it is."""


class StartedEngine(HTTPEngine):
    """Answers of servers that are started for it, and end with it."""

    def __init__(self, started: Started, **settings: Any) -> None:
        self.started = started
        urls = started.start()
        try:
            super().__init__(urls, **settings)
        except BaseException:
            started.close()
            raise
        self.fleet.patience = NOTICED_WITHIN
        started.watch(self)

    def close(self) -> None:
        """End the servers, and let go of everything."""
        self.started.close()
        super().close()


def _given_up(engine: HTTPEngine, url: str) -> str | None:
    """Why a server that runs is not asked any more: it hangs, or answers nonsense."""
    states = ("gone", "out")
    return next((each.problem for each in engine.fleet.servers if each.url == url and each.state in states), None)


def _answers(url: str, body: Any = None) -> bool:
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=ANSWERED_WITHIN) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _surroundings() -> dict[str, str]:
    """The environment of this process, but for what makes it a rank: a server is none."""
    return {name: value for name, value in os.environ.items() if not A_RANKS.fullmatch(name)}


def _free_port(host: str) -> int:
    with socket.socket() as free:
        free.bind((host, 0))
        found: int = free.getsockname()[1]
        return found
