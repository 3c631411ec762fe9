"""AdapterSync: servers get the frozen model once, and then only the adapter of an engine, unmerged."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import torch.distributed as dist

from postlude.engine import Engine
from postlude.engine.base_weights import adapter_matrices, export_base
from postlude.hf.peft import to_peft, write_adapter
from postlude.options import SyncMethod
from postlude.serving.clients.client import GenerationClient
from postlude.serving.clients.server_weights import WeightsVersion
from postlude.serving.errors import ServerError
from postlude.serving.weights.shared_memory_sync import SharedMemorySync
from postlude.serving.weights.sync import DeltaSync, DiskSync, NetworkSync, SyncOptions, WeightSync
from postlude.world.agreement import on_rank0
from postlude.world.work_directories import WorkDirectories

POLICY = "policy"  # the name of the adapter at servers
BASE = "base"  # in the directory of weights: the frozen model
SHARED_MEMORY = Path("/dev/shm")  # files in memory, where the system has them
COPIES = 3  # of an adapter, for which memory must have room: the last one, the next, and one to spare
LOCAL_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
LOG = logging.getLogger("postlude")


class AdapterSync(DiskSync):
    """Rank 0 writes the adapter as peft's files, and servers load it.

    The files are in memory if all servers are on this machine and there is room, else in the run's directory. Servers
    that start or come back get the frozen model first, which stays in that directory.
    """

    _adapter_root: Path | None = None
    """The directory of the adapters, on rank 0."""
    _in_memory: WorkDirectories | None = None
    """The directories in memory that hold it, if all servers are on this machine."""

    def close(self) -> None:
        super().close()
        if self._in_memory is not None:
            self._in_memory.close()

    def _compare_checksums(self) -> None:
        """Does nothing: a server's checksum is that of the frozen model, and the probe compares log-probs."""

    def _sync(self, version: str) -> int:
        start = time.perf_counter()
        base = self.root / f"{version.partition('.')[0]}.{BASE}"
        try:
            if self.version is None:
                export_base(self.engine, base, untied=self.options.untied)
            configs, pairs = adapter_matrices(self.engine)

            def write() -> Path:
                on_cpu = {name: (a.cpu(), b.cpu()) for name, (a, b) in pairs.items()}
                path = self._make_adapter_root(sum(a.nbytes + b.nbytes for a, b in on_cpu.values())) / version
                model = (self.engine.config, self.engine.family)
                # Servers read experts one by one where the model's files have them so.
                files = to_peft(on_cpu, configs, *model, separate_experts=True, blocks=self.engine.block_types)
                write_adapter(path, *files)
                return path

            path = on_rank0(write, self.group)
        except OSError as error:
            raise ServerError(f"the adapter for servers could not be written: {error}") from error
        self.metrics["servers/write_seconds"] = time.perf_counter() - start
        weights = WeightsVersion(str(base), version, self._probe, adapter_directory=str(path), adapter_name=POLICY)
        return on_rank0(lambda: self._reload(weights, path), self.group)

    def _make_adapter_root(self, size: int) -> Path:
        """Returns the directory of the adapters of all versions, made at the first call. One has `size` bytes."""
        if self._adapter_root is None:
            hosts = {urlsplit(server.url).hostname for server in self.client.pool.servers}
            # A container often has 64 MiB of it.
            has_room = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free >= COPIES * size
            if hosts <= LOCAL_HOSTS and has_room:
                self._in_memory = WorkDirectories(SHARED_MEMORY)
                self._adapter_root = self._in_memory.make()
            else:
                self._adapter_root = self.root / "adapters"
                self._adapter_root.mkdir(parents=True, exist_ok=True)
        return self._adapter_root


def make_sync(
    engine: Engine, client: GenerationClient | None, options: SyncOptions, group: dist.ProcessGroup | None
) -> WeightSync:
    """Returns the `WeightSync` of an engine. Every rank calls it.

    An adapter is sent as an adapter if all servers can load one; else all get merged weights, and a warning is logged.
    """
    by_method: dict[SyncMethod, Callable[..., WeightSync]] = {
        "disk": DiskSync,
        "network": NetworkSync,
        "ipc": SharedMemorySync,
        "delta": DeltaSync,
    }
    full_sync = by_method[options.method]
    if not engine.adapters.configs:
        return full_sync(engine, client, options, group)

    def adapter_problem() -> str:
        assert client is not None
        if options.method != "disk":
            return f"rollout.sync: {options.method} sends whole models"
        servers = [server for server in client.connect() if server.state == "up"]
        reasons = [(server.url, client.run_on(server, server.adapter_problem())) for server in servers]
        return next((f"{url} {reason}" for url, reason in reasons if reason), "")

    problem = on_rank0(adapter_problem, group)
    if not problem:
        return AdapterSync(engine, client, options, group)
    if client is not None:
        LOG.warning(
            "%s: at every synchronisation servers get weights with the adapter merged in, in %s. In bfloat16 this "
            "rounds small updates away (in the first steps of a run most of them), so the servers' weights lag behind "
            "the trainer's; sync/logprob_diff and rollout_kl show by how much.",
            problem,
            str(engine.compute_dtype).removeprefix("torch."),
        )
    return full_sync(engine, client, options, group)
