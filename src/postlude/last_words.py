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

from postlude.checks import MISTAKES

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
class Word:
    """How a rank stands: here, failed (by its own error), stopped (waiting for another rank) or finished."""

    state: str
    text: str = ""
    traceback: str = ""
    time: float = field(default_factory=time.time)
    mistake: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Word:
        """How a rank stands that `error` ends."""
        if isinstance(error, SystemExit) and not error.code:
            return cls("finished")
        kind = "stopped" if isinstance(error, RankError) or _came_from_a_collective(error) else "failed"
        text = str(error) if isinstance(error, RankError) else f"{type(error).__name__}: {error}"
        trace = getattr(error, "traceback", "") or "".join(traceback.format_exception(error))
        return cls(kind, text, trace, mistake=isinstance(error, MISTAKES))


class LastWords:
    """What ranks tell one another through the rendezvous store.

    `word/R` is how rank R stands. Who stops rings `bell/R` of all others, and a thread of each, which waits for that,
    answers in `at/R` where its rank is, and remembers all words in case the store goes with rank 0.
    """

    def __init__(self, index: int, size: int, timeout: float) -> None:
        self.index, self.size, self.timeout = index, size, timeout
        self.others = [other for other in range(size) if other != index]
        self.agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # then the launcher holds the store
        self.hosts = index == 0 and not self.agent
        self.heard: dict[int, Word] = {}
        self.failed = self.lost = self.leaving = False
        base = self._connect(self.hosts)
        attempt = f"postlude/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        prefix = f"{attempt}/{base.add(f'{attempt}/uses/{index}', 1)}"  # the same number on every rank
        self.store = PrefixStore(f"{prefix}/words", base)
        self.group_store = PrefixStore(f"{prefix}/group", base)
        self.place_store = PrefixStore(f"{prefix}/place", base)
        ear = PrefixStore(f"{prefix}/words", self._connect(False))  # a waiting store can do nothing else
        self.say(Word("here"))
        self.listener = threading.Thread(target=self._listen, args=(ear, threading.get_ident()), daemon=True)
        self.listener.start()

    def say(self, word: Word) -> None:
        """Leave this rank's word."""
        self.store.set(f"word/{self.index}", json.dumps(asdict(word)))

    def fail(self, error: BaseException) -> RankError | None:
        """Leave a last word about `error`. Where other ranks caused it, ask them, and return what names the cause."""
        word = Word.of(error)
        self.failed = word.state == "failed"
        if word.state != "stopped":
            bounded(lambda: self._tell(word))
            return None
        answers = bounded(self._ask)
        if answers is None:
            self.lost = True
            return self._verdict_without_store()
        words, at = answers
        verdict = self._verdict(words, at)
        self.others = [rank for rank in self.others if rank in at or (rank in words and words[rank].state != "here")]
        bounded(lambda: self.say(Word("stopped", str(verdict))))  # for those who cannot find out themselves
        return verdict

    def leave(self) -> None:
        """Close this rank's part. The host of the store stays a little, so that the others can read it."""
        self.leaving = True
        for key in ("heard", "gone", "bell"):
            self.store.set(f"{key}/{self.index}", "")
        self.listener.join(0.5)
        if self.hosts:
            _until(lambda: self._all("heard" if self.failed else "gone"))
            self._ring()  # the store closes: whoever is still at work had better listen now
            _until(lambda: self._all("heard"), 0.5)

    def _connect(self, host: bool) -> TCPStore:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        patience = timedelta(seconds=self.timeout)
        try:
            return TCPStore(address, port, None, host, patience, wait_for_workers=False, multi_tenant=host)
        except dist.DistError as error:
            if host:
                raise
            raise RankError(
                f"rank {self.index} of {self.size} found no store at {address}:{port} within "
                f"{self.timeout:g} s: rank 0, or the launcher, was not started or is gone."
            ) from error

    def _listen(self, store: Store, thread: int) -> None:
        with suppress(RuntimeError):  # the store is gone; a collective will notice
            store.wait([f"bell/{self.index}"], timedelta(days=365))
            if not self.leaving:
                store.set(f"at/{self.index}", _whereabouts(sys._current_frames().get(thread)))
                self.heard = self._words(store)
                store.set(f"heard/{self.index}", "")

    def _words(self, store: Store) -> dict[int, Word]:
        said = [rank for rank in range(self.size) if store.check([f"word/{rank}"])]
        return {rank: Word(**json.loads(store.get(f"word/{rank}"))) for rank in said}

    def _all(self, key: str) -> bool:
        return all(self.store.check([f"{key}/{other}"]) for other in self.others)

    def _ring(self) -> None:
        for other in self.others:
            self.store.set(f"bell/{other}", "")

    def _tell(self, word: Word) -> None:
        self.say(word)
        self._ring()

    def _ask(self) -> tuple[dict[int, Word], dict[int, str]]:
        """All words, and where each rank is that has not ended, once everyone has answered or GRACE has passed."""
        self._tell(Word("stopped"))
        _until(lambda: all(self._settled(other) for other in self.others))
        at = {rank: self.store.get(f"at/{rank}").decode() for rank in self.others if self.store.check([f"at/{rank}"])}
        return self._words(self.store), at

    def _settled(self, rank: int) -> bool:
        return self.store.check([f"at/{rank}"]) or self.store.check([f"gone/{rank}"])

    def _verdict(self, words: dict[int, Word], at: dict[int, str]) -> RankError:
        size = self.size
        if first := first_failure(words, size):
            return first
        blame: dict[str, list[int]] = {}
        for rank in self.others:
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
            told = (f"rank {', '.join(map(str, who))} of {size} {what}" for what, who in blame.items())
            return RankError("; ".join(told) + ".")
        if known := [(words[rank].time, rank) for rank in self.others if rank in words and words[rank].text]:
            _, rank = min(known)
            return RankError(f"rank {rank} of {size} stopped waiting: {words[rank].text}")
        return RankError(f"all {size} ranks waited for one another; do they call the same collectives?")

    def _verdict_without_store(self) -> RankError:
        if first := first_failure(self.heard, self.size):
            return first
        if 0 in self.heard and self.heard[0].state == "finished":
            return RankError(f"rank 0 of {self.size} {FINISHED}.")
        host = "the launcher" if self.agent else f"rank 0 of {self.size}"
        return RankError(f"{host} {SILENT}, and the last words with it.")


def first_failure(words: dict[int, Word], size: int) -> RankError | None:
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


def bounded(work: Callable[[], Result]) -> Result | None:
    """What `work` returns; None where it fails or takes too long, as calls to a lost store do."""
    results: list[Result] = []

    def run() -> None:
        with suppress(Exception):
            results.append(work())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(GRACE + 1)
    return results[0] if results else None
