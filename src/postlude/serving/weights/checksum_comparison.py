"""ChecksumComparison: compares the checksums that servers report of weights they were sent."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import Mapping

from postlude.serving.clients.remote_server import RemoteServer
from postlude.serving.clients.server_pool import ServerPool
from postlude.serving.errors import InvalidResponse, RequestRefused, ServerUnavailable

LOG = logging.getLogger("postlude")


class ChecksumComparison:
    """Servers hash weights as they hold them, fused and cut: only servers that hold them alike can be compared.

    One that differs from most of its like is left out. So is one whose weights are what they were at the last
    comparison, if the trainer's are not. Where as many say one thing as another, nobody knows who is right: that is
    said, and all go on.
    """

    def __init__(self, fleet: ServerPool) -> None:
        self.fleet = fleet
        self.given: str | None = None
        """The trainer's own checksum at the last comparison."""
        self.held: dict[RemoteServer, str] = {}
        """What each server's weights came to then."""

    async def compare(self, given: str) -> int:
        """Compare all servers that are up, and say how many were; `given` is the trainer's checksum of the weights."""
        up = [server for server in self.fleet.servers if server.state == "up"]
        found = dict(zip(up, await asyncio.gather(*(self._digests(server) for server in up)), strict=True))
        told = {server: digests for server, digests in found.items() if digests}
        sums = {server: _sum(digests) for server, digests in told.items()}
        for server, sum_ in sums.items():
            if self.given is not None and self.given != given and self.held.get(server) == sum_:
                self._leave_out(
                    server, "has the weights of before, as their checksum says, after it was given new ones"
                )
        alike: dict[frozenset[str], list[RemoteServer]] = defaultdict(list)
        for server, digests in told.items():
            if server.state == "up":
                alike[frozenset(digests)].append(server)
        for servers in alike.values():
            self._compare(servers, told, sums)
        self.given, self.held = given, sums
        return len(told)

    def _compare(
        self,
        servers: list[RemoteServer],
        told: Mapping[RemoteServer, Mapping[str, str]],
        sums: Mapping[RemoteServer, str],
    ) -> None:
        counts = Counter(sums[server] for server in servers).most_common()
        if len(counts) == 1:
            return
        if counts[0][1] == counts[1][1]:
            some = " and ".join(next(s.url for s in servers if sums[s] == each) for each, _ in counts[:2])
            LOG.warning("%s have other weights after the same update, and nobody can tell which are right.", some)
            return
        right = next(server for server in servers if sums[server] == counts[0][0])
        for server in servers:
            if sums[server] != counts[0][0]:
                other = [name for name, digest in told[server].items() if told[right][name] != digest]
                self._leave_out(
                    server,
                    f"has other weights than {counts[0][1]} others after the same update: {len(other)} of "
                    f"{len(told[server])} tensors, such as {other[0]}",
                )

    def _leave_out(self, server: RemoteServer, clause: str) -> None:
        self.fleet.failed(server, InvalidResponse(clause))

    async def _digests(self, server: RemoteServer) -> Mapping[str, str] | None:
        try:
            return await server.say(lambda api, ask: api.digests(ask))
        except RequestRefused:  # an older one
            return None
        except (ServerUnavailable, InvalidResponse) as error:
            self.fleet.failed(server, error)
            return None


def _sum(digests: Mapping[str, str]) -> str:
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()
