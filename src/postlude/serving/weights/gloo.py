"""A channel between CPUs: a gloo group outside of torch's default group."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from torch import Tensor

from postlude.serving.weights.channel import LOST, ChannelError
from postlude.world.rendezvous import host_store

STORE_TIMEOUT = 300.0  # seconds


class GlooRendezvous:
    """A gloo group of `size` ranks, whose store is on this machine."""

    def __init__(self, url: str, size: int) -> None:
        self.size = size
        self.address = local_address(url)
        self.store = host_store(self.address, 0, STORE_TIMEOUT)

    @property
    def info(self) -> dict[str, Any]:
        """The address and port of the store."""
        return {"master_address": self.address, "master_port": self.store.port}

    def open(self, timeout: float) -> GlooChannel:
        """Waits for the workers."""
        try:
            group = dist.ProcessGroupGloo(self.store, 0, self.size, timedelta(seconds=timeout))
        except RuntimeError as error:
            raise ChannelError(f"did not join to receive weights within {timeout:g} s") from error
        return GlooChannel(group, self.store)


class GlooChannel:
    """An open channel between CPUs."""

    def __init__(self, group: Any, store: Any) -> None:
        self._group, self._store = group, store
        self._work: dist.Work | None = None

    def start_send(self, data: Tensor) -> None:
        assert self._group is not None, "the channel is closed"
        try:
            self._work = self._group.broadcast(data, 0)
        except RuntimeError as error:
            raise ChannelError(LOST) from error

    def is_done(self) -> bool:
        """Whether the send is complete."""
        assert self._work is not None, "no send was started"
        if not self._work.is_completed():
            return False
        try:
            self._work.wait()
        except RuntimeError as error:
            raise ChannelError(LOST) from error
        return True

    def close(self) -> None:
        """Closes the connections, which end with the group."""
        self._work = self._group = self._store = None


def local_address(url: str) -> str:
    """Returns the address of this machine that a server at `url` can reach."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "localhost", parts.port or 80))  # sends nothing, but chooses the route
        return str(probe.getsockname()[0])
