"""MLP: SwiGLU, GeGLU or ungated ReLU², chosen by `gated` and `activation`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from torch import Tensor

from postlude.checks import Finite, Positive, check_bounds
from postlude.lora import LoRAGroup
from postlude.model.block_config import BlockConfig, Size
from postlude.model.blocks.block import Block
from postlude.model.config import ModelConfig
from postlude.model.context import ForwardContext
from postlude.model.parallel import ColumnLinear, Linear, RowLinear, apply_linears, fused_operand
from postlude.ops.activation import Activation, gated_activation
from postlude.ops.collectives import gather_from_sequence
from postlude.ops.decode_linear import mlp_add
from postlude.ops.norm import Norm
from postlude.world.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class GatedConfig(BlockConfig):
    """The intermediate features are activation(gate) · (up + up_offset), or activation(up) if not `gated`.

    `gated` with silu is SwiGLU, with gelu GeGLU; ungated relu2 is ReLU². `limit` clamps the gate from above and `up` on
    both sides, before the activation. `alpha` makes silu steeper: x · sigmoid(alpha · x).
    """

    intermediate_size: Size
    activation: Activation = "silu"
    gated: bool = True
    alpha: Finite = 1.0
    limit: Positive | None = None
    up_offset: Finite = 0.0

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.alpha != 1.0 and self.activation != "silu":
            raise ValueError(f"alpha={self.alpha} makes silu steeper, but the activation is {self.activation}.")
        if not self.gated and (self.limit is not None or self.up_offset):
            raise ValueError(
                f"limit={self.limit} and up_offset={self.up_offset} belong to a gated MLP; leave them out, "
                "or set gated=True."
            )

    @property
    def is_plain(self) -> bool:
        """Whether it is gated, by the activation alone: without alpha, limit and offset."""
        return self.gated and self.alpha == 1.0 and self.limit is None and not self.up_offset

    @classmethod
    def gated_fields(cls, others: Sequence[BlockConfig]) -> dict[str, Any]:
        """Returns the fields of the first GatedConfig among `others`, else the shared fields of the first."""
        gated = next((other for other in others if isinstance(other, GatedConfig)), None)
        return (
            cls.shared_fields(others)
            if gated is None
            else {field.name: getattr(gated, field.name) for field in fields(GatedConfig)}
        )

    def features(self, gate: Tensor | None, up: Tensor) -> Tensor:
        """Returns the intermediate features, [..., intermediate_size], from both projections' outputs, or `up`'s."""
        if self.alpha == 1.0:
            return gated_activation(*self._clamp_and_offset(gate, up), self.activation)
        gate, up = self._clamp_and_offset(gate, up)
        activated = up if gate is None else gate
        activated = activated * (self.alpha * activated).sigmoid()
        return activated if gate is None else activated * up

    def apply_down(self, down: Linear | RowLinear, gate: Tensor | None, up: Tensor) -> Tensor:
        """Applies `down` to the intermediate features, without keeping them for the backward where possible."""
        if self.alpha == 1.0:
            return down.apply_gated(*self._clamp_and_offset(gate, up), self.activation)
        output: Tensor = down(self.features(gate, up))
        return output

    def _clamp_and_offset(self, gate: Tensor | None, up: Tensor) -> tuple[Tensor | None, Tensor]:
        if gate is None:
            return gate, up
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate, up + self.up_offset if self.up_offset else up


@dataclass(frozen=True, kw_only=True)
class MLPConfig(GatedConfig):
    """A dense MLP."""

    kernel_share = 0.55
    bias: bool = False

    @classmethod
    def default_for(cls, hidden_size: int, others: Sequence[BlockConfig]) -> Self:
        """Returns SwiGLU, or the experts' fields; intermediate_size is 8/3 · hidden_size, rounded up to 64."""
        return cls(**cls.gated_fields(others) | {"intermediate_size": 64 * math.ceil(hidden_size * 8 / 3 / 64)})

    def flops(self, hidden_size: int) -> float:
        """Counts two or three GEMMs."""
        return 2 * hidden_size * self.intermediate_size * (3 if self.gated else 2)

    def saved_activations(self, hidden_size: int) -> float:
        """Counts three tensors of the norm, and every feature before and after the activation."""
        return 3 * hidden_size + self.intermediate_size * (4 if self.gated else 2)

    def wgrad_activations(self, hidden_size: int) -> float:
        """Counts the norm's output and the features; gradients of those before the activation, and of the output."""
        return 2 * hidden_size + self.intermediate_size * (3 if self.gated else 2)


class MLP(Block):
    """down(activation(gate(x)) · up(x)), or down(activation(up(x)))."""

    Config = MLPConfig
    lora_groups: ClassVar[Mapping[str, LoRAGroup]] = {"": "mlp"}
    supports_decoding = shares_prefixes = batch_invariant = cuda_graphable = True

    def __init__(self, config: MLPConfig, model: ModelConfig, name: str, mesh: Mesh) -> None:
        super().__init__(config, model, name, mesh)
        self.config = config
        hidden, intermediate = model.hidden_size, config.intermediate_size
        self.gate_proj = ColumnLinear(hidden, intermediate, bias=config.bias, tp=mesh.tp) if config.gated else None
        self.up_proj = ColumnLinear(hidden, intermediate, bias=config.bias, tp=mesh.tp)
        self.down_proj = RowLinear(intermediate, hidden, bias=config.bias, tp=mesh.tp)

    def fused_projections(self) -> tuple[tuple[ColumnLinear, ...], ...]:
        """Returns gate and up, in the order of their fused weight."""
        return ((*(() if self.gate_proj is None else (self.gate_proj,)), self.up_proj),)

    def fused_decode(self, hidden: Tensor, norm: Norm, context: ForwardContext) -> Tensor | None:
        """Supports a gated MLP of GEMMs and an activation only: see `Block`."""
        config, operand = self.config, fused_operand(self.fused_projections()[0])
        output = fused_operand((self.down_proj,))
        if operand is None or output is None or config.bias or not config.is_plain:
            return None
        return mlp_add(hidden, norm, config.activation, operand, output, context.counters)

    def sublayer(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Computes the MLP, [T / tp, H] -> [T / tp, H]."""
        hidden = gather_from_sequence(hidden, self.mesh.tp.group)
        *gates, up = apply_linears(hidden, *self.fused_projections()[0], single_gemm=True)
        return self.config.apply_down(self.down_proj, gates[0] if gates else None, up)
