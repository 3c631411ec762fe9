"""Tensor-parallel layers: parameters are stored as DTensors and used as plain tensors, with explicit collectives.

Between blocks each rank holds its own shard of the tokens. A block that works on heads or features gathers all tokens
(`gather_from_sequence`); its column layers compute different features on each rank, and its row layer sums the parts
and scatters the tokens again. What works token by token (norms, routers) stays on the shard with a copy of its
parameters. So every replicated parameter is used on different tokens or heads, and its gradient is a sum over ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from postlude.lora import AdapterConfig
from postlude.model.recompute import Recompute, recomputed
from postlude.ops.activation import Activation, gated_activation, gated_linear
from postlude.ops.adapted_linear import AdapterOperand, adapted_linears
from postlude.ops.block_fp8 import FP8Weight, fp8_linears, joined
from postlude.ops.collectives import scatter_to_sequence, sum_over_group
from postlude.ops.experts import grouped_linear
from postlude.ops.fp8 import FP8Scaling
from postlude.ops.linear import adjacent_view, embed, linear, linear_group
from postlude.ops.low_rank import LowRank
from postlude.ops.norm import rms_norm, rms_norm_with_residual
from postlude.world.mesh import SINGLE_RANK, Axis

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


Role: TypeAlias = Literal["matrix", "norm", "vector"]
"""The role of a parameter, whatever its number of dimensions: a matrix, which starts from random values; the scale of a
norm, which starts from one; or another vector, such as a bias, which starts from zero. Weight decay, 8-bit moments and
state in host memory are for matrices only."""


def role_of(model: nn.Module, name: str) -> Role:
    """Returns the role of a parameter from `roles` of its module or the nearest parent that lists it."""
    path = name.split(".")
    for cut in range(len(path) - 1, -1, -1):
        roles: Mapping[str, Role] = getattr(model.get_submodule(".".join(path[:cut])), "roles", {})
        if (leaf := ".".join(path[cut:])) in roles:
            return roles[leaf]
    raise TypeError(
        f"{name} has no role: add {path[-1]!r} to `roles` of the module that makes it, as "
        f'{{{path[-1]!r}: "matrix"}}, or "norm", or "vector".'
    )


def sharded_parameter(*shape: int, axis: Axis, dim: int | None, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Returns an uninitialised parameter of this global shape, sharded along `dim`; None replicates it.

    With a `dtype` it ignores the model's dtype. To be gathered in it too, its module must be a `SeparateUnit`. Where
    the other ranks do not exist (a planned layout), it is a plain tensor of this rank's size.
    """
    local_shape = list(shape)
    if dim is not None:
        start, stop = axis.block(shape[dim])
        local_shape[dim] = stop - start
    if axis.mesh is None:
        return nn.Parameter(torch.empty(local_shape, dtype=dtype))
    from torch.distributed.tensor import DTensor, Replicate, Shard  # takes long to import

    full = torch.empty(shape, device="meta")
    placement = Replicate() if dim is None else Shard(dim)
    return nn.Parameter(
        DTensor.from_local(
            torch.empty(local_shape, dtype=dtype),
            axis.mesh,
            [placement],
            run_check=False,
            shape=full.shape,
            stride=full.stride(),
        )
    )


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Sets the default dtype of parameters created inside; None keeps torch's."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def is_dtensor(parameter: Tensor) -> TypeGuard[DTensor]:
    if type(parameter) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor)


def local(parameter: Tensor) -> Tensor:
    """Returns this rank's part of a parameter for a forward. The gradient of a replica is this rank's addend."""
    if not is_dtensor(parameter):
        return parameter
    from torch.distributed.tensor import Partial

    placements = [Partial() if placement.is_replicate() else placement for placement in parameter.placements]
    part: Tensor = parameter.to_local(grad_placements=placements)
    return part


def local_shard(parameter: Tensor) -> Tensor:
    """Returns the memory in which this rank stores a parameter or its gradient. No gradient."""
    if not is_dtensor(parameter):
        return parameter.detach() if parameter.requires_grad else parameter
    with torch.no_grad():
        part: Tensor = parameter.to_local()
    return part


