"""serve: runs the application of a backend on uvicorn until a signal stops it."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import uvloop

from postlude.serving.http.access import Keys
from postlude.serving.http.server import listening
from postlude.tinker.app import TinkerApp
from postlude.tinker.backend import TinkerBackend
from postlude.tinker.limits import Limits
from postlude.tinker.openai import OpenAIApp
from postlude.tinker.service import TinkerService
from postlude.tinker.state import StateDirectory
from postlude.world.ports import is_loopback

LOG = logging.getLogger("postlude")
KEY_PREFIX = "tml-"  # the client refuses other keys
SWITCH_SECONDS = 0.0005


def read_keys(path: Path) -> list[str]:
    """Returns the keys of a file, one on each line; # begins a comment."""
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    keys = [line for line in lines if line]
    if not keys:
        raise ValueError(f"--key-file {path} has no key: write one on each line, such as {KEY_PREFIX}…")
    for number, key in enumerate(keys, start=1):
        if not key.startswith(KEY_PREFIX) or len(key) < 20:
            raise ValueError(
                f"--key-file {path}: key {number} is not {KEY_PREFIX} and at least 16 more characters; the client "
                "refuses keys that begin otherwise."
            )
    return keys


def check_key_file(host: str, key_file: Path | None) -> None:
    """Refuses to listen to other machines without keys."""
    if key_file is None and not is_loopback(host):
        raise ValueError(
            f"--host {host} is reached from other machines, which could train and read models here. Give --key-file "
            "FILE with the keys that they must send, or listen at 127.0.0.1."
        )


def run_server(serving: Coroutine[Any, Any, None]) -> None:
    """Runs `serve`. uvloop sends head and body of a response at once, in half of asyncio's system calls.

    Threads take turns more often, so that calls to the ranks and their results do not wait for requests that are read.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serving)


async def serve(
    backend: TinkerBackend,
    state: StateDirectory,
    *,
    host: str,
    port: int,
    keys: Sequence[str] | None,
    limits: Limits,
    ready: Callable[[str], None],
) -> None:
    """Serves until SIGTERM or SIGINT. Calls `ready` with the address once the base models are loaded."""
    state.open()
    try:
        await backend.start()
        try:
            await _serve(TinkerService(backend, state, limits), host, port, keys, ready)
        finally:
            await backend.stop()
    finally:
        state.close()


async def _serve(
    service: TinkerService, host: str, port: int, keys: Sequence[str] | None, ready: Callable[[str], None]
) -> None:
    tinker = TinkerApp(service, Keys(keys, host, "--key-file"), compress=not is_loopback(host))
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    app = service.metrics.requests.counting(tinker.build(OpenAIApp(tinker).routes()))
    async with listening(app, host, port) as address:
        ready(address)
        await stopped.wait()
        service.futures.close()  # ends the polls
