"""Fleet: several servers as one. Who is asked next, what becomes of requests whose server fails, and of that server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from postlude.rollout.protocol import Completion, Request
from postlude.rollout.servers.errors import Garbled, Refused, ServerError, Unreachable
from postlude.rollout.servers.server import CHECKED_WITHIN, Server, Weights

LONGEST_REST = 30.0  # seconds between two attempts to reach a server
READ_WITHIN = 10.0  # seconds in which weights that are being read at the end are waited for
LOG = logging.getLogger("postlude")


@dataclass
class Counts:
    """What happened since it was last looked at."""

    retried: int = 0
    """Requests that were sent again, here or elsewhere."""
    failed: int = 0
    """Times that a server failed."""


class Fleet:
    """Servers of one model. Everything here runs in one loop.

    A request goes to the server with the fewest outstanding answers, so that a slow one gets less. One that cannot be
    reached, is silent for too long or says "not now" is left alone for `backoff` seconds, which double each time, and
    its requests go to others; after `retries` failures in a row it is gone, until there are new weights. One that
    answers nonsense is out for good. A server is met again, and given the newest weights, before it is asked again.
    """

    def __init__(self, servers: list[Server], *, retries: int, backoff: float, concurrency: int) -> None:
        self.servers = servers
        self.retries, self.backoff, self.concurrency = retries, backoff, concurrency
        self.weights: Weights | None = None
        self.expected = 0
        """How many are being started, and will join."""
        self.patience = 0.0
        """Seconds for which, when all are lost, someone may still say that another will join."""
        self.lost: list[str] = []
        """What became of those that will not, each a clause that begins with its address."""
        self.counts = Counts()
        self._coming: dict[Server, asyncio.Task[None]] = {}
        self._renewing: dict[Server, asyncio.Task[None]] = {}
        self._changed = asyncio.Condition()
        self._turn = 0

    def up(self) -> int:
        """How many servers answer."""
        return sum(server.state == "up" for server in self.servers)

    def any_waits(self) -> bool:
        """Whether a server is there that weights have to be sent to. Where all are such, requests wait for that."""
        return any(server.state == "waiting" for server in self.servers)

    async def answer(self, request: Request) -> Completion:
        """One answer, by whichever server gives it."""
        attempts = self.retries + len(self.servers)
        last = ""
        for attempt in range(attempts + 1):
            server = await self._one_of(self._has_room)
            server.outstanding += 1
            self.counts.retried += attempt > 0
            try:
                found = await server.answer(request)
                self._check(server, found)
                server.failures = 0
                return found
            except Refused as error:
                raise ServerError(f"{server.url} refused the request with {error}") from error
            except (Unreachable, Garbled) as error:
                last = f"{server.url} {error}"
                self.failed(server, error)
            finally:
                server.outstanding -= 1
                await self._tell()
        raise ServerError(f"a request was not answered in {attempts + 1} attempts, lastly as {last}.")

    async def update(self, weights: Weights) -> None:
        """Give every server new weights. None that is up is asked before it has them; others get them as they come."""
        self.weights = weights
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

    async def _renew(self, server: Server, weights: Weights, before: asyncio.Task[None] | None) -> None:
        try:
            if before is not None:
                await asyncio.wait({before})
            if weights is self.weights and server.state == "up":  # else newer ones come next, or it comes for them
                await server.reload(weights)
        except (Unreachable, Garbled) as error:
            self.failed(server, error)
        finally:
            server.renewing -= 1
            await self._tell()

    async def takers(self, weights: Weights) -> list[Server]:
        """Those that are there and lack weights, which are to be sent to them. Others wait for the next sending.

        Those that were given up are tried again once for every version.
        """
        again = ("coming", "gone") if weights != self.weights else ("coming",)
        self.weights = weights
        for server in self.servers:
            if server.state in again:
                self._begin(server)
        first_time = [task for server, task in self._coming.items() if not server.failures]
        if first_time:
            await asyncio.wait(first_time, timeout=CHECKED_WITHIN)
        await asyncio.gather(*(self._look(server) for server in self.servers if server.state == "up"))
        async with self._changed:
            while not (there := [server for server in self.servers if server.state in ("up", "waiting")]):
                if self._none_left():
                    await self._see_that_one_is_left()  # and look again: that may have taken a while
                else:
                    await self._changed.wait()
        return [server for server in there if not server.has(weights)]

    async def _look(self, server: Server) -> None:
        """Whether a server that is up is the one that was met: one that was started anew has other weights."""
        try:
            told = await server.told_version()
            if told != server.version:
                server.version = told
                server.meetings += 1
        except (Unreachable, Garbled) as error:
            self.failed(server, error)

    async def has(self, server: Server, weights: Weights) -> None:
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

    async def join(self, server: Server) -> None:
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
        await self._one_of(lambda server: True)

    async def _one_of(self, suits: Callable[[Server], bool]) -> Server:
        """The server to ask next among those that are up and suit: the one with the fewest outstanding, in turn."""
        for server in self.servers:
            if server.state == "coming":
                self._begin(server)
        async with self._changed:
            while True:
                await self._see_that_one_is_left()
                if up := [server for server in self.servers if server.state == "up" and suits(server)]:
                    self._turn += 1
                    turns = {server: (place - self._turn) % len(up) for place, server in enumerate(up)}
                    return min(up, key=lambda each: (each.outstanding, turns[each]))
                await self._changed.wait()

    async def _see_that_one_is_left(self) -> None:
        if self._none_left() and not await self._someone_comes():
            raise ServerError(self._all_lost())

    def _none_left(self) -> bool:
        return not self.expected and all(server.state in ("gone", "out") for server in self.servers)

    async def _someone_comes(self) -> bool:
        """Whether that changes while there is patience."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.patience):
                while self.servers and self._none_left():
                    await self._changed.wait()
        return not self._none_left()

    def _has_room(self, server: Server) -> bool:
        """One that has just failed shows with a single request that it is well again."""
        return not server.renewing and server.outstanding < (1 if server.failures else self.concurrency)

    def _check(self, server: Server, found: Completion) -> None:
        """Refuse answers of a server that was left out meanwhile, or was started anew: by weights never sent to it."""
        if server.state == "out":
            raise Unreachable(f"was left out while it answered, as it {server.problem}")
        if self.weights is None:
            return
        start = self.weights.version.rpartition(".")[0]  # older ones of the same trainer may be those of a first part
        strange = sorted({span.version for span in found.versions if span.version.rpartition(".")[0] != start})
        if strange:
            raise Unreachable(
                f"answered with weights {strange[0]!r}, which it was not given; it may have been restarted"
            )

    def failed(self, server: Server, error: Exception) -> None:
        """Leave a server alone for a while, or for good. Of many requests that fail with it, the first one counts."""
        if isinstance(error, Garbled):
            if server.state != "out":
                self.counts.failed += 1
                LOG.warning("%s %s. It is left out from now on.", server.url, error)
            server.state, server.problem = "out", str(error)
            server.wire.hang_up()  # what it would still answer is asked of others
        elif server.state in ("up", "waiting"):
            pause = self._rest(server, error)
            if pause is not None:
                self._begin(server, pause)

    def _rest(self, server: Server, error: Exception) -> float | None:
        """A server failed: for how long it is left alone, or None if it is given up."""
        server.problem = str(error)
        server.failures += 1
        self.counts.failed += 1
        if server.failures > self.retries:
            LOG.warning("%s %s. It is given up for now.", server.url, error)
            server.state = "gone"
            if server.unsure:  # paused, as far as is known: its answers would be waited for in vain
                server.wire.hang_up()
            return None
        server.state = "coming"
        pause = min(LONGEST_REST, self.backoff * 2.0 ** (server.failures - 1))
        return max(error.after, pause) if isinstance(error, Unreachable) else pause

    def _begin(self, server: Server, pause: float = 0.0) -> None:
        """Let a server come, after a while."""
        if server not in self._coming:
            if server.state == "gone":
                server.failures = self.retries  # one attempt more
            server.state = "coming"
            task = asyncio.create_task(self._come(server, pause))
            self._coming[server] = task
            task.add_done_callback(lambda _: self._coming.pop(server, None))

    async def _come(self, server: Server, pause: float) -> None:
        while server.state == "coming":
            await asyncio.sleep(pause)
            try:
                weights = self.weights
                await server.meet(weights)
                if weights is self.weights:  # else newer ones came meanwhile
                    server.state = "up" if weights is None or server.has(weights) else "waiting"
            except Unreachable as error:
                pause = self._rest(server, error) or 0.0
            except (Garbled, Refused) as error:
                if weights is self.weights:  # else what it was told to read may be gone, for newer ones
                    self.failed(server, Garbled(str(error)))
            await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _all_lost(self) -> str:
        each = [*(f"{server.url} {server.problem}" for server in self.servers), *self.lost]
        if len(each) == 1:
            return f"the one server there is does not answer any more: {each[0]}."
        return f"none of the {len(each)} servers answers any more: {'; '.join(each)}."
