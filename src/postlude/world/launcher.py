"""Starts and stops ranks.

`launch` runs a function on several ranks of this machine. `ranks` makes the process a rank: under `launch`, `torchrun`,
any other launcher that sets torchrun's variables, or alone. When one rank fails, all others report why
(`failure_report.py`).
"""

from __future__ import annotations

import functools
import json
import logging
import os
import pickle
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import ProcessExitedException, spawn

from postlude.json_log import is_json, json_line, set_up_logging
from postlude.world.devices import (
    DeviceAssignment,
    VisibleDevices,
    agree_on_device,
    assign_devices,
    check_device,
    group_device,
)
from postlude.world.failure_report import (
    AGENT_STORE,
    FailureReporter,
    GPUProbe,
    RankError,
    RankStatus,
    StallWatchdog,
    first_failure,
    first_stopped,
    run_with_timeout,
)
from postlude.world.rendezvous import GROUP_FILE, RendezvousStores, host_store, loopback_variables
from postlude.world.signals import SIGNALS, SignalForwarding

NCCL_WATCHDOG_DELAY = 60.0  # seconds after our own timeout
QUIET = {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL")}  # c10d logs pages when a rank is lost
LOG = logging.getLogger("postlude")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Rank:
    """This process: rank `index` of `size`, computing on `device`."""

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
    """Runs function(*args) on `nproc` ranks of this machine, each inside `ranks`. Returns the results in rank order.

    The ranks are new processes: function, arguments and results are pickled. The first rank that fails ends all others
    and is named by the `RankError` raised here.

    A signal that would end this process (one of `SIGNALS`) is forwarded to the ranks, whose handlers
    may finish a step and save. A cluster may send it to them as well, so a rank may get it twice. If every rank then
    returns, so does `launch`. Otherwise the signal has its usual effect here: SIGINT raises KeyboardInterrupt (exit
    code 130), SIGTERM ends the process (143). Ranks that are alive after `grace` seconds, or when a second signal
    comes, are killed.
    """
    if nproc < 1:
        raise ValueError(f"launch(nproc={nproc}): at least one rank is needed.")
    check_device(device)
    # Only this user may read or write the directory. The store listens on loopback and holds nothing that is unpickled.
    with TemporaryDirectory(prefix="postlude-") as reports:
        store = host_store("127.0.0.1", 0, timeout)
        shared = {
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            AGENT_STORE: "True",
            GROUP_FILE: str(Path(reports, "group")),
        }
        forwarding, error = SignalForwarding(grace), None
        with _silenced(logging.getLogger("torch.multiprocessing.spawn")), _environment(QUIET | shared), forwarding:
            arguments = (function, args, reports, timeout, backend, device)
            processes = spawn(_run_rank, arguments, nprocs=nproc, join=False)
            try:
                while not processes.join(0.1):
                    pass
            except ProcessExitedException as failure:
                error = _launch_error(Path(reports), nproc, failure.error_index, failure.exit_code or 0)
            finally:
                for process in processes.processes:
                    if process.is_alive():
                        process.kill()
        missing = [rank for rank in range(nproc) if not Path(reports, f"result-{rank}").exists()]
        if error is None and missing:
            error = _launch_error(Path(reports), nproc, missing[0], 0)
        if error is None:
            return [pickle.loads(Path(reports, f"result-{rank}").read_bytes()) for rank in range(nproc)]
    if forwarding.received and _ended_by_signal(error):
        signal.raise_signal(forwarding.received[0])  # now with its usual effect
        raise SystemExit(128 + forwarding.received[0])
    raise error


def run_on_ranks(
    function: Callable[..., Result],
    *args: Any,
    nproc: int,
    timeout: float = 600.0,
    device: torch.device | str | None = None,
    backend: str | None = None,
) -> Result:
    """Returns rank 0's function(*args), of `nproc` ranks: this process if there is one, else new ones.

    In a process that a launcher started as a rank, returns this rank's function(*args).
    """
    check_device(device)
    if nproc != 1 and "RANK" not in os.environ:
        return launch(function, *args, nproc=nproc, timeout=timeout, backend=backend, device=device)[0]
    with _ignored_torch_warnings(), ranks(timeout, backend, device):
        return function(*args)


@contextmanager
def ranks(
    timeout: float = 600.0, backend: str | None = None, device: torch.device | str | None = None
) -> Iterator[Rank]:
    """Makes this process a rank for the length of the block.

    Reads torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and, if set, LOCAL_RANK); without them it is
    the only rank. `device` is by default a GPU that no other rank has if this process sees one, and the CPU if no rank
    sees any; an `Engine` made inside computes there. `backend` is nccl if every rank has its own GPU, and gloo on the
    CPU. Ranks that share a GPU communicate through gloo, or through NCCL's sockets if `backend` is "nccl", with a
    warning. A collective fails after `timeout` seconds, and the block raises a `RankError` that names the rank at
    fault. An existing process group is used unchanged, whatever the arguments.
    """
    with _ranks(timeout, backend, device, _print_and_exit) as rank:
        yield rank


@contextmanager
def _ranks(
    timeout: float, backend: str | None, device: torch.device | str | None, exit_with: Callable[[RankError], None]
) -> Iterator[Rank]:
    """As `ranks`. `exit_with` ends the process with an error that cannot be raised, because the host hangs."""
    set_up_logging()
    if dist.is_initialized():
        yield Rank(dist.get_rank(), dist.get_world_size(), group_device())
        return
    index, size = _rank_and_size()
    check_device(device)
    cleanup = ExitStack()
    stores = RendezvousStores.connect(index, size, timeout) if size > 1 else None
    cleanup.enter_context(_environment(loopback_variables(size) if stores else {}))
    reporter = FailureReporter(index, size, timeout, stores.reports, stores.hosted) if stores else None
    try:
        if reporter and stores:
            reporter.start_listener(stores.listener)
        assignment = _assign_device(None if device is None else torch.device(device), index, size, stores)
        rank = Rank(index, size, assignment.device)
        if assignment.gpu is not None:
            torch.cuda.set_device(assignment.device)
        if backend == "nccl" and assignment.gpu is None:
            raise ValueError(
                "backend 'nccl' needs a GPU, but ranks compute on the CPU; use gloo, or a device with CUDA."
            )
        backend = backend or assignment.backend
        if index == 0 and (warning := assignment.warning(backend)):
            LOG.warning("%s", warning)
        if backend == "nccl" and reporter:
            cleanup.enter_context(_prepared_for_nccl(assignment, reporter, timeout, exit_with))
        dist.init_process_group(
            backend,
            store=stores.group if stores else HashStore(),
            rank=index,
            world_size=size,
            # NCCL's own watchdog aborts the process without a message, so it comes after ours.
            timeout=timedelta(seconds=timeout + (NCCL_WATCHDOG_DELAY if backend == "nccl" else 0)),
            # NCCL uses the current GPU anyway, and groups that are bound to it are formed in another way.
            device_id=assignment.device if assignment.gpu is not None and backend == "gloo" else None,
        )
        yield rank
        if reporter:
            run_with_timeout(lambda: reporter.set_status(RankStatus("finished")))
        dist.destroy_process_group()
    except BaseException as error:
        cause = reporter.report(error) if reporter else None
        if dist.is_initialized():
            run_with_timeout(dist.destroy_process_group)  # NCCL may wait here for collectives that never come
        if cause is not None:
            raise cause from error
        raise
    finally:
        cleanup.close()
        if reporter and not reporter.store_lost:
            run_with_timeout(reporter.close)


@contextmanager
def _prepared_for_nccl(
    assignment: DeviceAssignment, reporter: FailureReporter, timeout: float, exit_with: Callable[[RankError], None]
) -> Iterator[None]:
    """Lets ranks share a GPU, and watches for a host that hangs."""
    assert assignment.gpu is not None
    probe = GPUProbe(assignment.gpu)
    reporter.gpu_is_stuck = probe.is_stuck

    def exit_stalled() -> None:
        error = reporter.report(RankError(f"rank {reporter.rank} of {reporter.size} waited {timeout:g} s for its GPU."))
        assert error is not None  # a RankError always has a cause elsewhere
        if not reporter.store_lost:
            run_with_timeout(reporter.close)
        exit_with(error)

    watchdog = StallWatchdog(timeout, probe.is_stuck, exit_stalled)
    with _environment(assignment.nccl_variables(reporter.rank)):
        yield
    watchdog.close()


def _print_and_exit(error: RankError) -> None:
    print(json_line("error", str(error)) if is_json() else error, file=sys.stderr, flush=True)
    os._exit(1)


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _assign_device(
    device: torch.device | None, rank: int, size: int, stores: RendezvousStores | None
) -> DeviceAssignment:
    if device is not None and device.type == "cpu":
        return DeviceAssignment()
    visible = VisibleDevices.of_this_process(device)
    assignment = agree_on_device(stores.devices, rank, size, visible) if stores else assign_devices([visible])[0]
    if assignment.refusal:
        raise ValueError(assignment.refusal)
    return assignment


def _rank_and_size() -> tuple[int, int]:
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
    index: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    reports: str,
    timeout: float,
    backend: str | None,
    device: Any,
) -> None:
    os.environ |= {"RANK": str(index), "LOCAL_RANK": str(index)}
    os.setpgrp()  # a key pressed in the terminal signals the launcher only, which forwards it once
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["WORLD_SIZE"])))
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # signals that came while torch was imported come now
        with _ignored_torch_warnings(), _ranks(timeout, backend, device, functools.partial(_write_report, reports)):
            result = pickle.dumps(function(*args))
        Path(reports, f"result-{index}").write_bytes(result)
    except BaseException as error:
        _write_report(reports, error)
        raise  # never: the process has ended


