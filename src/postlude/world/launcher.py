"""How ranks start and how they stop.

`launch` runs a function on several ranks of this machine. `ranks` makes the process a rank, under `launch`, `torchrun`,
any other starter that sets torchrun's variables, or alone. When one fails, all others say why (`last_words.py`).
"""

from __future__ import annotations

import functools
import json
import logging
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from postlude.world.devices import (
    DeviceAssignment,
    VisibleDevices,
    agree_on_device,
    assign_devices,
    check_device,
    group_device,
)
from postlude.world.failure_report import (
    FailureReporter,
    RankError,
    RankStatus,
    RendezvousStores,
    first_failure,
    hosts_store,
    run_with_timeout,
)
from postlude.world.stall_watchdog import GPUProbe, StallWatchdog

LOUD = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.launcher.api",
    "torch.multiprocessing.spawn",
)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # those that ask a process to end
WATCHDOG_LATER = 60.0  # seconds
QUIET = {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL")}  # c10d logs pages when a rank is lost
LOG = logging.getLogger("postlude")
Result = TypeVar("Result")


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
    grace: float = 300.0,
) -> list[Result]:
    """Run function(*args) on `nproc` ranks of this machine, each inside `ranks`, and return the results in rank order.

    The ranks are new processes: function, arguments and results are pickled. The first rank that fails ends all others
    and is named by the `RankError` raised here.

    A signal that would end this process (SIGINT, SIGTERM, SIGHUP, SIGQUIT) is handed to the ranks, whose own handlers
    may finish a step and save; a cluster may send it to them as well, so a rank may get it twice. If every rank then
    returns, so does `launch`, and what they return can tell. Otherwise the signal does here what it does where no rank
    runs: SIGINT raises KeyboardInterrupt (exit code 130), SIGTERM ends the process (143). Ranks that are still there
    after `grace` seconds, or when a second signal comes, are killed.
    """
    if nproc < 1:
        raise ValueError(f"launch(nproc={nproc}): at least one rank is needed.")
    check_device(device)
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
            signals_to_handle="",  # they are forwarded here
        )
        forwarding, results, error = SignalForwarding(grace), {}, None
        try:
            with _quiet_agent(), _environment(QUIET), forwarding:
                results = elastic_launch(config, _run_rank)(function, args, notes, timeout, backend, device)
        except ChildFailedError as failure:
            rank, process = failure.get_first_failure()
            error = _failure(Path(notes), nproc, rank, process.exitcode)
    if error is not None and forwarding.received and _ended_by_signal(error):
        signal.raise_signal(forwarding.received[0])  # now it means what it always means here
        raise SystemExit(128 + forwarding.received[0])
    if error is not None:
        raise error
    return [pickle.loads(results[rank]) for rank in range(nproc)]


def run_on_ranks(
    function: Callable[..., Result],
    *args: Any,
    nproc: int,
    timeout: float = 600.0,
    device: torch.device | str | None = None,
    backend: str | None = None,
) -> Result:
    """What function(*args) returns on the first of `nproc` ranks: this process where there is one, else new ones.

    In a process that a launcher started as a rank already, function(*args) of this rank, with those that run.
    """
    check_device(device)
    if nproc != 1 and "RANK" not in os.environ:
        return launch(function, *args, nproc=nproc, timeout=timeout, backend=backend, device=device)[0]
    with _without_torchs_own_warnings(), ranks(timeout, backend, device):
        return function(*args)


@contextmanager
def ranks(
    timeout: float = 600.0, backend: str | None = None, device: torch.device | str | None = None
) -> Iterator[Rank]:
    """Make this process a rank for the length of the block.

    Reads torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and, if set, LOCAL_RANK); without them it is
    the only rank. `device` is by default a GPU that no other rank has where this process sees one, and the CPU where no
    rank sees any; an `Engine` made inside computes there. `backend` is nccl where every rank has a GPU of its own and
    gloo on the CPU; ranks that have to share a GPU speak through gloo, or through NCCL's sockets where `backend` is
    "nccl", and the first of them says so. A collective gives up after `timeout` seconds, and what then leaves the block
    is a `RankError` that names the rank to blame. A process group that exists already is used and left alone, whatever
    the arguments.
    """
    with _ranks(timeout, backend, device, _print_and_exit) as rank:
        yield rank


