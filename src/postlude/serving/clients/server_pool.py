"""ServerPool: several servers of one model. Assigns requests to servers, and handles the failures of servers."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from postlude.generate.protocol import Completion, Request
from postlude.serving.clients.remote_server import BUSY_TIMEOUT, STATUS_TIMEOUT, RemoteServer
from postlude.serving.clients.request_queue import ALIVE, RequestQueue
from postlude.serving.clients.server_weights import WeightsVersion
from postlude.serving.errors import (
    InvalidResponse,
    RequestCancelled,
    RequestRefused,
    ServerBusy,
    ServerError,
    ServerUnavailable,
)

MAX_BACKOFF = 30.0  # seconds between two attempts to reach a server
MIN_BACKOFF = 0.05
MAX_RETRY_AFTER = 60.0  # seconds; a server that asks for a longer wait (Retry-After) is tried again after this
REFUSALS_PER_SERVER = 2  # times that each server may refuse a request before the request fails
RELOAD_GRACE = 10.0  # seconds that `close` waits for servers that read weights
LOG = logging.getLogger("postlude")


@dataclass
class Counts:
    retried: int = 0
    """Requests sent again, to the same server or another."""
    failed: int = 0
    """Failures of servers."""


@dataclass
class _Attempts:
    completed_before: int
    """The pool's count of completions when the request was submitted."""
    count: int = 0
    """All attempts."""
    failures: int = 0
    """Attempts in which the server failed."""
    refusals: int = 0
    refused_by: set[RemoteServer] = field(default_factory=set)
    last_problem: str = ""
    first_failure: float | None = None
    """Time of the first attempt without a completion: a failure, a refusal or a busy reply."""


