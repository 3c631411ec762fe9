"""ExpertLinear: one linear layer per expert, stacked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from postlude.lora import AdapterConfig
from postlude.model.parallel import Adapter, Role, local, sharded_parameter
from postlude.ops.experts import add_bias, grouped_linears
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
