"""How ranks start and how they stop.

`launch` runs a function on several ranks of this machine. `ranks` makes the process a rank, under `launch`, `torchrun`,
any other starter that sets torchrun's variables, or alone. A rank that fails leaves its last words in the rendezvous
store, so every other rank stops with one sentence that names the cause, not with "connection closed by peer".
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

GRACE = 3.0  # seconds a rank that stops gives the others to say why
LOST = re.compile(r"gloo/(transport|rendezvous)|connectFullMesh|connection (closed|reset)|timed out waiting|NCCL", re.I)
FINISHED = "finished without coming to this collective"
SILENT = "does not answer any more: it was killed or lost"
LOUD = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.launcher.api",
    "torch.multiprocessing.spawn",
)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # those the elastic agent takes for itself
Result = TypeVar("Result")


class RankError(RuntimeError):
    """A rank failed or was lost. The message names it; `traceback` is its own, where it could still tell."""

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback
        if traceback:
            self.add_note(traceback)


@dataclass(frozen=True)
class Rank:
    """This process among the others: number `index` of `size`, computing on `device`."""

    index: int
    size: int
    device: torch.device


def launch(
    function: Callable[..., Result],
    *args: Any,
    nproc: int,
    timeout: float = 600.0,
    backend: str | None = None,
    device: torch.device | str | None = None,
) -> list[Result]:
    """Run function(*args) on `nproc` ranks of this machine, each inside `ranks`, and return the results in rank order.

    The ranks are new processes: function, arguments and results are pickled. The first rank that fails ends all others
    and is named by the `RankError` raised here.
    """
    if nproc < 1:
        raise ValueError(f"launch(nproc={nproc}): at least one rank is needed.")
    with TemporaryDirectory(prefix="postlude-") as notes:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=notes),
        )
        try:
            with _quiet_agent():
                results = elastic_launch(config, _run_rank)(function, args, notes, timeout, backend, device)
        except ChildFailedError as failure:
            rank, process = failure.get_first_failure()
            raise _failure(Path(notes), nproc, rank, process.exitcode) from None
        except SignalException as stop:
            signal.raise_signal(stop.sigval)  # the ranks are gone; now it means what it always means here
            raise
    return [pickle.loads(results[rank]) for rank in range(nproc)]


def on_ranks(
    function: Callable[..., Result],
    *args: Any,
    nproc: int,
    timeout: float = 600.0,
    device: torch.device | str | None = None,
) -> Result:
    """What function(*args) returns on the first of `nproc` ranks: this process where there is one, else new ones.

    In a process that a launcher started as a rank already, function(*args) of this rank, with those that run.
    """
    if nproc != 1 and "RANK" not in os.environ:
        return launch(function, *args, nproc=nproc, timeout=timeout, device=device)[0]
    with _without_torchs_own_warnings(), ranks(timeout, device=device):
        return function(*args)


@contextmanager
def ranks(
    timeout: float = 600.0, backend: str | None = None, device: torch.device | str | None = None
) -> Iterator[Rank]:
    """Make this process a rank for the length of the block.

    Reads torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK, LOCAL_WORLD_SIZE); without them
    it is the only rank. `backend` is nccl where every rank has a GPU of its own, gloo otherwise; `device` is the rank's
    GPU or the CPU. A collective gives up after `timeout` seconds, and what then leaves the block is a `RankError` that
    names the rank to blame. A process group that exists already is used and left alone, whatever the arguments.
    """
    index, size = _numbers()
    local = int(os.environ.get("LOCAL_RANK", index))
    neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", size))  # ranks on this machine
    gpus = torch.cuda.device_count()
    place = torch.device(device or ("cuda" if gpus else "cpu"))
    joined = dist.is_initialized()
    if str(place) == "cuda":
        place = torch.device("cuda", torch.cuda.current_device() if joined else local % max(gpus, 1))
    if joined:
        yield Rank(dist.get_rank(), dist.get_world_size(), place)
        return
    if place.type == "cuda":
        torch.cuda.set_device(place)
    rank = Rank(index, size, place)
    words = _LastWords(rank, timeout) if size > 1 else None
    try:
        dist.init_process_group(
            backend or ("nccl" if place.type == "cuda" and neighbours <= gpus else "gloo"),
            store=words.group_store if words else HashStore(),
            rank=index,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
        yield rank
        if words:
            _bounded(lambda: words.say(_Word("finished")))
        dist.destroy_process_group()
    except BaseException as error:
        cause = words.fail(error) if words else None
        if dist.is_initialized():
            _bounded(dist.destroy_process_group)  # NCCL may wait here for collectives that never come
        if cause is not None:
            raise cause from error
        raise
    finally:
        if words and not words.lost:
            _bounded(words.leave)


@dataclass(frozen=True)
class _Word:
    """How a rank stands: here, failed (by its own error), stopped (waiting for another rank) or finished."""

    state: str
    text: str = ""
    traceback: str = ""
    time: float = field(default_factory=time.time)

    @classmethod
    def of(cls, error: BaseException) -> _Word:
        if isinstance(error, SystemExit) and not error.code:
            return cls("finished")
        kind = "stopped" if isinstance(error, RankError) or _came_from_a_collective(error) else "failed"
        text = str(error) if isinstance(error, RankError) else f"{type(error).__name__}: {error}"
        trace = getattr(error, "traceback", "") or "".join(traceback.format_exception(error))
        return cls(kind, text, trace)


class _LastWords:
    """What ranks tell one another through the rendezvous store.

    `word/R` is how rank R stands. Who stops rings `bell/R` of all others, and a thread of each, which waits for that,
    answers in `at/R` where its rank is, and remembers all words in case the store goes with rank 0.
    """

    def __init__(self, rank: Rank, timeout: float) -> None:
        self.rank, self.timeout = rank, timeout
        self.others = [other for other in range(rank.size) if other != rank.index]
        self.agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # then the launcher holds the store
        self.hosts = rank.index == 0 and not self.agent
        self.heard: dict[int, _Word] = {}
        self.failed = self.lost = self.leaving = False
        base = self._connect(self.hosts)
        attempt = f"postlude/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        prefix = f"{attempt}/{base.add(f'{attempt}/uses/{rank.index}', 1)}"  # the same number on every rank
        self.store = PrefixStore(f"{prefix}/words", base)
        self.group_store = PrefixStore(f"{prefix}/group", base)
        ear = PrefixStore(f"{prefix}/words", self._connect(False))  # a waiting store can do nothing else
        self.say(_Word("here"))
        self.listener = threading.Thread(target=self._listen, args=(ear, threading.get_ident()), daemon=True)
        self.listener.start()

    def say(self, word: _Word) -> None:
        """Leave this rank's word."""
        self.store.set(f"word/{self.rank.index}", json.dumps(asdict(word)))

    def fail(self, error: BaseException) -> RankError | None:
        """Leave a last word about `error`. Where other ranks caused it, ask them, and return what names the cause."""
        word = _Word.of(error)
        self.failed = word.state == "failed"
        if word.state != "stopped":
            _bounded(lambda: self._tell(word))
            return None
        answers = _bounded(self._ask)
        if answers is None:
            self.lost = True
            return self._verdict_without_store()
        words, at = answers
        verdict = self._verdict(words, at)
        self.others = [rank for rank in self.others if rank in at or (rank in words and words[rank].state != "here")]
        _bounded(lambda: self.say(_Word("stopped", str(verdict))))  # for those who cannot find out themselves
        return verdict

    def leave(self) -> None:
        """Close this rank's part. The host of the store stays a little, so that the others can read it."""
        self.leaving = True
        for key in ("heard", "gone", "bell"):
            self.store.set(f"{key}/{self.rank.index}", "")
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
                f"rank {self.rank.index} of {self.rank.size} found no store at {address}:{port} within "
                f"{self.timeout:g} s: rank 0, or the launcher, was not started or is gone."
            ) from error

    def _listen(self, store: Store, thread: int) -> None:
        with suppress(RuntimeError):  # the store is gone; a collective will notice
            store.wait([f"bell/{self.rank.index}"], timedelta(days=365))
            if not self.leaving:
                store.set(f"at/{self.rank.index}", _whereabouts(sys._current_frames().get(thread)))
                self.heard = self._words(store)
                store.set(f"heard/{self.rank.index}", "")

    def _words(self, store: Store) -> dict[int, _Word]:
        said = [rank for rank in range(self.rank.size) if store.check([f"word/{rank}"])]
        return {rank: _Word(**json.loads(store.get(f"word/{rank}"))) for rank in said}

    def _all(self, key: str) -> bool:
        return all(self.store.check([f"{key}/{other}"]) for other in self.others)

    def _ring(self) -> None:
        for other in self.others:
            self.store.set(f"bell/{other}", "")

    def _tell(self, word: _Word) -> None:
        self.say(word)
        self._ring()

    def _ask(self) -> tuple[dict[int, _Word], dict[int, str]]:
        """All words, and where each rank is that has not ended, once everyone has answered or GRACE has passed."""
        self._tell(_Word("stopped"))
        _until(lambda: all(self._settled(other) for other in self.others))
        at = {rank: self.store.get(f"at/{rank}").decode() for rank in self.others if self.store.check([f"at/{rank}"])}
        return self._words(self.store), at

    def _settled(self, rank: int) -> bool:
        return self.store.check([f"at/{rank}"]) or self.store.check([f"gone/{rank}"])

    def _verdict(self, words: dict[int, _Word], at: dict[int, str]) -> RankError:
        size = self.rank.size
        if first := _first_failure(words, size):
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
        if first := _first_failure(self.heard, self.rank.size):
            return first
        if 0 in self.heard and self.heard[0].state == "finished":
            return RankError(f"rank 0 of {self.rank.size} {FINISHED}.")
        host = "the launcher" if self.agent else f"rank 0 of {self.rank.size}"
        return RankError(f"{host} {SILENT}, and the last words with it.")


