"""Last words: what ranks tell one another about how they stand, through the rendezvous store.

A rank that fails leaves its last words there, so every other rank stops with one sentence that names the cause, not
with "connection closed by peer".
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from postlude.checks import USER_ERRORS

GRACE = 3.0  # seconds a rank that stops gives the others to say why
LOST = re.compile(r"gloo/(transport|rendezvous)|connectFullMesh|connection (closed|reset)|timed out waiting|NCCL", re.I)
FINISHED = "finished without coming to this collective"
SILENT = "does not answer any more: it was killed or lost"
Result = TypeVar("Result")


class RankError(RuntimeError):
    """A rank failed or was lost. The message names it; `traceback` is its own, where it could still tell.

    It is a `mistake` if what the rank raised is what users' mistakes raise.
    """

    def __init__(self, message: str, traceback: str = "", *, mistake: bool = False) -> None:
        super().__init__(message)
        self.traceback, self.mistake = traceback, mistake
        if traceback:
            self.add_note(traceback)


@dataclass(frozen=True)
class RankStatus:
    """How a rank stands: here, failed (by its own error), stopped (waiting for another rank) or finished."""

    state: str
    text: str = ""
    traceback: str = ""
    time: float = field(default_factory=time.time)
    mistake: bool = False

    @classmethod
    def of(cls, error: BaseException) -> RankStatus:
        """How a rank stands that `error` ends."""
        if isinstance(error, SystemExit) and not error.code:
            return cls("finished")
        kind = "stopped" if isinstance(error, RankError) or _came_from_a_collective(error) else "failed"
        text = str(error) if isinstance(error, RankError) else f"{type(error).__name__}: {error}"
        trace = getattr(error, "traceback", "") or "".join(traceback.format_exception(error))
        return cls(kind, text, trace, mistake=isinstance(error, USER_ERRORS))


class FailureReporter:
    """What ranks tell one another through the rendezvous store, in a number of words that does not grow with the ranks.

    `word/R` is how rank R stands, and `first` the first failure of all. The first to stop rings every `bell/R`, and a
    thread of each rank, which waits for its own, adds to `at` where its rank is, and remembers who failed in case the
    store goes with rank 0. Of all ranks that stop waiting one asks, and leaves its `verdict` for the others. Each rank
    does a few operations, and the one that asks a few more.
    """

    def __init__(self, index: int, size: int, timeout: float, store: Store, hosts: bool = False) -> None:
        self.index, self.size, self.timeout, self.store, self.hosts = index, size, timeout, store, hosts
        self.alive = size  # ranks that can still answer, this one included
        self.heard: dict[int, RankStatus] = {}
        self.failed = self.lost = self.leaving = False
        self.counted: set[str] = set()
        self.lock = threading.Lock()
        self.listener: threading.Thread | None = None
        self.gpu_is_stuck: Callable[[float], bool] = lambda seconds: False
        self.say(RankStatus("here"))

    def say(self, word: RankStatus) -> None:
        """Leave this rank's word."""
        self.store.set(f"word/{self.index}", json.dumps(asdict(word)))

    def listen(self, ear: Store) -> None:
        """Have a thread wait for the bell, and answer where this one is. A store that waits can do nothing else."""
        thread = threading.get_ident()

        def wait() -> None:
            with suppress(RuntimeError):  # the store is gone; a collective will notice
                ear.wait([f"bell/{self.index}"], timedelta(days=365))
                self.hear(ear, thread)

        self.listener = threading.Thread(target=wait, daemon=True)
        self.listener.start()

    def hear(self, store: Store, thread: int) -> None:
        """Answer the bell."""
        if self.leaving:
            return
        waits = self.gpu_is_stuck(1.0)  # then the host stands at any line, and what it waits for is another rank
        place = [self.index, "" if waits else _whereabouts(sys._current_frames().get(thread))]
        store.append("at", json.dumps(place) + "\n")  # type: ignore[attr-defined]
        self._count("settled", store)
        first = self._first(store)
        known = [(0, store.get("word/0"))] if store.check(["word/0"]) else []
        self.heard = {rank: RankStatus(**json.loads(word)) for rank, word in known} | first
        self._count("heard", store)

    def fail(self, error: BaseException) -> RankError | None:
        """Leave a last word about `error`. Where other ranks caused it, ask them, and return what names the cause."""
        word = RankStatus.of(error)
        self.failed = word.state == "failed"
        if word.state != "stopped":
            run_with_timeout(lambda: self._tell(word))
            return None
        verdict = run_with_timeout(self._ask)
        if verdict is None:
            self.lost = True
            return self._verdict_without_store()
        return verdict

    def leave(self) -> None:
        """Close this rank's part. The host of the store stays a little, so that the others can read it."""
        self.leaving = True
        for name in ("settled", "heard"):
            self._count(name, self.store)
        self.store.add("gone", 1)
        self.store.set(f"bell/{self.index}", "")
        if self.listener is not None:
            self.listener.join(GRACE)  # a thread that wakes while Python ends takes the process with it
        if self.hosts:
            _until(lambda: self.store.add("heard" if self.failed else "gone", 0) >= self.alive)
            self._ring()  # the store closes: whoever is still at work had better listen now
            _until(lambda: self.store.add("heard", 0) >= self.alive, 0.5)

    def _ring(self) -> None:
        bells = [f"bell/{rank}" for rank in range(self.size)]
        self.store.multi_set(bells, [""] * self.size)  # type: ignore[attr-defined]

    def _count(self, name: str, store: Store) -> None:
        """Count this rank among those that have `heard`, or have `settled`: no answer is to come from them. Once."""
        with self.lock:
            known = name in self.counted
            self.counted.add(name)
        if not known:
            store.add(name, 1)

    def _tell(self, word: RankStatus) -> None:
        self.say(word)
        if word.state == "failed":
            self.store.compare_set("first", "", json.dumps([self.index, asdict(word)]))
        if int(self.store.compare_set("ringer", "", str(self.index))) == self.index:
            self._ring()

    def _first(self, store: Store) -> dict[int, RankStatus]:
        """The first failure of all, by its rank, if there was one."""
        if not store.check(["first"]):
            return {}
        rank, word = json.loads(store.get("first"))
        return {rank: RankStatus(**word)}

    def _ask(self) -> RankError:
        """What stopped this rank: what the first that failed says, or else one rank finds out for all."""
        self._tell(RankStatus("stopped"))
        if error := first_failure(self._first(self.store), self.size):
            return error
        asker = int(self.store.compare_set("asker", "", str(self.index)))
        if asker != self.index:
            try:
                self.store.wait(["verdict"], timedelta(seconds=GRACE + 0.5))
            except dist.DistError:
                return RankError(f"rank {asker} of {self.size} {SILENT}.")
            text, trace, mistake, self.alive = json.loads(self.store.get("verdict"))
            return RankError(text, trace, mistake=mistake)
        self._ring()  # who rang may have been killed over it
        _until(lambda: self.store.add("settled", 0) >= self.size)
        lines = self.store.get("at").decode().splitlines() if self.store.check(["at"]) else []
        at = dict(json.loads(line) for line in lines)
        words = self._words() | self._first(self.store)
        verdict = self._verdict(words, at)
        self.alive = sum(rank in at or word.state != "here" for rank, word in words.items())
        told = [str(verdict), verdict.traceback, verdict.mistake, self.alive]
        self.store.set("verdict", json.dumps(told))
        return verdict

    def _words(self) -> dict[int, RankStatus]:
        keys = [f"word/{rank}" for rank in range(self.size)]
        if not self.store.check(keys):  # some never arrived
            keys = [key for key in keys if self.store.check([key])]
        found = zip(keys, self.store.multi_get(keys), strict=True)
        return {int(key.removeprefix("word/")): RankStatus(**json.loads(word)) for key, word in found}

    def _verdict(self, words: dict[int, RankStatus], at: dict[int, str]) -> RankError:
        size = self.size
        if first := first_failure(words, size):
            return first
        blame: dict[str, list[int]] = {}
        for rank in range(size):
            state = words[rank].state if rank in words else "absent"
            if state == "absent":
                blame.setdefault(f"never arrived within {self.timeout:g} s", []).append(rank)
            elif state == "finished":
                blame.setdefault(FINISHED, []).append(rank)
            elif state == "here" and rank not in at:
                blame.setdefault(SILENT, []).append(rank)
            elif state == "here" and at[rank]:
                blame.setdefault(f"did not come: it is {at[rank]}", []).append(rank)
        if blame:
            told = (f"rank {_some(who)} of {size} {what}" for what, who in blame.items())
            return RankError("; ".join(told) + ".")
        return RankError(f"all {size} ranks waited for one another; do they call the same collectives?")

    def _verdict_without_store(self) -> RankError:
        if first := first_failure(self.heard, self.size):
            return first
        if 0 in self.heard and self.heard[0].state == "finished":
            return RankError(f"rank 0 of {self.size} {FINISHED}.")
        host = "the launcher" if _agent() else f"rank 0 of {self.size}"
        return RankError(f"{host} {SILENT}, and the last words with it.")


