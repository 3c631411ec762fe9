"""Channel: sends bytes from one rank of the trainer to every worker of one server, over NCCL or gloo.

Each server has its own channel, a process group in which the trainer is rank 0. So a failed server does not block the
others, whose workers have no timeout of their own.

Between CPUs it is a gloo group outside of torch's default group, as here; `nccl.py` is that between GPUs.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch.distributed as dist
from torch import Tensor

from postlude.world.rendezvous import host_store

POLL_SECONDS = 0.0005
LOST = "was lost while it received weights"
STORE_TIMEOUT = 300.0  # seconds


class ChannelError(Exception):
    """A failure of a channel, as a clause that follows the server's address."""


class Channel(Protocol):
    """An open channel."""

    def start_send(self, data: Tensor) -> None:
        """Starts to send bytes, [n] uint8, to every worker. They must not change until `is_done`."""

    def is_done(self) -> bool:
        """Whether the send is complete. Raises `ChannelError` if it failed."""

    def close(self) -> None:
        """Closes the channel, also during a send."""


class ChannelRendezvous(Protocol):
    """A channel that the workers of a server are about to join."""

    @property
    def info(self) -> dict[str, Any]:
        """The address to join at, as fields of vLLM's `init_info`."""

    def open(self, timeout: float) -> Channel:
        """Waits for all workers. They must join at the same time, within `timeout` seconds."""


def open_all(rendezvous: Mapping[str, ChannelRendezvous], timeout: float) -> tuple[dict[str, Channel], dict[str, str]]:
    """Opens channels in parallel. Returns the open ones and the failures, by server."""
    opened: dict[str, Channel] = {}
    failures: dict[str, str] = {}

    def open_channel(url: str) -> None:
        try:
            opened[url] = rendezvous[url].open(timeout)
        except ChannelError as error:
            failures[url] = str(error)

    if rendezvous:
        with ThreadPoolExecutor(len(rendezvous)) as threads:
            list(threads.map(open_channel, rendezvous))
    return opened, failures


def send_all(channels: Mapping[str, Channel], data: Tensor, timeout: float) -> dict[str, str]:
    """Sends bytes through all channels in parallel. Returns the failures by server."""
    failed: dict[str, str] = {}

    def is_finished(url: str, action: Callable[[], Any]) -> bool:
        """Runs `action` and returns its result; True if the channel failed."""
        try:
            return bool(action())
        except ChannelError as error:
            failed[url] = str(error)
            return True

    for url, channel in channels.items():
        is_finished(url, partial(channel.start_send, data))
    deadline = time.monotonic() + timeout
    waiting = [url for url in channels if url not in failed]
    while waiting := [url for url in waiting if not is_finished(url, channels[url].is_done)]:
        if time.monotonic() > deadline:
            failed |= dict.fromkeys(waiting, f"did not receive weights within {timeout:g} s")
            break
        time.sleep(POLL_SECONDS)
    return failed


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
