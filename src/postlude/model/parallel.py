"""Layers cut over tensor-parallel ranks: parameters stored as DTensors, used as plain tensors, collectives written out.

Between blocks each rank holds its own shard of the tokens. A block that works on heads or features gathers all tokens
(`gather_from_sequence`), its column layers make different features on each rank, and its row layer sums the parts and
spreads the tokens again. What works token by token (norms, routers) stays on the shard with a whole copy of its
parameters. So every parameter that ranks hold alike is used on different tokens or heads, and its gradient is the sum.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from postlude.model.recompute import Recompute, recomputed
from postlude.ops.activation import Activation, gated_linear
from postlude.ops.collectives import scatter_to_sequence, sum_over_group
from postlude.ops.linear import adjacent_view, linear, linear_group
from postlude.ops.norm import rms_norm, rms_norm_with_residual
from postlude.world.mesh import SINGLE_RANK, Axis

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


Role: TypeAlias = Literal["matrix", "norm", "vector"]
"""What a parameter is, whatever its number of dimensions: a matrix, which multiplies features and starts from random
values; the scale of a norm, which starts from one; or any other vector, such as a bias, which starts from zero. Weight
decay, 8-bit moments and state in host memory are for matrices alone."""


def role_of(model: nn.Module, name: str) -> Role:
    """The role of a parameter: what `roles` of its module, or of the nearest module above that knows it, says."""
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
    """An uninitialised parameter of this whole shape, cut along dimension `dim`; None gives every rank a copy.

    One with a `dtype` of its own has it whatever the model's is. To be gathered in it too, its module is a
    `SeparateUnit`. Where the other ranks are only without_processes it is a plain tensor of the size that this
    one holds.
    """
    held = list(shape)
    if dim is not None:
        start, stop = axis.block(shape[dim])
        held[dim] = stop - start
    if axis.mesh is None:
        return nn.Parameter(torch.empty(held, dtype=dtype))
    from torch.distributed.tensor import DTensor, Replicate, Shard  # as slow as half of torch, and for ranks alone

    whole = torch.empty(shape, device="meta")
    placement = Replicate() if dim is None else Shard(dim)
    return nn.Parameter(
        DTensor.from_local(
            torch.empty(held, dtype=dtype),
            axis.mesh,
            [placement],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
    )


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Parameters made inside that ask for no dtype of their own have this one; None leaves torch's default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def is_dtensor(parameter: Tensor) -> TypeGuard[DTensor]:
    """Whether it is part of a whole that several ranks hold."""
    if type(parameter) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor)


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a stored parameter, for use in a forward. The gradient of a copy is this rank's addend."""
    if not is_dtensor(parameter):
        return parameter
    from torch.distributed.tensor import Partial

    placements = [Partial() if placement.is_replicate() else placement for placement in parameter.placements]
    part: Tensor = parameter.to_local(grad_placements=placements)
    return part


def local_shard(parameter: Tensor) -> Tensor:
    """The very memory this rank stores of a parameter or its gradient, whatever it is cut over. No gradient."""
    if not is_dtensor(parameter):
        return parameter.detach() if parameter.requires_grad else parameter
    with torch.no_grad():
        part: Tensor = parameter.to_local()
    return part


def region(parameter: Tensor) -> tuple[slice, ...]:
    """Which part of the whole parameter `local_shard` is."""
    bounds = [(0, size) for size in parameter.shape]
    if is_dtensor(parameter):
        mesh = parameter.device_mesh
        coordinate = mesh.get_coordinate()
        assert coordinate is not None  # this rank stores part of it
        # The model's own cut is the last mesh dimension and was made first; data-parallel shards cut what it left.
        for placement, size, rank in reversed(list(zip(parameter.placements, mesh.shape, coordinate, strict=True))):
            dimension = getattr(placement, "dim", None)  # of a shard, strided or not; a copy has none
            if dimension is not None:
                start, stop = bounds[dimension]
                first, last = Axis(size, rank).block(stop - start)
                bounds[dimension] = start + first, start + last
    return tuple(slice(start, stop) for start, stop in bounds)


class FSDPUnit(nn.Module):
    """A module whose weights are gathered, and their gradients summed, together: a layer, a `SeparateUnit`, a
    whole stage.

    Data parallelism does both around its forward. Where its work is done in other ways than by calling it, what was
    added to its gradients since is summed by a backward through this.
    """

    def trigger_grad_reduce(self, nothing: Tensor) -> Tensor:
        """As it is: what counts is the call."""
        return nothing.clone()


class Linear(nn.Module):
    """Token by token, with a whole copy of the weight on every rank."""

    roles: ClassVar[Mapping[str, Role]] = {"weight": "matrix", "bias": "vector"}

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, tp: Axis = SINGLE_RANK) -> None:
        super().__init__()
        self.weight = sharded_parameter(out_features, in_features, axis=tp, dim=None)
        self.bias = sharded_parameter(out_features, axis=tp, dim=None) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        return linear(hidden, local(self.weight), _local_or_none(self.bias))

    def of_gated(self, gate: Tensor | None, up: Tensor, activation: Activation) -> Tensor:
        """What `forward` makes of activation(gate) · up, [T, in] both, or of activation(up): [T, out]."""
        return gated_linear(gate, up, activation, local(self.weight), _local_or_none(self.bias))


