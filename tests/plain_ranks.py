"""Ranks that are forked with everything imported: without an agent, with torchrun's variables, or of `launch`."""

import os
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
from torch.multiprocessing.spawn import ProcessContext, start_processes

from postlude.world import launcher
from postlude.world.failure_report import RankError
from postlude.world.launcher import ranks
from postlude.world.ports import ReservedPort
from tests.conftest import SERVER

PATIENCE = 300  # seconds until a process that should end by itself is given up


def fork_launched_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `launch` fork its ranks, which it would spawn. They have its variables and its output all the same."""
    forkserver.ensure_running()  # without those variables, which all its later processes would have
    monkeypatch.setattr(launcher, "spawn", _fork)


def _fork(function: Callable[..., None], arguments: tuple[Any, ...], nprocs: int, join: bool) -> ProcessContext | None:
    output = [Connection(os.dup(number), readable=False) for number in (1, 2)]
    inherited = dict(os.environ), output
    return start_processes(_run_launched, (*inherited, function, arguments), nprocs, join, start_method="forkserver")


def _run_launched(
    index: int,
    environment: dict[str, str],
    output: list[Connection],
    function: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, stream in enumerate(output, start=1):
        os.dup2(stream.fileno(), number)
    function(index, *arguments)


class PlainRanks:
    """Runs `function(*arguments)` on ranks that start with the context and end with it."""

    def __init__(self, size: int, timeout: float, function: Callable[..., Any], *arguments: Any) -> None:
        self.size, self.work = size, (timeout, function, arguments)
        self.started: list[tuple[BaseProcess, Connection]] = []

    def __enter__(self) -> "PlainRanks":
        self.port = ReservedPort("localhost")
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(self.port.number)}
        for rank in range(self.size):
            parent_pipe, child_pipe = SERVER.Pipe()
            variables = {**place, "RANK": str(rank), "WORLD_SIZE": str(self.size)}
            process = SERVER.Process(target=_run_rank, args=(variables, child_pipe, *self.work))
            process.start()
            child_pipe.close()  # so that the end of a rank without a message is noticed
            self.started.append((process, parent_pipe))
        return self

    def error_of(self, rank: int) -> str:
        """Returns the message of the error that this rank ends with."""
        assert self.started[rank][1].poll(PATIENCE), f"rank {rank} goes on"
        message: str = self.started[rank][1].recv()
        return message

    def __exit__(self, *_: object) -> None:
        for process, _ in self.started:
            process.kill()
            process.join()
        self.port.release()


def _run_rank(
    variables: dict[str, str],
    reports: Connection,
    timeout: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(variables)
    try:
        with ranks(timeout=timeout, device="cpu"):
            function(*arguments)
    except RankError as error:
        reports.send(str(error))