def _first_failure(words: dict[int, _Word], size: int) -> RankError | None:
    """The error of the rank that was the first to fail by itself, if any did."""
    failed = [(word.time, rank) for rank, word in words.items() if word.state == "failed"]
    if not failed:
        return None
    _, rank = min(failed)
    return RankError(f"rank {rank} of {size} failed: {words[rank].text}", words[rank].traceback)


def _numbers() -> tuple[int, int]:
    """This process's rank and the number of ranks."""
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return 0, 1
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} is not set, but a rank needs it. Start with torchrun, set all of RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT, or none of RANK and WORLD_SIZE for one rank."
        )
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


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


def _bounded(work: Callable[[], Result]) -> Result | None:
    """What `work` returns; None where it fails or takes too long, as calls to a lost store do."""
    results: list[Result] = []

    def run() -> None:
        with suppress(Exception):
            results.append(work())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(GRACE + 1)
    return results[0] if results else None


def _run_rank(
    function: Callable[..., Any], args: tuple[Any, ...], notes: str, timeout: float, backend: str | None, device: Any
) -> bytes:
    """The life of a rank under `launch`."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["WORLD_SIZE"])))
    try:
        with _without_torchs_own_warnings(), ranks(timeout, backend, device):
            return pickle.dumps(function(*args))
    except BaseException as error:
        note = Path(notes, f"rank-{os.environ['RANK']}.json")
        note.with_suffix(".part").write_text(json.dumps(asdict(_Word.of(error))))
        note.with_suffix(".part").rename(note)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # at once: what an ordinary exit waits for may never come


@contextmanager
def _without_torchs_own_warnings() -> Iterator[None]:
    """FSDP calls what torch has renamed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        yield


def _failure(notes: Path, size: int, rank: int, code: int) -> RankError:
    """The one error of a failed launch, from the ranks' notes and the exit code of the first one seen to end."""
    words = {int(note.stem[5:]): _Word(**json.loads(note.read_text())) for note in notes.glob("rank-*.json")}
    if first := _first_failure(words, size):
        return first
    if code < 0:
        watchdog = " NCCL's watchdog does that to a rank that waited too long." if -code == signal.SIGABRT else ""
        return RankError(f"rank {rank} of {size} was killed by {signal.Signals(-code).name}.{watchdog}")
    stopped = sorted((word.time, word.text, word.traceback) for word in words.values() if word.state == "stopped")
    if stopped:
        return RankError(*stopped[0][1:])
    return RankError(f"rank {rank} of {size} ended with exit code {code} and no result.")


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """Keep the elastic agent's tables from the console, and give back the signals it takes."""
    loggers = [logging.getLogger(name) for name in LOUD]
    before = [logger.disabled for logger in loggers]
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
        for number, handler in handlers.items() if main else ():
            signal.signal(number, handler)
