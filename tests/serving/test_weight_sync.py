"""WeightSync: ranks wait longer for servers than for each other."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from postlude.serving.clients.server_weights import WeightsVersion
from postlude.serving.weights.sync import DiskSync, SyncOptions
from postlude.world.agreement import Rank0Controller
from postlude.world.launcher import launch

TIMEOUT = 30.0  # seconds after which a rank that is silent is given up


class Model:
    def export_hf(self, path: Path, **_: Any) -> None:
        path.mkdir(parents=True, exist_ok=True)


class SlowServers:
    """Servers of which the only one is starting, or reads for longer than the ranks' timeout."""

    def reload(self, weights: WeightsVersion, **_: Any) -> None:
        time.sleep(TIMEOUT + 3.0)

    def directories_in_use(self) -> set[str]:
        return set()


def sync_result(directory: str) -> str | None:
    controller: Rank0Controller[None, None] = Rank0Controller(lambda _: None)
    servers: Any = SlowServers() if dist.get_rank() == 0 else None
    model: Any = Model()
    sync = DiskSync(model, servers, SyncOptions(Path(directory)), controller.group)
    sync.sync("start.1")
    return sync.version


@pytest.mark.thorough  # it waits for longer than ranks have patience
@pytest.mark.slow
def test_ranks_wait_for_servers_longer_than_for_each_other(tmp_path: Path) -> None:
    assert launch(sync_result, str(tmp_path), nproc=2, timeout=TIMEOUT) == ["start.1"] * 2
