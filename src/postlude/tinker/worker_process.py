"""WorkerProcess: the ranks of one base model as seen from the HTTP process. Calls go to rank 0, results come back.

Two threads send and receive, so the event loop never waits for a worker that is busy. No torch here.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import queue
import secrets
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from postlude.cluster.ray_cluster import LOCAL
from postlude.generate.protocol import Progress, SamplingUsage
from postlude.tinker.backend import BaseModelInfo, PassRequest, Result, TinkerCommand
from postlude.tinker.messages import (
    ERROR,
    PROGRESS,
    RAN,
    READY,
    RESULT,
    USAGE,
    Call,
    Cancel,
    StagePass,
    take_all,
)
from postlude.tinker.rank_listener import Address, RankListener
from postlude.tinker.settings import WorkerSettings

CLOSE_SECONDS = 10.0
"""How long ranks may take to end by themselves."""
STAGED_BYTES = 256 * 1024**2
"""The most bytes of passes that rank 0 holds before their turn."""


class WorkerDied(RuntimeError):
    """The ranks ended. The text says why."""


class WorkerProcess:
    """Starts the ranks. `start` returns when they have loaded the model; after they end, every call raises."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.info: BaseModelInfo | None = None
        self.death: str | None = None
        """Why the ranks ended; None while they run."""
        self.usage = SamplingUsage()
        """How busy sampling was when the ranks reported it last."""
        self._ids = itertools.count()
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._progress: dict[int, Callable[[Progress], None]] = {}
        self._ran: dict[int, Callable[[], None]] = {}
        self._outbox: queue.SimpleQueue[Call | Cancel | StagePass | None] = queue.SimpleQueue()
        self._staged: dict[PassRequest, int] = {}  # the number of each pass that rank 0 has before its turn
        self._staged_bytes = 0
        self._process: Any = None

    async def start(self) -> BaseModelInfo:
        """Starts the ranks, and waits until they are ready. Raises `WorkerDied` if they end before."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[BaseModelInfo] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._directory = tempfile.TemporaryDirectory(prefix="postlude-tinker-")
        key = secrets.token_bytes(32)
        listener = RankListener(self._listening_address(), key)
        context = multiprocessing.get_context("spawn")
        report, child_report = context.Pipe(duplex=False)
        self._process = context.Process(target=run_ranks, args=(self.settings, listener.address, key, child_report))
        self._process.start()
        child_report.close()
        threading.Thread(target=self._receive, args=(listener,), name="tinker results", daemon=True).start()
        threading.Thread(target=self._watch, args=(report, listener), name="tinker ranks", daemon=True).start()
        self.info = await self._ready
        return self.info

    def _listening_address(self) -> Address:
        """Returns where rank 0 connects to: a file, or a free port of this node's address if it may be on another."""
        if self.settings.ray in (None, LOCAL):
            return str(Path(self._directory.name, "rank0"))
        from postlude.cluster.driver import node_address

        return node_address(), 0

    async def call(
        self,
        command: TinkerCommand[Result],
        progress: Callable[[Progress], None] | None = None,
        ran: Callable[[], None] | None = None,
    ) -> Result:
        """Returns the result of a command, or raises its error. If a task is cancelled, sampling ends.

        `ran` is called once a pass has run, before its result is here.
        """
        if self.death is not None:
            raise WorkerDied(self.death)
        call_id = next(self._ids)
        future: asyncio.Future[Any] = self._loop.create_future()
        self._pending[call_id] = future
        if progress is not None:
            self._progress[call_id] = progress
        if ran is not None:
            self._ran[call_id] = ran
        self._outbox.put(Call(call_id, command))
        try:
            result: Result = await future
            return result
        except asyncio.CancelledError:
            self._outbox.put(Cancel(call_id))
            raise
        finally:
            self._pending.pop(call_id, None)
            self._progress.pop(call_id, None)
            self._ran.pop(call_id, None)

    def stage(self, request: PassRequest) -> None:
        """Sends a pass to rank 0 before its turn, unless rank 0 holds too many."""
        if self.death is None and self._staged_bytes + request.size <= STAGED_BYTES:
            number = self._staged[request] = next(self._ids)
            self._staged_bytes += request.size
            self._outbox.put(StagePass(number, request))

    def unstage(self, request: PassRequest) -> None:
        """Has rank 0 drop a pass that was staged, if it was."""
        if (number := self.take_staged(request)) is not None:
            self._outbox.put(StagePass(number, None))

    def take_staged(self, request: PassRequest) -> int | None:
        """Returns the number of a staged pass, once, to run it; None if rank 0 does not have it."""
        number = self._staged.pop(request, None)
        if number is not None:
            self._staged_bytes -= request.size
        return number

    async def stop(self) -> None:
        self._outbox.put(None)
        if self._process is None:
            return
        try:
            await asyncio.wait_for(asyncio.shield(self._ended), CLOSE_SECONDS)
        except TimeoutError:
            self._process.terminate()  # its ranks end with it
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._ended), CLOSE_SECONDS)

    # --- in threads

    def _receive(self, listener: RankListener) -> None:
        try:
            with listener.accept() as connection:
                threading.Thread(target=self._send, args=(connection,), name="tinker calls", daemon=True).start()
                while True:
                    messages = connection.recv()
                    self._loop.call_soon_threadsafe(self._deliver_all, messages)
        except (EOFError, OSError, RuntimeError):
            return  # the ranks ended, and `_watch` says why; or the event loop did

    def _send(self, connection: Connection) -> None:
        with suppress(OSError, ValueError):
            while True:
                messages = take_all(self._outbox)
                connection.send(messages)
                if None in messages:  # the last one
                    return

    def _watch(self, report: Connection, listener: RankListener) -> None:
        reason = "its process was killed"
        with suppress(EOFError, OSError):
            reason = report.recv()
        self._process.join()
        listener.close()
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._die, reason)

    # --- in the event loop

    def _deliver_all(self, messages: Sequence[tuple[str, int, Any]]) -> None:
        for message in messages:
            self._deliver(*message)

    def _deliver(self, kind: str, call_id: int, value: Any) -> None:
        if kind == READY:
            if not self._ready.done():
                self._ready.set_result(value)
        elif kind == PROGRESS:
            if call_id in self._progress:
                self._progress[call_id](value)
        elif kind == USAGE:
            self.usage = value
        elif kind == RAN:
            if call_id in self._ran:
                self._ran[call_id]()
        elif (future := self._pending.get(call_id)) is not None and not future.done():
            if kind == ERROR:
                future.set_exception(value)
            elif kind == RESULT:
                future.set_result(value)

    def _die(self, reason: str) -> None:
        self.usage = SamplingUsage()
        self.death = f"the ranks of {self.settings.name} have ended: {reason.rstrip('.')}."
        for future in (self._ready, *self._pending.values()):
            if not future.done():
                future.set_exception(WorkerDied(self.death))
        self._outbox.put(None)
        self._staged.clear()
        self._staged_bytes = 0
        self._directory.cleanup()
        if not self._ended.done():
            self._ended.set_result(None)


def run_ranks(settings: WorkerSettings, address: Address, key: bytes, report: Connection) -> None:
    """Runs the ranks in this new process and those that it starts, or on Ray. Reports why they ended."""
    from postlude.tinker.worker import run_worker
    from postlude.world.launcher import run_on_ranks

    size = settings.layout.world_size
    options: dict[str, Any] = {"timeout": settings.timeout, "device": settings.device}
    try:
        if settings.ray is None:
            run_on_ranks(run_worker, settings, address, key, nproc=size, **options)
        else:
            from postlude.cluster.driver import run_service_on_ray

            run_service_on_ray(run_worker, settings, address, key, address=settings.ray, ranks=size, **options)
        report.send("the server closed the connection")
    except BaseException as error:
        report.send(str(error) or type(error).__name__)
        if not isinstance(error, (OSError, ValueError, RuntimeError, SystemExit, KeyboardInterrupt)):
            raise