def _write_report(reports: str, error: BaseException) -> None:
    """Writes what ended this rank, and exits at once: an ordinary exit may wait for what never comes."""
    report = Path(reports, f"rank-{os.environ['RANK']}.json")
    report.with_suffix(".part").write_text(json.dumps(asdict(RankStatus.of(error))))
    report.with_suffix(".part").rename(report)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


@contextmanager
def _ignored_torch_warnings() -> Iterator[None]:
    """Ignores warnings of FSDP, which calls renamed functions, and of autograd's threads, which lack a CUDA context."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Attempting to run cuBLAS, but there was no current CUDA context", UserWarning
        )
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        yield


def _launch_error(reports: Path, size: int, rank: int, code: int) -> RankError:
    """Returns the error of a failed launch, from the ranks' reports and the exit code of the first that ended."""
    files = reports.glob("rank-*.json")
    statuses = {int(file.stem[5:]): RankStatus(**json.loads(file.read_text())) for file in files}
    if first := first_failure(statuses, size):
        return first
    if code < 0:
        watchdog = " NCCL's watchdog does that to a rank that waited too long." if -code == signal.SIGABRT else ""
        return RankError(f"rank {rank} of {size} was killed by {signal.Signals(-code).name}.{watchdog}")
    return first_stopped(statuses) or RankError(f"rank {rank} of {size} ended with exit code {code} and no result.")


def _ended_by_signal(error: RankError) -> bool:
    """Returns whether a rank ended as a process does that leaves a signal to Python, or to the system."""
    return bool(re.search(r" failed: (KeyboardInterrupt|SystemExit)\b| was killed by SIG", str(error)))


@contextmanager
def _silenced(logger: logging.Logger) -> Iterator[None]:
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled
