"""check_memory: whether the ranks of a base model have room to train all weights of another copy of it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from postlude.engine import Engine
from postlude.plan.memory import estimate_memory
from postlude.plan.parameter_count import total_parameters
from postlude.world.agreement import gather_and_decide

GIB = 1024**3


def check_memory(engine: Engine, free: int) -> None:
    """Raises ValueError on every rank if one has too few bytes `free`. Every rank calls it.

    A rank needs its part of weights, gradients and moments, and a whole copy in the compute dtype that samples.
    """
    estimates = estimate_memory(
        engine.config,
        replace(engine.options, lora=None),
        compute_bytes=engine.compute_dtype.itemsize,
    )
    trained = max(estimate.lasting for estimate in estimates)
    needed = trained + total_parameters(engine.config) * engine.compute_dtype.itemsize
    smallest = min(gather_and_decide(lambda: free, list))
    if needed > smallest:
        raise ValueError(
            f"training all weights of this model needs {needed / GIB:.3g} GiB on each rank, but {smallest / GIB:.3g} "
            "GiB are free. Give a lora_config, end other models, or start the server with a --layout that shards more."
        )


def free_memory(device: torch.device) -> int:
    """Returns the bytes that this rank may still use."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        sizes = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(sizes["MemAvailable"].split()[0]) * 1024
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return free // dist.get_world_size()
