"""Hardware: the numbers of a GPU and of what joins it to others, by name or from a JSON file. No torch."""

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
    """One GPU, and its links to those of its node and to other nodes. Rates are a second's, one way.

    `efficiency` is the share of `flops` that a whole forward or backward reaches, `link_efficiency` that of a link's.
    """

    flops: float
    """bf16 products, dense."""
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes between the GPU and its memory."""
    node: int = 8
    """GPUs of a node."""
    inside: float = 450 * GB
    """Bytes a GPU sends to others of its node."""
    between: float = 50 * GB
    """Bytes a GPU sends to other nodes."""
    latency: float = 2e-5
    """Seconds that a transfer takes besides."""
    efficiency: float = 0.45
    link_efficiency: float = 0.8

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (value == 0 and field.name != "latency"):
                raise ValueError(f"{field.name} of a GPU is {value!r}; give a number above 0.")
            if field.name.endswith("efficiency") and value > 1:
                raise ValueError(f"{field.name} is {value}, but is a share: give at most 1.")

    def ring_rate(self, size: int, stride: int) -> float:
        """Bytes a second that come to each of `size` ranks, every `stride`th, that gather or sum in a ring.

        Between nodes a ring passes through the links of all its ranks in a node at once.
        """
        near = self.near(size, stride)
        rate = self.inside if near == size else min(self.inside, near * self.between)
        return rate * self.link_efficiency

    def exchange_seconds(self, sent: float, size: int, stride: int) -> float:
        """How long it takes when each of `size` ranks sends `sent` bytes, evenly to all of them, itself included."""
        if size == 1:
            return 0.0
        near = self.near(size, stride)
        inside, between = sent * (near - 1) / size, sent * (size - near) / size
        return self.latency + max(inside / self.inside, between / self.between) / self.link_efficiency

    def near(self, size: int, stride: int) -> int:
        """How many of `size` ranks, every `stride`th, are in one node."""
        return min(size, max(1, self.node // stride))


HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        "a100": Hardware(flops=312e12, memory=80 * GB, bandwidth=2.0e12, inside=300 * GB, between=25 * GB),
        "h100": Hardware(flops=989e12, memory=80 * GB, bandwidth=3.35e12),
        "h800": Hardware(flops=989e12, memory=80 * GB, bandwidth=3.35e12, inside=200 * GB),
        "h200": Hardware(flops=989e12, memory=141 * GB, bandwidth=4.8e12),
        "b200": Hardware(flops=2250e12, memory=180 * GB, bandwidth=8.0e12, inside=900 * GB),
    }
)


def load_hardware(name: str) -> Hardware:
    """One of `HARDWARE`, or one that a JSON file describes: its fields, and perhaps `like`, a name to start from."""
    if name in HARDWARE:
        return HARDWARE[name]
    path = Path(name).expanduser()
    if path.suffix != ".json":
        raise ValueError(f"GPU {name!r} is unknown; use {', '.join(HARDWARE)}, or a .json file of its numbers.")
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist. Use {', '.join(HARDWARE)}, or write the file.")
    try:
        given = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    known = [field.name for field in fields(Hardware)]
    if not isinstance(given, dict) or (unknown := [key for key in given if key not in (*known, "like")]):
        wrong = f"{unknown[0]!r} in it is unknown" if isinstance(given, dict) else "it is none"
        raise ValueError(f"{path} is to be an object of a GPU's numbers, but {wrong}; there are {', '.join(known)}.")
    like = given.pop("like", None)
    if like is not None and like not in HARDWARE:
        raise ValueError(f"{path} is like {like!r}, which is unknown; use {', '.join(HARDWARE)}.")
    if like is not None:
        return replace(HARDWARE[like], **given)
    missing = [key for key in ("flops", "memory", "bandwidth") if key not in given]
    if missing:
        raise ValueError(f"{path} does not say {', '.join(missing)}. Add it, or `like`: one of {', '.join(HARDWARE)}.")
    return Hardware(**given)