@contextmanager
def _ranks(
    timeout: float, backend: str | None, device: torch.device | str | None, end: Callable[[RankError], None]
) -> Iterator[Rank]:
    """As `ranks`. `end` ends the process with an error that cannot be raised, since the host hangs in a call."""
    if dist.is_initialized():
        yield Rank(dist.get_rank(), dist.get_world_size(), group_device())
        return
    index, size = _numbers()
    check_device(device)
    cleanup = ExitStack()
    stores = RendezvousStores.connect(index, size, timeout) if size > 1 else None
    words = FailureReporter(index, size, timeout, stores.words, hosts_store(index)) if stores else None
    try:
        if words and stores:
            words.listen(stores.ear)
        place = _place(None if device is None else torch.device(device), index, size, stores)
        rank = Rank(index, size, place.device)
        if place.gpu is not None:
            torch.cuda.set_device(place.device)
        backend = _checked(backend, place)
        if index == 0 and (warning := place.warning(backend)):
            LOG.warning("%s", warning)
        if backend == "nccl" and words:
            cleanup.enter_context(_prepared_for_nccl(place, words, timeout, end))
        dist.init_process_group(
            backend,
            store=stores.group if stores else HashStore(),
            rank=index,
            world_size=size,
            # NCCL's own watchdog aborts the process without a sentence, so it comes after ours.
            timeout=timedelta(seconds=timeout + (WATCHDOG_LATER if backend == "nccl" else 0)),
            # NCCL's groups are of the current GPU anyway, and bound to it they would be joined in another way.
            device_id=place.device if place.gpu is not None and backend == "gloo" else None,
        )
        yield rank
        if words:
            run_with_timeout(lambda: words.say(RankStatus("finished")))
        dist.destroy_process_group()
    except BaseException as error:
        cause = words.fail(error) if words else None
        if dist.is_initialized():
            run_with_timeout(dist.destroy_process_group)  # NCCL may wait here for collectives that never come
        if cause is not None:
            raise cause from error
        raise
    finally:
        cleanup.close()
        if words and not words.lost:
            run_with_timeout(words.leave)


@contextmanager
def _prepared_for_nccl(
    place: DeviceAssignment, words: FailureReporter, timeout: float, end: Callable[[RankError], None]
) -> Iterator[None]:
    """Let ranks share a GPU where they do, and watch for a host that hangs."""
    assert place.gpu is not None
    gpu = GPUProbe(place.gpu)
    words.gpu_is_stuck = gpu.is_stuck
    watch = StallWatchdog(timeout, gpu.is_stuck, lambda: _end_stalled(words, timeout, end))
    with _environment(place.nccl_variables(words.index)):
        yield
    watch.close()


def _end_stalled(words: FailureReporter, timeout: float, end: Callable[[RankError], None]) -> None:
    """Find out which rank did not come, and end this one, whose host hangs."""
    error = words.fail(RankError(f"rank {words.index} of {words.size} waited {timeout:g} s for its GPU."))
    assert error is not None  # a RankError always has a cause elsewhere
    if not words.lost:
        run_with_timeout(words.leave)
    end(error)


def _print_and_exit(error: RankError) -> None:
    print(error, file=sys.stderr, flush=True)
    os._exit(1)


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the length of the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _place(device: torch.device | None, index: int, size: int, stores: RendezvousStores | None) -> DeviceAssignment:
    """Where this rank computes, as all ranks agree."""
    if device is not None and device.type == "cpu":
        return DeviceAssignment()
    seen = VisibleDevices.here(device)
    place = agree_on_device(stores.place, index, size, seen) if stores else assign_devices([seen])[0]
    if place.refusal:
        raise ValueError(place.refusal)
    return place


def _checked(backend: str | None, place: DeviceAssignment) -> str:
    """The backend, by default the one for the device."""
    if backend == "nccl" and place.gpu is None:
        raise ValueError("backend 'nccl' needs a GPU, but ranks compute on the CPU; use gloo, or a device with CUDA.")
    return backend or place.backend


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


