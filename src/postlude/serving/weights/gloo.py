"""Gloo as a way to workers on a CPU: a group outside torch's own world, whose meeting place is the trainer's rank."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from torch import Tensor

from postlude.serving.weights.channel import LOST, ChannelError


class GlooRendezvous:
    """A channel between CPUs, whose meeting place is here."""

    def __init__(self, url: str, size: int) -> None:
        self.size = size
        self.address = address_towards(url)
        self.store: Any = dist.TCPStore(  # type: ignore[attr-defined]  # torch names it for others, but not to mypy
            self.address, 0, is_master=True, wait_for_workers=False
        )

    @property
    def info(self) -> dict[str, Any]:
        """The address and port of the meeting place."""
        return {"master_address": self.address, "master_port": self.store.port}

    def open(self, seconds: float) -> GlooChannel:
        """Wait for the workers."""
        try:
            group = dist.ProcessGroupGloo(self.store, 0, self.size, timedelta(seconds=seconds))
        except RuntimeError as error:
            raise ChannelError(f"did not come to take weights within {seconds:g} s") from error
        return GlooChannel(group, self.store)


class GlooChannel:
    """A channel between CPUs."""

    def __init__(self, group: Any, store: Any) -> None:
        self._group, self._store = group, store
        self._work: dist.Work | None = None

    def begin(self, data: Tensor) -> None:
        """Send bytes."""
        assert self._group is not None, "it was closed"
        try:
            self._work = self._group.broadcast(data, 0)
        except RuntimeError as error:
            raise ChannelError(LOST) from error

    def is_done(self) -> bool:
        """Whether they were sent."""
        assert self._work is not None, "nothing was begun"
        if not self._work.is_completed():
            return False
        try:
            self._work.wait()
        except RuntimeError as error:
            raise ChannelError(LOST) from error
        return True

    def close(self) -> None:
        """Let go: connections end with the group."""
        self._work = self._group = self._store = None


def address_towards(url: str) -> str:
    """Which of this machine's addresses a server at `url` can reach."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "localhost", parts.port or 80))  # sends nothing, but finds the way
        return str(probe.getsockname()[0])
