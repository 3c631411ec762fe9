"""StackedExpertsSource: stacks experts of multi-token prediction that files have one by one."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from postlude.hf.family import TensorSource

ONE = re.compile(r"(mtp\..+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
FUSED, DOWN = ".gate_up_proj", ".down_proj"


class StackedExpertsSource:
    """The tensors of another source, with each depth's experts as [experts, 2 · inner, H] and [experts, H, inner].

    The gate of an expert comes before its up projection. Experts that are stacked already stay as they are.
    """

    def __init__(self, single: TensorSource) -> None:
        self._single = single
        self._experts: dict[str, int] = {}  # the number of experts by the prefix of their names
        for name in single.names():
            if match := ONE.fullmatch(name):
                self._experts[match[1]] = max(self._experts.get(match[1], 0), int(match[2]) + 1)

    def names(self) -> Iterable[str]:
        """Returns the names of all tensors, with the names of stacked experts."""
        yield from (name for name in self._single.names() if not ONE.fullmatch(name))
        for stem in self._experts:
            yield from (stem + FUSED, stem + DOWN)

    def take(self, name: str) -> Tensor:
        """Returns one tensor, on the CPU."""
        parts = self._parts(name)
        if parts is None:
            return self._single.take(name)
        return torch.stack([torch.cat([self._single.take(part) for part in expert]) for expert in parts])

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of one tensor."""
        parts = self._parts(name)
        if parts is None:
            return self._single.shape(name)
        rows, *other_sizes = zip(*(self._single.shape(part) for part in parts[0]), strict=True)
        return (len(parts), sum(rows), *(sizes[0] for sizes in other_sizes))

    def _parts(self, name: str) -> list[list[str]] | None:
        """Returns the tensors of a stacked one, expert by expert; None if it is not stacked here."""
        stem, dot, leaf = name.rpartition(".")
        if stem not in self._experts or dot + leaf not in (FUSED, DOWN):
            return None
        projections = ("gate", "up") if dot + leaf == FUSED else ("down",)
        experts = range(self._experts[stem])
        parts = [[f"{stem}.{expert}.{projection}_proj.weight" for projection in projections] for expert in experts]
        available = set(self._single.names())
        for missing in (name for expert in parts for name in expert if name not in available):
            raise ValueError(f"the source lacks {missing}, but has other experts of {stem}; fetch it again.")
        return parts
