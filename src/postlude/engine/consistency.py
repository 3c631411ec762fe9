"""ConsistencyCheck: compares integers and digests of all ranks, and shares the failure of one, in small all-reduces."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

UNKNOWN = torch.iinfo(torch.int64).min // 2
"""The value that a rank without data sends."""


class ConsistencyCheck:
    """Lists of integers by name, which all ranks compare: after an `exchange`, the highest and lowest of each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.highest: dict[str, list[int]] = {}
        self.lowest: dict[str, list[int]] = {}

    @contextmanager
    def exchange(self, action: str, sizes: Mapping[str, int]) -> Iterator[dict[str, list[int]]]:
        """Compares the lists that the block stores in the dict. `sizes` has the length of each, the same on all ranks.

        A list that the block does not store is UNKNOWN on this rank. If the block raises on one rank, every rank
        raises: that rank its own error, the others that it could not do the `action`.
        """
        unknown = {name: [UNKNOWN] * size for name, size in sizes.items()}
        values = dict(unknown)
        error: Exception | None = None
        try:
            yield values
        except Exception as raised:
            error = raised
        if error is not None and dist.get_world_size() == 1:
            raise error
        failed_rank = self._reduce(values, UNKNOWN) if error is None else self._reduce(unknown, dist.get_rank())
        if error is not None:
            raise error
        if failed_rank != UNKNOWN:
            raise RuntimeError(f"rank {failed_rank} could not {action}: its own error says why.")

    def differs(self, name: str) -> bool:
        """Returns whether two ranks had different integers under this name."""
        return self.lowest[name] != self.highest[name]

    def digest(self, *data: Sequence[int] | str | Tensor) -> int:
        """Returns a 62-bit digest of the data; 0 if there is only one rank."""
        if dist.get_world_size() == 1:
            return 0
        digest = hashlib.blake2b(digest_size=8)
        for item in data:
            if isinstance(item, str):
                content: Any = item.encode()
            elif isinstance(item, Tensor):
                content = item.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy() if item.numel() else b""
            else:
                content = np.asarray(item, dtype=np.int64)
            digest.update(f"{len(content)} ".encode())
            digest.update(content)
        return int.from_bytes(digest.digest(), "little") >> 2

    def _reduce(self, values: Mapping[str, list[int]], failed_rank: int) -> int:
        """Fills `highest` and `lowest`, and returns a rank that failed, or UNKNOWN."""
        self.highest = self.lowest = dict(values)
        if dist.get_world_size() == 1:
            return failed_rank
        integers = [integer for name in values for integer in values[name]]
        data = torch.tensor([failed_rank, *integers, *map(_negate, integers)], dtype=torch.int64, device=self.device)
        data = cpu_if_gloo(data)
        dist.all_reduce(data, dist.ReduceOp.MAX)
        failed_rank, *maxima = data.tolist()
        highest, lowest = iter(maxima[: len(integers)]), map(_negate, maxima[len(integers) :])
        self.highest = {name: list(islice(highest, len(values[name]))) for name in values}
        self.lowest = {name: list(islice(lowest, len(values[name]))) for name in values}
        return failed_rank


def _negate(integer: int) -> int:
    """Returns -integer, so that a maximum of negated integers gives the minimum; UNKNOWN stays the lowest."""
    return UNKNOWN if integer == UNKNOWN else -integer


def cpu_if_gloo(tensor: Tensor) -> Tensor:
    """Returns the tensor on the CPU if the backend is gloo, which sends from there; else as it is."""
    return tensor.cpu() if dist.is_initialized() and dist.get_backend() == "gloo" else tensor
