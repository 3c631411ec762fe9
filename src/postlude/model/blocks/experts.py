"""The MLPs of an MoE block: experts that each see their own rows, with their linear layers, and one for all tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from postlude.lora import AdapterConfig, LoRAGroup, SharedMatrix
from postlude.model.blocks.mlp import GatedConfig
from postlude.model.parallel import Adapter, FSDPUnit, Linear, Role, fused_operand, is_dtensor, local, sharded_parameter
from postlude.model.recompute import Recompute, recomputed
from postlude.ops.decode_experts import ExpertMLPs
from postlude.ops.decode_linear import mlp_add
from postlude.ops.experts import add_bias, grouped_linears
from postlude.ops.norm import Norm
from postlude.world.mesh import Axis


class ExpertLinear(nn.Module):
    """One matrix [E / ep, out, in] and one bias [E / ep, out] per expert."""

    roles: ClassVar[Mapping[str, Role]] = {"weight": "matrix", "bias": "vector"}

    def __init__(self, experts: int, in_features: int, out_features: int, ep: Axis, *, bias: bool = False) -> None:
        super().__init__()
        self.shape, self.ep = (experts, out_features, in_features), ep
        self.weight = sharded_parameter(experts, out_features, in_features, axis=ep, dim=0)
        self.bias = sharded_parameter(experts, out_features, axis=ep, dim=0) if bias else None
        self.adapter: Adapter | None = None

    def add_adapter(self, config: AdapterConfig) -> None:
        experts, out_features, in_features = self.shape

        def matrix(name: str, *shape: int) -> nn.Parameter:
            if config.shared == name:
                return sharded_parameter(*shape, axis=self.ep, dim=None, dtype=torch.float32)
            return sharded_parameter(experts, *shape, axis=self.ep, dim=0, dtype=torch.float32)

        self.adapter = Adapter(config, matrix("a", config.rank, in_features), matrix("b", out_features, config.rank))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Applies each expert's layer to its rows, [R, in] -> [R, out]. They are sorted, with `counts` [E / ep]."""
        return apply_expert_linears(rows, counts, self)[0]

    def complete(self, product: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
        """Returns the product of rows and weight with what adapter and bias add to it, [R, out]."""
        if self.adapter is not None:
            product = product + self.adapter(rows, counts)
        return product if self.bias is None else add_bias(product, local(self.bias), counts)


def apply_expert_linears(rows: Tensor, counts: Tensor, *layers: ExpertLinear) -> tuple[Tensor, ...]:
    """Returns each layer's output for the same rows, [R, in] -> [R, out] each."""
    products = grouped_linears(rows, [local(layer.weight) for layer in layers], counts)
    return tuple(layer.complete(product, rows, counts) for layer, product in zip(layers, products, strict=True))


class Experts(FSDPUnit):
    """This rank's experts, stacked: gate and up [E / ep, I, H], down [E / ep, H, I], and biases if any."""

    lora_groups: ClassVar[Mapping[str, LoRAGroup]] = {"": "experts"}
    lora_shared: ClassVar[Mapping[str, SharedMatrix]] = {"gate_proj": "a", "up_proj": "a", "down_proj": "b"}
    """The matrix of an adapter on the side of the hidden states, which experts may share."""
    alternating: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")

    def __init__(self, config: GatedConfig, count: int, hidden_size: int, ep: Axis, *, bias: bool) -> None:
        super().__init__()
        self.config = config
        inner = config.intermediate_size
        self.gate_proj = ExpertLinear(count, hidden_size, inner, ep, bias=bias) if config.gated else None
        self.up_proj = ExpertLinear(count, hidden_size, inner, ep, bias=bias)
        self.down_proj = ExpertLinear(count, inner, hidden_size, ep, bias=bias)

    def forward(self, rows: Tensor, counts: Tensor, recompute: Recompute = "none") -> Tensor:
        """Applies the experts to `rows` [R, H], sorted by expert with `counts` [E / ep] -> [R, H]."""
        return recomputed(self._work, "selective" if recompute == "selective" else "none", rows, counts)

    def operand(self) -> ExpertMLPs | None:
        """Returns the experts as `ops.decode_experts` takes them; None if they have adapters or ranks share them."""
        gate, up, down, config = self.gate_proj, self.up_proj, self.down_proj, self.config
        if any(layer.adapter is not None or is_dtensor(layer.weight) for layer in (gate or up, up, down)):
            return None
        gate_weight, gate_bias = (None, None) if gate is None else (gate.weight, gate.bias)
        weights, biases = (gate_weight, up.weight, down.weight), (gate_bias, up.bias, down.bias)
        return ExpertMLPs(*weights, *biases, config.activation, config.alpha, config.limit, config.up_offset)

    def _work(self, rows: Tensor, counts: Tensor) -> Tensor:
        layers = (self.up_proj,) if self.gate_proj is None else (self.gate_proj, self.up_proj)
        *gates, up = apply_expert_linears(rows, counts, *layers)
        output: Tensor = self.down_proj(self.config.features(gates[0] if gates else None, up), counts)
        return output


class SharedExpert(nn.Module):
    """An MLP for every token, scaled by a sigmoid gate if there is one. Each rank has all of it."""

    lora_groups: ClassVar[Mapping[str, LoRAGroup]] = {"token_gate": "named"}
    never_fp8 = ("token_gate",)

    def __init__(self, config: GatedConfig, hidden_size: int, size: int, tp: Axis, *, gate: bool) -> None:
        super().__init__()
        self.config = config
        self.gate_proj = Linear(hidden_size, size, tp=tp) if config.gated else None
        self.up_proj = Linear(hidden_size, size, tp=tp)
        self.down_proj = Linear(size, hidden_size, tp=tp)
        self.token_gate = Linear(hidden_size, 1, tp=tp) if gate else None

    def fused_projections(self) -> tuple[tuple[Linear, ...], ...]:
        return () if self.gate_proj is None else ((self.gate_proj, self.up_proj),)

    def fused_decode(self, hidden: Tensor, norm: Norm, counters: Tensor) -> Tensor | None:
        """Returns `hidden` plus the expert of its norm, [T, H]. None without a plain gate, as in `Block`."""
        if not self.config.is_plain or self.token_gate is not None:
            return None
        operand, output = fused_operand(*self.fused_projections()), fused_operand((self.down_proj,))
        if operand is None or output is None:
            return None
        return mlp_add(hidden, norm, self.config.activation, operand, output, counters)

    def forward(self, tokens: Tensor) -> Tensor:
        """Applies the shared expert, [T, H] -> [T, H]."""
        gate = self.gate_proj(tokens) if self.gate_proj is not None else None
        output: Tensor = self.down_proj(self.config.features(gate, self.up_proj(tokens)))
        return output if self.token_gate is None else output * self.token_gate(tokens).sigmoid()
