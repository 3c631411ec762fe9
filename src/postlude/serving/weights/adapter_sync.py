"""AdapterSync: servers get the frozen model once, and then only the adapter of an engine, unmerged."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import torch.distributed as dist

from postlude.engine import Engine
from postlude.engine.base_weights import adapter_matrices, export_base
from postlude.hf.peft import to_peft, write_adapter
from postlude.serving.clients.client import GenerationClient
from postlude.serving.clients.remote_server import Weights
from postlude.serving.errors import ServerError
from postlude.serving.weights.sync import DiskSync, NetworkSync, SyncOptions, WeightSync
from postlude.world.agreement import on_rank0

POLICY = "policy"  # the name of the adapter at servers
BASE = "base"  # in the directory of weights: the frozen model
MEMORY = Path("/dev/shm")  # memory-backed files, where the system has them
LOCAL_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
LOG = logging.getLogger("postlude")


class AdapterSync(DiskSync):
    """Rank 0 writes the adapter as peft's files, to memory if all servers are on this machine, and servers load it.

    Servers that start or come back get the frozen model first, which stays in the run's directory.
    """

    def __init__(
        self,
        engine: Engine,
        client: GenerationClient | None,
        options: SyncOptions,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(engine, client, options, group)
        self._folder: Path | None = None
        """The directory of the adapters, on rank 0."""

    def close(self) -> None:
        """Removes the files."""
        super().close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

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
                path = self._adapter_folder() / version
                on_cpu = {name: (a.cpu(), b.cpu()) for name, (a, b) in pairs.items()}
                model = (self.engine.config, self.engine.family)
                # Servers read experts one by one where the model's files have them so.
                files = to_peft(on_cpu, configs, *model, separate_experts=True, blocks=self.engine.block_types)
                write_adapter(path, *files)
                return path

            path = on_rank0(write, self.group)
        except OSError as error:
            raise ServerError(f"the adapter for servers could not be written: {error}") from error
        self.metrics["servers/write_seconds"] = time.perf_counter() - start
        return on_rank0(lambda: self._load(str(base), path), self.group)

    def _load(self, base: str, path: Path) -> int:
        self.client.load(
            Weights(base, path.name, self._probe, adapter=str(path), adapter_name=POLICY), wait=self.options.wait
        )
        in_use = self.client.directories_in_use()
        for other in path.parent.iterdir():
            if str(other) not in in_use:
                shutil.rmtree(other, ignore_errors=True)
        return sum(file.stat().st_size for file in path.glob("*.safetensors"))

    def _adapter_folder(self) -> Path:
        """Returns the directory of the adapters of all versions, made at the first call."""
        if self._folder is None:
            hosts = {urlsplit(server.url).hostname for server in self.client.pool.servers}
            if hosts <= LOCAL_HOSTS:
                self._folder = Path(tempfile.mkdtemp(prefix="postlude-", dir=MEMORY if MEMORY.is_dir() else None))
            else:
                self._folder = self.root / "adapters"
                self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder


def make_sync(
    engine: Engine, client: GenerationClient | None, options: SyncOptions, group: dist.ProcessGroup | None
) -> WeightSync:
    """Returns the way in which servers get an engine's weights. Every rank calls it.

    An adapter is sent as an adapter if all servers take one; else all get merged weights, which is logged once.
    """
    merged = NetworkSync if options.method == "network" else DiskSync
    if not engine.adapters.configs:
        return merged(engine, client, options, group)

    def problem() -> str:
        assert client is not None
        if options.method == "network":
            return "rollout.sync: network sends whole models"
        servers = [server for server in client.connect() if server.state == "up"]
        reasons = [(server.url, client.run_on(server, server.adapter_problem())) for server in servers]
        return next((f"{url} {reason}" for url, reason in reasons if reason), "")

    why = on_rank0(problem, group)
    if not why:
        return AdapterSync(engine, client, options, group)
    if client is not None:
        LOG.warning(
            "%s: at every synchronisation servers get weights with the adapter merged in, in %s. In bfloat16 this "
            "rounds small updates away (in the first steps of a run most of them), so that the sampler is behind the "
            "trainer; sync/gap and rollout_kl show by how much.",
            why,
            str(engine.compute_dtype).removeprefix("torch."),
        )
    return merged(engine, client, options, group)
