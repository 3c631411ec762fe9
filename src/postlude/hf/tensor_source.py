"""What a source of tensors offers, whatever they come from: one at a time, by their Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor


class TensorSource(Protocol):
    """Tensors by name, read on demand."""

    def names(self) -> Iterable[str]:
        """Every tensor there is."""
        ...

    def take(self, name: str) -> Tensor:
        """One tensor. It is taken once, so a source may let go of it."""
        ...


class SizedSource(TensorSource, Protocol):
    """Tensors whose sizes are known before they are read."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The sizes of one tensor."""
        ...
