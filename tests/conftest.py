"""Gloo ranks that are kept between tests: started on first use, and shared by tests with the same number of ranks."""

import asyncio
import datetime
import gc
import inspect
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

from tests.process_groups import CALL_GROUPS

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # it costs each process that a test starts a second
sys.dont_write_bytecode = False  # nor should pytest rewrite every assertion again, which takes a third of collection
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the Hugging Face Hub; tests/hub_server.py stands in for it
torch.backends.mkldnn.enabled = False  # see ops/linear.py: the models of tests are small

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as for a job that a script starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # processes that tests start inherit it

settings.register_profile(
    "unhurried", deadline=None, max_examples=50, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("unhurried")  # a busy machine is slow, and nothing else is wrong with it

PATIENCE = 300  # seconds; a rank that waits longer is stuck, however busy the machine is
GRACE = 10  # seconds that the other ranks have once one has failed: they may wait for it until PATIENCE is over
CALLS = 200  # of a pool, before its ranks are new ones: meshes that are kept have groups that wake all the time
CONTINUE = 'while read -r pid; do pids="$pids $pid"; done; kill -CONT $pids'  # lets ranks end when the tests are killed
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(  # once, for all ranks: each would take seconds to import it, some at its first step
    [
        "pytest",
        "hypothesis",  # of this file, which every rank and command imports
        "torch._dynamo",
        "torch.utils.tensorboard",
        "transformers.models.llama.modeling_llama",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
        "reasoning_gym",
        "postlude.recipes.grpo",
    ]
)


def pytest_configure(config: pytest.Config) -> None:
    """Hides GPUs if GPU tests are left out, so that the tests are the same on every machine."""
    if "not gpu" in config.getoption("markexpr"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disables garbage collection during collection, where it takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts files with slow tests first, so that no worker is idle at the end (`--no-loadscope-reorder`)."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


class Ranks:
    """`ranks(2, function, *arguments)` runs function(group, *arguments) on two ranks and returns both results.

    They have `patience` seconds for it.
    """

    def __init__(self, directory: Path, serve: Callable[..., None] | None = None) -> None:
        self.directory, self.serve = directory, serve or _serve
        self.pools: dict[int, list[tuple[Connection, Any]]] = {}
        self.calls: Counter[int] = Counter()
        self.guard = subprocess.Popen(
            ("sh", "-c", CONTINUE), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )

    def __call__(
        self, size: int, function: Callable[..., Any], *arguments: Any, patience: float = 2 * PATIENCE
    ) -> list[Any]:
        if size not in self.pools:
            for other in [other for other in self.pools if other > 2]:
                self._stop(other)  # these have many groups
        elif self.calls[size] % CALLS == 0:
            self._stop(size)
        if size not in self.pools:
            self.pools[size] = self._start(size)
        self.calls[size] += 1
        self._signal(size, signal.SIGCONT)
        for connection, _ in self.pools[size]:
            with suppress(BrokenPipeError):  # a rank that died is noticed when its answer is missing
                connection.send((function, arguments))
        results, errors = self._receive(size, patience)
        if errors:
            self._stop(size)  # its groups may be out of step
            pytest.fail("\n".join(errors), pytrace=False)
        self._signal(size, signal.SIGSTOP)
        return results

    def _receive(self, size: int, patience: float) -> tuple[list[Any], list[str]]:
        """Returns the ranks' results, and the errors of those that failed, in order of failure."""
        waiting = {connection: rank for rank, (connection, _) in enumerate(self.pools[size])}
        results: list[Any] = [None] * size
        errors: list[str] = []
        end = time.monotonic() + patience
        while waiting and (ready := wait(list(waiting), max(0, end - time.monotonic()))):
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    results[rank], error = connection.recv()
                except (EOFError, ConnectionError):
                    error = f"rank {rank} died"
                if error is not None:
                    errors.append(error)
                    end = min(end, time.monotonic() + GRACE)
        return results, errors + [f"rank {rank} did not answer" for rank in waiting.values()]

    def _signal(self, size: int, number: signal.Signals) -> None:
        """Stops or continues ranks between calls: their idle gloo groups use a tenth of a core."""
        if self.serve is _serve:  # others may have threads that must not be late
            for _, process in self.pools[size]:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def _start(self, size: int) -> list[tuple[Connection, Any]]:
        rendezvous = self.directory / f"{size}-{len(list(self.directory.iterdir()))}"
        pool = []
        for rank in range(size):
            connection, child_connection = SERVER.Pipe()
            process = SERVER.Process(
                target=self.serve, args=(rank, size, str(rendezvous), child_connection), daemon=True
            )
            process.start()
            pool.append((connection, process))
            print(process.pid, file=self.guard.stdin, flush=True)
        return pool

    def _stop(self, size: int) -> None:
        for connection, process in self.pools.pop(size):
            connection.close()
            process.kill()

    def close(self) -> None:
        for size in list(self.pools):
            self._stop(size)
        self.guard.communicate()


def _serve(rank: int, size: int, rendezvous: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False
    timeout = datetime.timedelta(seconds=PATIENCE)
    store = dist.FileStore(rendezvous, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    gc.freeze()  # what was imported stays: a collection looks at what the calls make
    with CALL_GROUPS.shared():
        answer_calls(rank, connection)


def answer_calls(rank: int, connection: Connection) -> None:
    """Runs the functions that tests send, until the tests end."""
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:  # the tests are over
            return
        CALL_GROUPS.begin_call()
        try:
            connection.send((function(dist.group.WORLD, *arguments), None))
        except Exception:
            connection.send((None, f"rank {rank}: {traceback.format_exc()}"))


@pytest.fixture(autouse=True)
def free_gpu_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Returns a GPU test's cached memory, which torch would keep: other test processes share the GPU."""
    yield
    if request.node.get_closest_marker("gpu") and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    pools = Ranks(tmp_path_factory.mktemp("ranks"))
    yield pools
    pools.close()
