"""NCCL ranks that share this machine's GPUs and are kept between tests. They run with CUDA's default settings."""

import functools
import os
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from postlude.layout import Layout
from postlude.world.launcher import ranks as become_rank
from postlude.world.mesh import Mesh
from tests.conftest import Ranks, answer_calls

TIMEOUT = 120.0  # seconds; a collective that takes longer is stuck


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    directory = Path(__file__).parent
    for item in items:
        if directory in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@functools.cache
def mesh(layout: Layout) -> Mesh:
    """Returns the mesh of a layout on the GPU, made once per process: its communicators take seconds."""
    return Mesh(layout, "cuda")


def _serve(rank: int, size: int, rendezvous: str, connection: Connection) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=_port(rendezvous, rank)
    )
    with become_rank(TIMEOUT, backend="nccl", device="cuda"):
        answer_calls(rank, connection)


def _port(rendezvous: str, rank: int) -> str:
    """Returns a free port that the first rank picks and writes to a file for the others."""
    path = Path(f"{rendezvous}.port")
    if rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            path.with_suffix(".part").write_text(str(free.getsockname()[1]))
        path.with_suffix(".part").rename(path)
    while not path.exists():
        os.sched_yield()
    return path.read_text()


@pytest.fixture(scope="session")
def nccl_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Like the fixture `ranks`, with NCCL on the GPU instead of gloo on the CPU."""
    pools = Ranks(tmp_path_factory.mktemp("nccl"), _serve)
    yield pools
    pools.close()
