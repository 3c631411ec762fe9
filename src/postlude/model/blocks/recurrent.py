"""Recurrent: the base of blocks whose heads keep a decaying state (`M`, `G`): a short convolution, then a scan."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from postlude.data.microbatch import HeadExchange
from postlude.model.blocks.block import Block, SeparateUnit
from postlude.model.context import ForwardContext, Inputs, States
from postlude.model.parallel import PerHeadVectors
from postlude.model.steps import LayerStep, compute
from postlude.ops.convolution import last_inputs
from postlude.ops.packing import Packing


class Recurrence(ABC):
    """Convolution and scan of some heads, over whole sequences or one token at a time.

    Its states are the last inputs of the convolution [sequences, K - 1, channels] and those of the scan, fp32
    [sequences, heads, ...].
    """

    kernel: Tensor
    """The weight of the convolution, [channels, K]."""

    def outputs(self, inputs: Inputs, packing: Packing) -> Tensor:
        """Returns the outputs of whole sequences, [T, heads, width]."""
        return self.run(inputs, packing, last_states=False)[0]

    def scan(self, inputs: Inputs, packing: Packing) -> tuple[Tensor, States]:
        outputs, states, channels = self.run(inputs, packing, last_states=True)
        assert states is not None
        return outputs, (last_inputs(channels, packing, self.kernel.shape[1] - 1), states)

    @abstractmethod
    def run(self, inputs: Inputs, packing: Packing, *, last_states: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns the outputs, the scan's states after each sequence on request, and the convolution's inputs."""

    @abstractmethod
    def step(self, inputs: Inputs, states: States, running: Tensor | None) -> Tensor:
        """Runs one token of each sequence. Returns [sequences, heads, width]. See `RecurrentStep`."""


class Recurrent(Block):
    """A block defines `mix`, which projects the inputs of `recur` and its outputs.

    Its decays come from `vectors`, among them A_log and dt_bias, which stay in fp32.
    """

    supports_decoding = True
    cuda_graphable = True
    vectors: PerHeadVectors
    decays: tuple[float, float]
    """Initial range of A."""
    time_steps: tuple[float, float] = (1e-3, 1e-1)
    """Initial range of softplus(dt_bias), uniform in its logarithm."""
    ones: tuple[str, ...]
    """Parameters that start from one, whatever the model's norms do."""

    def steps(self) -> tuple[LayerStep, ...]:
        return (compute("vectors", self.read_vectors, recompute_selective=False), compute("sublayer", self.run))

    def sharded_separately(self) -> tuple[SeparateUnit, ...]:
        return (SeparateUnit(self.vectors, fp32=True),)

    def read_vectors(self, hidden: Tensor, context: ForwardContext) -> Mapping[str, Any]:
        return {"vectors": self.vectors(hidden.detach())}

    def run(self, hidden: Tensor, vectors: Mapping[str, Tensor], context: ForwardContext) -> Mapping[str, Tensor]:
        hidden, normed = self.norm.with_residual(hidden)
        return self.add_residual(hidden, self.mix(normed, vectors, context))

    def mix(self, hidden: Tensor, vectors: Mapping[str, Tensor], context: ForwardContext) -> Tensor:
        """Mixes tokens after the pre-norm, [T / tp, H] -> [T / tp, H]."""
        raise NotImplementedError(f"{type(self).__name__} must define mix().")

    def recur(
        self, inputs: Inputs, recurrence: Recurrence, head_exchange: HeadExchange, context: ForwardContext
    ) -> Tensor:
        """Runs whole sequences, or continues running ones from their states: [T, heads, width]."""
        if context.decode_state is None:
            return head_exchange.to_sequences(recurrence.outputs(inputs, head_exchange.packing))
        return context.decode_state.recur(self.name, inputs, recurrence.step, recurrence.scan)

    def reset(self, name: str, parameter: Tensor, std: float, generator: torch.Generator) -> None:
        """Initialises decays and time steps over their ranges, and kernels as torch's convolutions."""

        def uniform(low: float, high: float) -> Tensor:
            return torch.empty_like(parameter, dtype=torch.float32).uniform_(low, high, generator=generator)

        match name.split("."):
            case _ if name in self.ones:
                parameter.fill_(1.0)
            case ["vectors", "A_log"]:
                parameter.copy_(uniform(*self.decays).log())
            case ["vectors", "dt_bias"]:
                low, high = self.time_steps
                step = uniform(math.log(low), math.log(high)).exp()
                parameter.copy_(step + (-torch.expm1(-step)).log())  # whose softplus is the step
            case [kernels, "weight"] if kernels.endswith("_conv"):
                bound = parameter.shape[1] ** -0.5
                parameter.copy_(uniform(-bound, bound))
            case _:
                super().reset(name, parameter, std, generator)
