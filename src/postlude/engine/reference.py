"""Reference: a frozen copy of the engine's weights, scored through the engine itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from postlude.data import Batch
from postlude.model.parallel import local_shard


@dataclass(frozen=True)
class TokenScores:
    """Per sequence in the caller's order, on the CPU: entry i is of token i given those before it; entry 0 is 0."""

    logprob: list[Tensor]
    entropy: list[Tensor] | None = None


class Scorer(Protocol):
    """A model in parts that scores tokens: an engine."""

    @property
    def device(self) -> torch.device:
        """Where its parts are."""
        ...

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """This rank's parameters and persistent buffers by their global names."""
        ...

    def logprobs(self, batch: Batch, *, entropy: bool = False, temperature: float = 1.0) -> TokenScores:
        """Log-prob of every token given those before it."""
        ...

    def topk(self, batch: Batch, k: int, *, temperature: float = 1.0) -> tuple[list[Tensor], list[Tensor]]:
        """The k likeliest tokens in place of every token."""
        ...


class Reference:
    """The weights as they were when this was made. To use them they change places with the engine's, and back.

    It costs one copy of this rank's weights, on the device or, with `offload`, in host memory.
    """

    def __init__(self, engine: Scorer, *, offload: bool = False) -> None:
        self.engine = engine
        where = torch.device("cpu") if offload else engine.device
        self.kept = {name: local_shard(tensor).detach().to(where, copy=True) for name, tensor in engine.tensors.items()}

    def logprobs(self, batch: Batch, *, entropy: bool = False, temperature: float = 1.0) -> TokenScores:
        """As `Engine.logprobs`, by the frozen weights."""
        with self.in_place():
            return self.engine.logprobs(batch, entropy=entropy, temperature=temperature)

    def topk(self, batch: Batch, k: int, *, temperature: float = 1.0) -> tuple[list[Tensor], list[Tensor]]:
        """As `Engine.topk`, by the frozen weights."""
        with self.in_place():
            return self.engine.topk(batch, k, temperature=temperature)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the engine has the frozen weights; after it, its own, however it ended."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        exchanged: list[tuple[Tensor, Tensor]] = []
        try:
            for name, tensor in self.engine.tensors.items():
                pair = local_shard(tensor), self.kept[name]
                _swap(*pair)
                exchanged.append(pair)
        except BaseException:  # such as a device without room for the largest tensor twice
            for pair in exchanged:
                _swap(*pair)
            raise


@torch.no_grad()
def _swap(one: Tensor, other: Tensor) -> None:
    before = one.clone()
    one.copy_(other)
    other.copy_(before)
