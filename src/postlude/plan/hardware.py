"""Hardware: the numbers of a GPU and of its links, by name or from a JSON file. Needs no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One GPU, and its links inside its node and to other nodes. Rates are per second and in one direction."""

    flops: float
    """Dense bf16 FLOPs."""
    memory: float
    """Bytes of GPU memory."""
    memory_bandwidth: float
    """Bytes between the GPU and its memory."""
    gpus_per_node: int = 8
    """GPUs per node."""
    intra_node: float = 450 * GB
    """Bytes that a GPU sends to others of its node."""
    inter_node: float = 50 * GB
    """Bytes that a GPU sends to other nodes."""
    host: float = 55 * GB
    """Bytes between the GPU and host memory, one direction at a time."""
    latency: float = 2e-5
    """Seconds that a transfer takes in addition."""
    efficiency: float = 0.45
    """The fraction of `flops` that a whole forward or backward reaches."""
    link_efficiency: float = 0.8
    """The fraction of a link's rate that is reached."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (value == 0 and field.name != "latency"):
                raise ValueError(f"{field.name} of a GPU is {value!r}; give a number above 0.")
            if field.name.endswith("efficiency") and value > 1:
                raise ValueError(f"{field.name} is {value}, but it is a fraction: give at most 1.")

    def ring_rate(self, size: int, stride: int) -> float:
        """Returns the bytes per second that each of `size` ranks, every `stride`th, receives in a ring collective.

        Between nodes, a ring uses the links of all its ranks in a node at once.
        """
        near = self.near(size, stride)
        rate = self.intra_node if near == size else min(self.intra_node, near * self.inter_node)
        return rate * self.link_efficiency

    def exchange_seconds(self, sent: float, size: int, stride: int) -> float:
        """Returns the seconds in which each of `size` ranks sends `sent` bytes, evenly to all, itself included."""
        if size == 1:
            return 0.0
        near = self.near(size, stride)
        inside, between = sent * (near - 1) / size, sent * (size - near) / size
        return self.latency + max(inside / self.intra_node, between / self.inter_node) / self.link_efficiency

    def near(self, size: int, stride: int) -> int:
        """Returns how many of `size` ranks, every `stride`th, are in one node."""
        return min(size, max(1, self.gpus_per_node // stride))


HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        "a100": Hardware(
            flops=312e12, memory=80 * GB, memory_bandwidth=2.0e12, intra_node=300 * GB, inter_node=25 * GB, host=22 * GB
        ),
        "h100": Hardware(flops=989e12, memory=80 * GB, memory_bandwidth=3.35e12),
        "h800": Hardware(flops=989e12, memory=80 * GB, memory_bandwidth=3.35e12, intra_node=200 * GB),
        "h200": Hardware(flops=989e12, memory=141 * GB, memory_bandwidth=4.8e12),
        "b200": Hardware(flops=2250e12, memory=180 * GB, memory_bandwidth=8.0e12, intra_node=900 * GB),
    }
)


def load_hardware(name: str) -> Hardware:
    """Returns one of `HARDWARE`, or what a JSON file describes: its fields, and optionally `like`, a name."""
    if name in HARDWARE:
        return HARDWARE[name]
    path = Path(name).expanduser()
    if path.suffix != ".json":
        raise ValueError(f"GPU {name!r} is unknown; use {', '.join(HARDWARE)}, or a .json file of its numbers.")
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist. Use {', '.join(HARDWARE)}, or write the file.")
    try:
        numbers = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    known = [field.name for field in fields(Hardware)]
    if not isinstance(numbers, dict) or (unknown := [key for key in numbers if key not in (*known, "like")]):
        wrong = f"{unknown[0]!r} in it is unknown" if isinstance(numbers, dict) else "it is not one"
        raise ValueError(f"{path} must be an object of a GPU's numbers, but {wrong}; the keys are {', '.join(known)}.")
    like = numbers.pop("like", None)
    if like is not None and like not in HARDWARE:
        raise ValueError(f"{path} is like {like!r}, which is unknown; use {', '.join(HARDWARE)}.")
    if like is not None:
        return replace(HARDWARE[like], **numbers)
    missing = [key for key in ("flops", "memory", "memory_bandwidth") if key not in numbers]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}. Add it, or `like`: one of {', '.join(HARDWARE)}.")
    return Hardware(**numbers)
