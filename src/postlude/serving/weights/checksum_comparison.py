"""ChecksumComparison: checks that servers hold the same weights, by the hashes that they report."""

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
UNCHANGED = "has its previous weights, by their checksum, after it was given new ones"


class ChecksumComparison:
    """Servers hash parameters as they are stored, fused and sharded, so only servers of equal layout are compared.

    A server that differs from the majority is excluded. So is one whose hashes did not change since the last
    comparison although the trainer's weights did. Without a majority, a warning is logged and all are kept.
    """

    def __init__(self, pool: ServerPool) -> None:
        self.pool = pool
        self.trainer_checksum: str | None = None
        """The trainer's checksum at the last comparison."""
        self.server_checksums: dict[RemoteServer, str] = {}
        """Each server's checksum at the last comparison."""

    def is_possible(self) -> bool:
        """Whether a server may report hashes."""
        return any(server.state == "up" and server.api.reports_hashes for server in self.pool.servers)

    async def compare(self, trainer_checksum: str) -> int:
        """Compares all servers that are up. Returns how many reported hashes."""
        servers = [server for server in self.pool.servers if server.state == "up"]
        reports = zip(servers, await asyncio.gather(*map(self._fetch_hashes, servers)), strict=True)
        hashes = {server: values for server, values in reports if values}
        checksums = {server: _combine(values) for server, values in hashes.items()}
        if self.trainer_checksum not in (None, trainer_checksum):
            for server, checksum in checksums.items():
                if self.server_checksums.get(server) == checksum:
                    self.pool.fail(server, InvalidResponse(UNCHANGED))
        by_layout: dict[frozenset[str], list[RemoteServer]] = defaultdict(list)
        for server, values in hashes.items():
            if server.state == "up":
                by_layout[frozenset(values)].append(server)
        for equal_layout in by_layout.values():
            self._compare(equal_layout, hashes, checksums)
        self.trainer_checksum, self.server_checksums = trainer_checksum, checksums
        return len(hashes)

    def _compare(
        self,
        servers: list[RemoteServer],
        hashes: Mapping[RemoteServer, Mapping[str, str]],
        checksums: Mapping[RemoteServer, str],
    ) -> None:
        counts = Counter(checksums[server] for server in servers).most_common()
        if len(counts) == 1:
            return
        if counts[0][1] == counts[1][1]:
            urls = [next(s.url for s in servers if checksums[s] == checksum) for checksum, _ in counts[:2]]
            LOG.warning(
                "%s have different weights after the same update, and there is no majority to tell which are right.",
                " and ".join(urls),
            )
            return
        correct = next(server for server in servers if checksums[server] == counts[0][0])
        for server in servers:
            if checksums[server] != counts[0][0]:
                different = [name for name, value in hashes[server].items() if hashes[correct][name] != value]
                problem = (
                    f"has other weights than {counts[0][1]} others after the same update: {len(different)} of "
                    f"{len(hashes[server])} tensors, such as {different[0]}"
                )
                self.pool.fail(server, InvalidResponse(problem))

    async def _fetch_hashes(self, server: RemoteServer) -> Mapping[str, str] | None:
        try:
            return await server.call(lambda api, send: api.parameter_hashes(send))
        except RequestRefused:  # an older version
            return None
        except (ServerUnavailable, InvalidResponse) as error:
            self.pool.fail(server, error)
            return None


def _combine(hashes: Mapping[str, str]) -> str:
    lines = "".join(f"{name} {hashes[name]}\n" for name in sorted(hashes))
    return hashlib.sha256(lines.encode()).hexdigest()
