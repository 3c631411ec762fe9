"""Channel: bytes from one rank of the trainer to every worker of one server. NCCL between GPUs, gloo between CPUs.

Each server has a channel of its own, a group in which the trainer is rank 0: what befalls one server cannot hold up the
others, whose workers know no time limit of their own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from torch import Tensor

SLEEP = 0.0005  # seconds between two looks at what is on its way
LOST = "was lost while it took weights"


class ChannelError(Exception):
    """What went wrong on the way to a server, as a clause that follows its address."""


class Channel(Protocol):
    """An open one."""

    def begin(self, data: Tensor) -> None:
        """Send bytes, [n] uint8, to every worker. They have to stay as they are until that is done."""
        ...

    def is_done(self) -> bool:
        """Whether what was begun has been sent. Raises `ChannelError` if it never will be."""
        ...

    def close(self) -> None:
        """Let go, also in the middle of something."""
        ...


class ChannelRendezvous(Protocol):
    """A channel that the workers of a server are to join."""

    @property
    def info(self) -> dict[str, Any]:
        """Where they join, in the words of vLLM's `init_info`."""
        ...

    def open(self, seconds: float) -> Channel:
        """Wait for all of them. They have to come at the same time, and within `seconds`."""
        ...


def open_all(offers: Mapping[str, ChannelRendezvous], seconds: float) -> tuple[dict[str, Channel], dict[str, str]]:
    """Open channels at the same time: those that are open, and why others are not."""
    opened: dict[str, Channel] = {}
    failed: dict[str, str] = {}

    def attempt(url: str) -> None:
        try:
            opened[url] = offers[url].open(seconds)
        except ChannelError as error:
            failed[url] = str(error)

    if offers:
        with ThreadPoolExecutor(len(offers)) as threads:
            list(threads.map(attempt, offers))
    return opened, failed


def send(channels: Mapping[str, Channel], data: Tensor, seconds: float) -> dict[str, str]:
    """Send bytes through channels at the same time: what went wrong, of those where something did. They are closed."""
    failed: dict[str, str] = {}

    def look(url: str, act: Any) -> bool:
        try:
            return bool(act())
        except ChannelError as error:
            failed[url] = str(error)
            return True

    for url, channel in channels.items():
        look(url, lambda channel=channel: channel.begin(data))
    deadline = time.monotonic() + seconds
    waiting = [url for url in channels if url not in failed]
    while waiting := [url for url in waiting if not look(url, channels[url].is_done)]:
        if time.monotonic() > deadline:
            failed |= dict.fromkeys(waiting, f"did not take weights within {seconds:g} s")
            break
        time.sleep(SLEEP)
    close(channels[url] for url in failed)
    return failed


def close(channels: Iterable[Channel]) -> None:
    """Let go of channels."""
    for channel in channels:
        channel.close()
