"""ServerPool: several servers as one.

Who is asked next, what becomes of requests whose server fails, and of that server.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from postlude.generate.protocol import Completion, Request
from postlude.serving.clients.remote_server import CHECKED_WITHIN, RemoteServer, Weights
from postlude.serving.errors import (
    InvalidResponse,
    RequestCancelled,
    RequestRefused,
    ServerBusy,
    ServerError,
    ServerUnavailable,
)

LONGEST_REST = 30.0  # seconds between two attempts to reach a server
LONGEST_AFTER = 60.0  # seconds that a server is left alone for when it asks for more (Retry-After)
BUSY_FOR = 60.0  # seconds that a server may say "not now" at least before it is given up
REFUSALS = 2  # times that each server may refuse a request before it counts as refused
LEAST_REST = 0.05
READ_WITHIN = 10.0  # seconds in which weights that are being read at the end are waited for
LOG = logging.getLogger("postlude")


@dataclass
class Counts:
    """What happened since it was last looked at."""

    retried: int = 0
    """Requests that were sent again, here or elsewhere."""
    failed: int = 0
    """Times that a server failed."""


ALIVE = ("coming", "up", "waiting")  # states of those that may answer


@dataclass(frozen=True)
class _Waiting:
    """A request that waits for a server."""

    server: asyncio.Future[RemoteServer]
    avoided: AbstractSet[RemoteServer]


@dataclass
class _Trial:
    """What became of a request so far."""

    answered_before: int
    """How many others had been answered when it came."""
    number: int = 0
    """Times that it was sent."""
    failures: int = 0
    """Times that a server failed with it."""
    refusals: int = 0
    refused_by: set[RemoteServer] = field(default_factory=set)
    last: str = ""
    """What became of it the last time."""
    began: float | None = None
    """When it first was not answered."""


class ServerPool:
    """Servers of one model. Everything here runs in one loop.

    A request goes to the server with the fewest outstanding answers, so that a slow one gets less. One that cannot be
    reached, is silent for too long or fails is left alone for `backoff` seconds, which double each time, and its
    requests go to others; after `retries` failures in a row it is gone, until there are new weights. One that answers
    nonsense is out. A server is met again, and given the newest weights, before it is asked again. One that is busy
    (status 429) is asked for fewer answers at once, after a moment; one that refuses a request is not asked for it
    again where another is there.

    When none is left, those that are gone, or out for an answer, are tried again for `outage_timeout` seconds.
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
        self.retries, self.backoff, self.concurrency, self.outage_timeout = (
            retries,
            backoff,
            concurrency,
            outage_timeout,
        )
        self.weights: Weights | None = None
        self.expected = 0
        """How many are being started, and will join."""
        self.notice = 0.0
        """Seconds for which, when all are lost, whoever starts servers may still say that another will join."""
        self.lost: list[str] = []
        """What became of those that will not, each a clause that begins with its address."""
        self.counts = Counts()
        self._coming: dict[RemoteServer, asyncio.Task[None]] = {}
        self._renewing: dict[RemoteServer, asyncio.Task[None]] = {}
        self._changed = asyncio.Condition()
        self._turn = 0
        self._queue: deque[_Waiting] = deque()
        self._answered = 0
        self._lost_at: float | None = None  # since when no server is left, with no answer after it
        self._said_lost = False
        self._noticing: asyncio.Task[None] | None = None

    def up(self) -> int:
        """How many servers answer."""
        return sum(server.state == "up" for server in self.servers)

    def any_waits(self) -> bool:
        """Whether a server is there that weights have to be sent to. Where all are such, requests wait for that."""
        return any(server.state == "waiting" for server in self.servers)

    async def answer(self, request: Request) -> Completion:
        """One answer, by whichever server gives it."""
        trial = _Trial(self._answered)
        while True:
            server = await self._assigned(trial.refused_by)
            self.counts.retried += trial.number > 0
            trial.number += 1
            try:
                found = await server.answer(request)
                self._check(server, found)
                self._well(server)
                return found
            except RequestRefused as error:
                trial.refused_by.add(server)
                trial.refusals += 1
                if trial.refusals >= REFUSALS * sum(each.state in ALIVE for each in self.servers):
                    raise ServerError(f"{server.url} refused the request with {error}") from error
            except ServerBusy as error:
                trial.last = f"{server.url} {error}"
                self._let_rest(server, error)
            except (ServerUnavailable, InvalidResponse) as error:
                trial.last = f"{server.url} {error}"
                trial.failures += not isinstance(error, RequestCancelled)
                self.failed(server, error, may_return=True)
            finally:
                server.outstanding -= 1
                await self._tell()
            await self._go_on(trial)

    async def _go_on(self, trial: _Trial) -> None:
        """Give a request up that was tried often enough, or let it be tried again."""
        now = asyncio.get_running_loop().time()
        trial.began = trial.began or now
        waited, most = now - trial.began, self.retries + len(self.servers)
        # Where others were answered meanwhile it is the request's own fault; else the servers', which may come back.
        if trial.failures > most and (waited >= self.outage_timeout or self._answered > trial.answered_before):
            raise ServerError(f"a request was not answered in {trial.number} attempts, lastly as {trial.last}.")
        if all(each in trial.refused_by for each in self.servers if each.state in ALIVE):
            trial.refused_by.clear()
            if trial.refusals:  # nobody else is there who could do it
                await asyncio.sleep(self._pause(trial.refusals))

    def _well(self, server: RemoteServer) -> None:
        """A server has given an answer."""
        server.failures, server.busy, server.busy_since = 0, 0, None
        server.room += 1.0 / server.room  # one more after as many answers as it takes at once
        self._answered += 1
        self._lost_at, self._said_lost = None, False

    def _let_rest(self, server: RemoteServer, error: ServerBusy) -> None:
        """A server has said "not now": ask for no more than it has now, and for nothing for a moment."""
        now = asyncio.get_running_loop().time()
        server.problem = str(error)
        server.busy_since = server.busy_since or now
        if server.state == "up" and now - server.busy_since >= max(self.outage_timeout, BUSY_FOR):
            LOG.warning("%s %s for %g s. It is given up for now.", server.url, error, now - server.busy_since)
            self.counts.failed += 1
            server.state, self._lost_at = "gone", self._lost_at or server.busy_since
            return
        server.room = max(1.0, min(server.room, float(server.outstanding - 1)))
        if not server.resting:
            server.resting = True
            server.busy += 1
            asyncio.get_running_loop().call_later(self._left_alone(server, error, server.busy), self._woken, server)

    def _woken(self, server: RemoteServer) -> None:
        server.resting = False
        self._dispatch()

    def _pause(self, times: int) -> float:
        """Seconds to wait after something failed so many times in a row."""
        return min(LONGEST_REST, self.backoff * 2.0 ** min(times - 1, 30))

    def _left_alone(self, server: RemoteServer, error: Exception, times: int) -> float:
        """Seconds for which a server is left alone: as it asks, within bounds, or longer each time."""
        after = error.after if isinstance(error, ServerUnavailable) else 0.0
        if after > LONGEST_AFTER:
            LOG.warning(
                "%s %s, and asks to be left alone for %g s. It is tried again after %g s.",
                *(server.url, error, after, LONGEST_AFTER),
            )
        return max(min(after, LONGEST_AFTER), self._pause(times))

    async def update(self, weights: Weights) -> None:
        """Give every server new weights. None that is up is asked before it has them; others get them as they come."""
        self.weights, self._lost_at = weights, None
        for server in self.servers:
            if server.state == "gone":
                self._begin(server)
            elif server.state == "up":
                server.renewing += 1
                self._renewing[server] = asyncio.create_task(self._renew(server, weights, self._renewing.get(server)))

    async def renewed(self) -> None:
        """Wait until servers have the newest weights. Raises a sentence when none is left."""
        await asyncio.gather(*self._renewing.values())
        await self.present()

    async def _renew(self, server: RemoteServer, weights: Weights, before: asyncio.Task[None] | None) -> None:
        try:
            if before is not None:
                await asyncio.wait({before})
            if weights is self.weights and server.state == "up":  # else newer ones come next, or it comes for them
                await server.reload(weights)
        except (ServerUnavailable, InvalidResponse) as error:
            self.failed(server, error)
        finally:
            server.renewing -= 1
            await self._tell()

    async def takers(self, weights: Weights) -> list[RemoteServer]:
        """Those that are there and lack weights, which are to be sent to them. Others wait for the next sending.

        Those that were given up are tried again once for every version.
        """
        again = ("coming", "gone") if weights != self.weights else ("coming",)
        self.weights, self._lost_at = weights, None
        for server in self.servers:
            if server.state in again:
                self._begin(server)
        first_time = [task for server, task in self._coming.items() if not server.failures]
        if first_time:
            await asyncio.wait(first_time, timeout=CHECKED_WITHIN)
        await asyncio.gather(*(self._look(server) for server in self.servers if server.state == "up"))
        async with self._changed:
            while not (there := [server for server in self.servers if server.state in ("up", "waiting")]):
                self._see_that_one_is_left()
                await self._changed.wait()
        return [server for server in there if not server.has(weights)]

    async def _look(self, server: RemoteServer) -> None:
        """Whether a server that is up is the one that was met: one that was started anew has other weights."""
        try:
            told = await server.told_version()
            if told != server.version:
                server.version = told
                server.meetings += 1
        except (ServerUnavailable, InvalidResponse) as error:
            self.failed(server, error)

    async def has(self, server: RemoteServer, weights: Weights) -> None:
        """A server was sent weights: see that it has them, and let it answer."""
        await server.seen_to_have(weights)
        server.state, server.unsure = "up", False
        await self._tell()

    async def gather(self) -> None:
        """Meet every server. Returns when each is up, gone or out."""
        for server in self.servers:
            if server.state in ("coming", "gone"):
                self._begin(server)
        await asyncio.gather(*self._coming.values())

    async def join(self, server: RemoteServer) -> None:
        """One more server, which gets the newest weights before it is asked."""
        self.expected = max(0, self.expected - 1)
        self.servers.append(server)
        self._begin(server)

    async def leave(self, url: str, problem: str, *, another: bool) -> None:
        """The server at an address is no more. If `another` is to join in its place, that is waited for."""
        for server in [each for each in self.servers if each.url == url]:
            self.servers.remove(server)
            server.state, server.problem = "out", problem
            self.counts.failed += 1
            server.wire.hang_up()
            server.wire.close()
        if another:
            self.expected += 1
        else:
            self.lost.append(f"{url} {problem}")
        await self._tell()

    async def give_up(self, problem: str) -> None:
        """One that was expected will not join."""
        self.expected = max(0, self.expected - 1)
        self.lost.append(problem)
        await self._tell()

    async def close(self) -> None:
        """Let go of everything, after a while for those who are reading weights: left so, they would stay paused."""
        under_way = {server: task for server, task in self._renewing.items() if not task.done()}
        if under_way:
            await asyncio.wait(under_way.values(), timeout=READ_WITHIN)
        for server in [server for server, task in under_way.items() if not task.done()]:
            LOG.warning("%s is left paused, as it has not read its newest weights. Start it again.", server.url)
        tasks = [*self._coming.values(), *self._renewing.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self.servers:
            server.wire.close()

    async def present(self) -> None:
        """Wait for a server that is up. Raises a sentence when none is left."""
        self._begin_all()
        async with self._changed:
            while not any(server.state == "up" for server in self.servers):
                self._see_that_one_is_left()
                await self._changed.wait()

    async def _assigned(self, avoided: AbstractSet[RemoteServer]) -> RemoteServer:
        """The server to ask next, which counts one more outstanding answer: of those that are up and have room, the
        one with the fewest outstanding, in turn. Requests get theirs in the order in which they came.

        Those in `avoided` are left out while there are others.
        """
        self._begin_all()
        waiting = _Waiting(asyncio.get_running_loop().create_future(), avoided)
        self._queue.append(waiting)
        self._dispatch()
        try:
            return await waiting.server
        except asyncio.CancelledError:
            if waiting.server.done() and not waiting.server.cancelled() and not waiting.server.exception():
                waiting.server.result().outstanding -= 1
                self._dispatch()
            raise

    def _begin_all(self) -> None:
        for server in self.servers:
            if server.state == "coming":
                self._begin(server)

    def _dispatch(self) -> None:
        """Give waiting requests their servers, as long as there is room."""
        while self._queue and self._queue[0].server.done():
            self._queue.popleft()  # nobody waits for it any more
        if not self._queue:
            return
        if lost := self._lost():
            while self._queue:
                waiting = self._queue.popleft()
                if not waiting.server.done():
                    waiting.server.set_exception(ServerError(lost))
            return
        passed_over = []
        while self._queue:
            open_ones = [server for server in self.servers if self._has_room(server)]
            if not open_ones:
                break
            waiting = self._queue.popleft()
            if waiting.server.done():
                continue
            others = [server for server in self.servers if server.state in ALIVE and server not in waiting.avoided]
            if waiting.avoided and others and not (open_ones := [each for each in others if each in open_ones]):
                passed_over.append(waiting)
                continue
            self._turn += 1
            turns = {server: (place - self._turn) % len(open_ones) for place, server in enumerate(open_ones)}
            server = min(open_ones, key=lambda each: (each.outstanding, turns[each]))
            server.outstanding += 1
            waiting.server.set_result(server)
        self._queue.extendleft(reversed(passed_over))

    def _see_that_one_is_left(self) -> None:
        if lost := self._lost():
            raise ServerError(lost)

    def _none_left(self) -> bool:
        return not self.expected and all(server.state not in ALIVE for server in self.servers)

    def _lost(self) -> str:
        """A sentence where no server answers and none will, else nothing: those given up may be tried again."""
        if not self._none_left():
            if self._noticing is not None:
                self._noticing.cancel()
                self._noticing = None
            return ""
        now = asyncio.get_running_loop().time()
        if self.notice and self.servers:
            return self._all_lost() if self._notice_is_over() else ""
        self._lost_at = now if self._lost_at is None else self._lost_at
        left = self._lost_at + self.outage_timeout - now
        again = [server for server in self.servers if server.state == "gone" or server.may_return]
        if self.notice or not again or left <= 0:
            return self._all_lost() + (f" It was waited for {self.outage_timeout:g} s." if self._said_lost else "")
        if not self._said_lost:
            self._said_lost = True
            LOG.warning(
                "%s One of them is waited for, up to %g s more (rollout.outage_timeout).",
                *(self._all_lost(), left),
            )
        for server in again:
            self._begin(server, min(left, max(LEAST_REST, self._pause(self.retries + 1))))
        return ""

    def _notice_is_over(self) -> bool:
        """Whether whoever starts servers has had the time to say that another will join."""
        if self._noticing is None:
            self._noticing = asyncio.create_task(self._wait_for_notice())
        return self._noticing.done()

    async def _wait_for_notice(self) -> None:
        await asyncio.sleep(self.notice)
        asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self._tell()))

    def _has_room(self, server: RemoteServer) -> bool:
        """One that has just failed shows with a single request that it is well again."""
        if server.state != "up" or server.renewing or server.resting:
            return False
        return server.outstanding < (1 if server.failures else min(self.concurrency, int(min(server.room, 1 << 20))))

    def _check(self, server: RemoteServer, found: Completion) -> None:
        """Refuse answers of a server that was left out meanwhile, or was started anew: by weights never sent to it."""
        if server.state == "out":
            raise RequestCancelled(f"was left out while it answered, as it {server.problem}")
        if self.weights is None:
            return
        start = self.weights.version.rpartition(".")[0]  # older ones of the same trainer may be those of a first part
        strange = sorted({span.version for span in found.versions if span.version.rpartition(".")[0] != start})
        if strange:
            raise ServerUnavailable(
                f"answered with weights {strange[0]!r}, which it was not given; it may have been restarted"
            )

    def failed(self, server: RemoteServer, error: Exception, *, may_return: bool = False) -> None:
        """Leave a server alone for a while, or leave it out. Of many requests that fail with it, the first one counts.

        One that is left out `may_return` where no other is left.
        """
        if isinstance(error, InvalidResponse):
            if server.state != "out":
                server.may_return = may_return
                self.counts.failed += 1
                LOG.warning("%s %s. It is left out from now on.", server.url, error)
            server.state, server.problem = "out", str(error)
            server.wire.hang_up()  # what it would still answer is asked of others
            self._dispatch()
        elif server.state in ("up", "waiting"):
            pause = self._rest(server, error)
            if pause is not None:
                self._begin(server, pause)

    def _rest(self, server: RemoteServer, error: Exception) -> float | None:
        """A server failed: for how long it is left alone, or None if it is given up."""
        server.problem = str(error)
        server.failures += 1
        self.counts.failed += 1
        if server.failures > self.retries:
            if not self._said_lost:
                LOG.warning("%s %s. It is given up for now.", server.url, error)
            server.state = "gone"
            if server.unsure:  # paused, as far as is known: its answers would be waited for in vain
                server.wire.hang_up()
            return None
        server.state = "coming"
        return self._left_alone(server, error, server.failures)

    def _begin(self, server: RemoteServer, pause: float = 0.0) -> None:
        """Let a server come, after a while."""
        if server.state in ("gone", "out"):
            server.failures = self.retries  # one attempt more
            server.may_return = False
        server.state = "coming"
        if server not in self._coming:
            self._coming[server] = asyncio.create_task(self._come(server, pause))

    async def _come(self, server: RemoteServer, pause: float) -> None:
        while server.state == "coming":
            await asyncio.sleep(pause)
            try:
                weights = self.weights
                await server.meet(weights)
                if weights is self.weights:  # else newer ones came meanwhile
                    server.state = "up" if weights is None or server.has(weights) else "waiting"
            except ServerUnavailable as error:
                pause = self._rest(server, error) or 0.0
            except RequestRefused as error:  # as who stands before one that is starting does
                pause = self._rest(server, ServerUnavailable(f"answers with {error}")) or 0.0
            except InvalidResponse as error:
                if weights is self.weights:  # else what it was told to read may be gone, for newer ones
                    self.failed(server, InvalidResponse(str(error)))
            if server.state != "coming":
                self._coming.pop(server, None)  # before it is told, since it may have to come again at once
            await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
        self._dispatch()

    def _all_lost(self) -> str:
        each = [*(f"{server.url} {server.problem}" for server in self.servers), *self.lost]
        if len(each) == 1:
            return f"the one server there is does not answer any more: {each[0]}."
        return f"none of the {len(each)} servers answers any more: {'; '.join(each)}."
