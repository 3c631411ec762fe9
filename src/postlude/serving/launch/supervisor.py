"""Servers that Postlude starts, and keeps running (`ServerSupervisor`), on some machine (`machine.py`)."""

from __future__ import annotations

import http.client
import json
import logging
import threading
import time
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from postlude.serving.clients.client import GenerationClient
from postlude.serving.errors import ServerError
from postlude.serving.launch.launcher import ServerCommand, ServerLauncher, ServerProcess
from postlude.world.ports import is_loopback

LOOKED = 0.2  # seconds between two looks at all servers
SETTLED = 0.5  # seconds after which it is known why a server is not reached any more, if it has ended
SAID = 30.0  # seconds without a place for a server after which that is said, again and again
ANSWERED_WITHIN = 5.0
NOTICED_WITHIN = 10.0  # seconds after which it is known that a server ended, on a busy machine
STRAIGHT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy does not know our own addresses
LOG = logging.getLogger("postlude")


class ServerSupervisor:
    """`count` servers that are kept running: one that ends is started again, `max_restarts` times each."""

    def __init__(self, program: ServerCommand, count: int, launcher: ServerLauncher, *, max_restarts: int = 3) -> None:
        self.program, self.launcher = program, launcher
        self.restarted = 0
        """How often a server was started again."""
        self._places = [_Place(max_restarts) for _ in range(count)]
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._say_at = time.monotonic() + SAID

    def start(self) -> list[str]:
        """Start all of them. Returns their addresses when all are ready; one that does not get there is a sentence."""
        try:
            for place in self._places:
                place.running, place.deadline = self.launcher.start(self.program), self._deadline()
            while coming := [place for place in self._places if place.deadline is not None]:
                for place in coming:
                    if problem := self._problem(place):
                        raise ServerError(f"{place.name} {problem}.")
                self._tell_of_places()
                time.sleep(LOOKED)
        except BaseException:
            self.close()
            raise
        return [place.running.url for place in self._places if place.running is not None]

    def watch(self, engine: GenerationClient) -> None:
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
        return time.monotonic() + self.program.start_timeout

    def _problem(self, place: _Place) -> str | None:
        """What befell the server of a place; None if nothing. One that is ready is not waited for any more."""
        running = place.running
        assert running is not None
        if problem := running.ended():
            return problem
        if place.deadline is None:
            return None
        if running.url and _answers(f"{running.url}/health"):
            for path, body in self.program.told:
                if not _answers(f"{running.url}{path}", body, self.program.key):
                    return f"did not do what it was told at {path}"
            self._warn_of_open(running.url)
            place.deadline = None
        elif time.monotonic() > place.deadline:
            running.stop()
            return f"was not ready within {self.program.start_timeout:g} s: it {running.ended()}"
        return None

    def _warn_of_open(self, url: str) -> None:
        """Say it where a server that other machines reach does as it is told without its key."""
        guarded = f"{url}{self.program.guarded}"
        if self.program.guarded and not is_loopback(str(urlsplit(url).hostname)) and _answers(guarded):
            LOG.warning("%s answers without its key: let no one but the run reach it, or use a newer version.", guarded)

    def _tell_of_places(self) -> None:
        """Say now and then how many servers no machine has had room for so far."""
        count = sum(place.running is not None and not place.running.url for place in self._places)
        if not count:
            self._say_at = time.monotonic() + SAID
        elif time.monotonic() > self._say_at:
            self._say_at += SAID
            cpus, gpus = self.program.cpus, self.program.gpus
            LOG.warning("%d server(s) wait for a place, of %g CPU(s) and %g GPU(s) each.", count, cpus, gpus)

    def _watch(self, engine: GenerationClient) -> None:
        while not self._closing.wait(LOOKED):
            self._tell_of_places()
            for place in self._places:
                if place.running is None or self._closing.is_set():
                    continue
                coming = place.deadline is not None
                try:
                    problem = self._problem(place)
                    if problem is None and (problem := _given_up(engine, place.running.url)):
                        if self._closing.wait(SETTLED):
                            return
                        problem = self._problem(place) or problem  # that it ended says more, and is known by then
                except Exception as error:  # of whatever machine it is: the others are watched on
                    problem = f"cannot be looked after: {error}"
                if problem:
                    self._replace(place, problem, engine, known=not coming)
                elif coming and place.deadline is None:
                    engine.join(place.running.url)

    def _replace(self, place: _Place, problem: str, engine: GenerationClient, *, known: bool) -> None:
        """Start another in the place of one that ended, if that was not done too often."""
        assert place.running is not None
        name, again = place.name, place.max_restarts > 0
        what = "Another is started." if again else "It was started again often enough."
        LOG.warning("%s %s. %s", name, problem, what)
        if known:
            engine.leave(place.running.url, problem, another=True)
        old, place.running = place.running, None
        try:
            old.stop()
            if again:
                place.max_restarts -= 1
                place.running, place.deadline = self.launcher.start(self.program), self._deadline()
                self.restarted += 1
                return
        except Exception as error:  # of whatever machine it is
            problem = f"{problem}; another could not be started: {error}"
        engine.give_up(f"{name} {problem}")


@dataclass
class _Place:
    """One of the servers there are to be."""

    max_restarts: int
    running: ServerProcess | None = None
    deadline: float | None = None
    """When it must be ready; None once it is."""

    @property
    def name(self) -> str:
        """What it is called in sentences."""
        assert self.running is not None
        return self.running.url or "a server that was to be started"


class SupervisedClient(GenerationClient):
    """Answers of servers that are started for it, and end with it."""

    def __init__(self, started: ServerSupervisor, **settings: Any) -> None:
        self.started = started
        urls = started.start()
        try:
            super().__init__(urls, **settings)
        except BaseException:
            started.close()
            raise
        self.fleet.notice = NOTICED_WITHIN
        started.watch(self)

    def close(self) -> None:
        """End the servers, and let go of everything."""
        self.started.close()
        super().close()


def _given_up(engine: GenerationClient, url: str) -> str | None:
    """Why a server that runs is not asked any more: it hangs, or answers nonsense."""
    states = ("gone", "out")
    return next((each.problem for each in engine.fleet.servers if each.url == url and each.state in states), None)


def _answers(url: str, body: Any = None, key: str = "") -> bool:
    data = None if body is None else json.dumps(body).encode()
    shown = {"Authorization": f"Bearer {key}"} if key else {}
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json", **shown})
    try:
        with STRAIGHT.open(asked, timeout=ANSWERED_WITHIN) as reply:
            return bool(reply.status == 200)
    except (OSError, http.client.HTTPException):
        return False
