"""ConsistencyCheck: compares integers and digests of all ranks, and shares the failure of one, in small all-reduces."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

UNKNOWN = torch.iinfo(torch.int64).min // 2
"""The value that a rank without data sends."""


class ConsistencyCheck:
    """Integers that all ranks compare: after an `exchange`, the highest and the lowest value of each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.highest: list[int] = []
        self.lowest: list[int] = []

    @contextmanager
    def exchange(self, action: str, count: int = 1) -> Iterator[list[int]]:
        """Compares the `count` integers that the block appends to the list.

        If the block raises on one rank, every rank raises: that rank its own error, the others that it could not do
        the `action`.
        """
        values: list[int] = []
        error: Exception | None = None
        try:
            yield values
        except Exception as raised:
            error = raised
        if error is not None and dist.get_world_size() == 1:
            raise error
        failed_rank = self._reduce(
            values if error is None else [UNKNOWN] * count, UNKNOWN if error is None else dist.get_rank()
        )
        if error is not None:
            raise error
        if failed_rank != UNKNOWN:
            raise RuntimeError(f"rank {failed_rank} could not {action}: its own error says why.")

    def differ(self, entries: Sequence[int]) -> bool:
        """Returns whether two ranks had different values in one of these entries."""
        return any(self.lowest[entry] != self.highest[entry] for entry in entries)

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

    def _reduce(self, values: Sequence[int], failed_rank: int) -> int:
        """Fills `highest` and `lowest`, and returns a rank that failed, or UNKNOWN."""
        self.highest = self.lowest = list(values)
        if dist.get_world_size() == 1:
            return failed_rank
        negated = [UNKNOWN if value == UNKNOWN else -value for value in values]
        numbers = for_backend(torch.tensor([failed_rank, *values, *negated], dtype=torch.int64, device=self.device))
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        failed_rank, *maxima = numbers.tolist()
        self.highest = maxima[: len(values)]
        self.lowest = [UNKNOWN if value == UNKNOWN else -value for value in maxima[len(values) :]]
        return failed_rank


def for_backend(tensor: Tensor) -> Tensor:
    """Returns the tensor on the CPU if the backend is gloo, which sends from there; else as it is."""
    return tensor.cpu() if dist.is_initialized() and dist.get_backend() == "gloo" else tensor
