"""TensorSource: tensors by their Hugging Face names, read one by one. `tensor_sources.py` has the implementations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor


class TensorSource(Protocol):
    """Tensors by name, read on demand."""

    def names(self) -> Iterable[str]:
        """Returns the names of all tensors."""

    def take(self, name: str) -> Tensor:
        """Returns one tensor. It is taken once, so a source may release it."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of one tensor, without reading it."""
