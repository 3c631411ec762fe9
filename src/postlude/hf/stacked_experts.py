"""Experts of multi-token prediction that files have one by one, seen stacked as the trunk's are."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from postlude.hf.tensor_source import TensorSource

ONE = re.compile(r"(mtp\..+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
FUSED, DOWN = ".gate_up_proj", ".down_proj"


class StackedExpertsSource:
    """The tensors of another source, where each depth's experts are [experts, 2 · inner, H] and [experts, H, inner].

    Each one's gate stands before its up. What is stacked already is left as it is.
    """

    def __init__(self, single: TensorSource) -> None:
        self._single = single
        self._experts: dict[str, int] = {}  # how many there are of one layer, by what their names begin with
        for name in single.names():
            if found := ONE.fullmatch(name):
                self._experts[found[1]] = max(self._experts.get(found[1], 0), int(found[2]) + 1)

    def names(self) -> Iterable[str]:
        """Every tensor, experts by the name that they have when they are stacked."""
        yield from (name for name in self._single.names() if not ONE.fullmatch(name))
        for stem in self._experts:
            yield from (stem + FUSED, stem + DOWN)

    def take(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        parts = self._parts(name)
        if parts is None:
            return self._single.take(name)
        return torch.stack([torch.cat([self._single.take(each) for each in expert]) for expert in parts])

    def shape(self, name: str) -> tuple[int, ...]:
        """The sizes of one tensor."""
        parts = self._parts(name)
        if parts is None:
            return self._single.shape(name)
        rows, *rest = zip(*(self._single.shape(each) for each in parts[0]), strict=True)
        return (len(parts), sum(rows), *(sizes[0] for sizes in rest))

    def _parts(self, name: str) -> list[list[str]] | None:
        """The tensors that a stacked one is made of, expert by expert; None if it is there as it is."""
        stem, dot, leaf = name.rpartition(".")
        if stem not in self._experts or dot + leaf not in (FUSED, DOWN):
            return None
        which = ("gate", "up") if dot + leaf == FUSED else ("down",)
        parts = [[f"{stem}.{expert}.{each}_proj.weight" for each in which] for expert in range(self._experts[stem])]
        there = set(self._single.names())
        for missing in (each for expert in parts for each in expert if each not in there):
            raise ValueError(f"the source lacks {missing}, but has other experts of {stem}; fetch it again.")
        return parts