def region(parameter: Tensor) -> tuple[slice, ...]:
    """Returns the slices of the global parameter that `local_shard` covers."""
    bounds = [(0, size) for size in parameter.shape]
    if is_dtensor(parameter):
        mesh = parameter.device_mesh
        coordinate = mesh.get_coordinate()
        assert coordinate is not None  # this rank is part of the mesh
        # Tensor parallelism is the last mesh dimension and divided first; data-parallel shards divide the rest.
        for placement, size, rank in reversed(list(zip(parameter.placements, mesh.shape, coordinate, strict=True))):
            dimension = getattr(placement, "dim", None)  # of a shard, strided or not; a replica has none
            if dimension is not None:
                start, stop = bounds[dimension]
                first, last = Axis(size, rank).block(stop - start)
                bounds[dimension] = start + first, start + last
    return tuple(slice(start, stop) for start, stop in bounds)


class FSDPUnit(nn.Module):
    """A module whose weights FSDP gathers, and whose gradients it reduces, together: a layer, a separate unit, a stage.

    FSDP does both around its forward. A schedule plan runs the steps of a layer without calling it. It then calls
    `trigger_grad_reduce` and differentiates the result, so that FSDP reduces the gradients.
    """

    alternating: ClassVar[tuple[str, ...]] = ()  # its layers whose weights may be one: `ops.experts.alternating`

    def trigger_grad_reduce(self, nothing: Tensor) -> Tensor:
        """Returns a copy: only the call and its backward matter."""
        return nothing.clone()