def _run_rank(
    function: Callable[..., Any], args: tuple[Any, ...], notes: str, timeout: float, backend: str | None, device: Any
) -> bytes:
    """The life of a rank under `launch`."""
    os.setpgrp()  # a key pressed in the terminal is the launcher's, who hands it on once
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["WORLD_SIZE"])))
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # what came while torch was imported comes now
        with _without_torchs_own_warnings(), _ranks(timeout, backend, device, functools.partial(_leave_note, notes)):
            return pickle.dumps(function(*args))
    except BaseException as error:
        _leave_note(notes, error)
        raise  # never: the process has ended


def _leave_note(notes: str, error: BaseException) -> None:
    """Write down what ended this rank, and exit at once: what an ordinary exit waits for may never come."""
    note = Path(notes, f"rank-{os.environ['RANK']}.json")
    note.with_suffix(".part").write_text(json.dumps(asdict(RankStatus.of(error))))
    note.with_suffix(".part").rename(note)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


@contextmanager
def _without_torchs_own_warnings() -> Iterator[None]:
    """FSDP calls what torch has renamed, and autograd's threads have no CUDA context before their first product."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Attempting to run cuBLAS, but there was no current CUDA context", UserWarning
        )
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        yield


def _failure(notes: Path, size: int, rank: int, code: int) -> RankError:
    """The one error of a failed launch, from the ranks' notes and the exit code of the first one seen to end."""
    words = {int(note.stem[5:]): RankStatus(**json.loads(note.read_text())) for note in notes.glob("rank-*.json")}
    if first := first_failure(words, size):
        return first
    if code < 0:
        watchdog = " NCCL's watchdog does that to a rank that waited too long." if -code == signal.SIGABRT else ""
        return RankError(f"rank {rank} of {size} was killed by {signal.Signals(-code).name}.{watchdog}")
    stopped = sorted((word.time, word.text, word.traceback) for word in words.values() if word.state == "stopped")
    if stopped:
        return RankError(*stopped[0][1:])
    return RankError(f"rank {rank} of {size} ended with exit code {code} and no result.")


def _ended_by_signal(error: RankError) -> bool:
    """Whether a rank ended as a process does that leaves a signal to Python, or to the system."""
    return bool(re.search(r" failed: (KeyboardInterrupt|SystemExit)\b| was killed by SIG", str(error)))


def ending_signals(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Those of the signals that may end this process: under nohup, SIGHUP may not."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in numbers if not (ignored and number == signal.SIGHUP)]


class SignalForwarding:
    """While it is entered, signals that would end this process go to its children instead: each once, then their end.

    Children begin with these signals blocked, so that none of them dies of one while it is still importing.
    """

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self.received: list[int] = []
        self.over = threading.Event()
        self.before = set(multiprocessing.active_children())
        self.handlers: dict[int, Any] = {}

    def __enter__(self) -> SignalForwarding:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python hears of no signal
            self.handlers = {number: signal.getsignal(number) for number in ending_signals(SIGNALS)}
            for number in self.handlers:
                signal.signal(number, lambda number, _: self.received.append(number))
            self.thread = threading.Thread(target=self._forward, name="postlude-signals", daemon=True)
            self.thread.start()
            self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the thread above still takes them
        return self

    def __exit__(self, *_: object) -> None:
        if self.handlers:
            signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
            self.over.set()
            self.thread.join()
            for number, handler in self.handlers.items():
                signal.signal(number, handler)

    def _forward(self) -> None:
        told: set[int] = set()
        deadline = float("inf")
        while not self.over.wait(0.05):
            if not self.received:
                continue
            deadline = min(deadline, time.monotonic() + self.grace)
            for child in set(multiprocessing.active_children()) - self.before:
                if len(self.received) > 1 or time.monotonic() > deadline:
                    child.kill()
                elif child.pid is not None and child.pid not in told:
                    told.add(child.pid)
                    with suppress(ProcessLookupError):
                        os.kill(child.pid, self.received[0])


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """Keep the elastic agent's tables from the console."""
    loggers = [logging.getLogger(name) for name in LOUD]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
