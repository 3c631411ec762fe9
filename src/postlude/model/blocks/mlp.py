"""MLP: SwiGLU, GeGLU or ungated ReLU², and the activations they are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from postlude.model.block_config import BlockConfig
from postlude.model.blocks.block import Block
from postlude.model.config import ModelConfig
from postlude.model.context import ForwardContext
from postlude.model.parallel import ColumnLinear, RowLinear
from postlude.ops.collectives import gather_from_sequence
from postlude.world.mesh import Mesh

Activation = Literal["silu", "gelu", "gelu_tanh", "relu2"]


@dataclass(frozen=True, kw_only=True)
class MLPConfig(BlockConfig):
    """`gated` with silu is SwiGLU, with gelu GeGLU; ungated relu2 is ReLU²."""

    intermediate_size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False

    def flops(self, hidden_size: int) -> float:
        """Two or three products."""
        return 2 * hidden_size * self.intermediate_size * (3 if self.gated else 2)

    def kept(self, hidden_size: int) -> float:
        """The norm's input and output, and every feature before and after the activation."""
        return 3 * hidden_size + self.intermediate_size * (4 if self.gated else 2)


class MLP(Block):
    """down(activation(gate(x)) · up(x)), or down(activation(up(x)))."""

    Config = MLPConfig
    generates = True

    def __init__(self, config: MLPConfig, model: ModelConfig, name: str, mesh: Mesh) -> None:
        super().__init__(config, model, name, mesh)
        self.activation = config.activation
        outer, inner = model.hidden_size, config.intermediate_size
        self.gate_proj = ColumnLinear(outer, inner, bias=config.bias, tp=mesh.tp) if config.gated else None
        self.up_proj = ColumnLinear(outer, inner, bias=config.bias, tp=mesh.tp)
        self.down_proj = RowLinear(inner, outer, bias=config.bias, tp=mesh.tp)

    def work(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """[T / tp, H] -> [T / tp, H]."""
        hidden = gather_from_sequence(hidden, self.mesh.tp.group)
        gate = self.gate_proj(hidden) if self.gate_proj is not None else None
        output: Tensor = self.down_proj(gated(self.activation, gate, self.up_proj(hidden)))
        return output


def gated(activation: Activation, gate: Tensor | None, up: Tensor) -> Tensor:
    """activation(gate) · up, or activation(up) where there is no gate."""
    return activate(activation, up) if gate is None else activate(activation, gate) * up


def activate(activation: Activation, values: Tensor) -> Tensor:
    """The activation by name."""
    match activation:
        case "silu":
            return F.silu(values)
        case "gelu":
            return F.gelu(values)
        case "gelu_tanh":
            return F.gelu(values, approximate="tanh")
        case "relu2":
            return F.relu(values).square()
    raise ValueError(f"activation {activation!r} is unknown; use silu, gelu, gelu_tanh or relu2.")