@dataclass(frozen=True)
class RendezvousStores:
    """What a rank says through, hears through, and meets the others through: to form a group, and to find its place."""

    words: Store
    ear: Store
    group: Store
    place: Store

    @classmethod
    def connect(cls, index: int, size: int, timeout: float) -> RendezvousStores:
        """To the store at MASTER_ADDR and MASTER_PORT, which rank 0 holds unless the launcher does."""
        base = _connect(index, size, timeout, hosts_store(index))
        attempt = f"postlude/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        prefix = f"{attempt}/{base.add(f'{attempt}/uses/{index}', 1)}"  # the same number on every rank
        ear = PrefixStore(f"{prefix}/words", _connect(index, size, timeout, False))
        return cls(
            PrefixStore(f"{prefix}/words", base),
            ear,
            *(PrefixStore(f"{prefix}/{part}", base) for part in ("group", "place")),
        )


def hosts_store(index: int) -> bool:
    """Whether this rank holds the store that all use."""
    return index == 0 and not _agent()


def _agent() -> bool:
    """Whether the launcher holds the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _connect(index: int, size: int, timeout: float, host: bool) -> TCPStore:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    patience = timedelta(seconds=timeout)
    try:
        return TCPStore(address, port, None, host, patience, wait_for_workers=False, multi_tenant=host)
    except dist.DistError as error:
        if host:
            raise
        raise RankError(
            f"rank {index} of {size} found no store at {address}:{port} within {timeout:g} s: rank 0, or the launcher, "
            "was not started or is gone."
        ) from error


def _some(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def first_failure(words: dict[int, RankStatus], size: int) -> RankError | None:
    """The error of the rank that was the first to fail by itself, if any did."""
    failed = [(word.time, rank) for rank, word in words.items() if word.state == "failed"]
    if not failed:
        return None
    _, rank = min(failed)
    word = words[rank]
    return RankError(f"rank {rank} of {size} failed: {word.text}", word.traceback, mistake=word.mistake)


def _came_from_a_collective(error: BaseException | None) -> bool:
    """Whether `error`, or one that led to it, says that another rank is missing."""
    while error is not None:
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and LOST.search(str(error))):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _whereabouts(frame: FrameType | None) -> str:
    """The line of the caller's code a rank is in; empty while it waits inside torch.distributed."""
    library = str(Path(torch.__file__).parent)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(str(Path(dist.__file__).parent)):
            return ""
        if not path.startswith(library):
            return f"in {frame.f_code.co_name} ({path}:{frame.f_lineno})"
        frame = frame.f_back
    return "at an unknown place"


def _until(ready: Callable[[], bool], patience: float = GRACE) -> None:
    """Wait until it is so, or patience ends."""
    end = time.monotonic() + patience
    while not ready() and time.monotonic() < end:
        time.sleep(0.02)


def run_with_timeout(work: Callable[[], Result]) -> Result | None:
    """What `work` returns; None where it fails or takes too long, as calls to a lost store do."""
    results: list[Result] = []

    def run() -> None:
        with suppress(Exception):
            results.append(work())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(GRACE + 1)
    return results[0] if results else None