class FP32Linear(FSDPUnit):
    """Token by token in fp32, with a whole copy of the weight on every rank, stored in fp32 whatever the model's dtype.

    Its owner declares it a `SeparateUnit` with `fp32`, so that it is gathered in fp32 too.
    """

    roles: ClassVar[Mapping[str, Role]] = {"weight": "matrix", "bias": "vector"}

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, tp: Axis = SINGLE_RANK) -> None:
        super().__init__()
        self.weight = sharded_parameter(out_features, in_features, axis=tp, dim=None, dtype=torch.float32)
        self.bias = sharded_parameter(out_features, axis=tp, dim=None, dtype=torch.float32) if bias else None

    def forward(self, hidden: Tensor, recompute: Recompute = "none") -> Tensor:
        """[T, in] -> [T, out] fp32."""
        return recomputed(self._work, recompute, hidden)

    def _work(self, hidden: Tensor) -> Tensor:
        bias = _local_or_none(self.bias)
        return linear(hidden.float(), local(self.weight).float(), None if bias is None else bias.float())


class ValueHead(FSDPUnit):
    """One number a token, hidden · weight in fp32, with a whole copy of the weight on every rank, stored in fp32."""

    roles: ClassVar[Mapping[str, Role]] = {"weight": "vector"}

    def __init__(self, size: int, *, tp: Axis = SINGLE_RANK) -> None:
        super().__init__()
        self.weight = sharded_parameter(size, axis=tp, dim=None, dtype=torch.float32)

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, size] -> [T] fp32."""
        return hidden.float() @ local(self.weight).float()


class PerHeadVectors(FSDPUnit):
    """Vectors of one number a head: each rank has its block of them. Stored in fp32 whatever the model's dtype.

    Its owner declares it a `SeparateUnit` with `fp32`, so that they are gathered in fp32 too.
    """

    def __init__(self, names: Sequence[str], heads: int, *, tp: Axis = SINGLE_RANK) -> None:
        super().__init__()
        self.roles: Mapping[str, Role] = dict.fromkeys(names, "vector")
        for name in names:
            self.register_parameter(name, sharded_parameter(heads, axis=tp, dim=0, dtype=torch.float32))

    def forward(self, hidden: Tensor) -> dict[str, Tensor]:
        """Each vector by its name, [heads / tp] fp32, in memory of its own: what is gathered is let go of again.

        They are the same for all `hidden`; FSDP cannot do with a call without arguments on a GPU.
        """
        return {name: local(vector).float().clone() for name, vector in self.named_parameters()}


class DepthwiseConvWeights(nn.Module):
    """A convolution's kernel [width] for each channel. Each rank has its block of the channels."""

    roles: ClassVar[Mapping[str, Role]] = {"weight": "matrix", "bias": "vector"}

    def __init__(self, channels: int, width: int, *, bias: bool = False, tp: Axis = SINGLE_RANK) -> None:
        super().__init__()
        self.weight = sharded_parameter(channels, width, axis=tp, dim=0)
        self.bias = sharded_parameter(channels, axis=tp, dim=0) if bias else None