class ServerPool:
    """Servers of one model. Everything here runs in one event loop.

    A request goes to the server with the fewest outstanding requests. A server that cannot be reached, does not reply
    in time or fails gets no requests for `backoff` seconds, which double each time; its requests go to others. After
    `retries` + 1 failures in a row it is unavailable until there are new weights. One that gives an invalid response is
    excluded. Before a server gets requests again it is connected again and given the newest weights. A busy one
    (status 429) gets fewer concurrent requests. One that refuses a request does not get it again if there is another.
    `RemoteServer` lists the states.

    When no server is left, the unavailable ones and those excluded because of an invalid completion are retried for
    `outage_timeout` seconds.
    """

    def __init__(
        self,
        servers: list[RemoteServer],
        *,
        retries: int,
        backoff: float,
        concurrency: int,
        outage_timeout: float = 0.0,
    ) -> None:
        self.servers = servers
        self.retries, self.backoff, self.concurrency = retries, backoff, concurrency
        self.outage_timeout = outage_timeout
        self.weights: WeightsVersion | None = None
        self.sleep_timeout: float | None = None
        """While it is set, servers sleep: one that connects frees its memory, within so many seconds."""
        self.pending_replacements = 0
        """The number of servers that are being started to replace lost ones."""
        self.replacement_timeout = 0.0
        """Seconds that a supervisor has to start a replacement after all servers are lost; 0 without a supervisor."""
        self.unreplaced: list[str] = []
        """Messages about lost servers that are not replaced. Each begins with the server's URL."""
        self.counts = Counts()
        self._queue = RequestQueue(servers, self._has_capacity, self._check_outage)
        self._connecting: dict[RemoteServer, asyncio.Task[None]] = {}
        self._reloading: dict[RemoteServer, asyncio.Task[None]] = {}
        self._changed = asyncio.Condition()
        self._completed = 0
        self._outage_start: float | None = None
        self._outage_logged = False
        self._replacement_timer: asyncio.Task[None] | None = None

    def count_up(self) -> int:
        return sum(server.state == "up" for server in self.servers)

    def any_needs_weights(self) -> bool:
        """Whether a server waits for weights over the network."""
        return any(server.state == "needs_weights" for server in self.servers)

    async def generate(self, request: Request) -> Completion:
        attempts = _Attempts(self._completed)
        while True:
            self._connect_new()
            server = await self._queue.assign(attempts.refused_by)
            self.counts.retried += attempts.count > 0
            attempts.count += 1
            try:
                completion = await server.generate(request)
                self._check_usable(server, completion)
                self._succeeded(server)
                return completion
            except RequestRefused as error:
                attempts.refused_by.add(server)
                attempts.refusals += REFUSALS_PER_SERVER if error.unknown_model else 1
                if attempts.refusals >= REFUSALS_PER_SERVER * sum(server.state in ALIVE for server in self.servers):
                    raise ServerError(f"{server.url} refused the request with {error}") from error
            except ServerBusy as error:
                attempts.last_problem = f"{server.url} {error}"
                self._back_off_busy(server, error)
            except (ServerUnavailable, InvalidResponse) as error:
                attempts.last_problem = f"{server.url} {error}"
                attempts.failures += not isinstance(error, RequestCancelled)
                self.fail(server, error, may_retry=True)
            finally:
                server.load.outstanding -= 1
                await self._notify()
            await self._prepare_retry(attempts)

    async def _prepare_retry(self, attempts: _Attempts) -> None:
        """Raises if the request was tried often enough; else waits until it may be tried again."""
        now = asyncio.get_running_loop().time()
        attempts.first_failure = attempts.first_failure or now
        waited, limit = now - attempts.first_failure, self.retries + len(self.servers)
        # If other requests completed meanwhile, this request is at fault. Otherwise wait for the servers to recover.
        others_completed = self._completed > attempts.completed_before
        if attempts.failures > limit and (waited >= self.outage_timeout or others_completed):
            raise ServerError(
                f"a request was not completed in {attempts.count} attempts; the last error: {attempts.last_problem}."
            )
        if all(server in attempts.refused_by for server in self.servers if server.state in ALIVE):
            attempts.refused_by.clear()  # each server may be tried again
            if attempts.refusals:
                await asyncio.sleep(self._backoff_seconds(attempts.refusals))

    def _succeeded(self, server: RemoteServer) -> None:
        server.succeed()
        self._completed += 1
        self._outage_start, self._outage_logged = None, False

    def _back_off_busy(self, server: RemoteServer, error: ServerBusy) -> None:
        """Lowers the capacity of a busy server, and sends it no requests for a moment."""
        loop = asyncio.get_running_loop()
        busy_seconds = server.load.reply_busy(loop.time())
        if server.state == "up" and busy_seconds >= max(self.outage_timeout, BUSY_TIMEOUT):
            LOG.warning("%s %s for %g s. It is unavailable now.", server.url, error, busy_seconds)
            self.counts.failed += 1
            server.give_up(str(error))
            self._outage_start = self._outage_start or server.load.busy_since
        elif server.load.back_off():
            loop.call_later(self._retry_delay(server, error, server.load.busy_replies), self._end_back_off, server)

    def _end_back_off(self, server: RemoteServer) -> None:
        server.load.backing_off = False
        self._queue.dispatch()

    def _backoff_seconds(self, times: int) -> float:
        return min(MAX_BACKOFF, self.backoff * 2.0 ** min(times - 1, 30))

    def _retry_delay(self, server: RemoteServer, error: Exception, times: int) -> float:
        """Returns the seconds until a server is used again: its Retry-After within bounds, or the backoff."""
        retry_after = error.retry_after if isinstance(error, ServerUnavailable) else 0.0
        if retry_after > MAX_RETRY_AFTER:
            LOG.warning(
                "%s %s, and asks to wait %g s. It is tried again after %g s.",
                *(server.url, error, retry_after, MAX_RETRY_AFTER),
            )
        return max(min(retry_after, MAX_RETRY_AFTER), self._backoff_seconds(times))

    async def reload(self, weights: WeightsVersion) -> None:
        """Makes every server read new weights. A server gets no requests until it has them."""
        self.weights, self._outage_start = weights, None
        for server in self.servers:
            if server.state == "unavailable":
                self._start_connecting(server)
            elif server.state == "up":
                server.load.pending_reloads += 1
                previous_reload = self._reloading.get(server)
                self._reloading[server] = asyncio.create_task(self._reload(server, weights, previous_reload))

    async def wait_for_reload(self) -> None:
        """Waits until servers have the newest weights. Raises `ServerError` when none is left."""
        await asyncio.gather(*self._reloading.values())
        await self.wait_until_up()

    async def _reload(
        self, server: RemoteServer, weights: WeightsVersion, previous_reload: asyncio.Task[None] | None
    ) -> None:
        try:
            if previous_reload is not None:
                await asyncio.wait({previous_reload})
            if weights is self.weights and server.state == "up":  # else newer weights follow, or it connects again
                await server.reload(weights)
        except Exception as error:
            self.fail(server, error)
        finally:
            server.load.pending_reloads -= 1
            await self._notify()

    async def servers_to_update(self, weights: WeightsVersion) -> list[RemoteServer]:
        """Makes these the newest weights. Returns the servers that reply and lack them, so that the caller sends them.

        Unavailable servers are tried once per version. A server that connects later gets the next update.
        """
        states_to_connect = ("connecting", "unavailable") if weights != self.weights else ("connecting",)
        self.weights, self._outage_start = weights, None
        for server in self.servers:
            if server.state in states_to_connect:
                self._start_connecting(server)
        first_connects = [task for server, task in self._connecting.items() if not server.failures]
        if first_connects:
            await asyncio.wait(first_connects, timeout=STATUS_TIMEOUT)
        await asyncio.gather(*(self._check_version(server) for server in self.servers if server.state == "up"))
        async with self._changed:
            while not (alive := [server for server in self.servers if server.state in ("up", "needs_weights")]):
                self._raise_if_outage()
                await self._changed.wait()
        return [server for server in alive if not server.has_weights(weights)]

    async def _check_version(self, server: RemoteServer) -> None:
        try:
            await server.refresh_version()
        except Exception as error:
            self.fail(server, error)

    async def confirm(self, server: RemoteServer, weights: WeightsVersion, *, timeout: float | None = None) -> None:
        """Checks that a server has the weights that it was sent, and lets it take requests."""
        await server.confirm(weights, timeout=timeout)
        await self._notify()

    async def connect(self) -> None:
        """Connects every server. Returns when each is up, unavailable or excluded."""
        for server in self.servers:
            if server.state in ("connecting", "unavailable"):
                self._start_connecting(server)
        await asyncio.gather(*self._connecting.values())

    async def add(self, server: RemoteServer) -> None:
        """Adds a server. It gets the newest weights before its first request."""
        self.pending_replacements = max(0, self.pending_replacements - 1)
        self.servers.append(server)
        self._start_connecting(server)

    async def remove(self, url: str, problem: str) -> None:
        """Removes the server at `url`. Its requests go to others, or wait for its replacement, which `add` adds."""
        for server in [server for server in self.servers if server.url == url]:
            self.servers.remove(server)
            server.exclude(problem)
            self.counts.failed += 1
            server.connection.close()
        self.pending_replacements += 1
        await self._notify()

    async def cancel_replacement(self, problem: str) -> None:
        """Stops waiting for a replacement. `problem` is the reason; it begins with the lost server's URL."""
        self.pending_replacements = max(0, self.pending_replacements - 1)
        self.unreplaced.append(problem)
        await self._notify()

    async def close(self) -> None:
        """Closes all connections. Waits up to RELOAD_GRACE seconds for reloads first: vLLM would stay paused."""
        running = {server: task for server, task in self._reloading.items() if not task.done()}
        if running:
            await asyncio.wait(running.values(), timeout=RELOAD_GRACE)
        for server in [server for server, task in running.items() if not task.done()]:
            LOG.warning("%s is left paused, as it has not read its newest weights. Start it again.", server.url)
        tasks = [*self._connecting.values(), *self._reloading.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self.servers:
            server.connection.close()

    async def wait_until_up(self) -> None:
        """Waits until a server is up. Raises `ServerError` when none is left."""
        self._connect_new()
        async with self._changed:
            while not self.count_up():
                self._raise_if_outage()
                await self._changed.wait()

    def _connect_new(self) -> None:
        for server in self.servers:
            if server.state == "connecting":
                self._start_connecting(server)

    def _raise_if_outage(self) -> None:
        if outage := self._check_outage():
            raise ServerError(outage)

    def _check_outage(self) -> str:
        """Returns an error message if no server takes requests and none will, else "".

        Until `outage_timeout` has passed it connects to unavailable servers again.
        """
        if self.pending_replacements or any(server.state in ALIVE for server in self.servers):
            if self._replacement_timer is not None:
                self._replacement_timer.cancel()
                self._replacement_timer = None
            return ""
        if self.replacement_timeout and self.servers:
            return self._outage_sentence() if self._replacement_overdue() else ""
        now = asyncio.get_running_loop().time()
        self._outage_start = now if self._outage_start is None else self._outage_start
        seconds_left = self._outage_start + self.outage_timeout - now
        candidates = [server for server in self.servers if server.state == "unavailable" or server.may_retry]
        if self.replacement_timeout or not candidates or seconds_left <= 0:
            wait_note = f" The run waited for {self.outage_timeout:g} s." if self._outage_logged else ""
            return self._outage_sentence() + wait_note
        if not self._outage_logged:
            self._outage_logged = True
            LOG.warning(
                "%s Waiting for one of them, up to %g s more (rollout.outage_timeout).",
                *(self._outage_sentence(), seconds_left),
            )
        for server in candidates:
            delay = max(MIN_BACKOFF, self._backoff_seconds(self.retries + 1))
            self._start_connecting(server, min(seconds_left, delay))
        return ""

    def _replacement_overdue(self) -> bool:
        """Returns whether `replacement_timeout` has passed since all servers were lost."""
        if self._replacement_timer is None:
            self._replacement_timer = asyncio.create_task(self._notify_after_timeout())
        return self._replacement_timer.done()

    async def _notify_after_timeout(self) -> None:
        await asyncio.sleep(self.replacement_timeout)
        asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self._notify()))

    def _outage_sentence(self) -> str:
        reasons = [*(f"{server.url} {server.problem}" for server in self.servers), *self.unreplaced]
        excluded = any(server.state == "excluded" for server in self.servers)
        if len(reasons) == 1:
            return f"the only server {'cannot be used' if excluded else 'does not reply'} any more: {reasons[0]}."
        verb = "can be used" if excluded else "replies"
        return f"none of the {len(reasons)} servers {verb} any more: {'; '.join(reasons)}."

    def _has_capacity(self, server: RemoteServer) -> bool:
        """Whether a server takes another request. After a failure it gets one at a time."""
        return server.state == "up" and server.load.has_room(1 if server.failures else self.concurrency)

    def _check_usable(self, server: RemoteServer, completion: Completion) -> None:
        """Raises for a completion of an excluded server, or one sampled with weights that the server was not given."""
        if server.state == "excluded":
            raise RequestCancelled(f"was excluded while it generated, as it {server.problem}")
        if self.weights is None:
            return
        # Versions are START.STEP. Older steps of the same start may have sampled the first tokens.
        start_id = self.weights.version.rpartition(".")[0]
        unknown = sorted({span.version for span in completion.versions if span.version.rpartition(".")[0] != start_id})
        if unknown:
            raise ServerUnavailable(f"used weights {unknown[0]!r}, which it was not given; it may have been restarted")

    def fail(self, server: RemoteServer, error: Exception, *, may_retry: bool = False) -> None:
        """Records a failure: the server gets no requests for some seconds, or is excluded.

        Several requests that fail together count once. A server that is excluded with `may_retry` is tried again
        when no other is left.
        """
        if not isinstance(error, ServerUnavailable):
            # Any other exception is that of code which read a reply: a server without an outcome would be waited for.
            problem = str(error) if isinstance(error, InvalidResponse) else f"cannot be used: {error!r}"
            if server.exclude(problem, may_retry=may_retry):
                self.counts.failed += 1
                LOG.warning("%s %s. It is excluded from now on.", server.url, problem)
            self._queue.dispatch()
        elif server.state in ("up", "needs_weights"):
            delay = self._record_failure(server, error)
            if delay is not None:
                self._start_connecting(server, delay)

    def _record_failure(self, server: RemoteServer, error: Exception) -> float | None:
        """Counts a failure. Returns the seconds until the next attempt; None without one."""
        if server.state == "excluded":  # meanwhile
            return None
        server.fail(str(error), self.retries)
        self.counts.failed += 1
        if server.state == "connecting":
            return self._retry_delay(server, error, server.failures)
        if not self._outage_logged:
            LOG.warning("%s %s. It is unavailable now.", server.url, error)
        return None

    def _start_connecting(self, server: RemoteServer, delay: float = 0.0) -> None:
        server.begin_connecting(self.retries)  # so that one more failure makes it unavailable
        if server not in self._connecting:
            self._connecting[server] = asyncio.create_task(self._connect(server, delay))

    async def _connect(self, server: RemoteServer, delay: float) -> None:
        await asyncio.sleep(delay)
        while server.state == "connecting":  # it may be excluded or removed at any time
            try:
                weights = self.weights
                await server.connect(weights)
                if self.sleep_timeout is not None and not server.is_asleep:
                    await server.sleep(self.sleep_timeout)
                if weights is self.weights:  # else newer ones came meanwhile
                    server.end_connecting(weights)
            except ServerUnavailable as error:
                delay = self._record_failure(server, error) or 0.0
            except RequestRefused as error:  # such as by a proxy while the server starts
                delay = self._record_failure(server, ServerUnavailable(f"replies with {error}")) or 0.0
            except Exception as error:
                if weights is self.weights:  # else the directory may be gone, for newer weights
                    self.fail(server, error)
            if server.state == "connecting":
                await self._notify()
                await asyncio.sleep(delay)
        del self._connecting[server]  # before the notification, which may start it again
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
        self._queue.dispatch()
