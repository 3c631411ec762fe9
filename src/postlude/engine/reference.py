"""Reference: a frozen copy of the engine's weights, which the engine evaluates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from postlude.data import Batch
from postlude.engine.adapters import AdaptedModel
from postlude.engine.result import TokenScores
from postlude.engine.training_state import TrainingState
from postlude.model.parallel import local_shard


class Scorer(AdaptedModel, Protocol):
    """A distributed model that scores tokens: an engine."""

    def logprobs(self, batch: Batch, *, entropy: bool = False) -> TokenScores: ...

    def topk(self, batch: Batch, k: int) -> tuple[list[Tensor], list[Tensor]]: ...


class Reference:
    """A frozen copy of the engine's weights. To evaluate it, they are swapped with the engine's weights, and back.

    It needs memory for one copy of this rank's weights, on the device or, with `offload`, in host memory. With LoRA it
    is a copy of the active adapter. If that is new, nothing is copied: the reference is the model without adapters.
    The engine may use another adapter when the reference is evaluated.
    """

    def __init__(self, engine: Scorer, *, offload: bool = False) -> None:
        self.engine = engine
        self.adapter = engine.adapters.active
        self.weights: dict[str, Tensor] = {}
        training_state = engine.training_states[self.adapter]
        if training_state.is_new_adapter():
            self.adapter = None
            return
        device = torch.device("cpu") if offload else engine.builder.device
        self.weights = {
            name: local_shard(tensor).detach().to(device, copy=True) for name, tensor in training_state.tensors.items()
        }

    def logprobs(self, batch: Batch, *, entropy: bool = False) -> TokenScores:
        with self.swapped_in():
            return self.engine.logprobs(batch, entropy=entropy)

    def topk(self, batch: Batch, k: int) -> tuple[list[Tensor], list[Tensor]]:
        with self.swapped_in():
            return self.engine.topk(batch, k)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Gives the engine the frozen weights inside the block, and its own afterwards, also if the block raises."""
        with ExitStack() as stack:
            stack.callback(self.engine.set_adapter, self.engine.adapters.active)
            self.engine.set_adapter(self.adapter)
            training_state = self.engine.training_states[self.adapter]
            self._swap(training_state)
            stack.callback(self._swap, training_state)
            yield

    def _swap(self, training_state: TrainingState) -> None:
        swapped: list[tuple[Tensor, Tensor]] = []
        try:
            self.engine.failure_state.check_on_device()
            for name, tensor in training_state.tensors.items():
                pair = local_shard(tensor), self.weights[name]
                _swap_values(*pair)
                swapped.append(pair)
        except BaseException:  # such as no memory for the largest tensor twice
            for pair in swapped:
                _swap_values(*pair)
            raise


@torch.no_grad()
def _swap_values(first: Tensor, second: Tensor) -> None:
    before = first.clone()
    first.copy_(second)
    second.copy_(before)