class ColumnLinear(nn.Module):
    """All tokens, this rank's block of the output features."""

    roles: ClassVar[Mapping[str, Role]] = {"weight": "matrix", "bias": "vector"}

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, tp: Axis = SINGLE_RANK) -> None:
        super().__init__()
        self.weight = sharded_parameter(out_features, in_features, axis=tp, dim=0)
        self.bias = sharded_parameter(out_features, axis=tp, dim=0) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, in] -> [T, out / tp]."""
        return linear(hidden, local(self.weight), _local_or_none(self.bias))


def apply_linears(hidden: Tensor, *layers: Linear | ColumnLinear, one: bool = False) -> tuple[Tensor, ...]:
    """What each of `layers` makes of the same tokens, [T, in] -> [T, out] each. `one`: as `linear_group` says."""
    weights, biases = [local(layer.weight) for layer in layers], [_local_or_none(layer.bias) for layer in layers]
    return linear_group(hidden, weights, biases, one=one)


def fused_weight(layers: Sequence[Linear | ColumnLinear]) -> Tensor | None:
    """The weights of these layers as one, where `fuse_weights` has put them so and none has a bias; else None."""
    if any(layer.bias is not None for layer in layers):
        return None
    return adjacent_view([local(layer.weight) for layer in layers])


@torch.no_grad()
def fuse_weights(layers: Sequence[Linear | ColumnLinear]) -> None:
    """Put the weights of these layers one after the other in memory, so that `apply_linears` of them can be one
    product.

    Names and values stay as they are. For plain parameters, whose memory nothing else looks at.
    """
    weights: list[Tensor] = [layer.weight for layer in layers]
    if adjacent_view(weights) is None:
        parts = torch.cat(weights).split([len(weight) for weight in weights])
        for weight, part in zip(weights, parts, strict=True):
            weight.data = part


class RowLinear(nn.Module):
    """All tokens and this rank's block of the input features -> all output features of this rank's tokens."""

    roles: ClassVar[Mapping[str, Role]] = {"weight": "matrix", "bias": "vector"}

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, tp: Axis = SINGLE_RANK) -> None:
        super().__init__()
        self.tp = tp
        self.weight = sharded_parameter(out_features, in_features, axis=tp, dim=1)
        self.bias = sharded_parameter(out_features, axis=tp, dim=None) if bias else None

    def forward(self, features: Tensor) -> Tensor:
        """[T, in / tp] -> [T / tp, out]."""
        if self.tp.group is None:
            return linear(features, local(self.weight), _local_or_none(self.bias))
        return self._spread(linear(features, local(self.weight)))

    def of_gated(self, gate: Tensor | None, up: Tensor, activation: Activation) -> Tensor:
        """What `forward` makes of activation(gate) · up, [T, in / tp] both, or of activation(up): [T / tp, out]."""
        if self.tp.group is None:
            return gated_linear(gate, up, activation, local(self.weight), _local_or_none(self.bias))
        return self._spread(gated_linear(gate, up, activation, local(self.weight)))

    def _spread(self, product: Tensor) -> Tensor:
        """The sum of what ranks have, each rank's tokens: [T, out] -> [T / tp, out]."""
        output = scatter_to_sequence(product, self.tp.group)
        return output if self.bias is None else output + local(self.bias)


class VocabularyEmbedding(nn.Module):
    """Each rank looks up the tokens of its block of the vocabulary; their sum is spread over the tokens."""

    roles: ClassVar[Mapping[str, Role]] = {"weight": "matrix"}

    def __init__(self, vocab_size: int, hidden_size: int, *, tp: Axis = SINGLE_RANK) -> None:
        super().__init__()
        self.tp = tp
        self.start, self.stop = tp.block(vocab_size)
        self.weight = sharded_parameter(vocab_size, hidden_size, axis=tp, dim=0)

    def forward(self, tokens: Tensor, weight: Tensor | None = None) -> Tensor:
        """[T] -> [T / tp, H]. `weight` is this rank's part of its own, where the caller has it at hand."""
        weight = local(self.weight) if weight is None else weight
        if self.tp.group is None:
            return F.embedding(tokens, weight)
        elsewhere = (tokens < self.start) | (tokens >= self.stop)
        if self.start == self.stop:  # more ranks than blocks of the vocabulary
            found = weight.new_zeros(len(tokens), weight.shape[1]) + weight.sum()
        else:
            found = F.embedding((tokens - self.start).masked_fill(elsewhere, 0), weight)
        return scatter_to_sequence(found.masked_fill(elsewhere[:, None], 0.0), self.tp.group)


class RMSNorm(nn.Module):
    """x / rms(x) · (offset + weight), computed in fp32, token by token."""

    roles: ClassVar[Mapping[str, Role]] = {"weight": "norm"}

    def __init__(self, size: int, eps: float, *, tp: Axis = SINGLE_RANK, offset: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.weight = sharded_parameter(size, axis=tp, dim=None)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return rms_norm(hidden, local(self.weight), self.eps, self.offset)

    def with_residual(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """`hidden` [..., size] to go on with, and what `forward` makes of it: their gradients are added in one."""
        return rms_norm_with_residual(hidden, local(self.weight), self.eps, self.offset)


class NoNorm(nn.Module):
    """In place of a norm where a block has none."""

    def forward(self, hidden: Tensor) -> Tensor:
        """As it is."""
        return hidden

    def with_residual(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """As it is, twice."""
        return hidden, hidden


class ColumnRMSNorm(nn.Module):
    """RMSNorm of a vector whose features are spread over the ranks."""

    roles: ClassVar[Mapping[str, Role]] = {"weight": "norm"}

    def __init__(self, size: int, eps: float, *, tp: Axis = SINGLE_RANK, offset: float = 0.0) -> None:
        super().__init__()
        self.offset = offset
        self.size = size
        self.eps = eps
        self.tp = tp
        self.weight = sharded_parameter(size, axis=tp, dim=0)

    def forward(self, features: Tensor) -> Tensor:
        """[T, size / tp] -> [T, size / tp]."""
        if self.tp.group is None:
            return rms_norm(features, local(self.weight), self.eps, self.offset)
        wide = features.float()
        squares = sum_over_group(wide.square().sum(-1, keepdim=True), self.tp.group)
        normed = wide * torch.rsqrt(squares / self.size + self.eps)
        return (normed * (self.offset + local(self.weight).float())).to(features.dtype)


def _local_or_none(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else local(parameter)
