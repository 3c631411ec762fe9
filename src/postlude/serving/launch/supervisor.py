"""ServerSupervisor: starts servers, waits until they are ready, and restarts the ones that end."""

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

POLL_SECONDS = 0.2
EXIT_DELAY = 3.0  # seconds at most until the exit reason of a server that does not reply any more is known
WARN_SECONDS = 30.0  # between two warnings that a server has no machine yet
REPLY_TIMEOUT = 5.0
REPLACEMENT_TIMEOUT = 10.0  # seconds; on a busy machine the exit of a server is noticed within this time
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy does not know our addresses
LOG = logging.getLogger("postlude")


class ServerSupervisor:
    """Keeps `count` servers running: one that ends is restarted, up to `max_restarts` times each."""

    def __init__(self, command: ServerCommand, count: int, launcher: ServerLauncher, *, max_restarts: int = 3) -> None:
        self.command, self.launcher = command, launcher
        self.restarted = 0
        """Restarts so far."""
        self._slots = [_ServerSlot(max_restarts) for _ in range(count)]
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._next_warning = time.monotonic() + WARN_SECONDS

    def start(self) -> list[str]:
        """Starts all servers. Returns their addresses when all are ready. Raises `ServerError` if one fails."""
        try:
            for slot in self._slots:
                self._start(slot)
            while starting := [slot for slot in self._slots if slot.deadline is not None]:
                for slot in starting:
                    if problem := self._problem(slot):
                        raise ServerError(f"{slot.name} {problem}.")
                self._warn_of_waiting()
                time.sleep(POLL_SECONDS)
        except BaseException:
            self.close()
            raise
        return [slot.process.url for slot in self._slots if slot.process is not None]

    def key_of(self, url: str) -> str | None:
        """Returns the key of the server at an address; None if it needs none."""
        processes = [slot.process for slot in self._slots if slot.process is not None]
        return next((process.key for process in processes if process.url == url and process.key), None)

    def watch(self, client: GenerationClient) -> None:
        """Restarts servers that end, from now on, and notifies the client."""
        self._thread = threading.Thread(target=self._watch, args=(client,), name="postlude supervisor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        threads = [threading.Thread(target=slot.process.stop) for slot in self._slots if slot.process is not None]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _start(self, slot: _ServerSlot) -> None:
        slot.process = self.launcher.start(self.command)
        slot.deadline = time.monotonic() + self.command.start_timeout

    def _problem(self, slot: _ServerSlot) -> str | None:
        """Returns why a server is not usable, or None. Clears the deadline of one that is ready."""
        process = slot.process
        assert process is not None
        if problem := process.exit_reason():
            return problem
        if slot.deadline is None:
            return None
        # Another user may have taken the port before the server did, and would reply, get the key and the prompts.
        if process.url and process.is_listening() and _replies(f"{process.url}/health"):
            for path, body in self.command.setup_requests:
                if not _replies(f"{process.url}{path}", body, process.key):
                    return f"refused the setup request at {path}"
            self._warn_if_unprotected(process.url)
            slot.deadline = None
        elif time.monotonic() > slot.deadline:
            process.stop()
            return f"was not ready within {self.command.start_timeout:g} s: it {process.exit_reason()}"
        return None

    def _warn_if_unprotected(self, url: str) -> None:
        """Warns if a server that other machines can reach ignores its key."""
        path = f"{url}{self.command.protected_path}"
        if self.command.protected_path and not is_loopback(str(urlsplit(url).hostname)) and _replies(path):
            LOG.warning("%s replies without its key: let only the run reach it, or use a newer version.", path)

    def _warn_of_waiting(self) -> None:
        """Warns repeatedly of servers that wait for a machine."""
        count = sum(slot.process is not None and not slot.process.url for slot in self._slots)
        if not count:
            self._next_warning = time.monotonic() + WARN_SECONDS
        elif time.monotonic() > self._next_warning:
            self._next_warning += WARN_SECONDS
            cpus, gpus = self.command.cpus, self.command.gpus
            LOG.warning("%d server(s) wait for a machine with %g CPU(s) and %g GPU(s) each.", count, cpus, gpus)

    def _watch(self, client: GenerationClient) -> None:
        while not self._closing.wait(POLL_SECONDS):
            self._warn_of_waiting()
            for slot in self._slots:
                if slot.process is None or self._closing.is_set():
                    continue
                starting = slot.deadline is not None
                try:
                    problem = self._problem(slot)
                    if problem is None and (problem := _client_problem(client, slot.process.url)):
                        problem = self._wait_for_exit(slot) or problem  # an exit reason says more
                except Exception as error:  # from any launcher: the other servers are still watched
                    problem = f"cannot be watched: {error}"
                if self._closing.is_set():
                    return
                if problem:
                    self._replace(slot, problem, client, in_use=not starting)
                elif starting and slot.deadline is None:
                    client.add_server(slot.process.url)

    def _wait_for_exit(self, slot: _ServerSlot) -> str | None:
        """Returns why a server ended as soon as that is known; None if it does not end within `EXIT_DELAY`."""
        deadline = time.monotonic() + EXIT_DELAY
        while time.monotonic() < deadline and not self._closing.wait(POLL_SECONDS / 2):
            if problem := self._problem(slot):
                return problem
        return None

    def _replace(self, slot: _ServerSlot, problem: str, client: GenerationClient, *, in_use: bool) -> None:
        """Restarts the server of a slot, if it has restarts left."""
        assert slot.process is not None
        name, can_restart = slot.name, slot.restarts_left > 0
        LOG.warning("%s %s. %s", name, problem, "It is restarted." if can_restart else "It has no restarts left.")
        if in_use:
            client.remove_server(slot.process.url, problem)
        old_process, slot.process = slot.process, None
        try:
            old_process.stop()
            if can_restart:
                slot.restarts_left -= 1
                self._start(slot)
                self.restarted += 1
                return
        except Exception as error:  # from any launcher
            problem = f"{problem}; it could not be restarted: {error}"
        client.cancel_replacement(f"{name} {problem}")


@dataclass
class _ServerSlot:
    restarts_left: int
    process: ServerProcess | None = None
    deadline: float | None = None
    """When it must be ready; None once it is."""

    @property
    def name(self) -> str:
        assert self.process is not None
        return self.process.url or "a server that was to be started"


class SupervisedClient(GenerationClient):
    """A client that starts its servers with a supervisor, and stops them when it closes."""

    def __init__(self, supervisor: ServerSupervisor, **settings: Any) -> None:
        self.supervisor = supervisor
        urls = supervisor.start()
        try:
            super().__init__(urls, api_key=supervisor.key_of, **settings)
        except BaseException:
            supervisor.close()
            raise
        self.pool.replacement_timeout = REPLACEMENT_TIMEOUT
        supervisor.watch(self)

    def close(self) -> None:
        """Stops the servers and closes the client."""
        self.supervisor.close()
        super().close()


def _client_problem(client: GenerationClient, url: str) -> str | None:
    """Returns why the client does not use a running server: it hangs, or gave an invalid response."""
    unused = ("unavailable", "excluded")
    return next(
        (server.problem for server in client.pool.servers if server.url == url and server.state in unused), None
    )


def _replies(url: str, body: Any = None, key: str = "") -> bool:
    """Whether the server replies with status 200."""
    data = None if body is None else json.dumps(body).encode()
    authorization = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **authorization})
    try:
        with DIRECT.open(request, timeout=REPLY_TIMEOUT) as reply:
            return bool(reply.status == 200)
    except (OSError, http.client.HTTPException):
        return False
