"""Channel: sends bytes from one rank of the trainer to every worker of one server, over NCCL or gloo.

Each server has its own channel, a process group in which the trainer is rank 0. So a failed server does not block the
others, whose workers have no timeout of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

from torch import Tensor

POLL_SECONDS = 0.0005
LOST = "was lost while it received weights"


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