class Adapter(nn.Module):
    """The low-rank addition to a linear layer, or to the stacked ones of experts: scale · B · A · input.

    Its output is in the parallel state of the layer's: a column layer's B is sharded over output features, a row
    layer's A over input features, and those of experts over experts. The other matrix is replicated. Both are stored in
    fp32 whatever the model's dtype, since they are trained and the model is not.
    """

    roles: ClassVar[Mapping[str, Role]] = {"a": "matrix", "b": "matrix"}

    def __init__(self, config: AdapterConfig, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.config = config
        self.a, self.b = a, b

    def operand(self) -> AdapterOperand:
        return AdapterOperand(local(self.a), local(self.b), self.config.scale)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """[T, in] -> [T, out]. Rows are sorted by expert and `counts` [E] has the rows of each."""
        low = _product(rows, local(self.a), counts)
        return _product(low if self.config.scale == 1.0 else low * self.config.scale, local(self.b), counts)

    def extend_rows(self, rows: Tensor) -> Tensor:
        """Returns rows [T, in] with scale · A · row beside each: [T, in + rank], rank rounded up to 64."""
        return torch.cat([rows, _padded(linear(rows, local(self.a)) * self.config.scale)], -1)

    def extend_weight(self, weight: Tensor) -> Tensor:
        """Returns the layer's weight [out, in] with B beside it, for products with `extend_rows`."""
        return torch.cat([weight, _padded(local(self.b))], -1)


def _padded(columns: Tensor) -> Tensor:
    """Returns columns with zeros after them, up to a multiple of 64, which kernels need."""
    return F.pad(columns, (0, -columns.shape[-1] % 64))


def _new_adapter(
    config: AdapterConfig, in_features: int, out_features: int, tp: Axis, weight_dim: int | None
) -> Adapter:
    """Returns an adapter of a layer whose weight [out, in] is sharded along `weight_dim`."""
    dims = {None: (None, None), 0: (None, 0), 1: (1, None)}[weight_dim]
    a = sharded_parameter(config.rank, in_features, axis=tp, dim=dims[0], dtype=torch.float32)
    b = sharded_parameter(out_features, config.rank, axis=tp, dim=dims[1], dtype=torch.float32)
    return Adapter(config, a, b)


def _product(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return linear(rows, weight) if weight.dim() == 2 else grouped_linear(rows, weight, counts)


class Linear(nn.Module):
    """A linear layer with a replicated weight, applied token by token."""

    roles: ClassVar[Mapping[str, Role]] = {"weight": "matrix", "bias": "vector"}
    weight_dim: ClassVar[int | None] = None
    """The dimension of the weight [out, in] that tensor parallelism shards."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, tp: Axis = SINGLE_RANK) -> None:
        super().__init__()
        self.in_features, self.out_features, self.tp = in_features, out_features, tp
        self.weight = sharded_parameter(out_features, in_features, axis=tp, dim=self.weight_dim)
        self.bias = sharded_parameter(out_features, axis=tp, dim=0 if self.weight_dim == 0 else None) if bias else None
        self.adapter: Adapter | None = None
        self.fp8_weight: FP8Weight | None = None  # used instead of the weight: see `FP8Weights`
        self.fp8: FP8Scaling | None = None  # of products in FP8: `fp8.py` says which layers have them

    def use_fp8(self) -> None:
        """Multiplies in FP8 from now on. Ranks that hold parts of the rows of an operand share their scales."""
        groups = {None: (None, None), 0: (None, self.tp.group), 1: (self.tp.group, None)}
        self.fp8 = FP8Scaling(*groups[self.weight_dim])

    def add_adapter(self, config: AdapterConfig) -> None:
        self.adapter = _new_adapter(config, self.in_features, self.out_features, self.tp, self.weight_dim)

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        return self._product(hidden, _local_or_none(self.bias))

    def apply_gated(self, gate: Tensor | None, up: Tensor, activation: Activation) -> Tensor:
        """Returns `forward` of activation(gate) · up, [T, in] both, or of activation(up): [T, out]."""
        if self.adapter is not None or self.fp8_weight is not None:
            output: Tensor = self(gated_activation(gate, up, activation))
            return output
        return gated_linear(gate, up, activation, local(self.weight), _local_or_none(self.bias), fp8=self.fp8)

    def _product(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.fp8_weight is not None:
            return apply_linears(rows, self)[0]
        weight = local(self.weight)
        if self.adapter is None:
            return linear(rows, weight, bias, fp8=self.fp8)
        return adapted_linears(rows, [weight], [bias], [self.adapter.operand()], fp8=self.fp8)[0]


class FP32Linear(FSDPUnit):
    """A linear layer in fp32 with a replicated weight, stored in fp32 whatever the model's dtype.

    Its owner declares it a `SeparateUnit` with `fp32`, so that it is gathered in fp32 too.
    """

    roles: ClassVar[Mapping[str, Role]] = {"weight": "matrix", "bias": "vector"}
    adapter: Adapter | None

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, tp: Axis = SINGLE_RANK) -> None:
        super().__init__()
        self.tp, self.adapter = tp, None
        self.weight = sharded_parameter(out_features, in_features, axis=tp, dim=None, dtype=torch.float32)
        self.bias = sharded_parameter(out_features, axis=tp, dim=None, dtype=torch.float32) if bias else None

    def add_adapter(self, config: AdapterConfig) -> None:
        out_features, in_features = self.weight.shape
        self.adapter = _new_adapter(config, in_features, out_features, self.tp, None)

    def forward(self, hidden: Tensor, recompute: Recompute = "none") -> Tensor:
        """[T, in] -> [T, out] fp32."""
        return recomputed(self._work, recompute, hidden)

    def _work(self, hidden: Tensor) -> Tensor:
        bias, rows = _local_or_none(self.bias), hidden.float()
        product = linear(rows, local(self.weight).float(), None if bias is None else bias.float())
        if self.adapter is None:
            return product
        a, b = local(self.adapter.a).float(), local(self.adapter.b).float()
        return product + linear(linear(rows, a) * self.adapter.config.scale, b)


class ValueHead(FSDPUnit):
    """One number per token, hidden · weight in fp32, with a replicated fp32 weight."""

    roles: ClassVar[Mapping[str, Role]] = {"weight": "vector"}

    def __init__(self, size: int, *, tp: Axis = SINGLE_RANK) -> None:
        super().__init__()
        self.weight = sharded_parameter(size, axis=tp, dim=None, dtype=torch.float32)

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, size] -> [T] fp32."""
        return hidden.float() @ local(self.weight).float()


class PerHeadVectors(FSDPUnit):
    """Vectors of one number per head, sharded over heads and stored in fp32 whatever the model's dtype.

    Its owner declares it a `SeparateUnit` with `fp32`, so that they are gathered in fp32 too.
    """

    def __init__(self, names: Sequence[str], heads: int, *, tp: Axis = SINGLE_RANK) -> None:
        super().__init__()
        self.roles: Mapping[str, Role] = dict.fromkeys(names, "vector")
        for name in names:
            self.register_parameter(name, sharded_parameter(heads, axis=tp, dim=0, dtype=torch.float32))

    def forward(self, hidden: Tensor) -> dict[str, Tensor]:
        """Returns each vector by name, [heads / tp] fp32, as a copy, since gathered weights are freed.

        They do not depend on `hidden`; on a GPU, FSDP needs an argument.
        """
        return {name: local(vector).float().clone() for name, vector in self.named_parameters()}


class DepthwiseConvWeights(nn.Module):
    """The depthwise kernel [width] of each channel, sharded over channels."""

    roles: ClassVar[Mapping[str, Role]] = {"weight": "matrix", "bias": "vector"}

    def __init__(self, channels: int, width: int, *, bias: bool = False, tp: Axis = SINGLE_RANK) -> None:
        super().__init__()
        self.weight = sharded_parameter(channels, width, axis=tp, dim=0)
        self.bias = sharded_parameter(channels, axis=tp, dim=0) if bias else None


class ColumnLinear(Linear):
    """Column-parallel: all tokens -> this rank's output features, [T, in] -> [T, out / tp]."""

    weight_dim = 0


def apply_linears(hidden: Tensor, *layers: Linear, single_gemm: bool = False) -> tuple[Tensor, ...]:
    """Returns each layer's output for the same tokens, [T, in] -> [T, out] each.

    `single_gemm`: see `linear_group`. Layers in FP8 are one group, and those that are not another.
    """
    fp8, others = layers[0].fp8, [layer for layer in layers if layer.fp8 is None]
    if 0 < len(others) < len(layers):
        in_fp8 = [layer for layer in layers if layer.fp8 is not None]
        outputs = [iter(apply_linears(hidden, *group, single_gemm=single_gemm)) for group in (in_fp8, others)]
        return tuple(next(outputs[layer.fp8 is None]) for layer in layers)
    weights, biases = [local(layer.weight) for layer in layers], [_local_or_none(layer.bias) for layer in layers]
    adapters = [None if layer.adapter is None else layer.adapter.operand() for layer in layers]
    if copies := [layer.fp8_weight for layer in layers if layer.fp8_weight is not None]:
        return fp8_linears(hidden, copies, biases, adapters)
    if any(adapters):
        return adapted_linears(hidden, weights, biases, adapters, single_gemm=single_gemm, fp8=fp8)
    return linear_group(hidden, weights, biases, single_gemm=single_gemm, fp8=fp8)


def fused_operand(layers: Sequence[Linear]) -> tuple[Tensor | FP8Weight, LowRank | None] | None:
    """Returns the weights of the layers as one, after `fuse_weights`, and their adapters as one, if there are any.

    None if a layer has a bias, or only some have adapters, or those are not adjacent in memory as a generator has them.
    """
    fp8 = [layer.fp8_weight for layer in layers if layer.fp8_weight is not None]
    weight = joined(fp8) if fp8 else adjacent_view([local(layer.weight) for layer in layers])
    if weight is None or any(layer.bias is not None for layer in layers):
        return None
    adapters = [layer.adapter for layer in layers if layer.adapter is not None]
    if not adapters:
        return weight, None
    kinds = {(adapter.a.dtype, adapter.config.rank, adapter.config.scale) for adapter in adapters}
    if len(adapters) < len(layers) or kinds != {(layers[0].weight.dtype, adapters[0].config.rank, 1.0)}:
        return None
    a, b = (adjacent_view([local(getattr(adapter, side)) for adapter in adapters]) for side in ("a", "b"))
    if a is None or b is None:
        return None
    return weight, LowRank(a, b, tuple(len(local(layer.weight)) for layer in layers))


@torch.no_grad()
def fuse_weights(layers: Sequence[Linear]) -> None:
    """Makes the weights of these layers adjacent in memory, so that `apply_linears` can be one product.

    Names and values do not change. For plain parameters, whose memory nothing else refers to.
    """
    weights: list[Tensor] = [layer.weight for layer in layers]
    if adjacent_view(weights) is None:
        parts = torch.cat(weights).split([len(weight) for weight in weights])
        for weight, part in zip(weights, parts, strict=True):
            weight.data = part


class RowLinear(Linear):
    """Row-parallel: this rank's input features of all tokens -> all output features of this rank's tokens."""

    weight_dim = 1

    def forward(self, features: Tensor) -> Tensor:
        """[T, in / tp] -> [T / tp, out]."""
        if self.tp.group is None:
            return super().forward(features)
        return self._scatter(self._product(features))

    def apply_gated(self, gate: Tensor | None, up: Tensor, activation: Activation) -> Tensor:
        """Returns `forward` of activation(gate) · up, [T, in / tp] both, or of activation(up): [T / tp, out]."""
        if self.tp.group is None or self.adapter is not None:
            return super().apply_gated(gate, up, activation)
        return self._scatter(gated_linear(gate, up, activation, local(self.weight), fp8=self.fp8))

    def _scatter(self, product: Tensor) -> Tensor:
        """Sums over ranks and scatters the tokens: [T, out] -> [T / tp, out]."""
        output = scatter_to_sequence(product, self.tp.group)
        return output if self.bias is None else output + local(self.bias)


class VocabularyEmbedding(nn.Module):
    """Vocabulary-parallel: each rank looks up its part of the vocabulary; the sum is scattered over tokens."""

    roles: ClassVar[Mapping[str, Role]] = {"weight": "matrix"}

    def __init__(self, vocab_size: int, hidden_size: int, *, tp: Axis = SINGLE_RANK) -> None:
        super().__init__()
        self.tp = tp
        self.start, self.stop = tp.block(vocab_size)
        self.weight = sharded_parameter(vocab_size, hidden_size, axis=tp, dim=0)
        self.adapter: Adapter | None = None

    def add_adapter(self, config: AdapterConfig) -> None:
        """Gives the layer a new adapter, which adds scale · B · A to the weight [vocab, H]."""
        vocab_size, hidden_size = self.weight.shape
        self.adapter = _new_adapter(config, hidden_size, vocab_size, self.tp, 0)

    def forward(self, tokens: Tensor, weight: Tensor | None = None) -> Tensor:
        """[T] -> [T / tp, H]. `weight` is this rank's part of the weight, if the caller has it."""
        weight = local(self.weight) if weight is None else weight
        if self.tp.group is None:
            return self._look_up(tokens, weight)
        elsewhere = (tokens < self.start) | (tokens >= self.stop)
        rows = (tokens - self.start).remainder(max(self.stop - self.start, 1))  # of elsewhere any, but not all the same
        return scatter_to_sequence(self._look_up(rows, weight).masked_fill(elsewhere[:, None], 0.0), self.tp.group)

    def _look_up(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Returns these rows of the weight and of what the adapter adds to it, [T, H]."""
        embedded = self._rows_of(weight, rows)
        if self.adapter is None:
            return embedded
        adapter = self.adapter
        product: Tensor = (self._rows_of(local(adapter.b), rows) * adapter.config.scale) @ local(adapter.a)
        return embedded + product

    def _rows_of(self, table: Tensor, rows: Tensor) -> Tensor:
        if self.start == self.stop:  # this rank has no part of the vocabulary
            return table.new_zeros(len(rows), table.shape[1]) + table.sum()
        return embed(rows, table)


class RMSNorm(nn.Module):
    """x / rms(x) · (offset + weight), computed in fp32, token by token."""

    roles: ClassVar[Mapping[str, Role]] = {"weight": "norm"}
    weight_dim: ClassVar[int | None] = None

    def __init__(self, size: int, eps: float, *, tp: Axis = SINGLE_RANK, offset: float = 0.0) -> None:
        super().__init__()
        self.size, self.eps, self.offset, self.tp = size, eps, offset, tp
        self.weight = sharded_parameter(size, axis=tp, dim=self.weight_dim)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return rms_norm(hidden, local(self.weight), self.eps, self.offset)

    def with_residual(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns `hidden` [..., size] for the residual stream and its norm; one kernel adds their gradients."""
        return rms_norm_with_residual(hidden, local(self.weight), self.eps, self.offset)


class NoNorm(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden

    def with_residual(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, hidden


class ColumnRMSNorm(RMSNorm):
    """RMSNorm of a vector whose features are sharded over ranks."""

    weight_dim = 0

    def forward(self, features: Tensor) -> Tensor:
        """[T, size / tp] -> [T, size / tp]."""
        if self.tp.group is None:
            return super().forward(features)
        wide = features.float()
        squares = sum_over_group(wide.square().sum(-1, keepdim=True), self.tp.group)
        normed = wide * torch.rsqrt(squares / self.size + self.eps)
        return (normed * (self.offset + local(self.weight).float())).to(features.dtype)


def _local_or_none(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else local(parameter)
