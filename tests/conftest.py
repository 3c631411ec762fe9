"""Long-lived gloo ranks: started once a session, shared by every test that needs more than one."""

from __future__ import annotations

import datetime
import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

SIZES = (1, 2, 4)
PATIENCE = 60  # seconds; a rank that waits longer is stuck


class Ranks:
    """`ranks(2, function, *arguments)` runs function(group, *arguments) on two ranks and returns both results."""

    def __init__(self, connections: list[Connection]) -> None:
        self.connections = connections

    def __call__(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        for connection in self.connections[:size]:
            connection.send((size, function, arguments))
        results, errors = [], []
        for connection in self.connections[:size]:
            assert connection.poll(PATIENCE), "a rank did not answer"
            result, error = connection.recv()
            results.append(result)
            errors.append(error)
        assert not any(errors), "\n".join(filter(None, errors))
        return results


def _serve(rank: int, rendezvous: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=PATIENCE)
    store = dist.FileStore(rendezvous, max(SIZES))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=max(SIZES), timeout=timeout)
    groups = {size: dist.new_group(list(range(size)), timeout=timeout) for size in SIZES}
    while (request := connection.recv()) is not None:
        size, function, arguments = request
        try:
            connection.send((function(groups[size], *arguments), None))
        except Exception:
            connection.send((None, f"rank {rank}: {traceback.format_exc()}"))
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    rendezvous: Path = tmp_path_factory.mktemp("ranks") / "store"
    spawn = multiprocessing.get_context("spawn")
    connections, processes = [], []
    for rank in range(max(SIZES)):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_serve, args=(rank, str(rendezvous), theirs), daemon=True)
        process.start()
        connections.append(ours)
        processes.append(process)
    yield Ranks(connections)
    for connection in connections:
        connection.send(None)
    for process in processes:
        process.join(PATIENCE)
