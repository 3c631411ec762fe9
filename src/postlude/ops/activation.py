"""What an MLP makes of its projections, activation(gate) · up: torch anywhere, one Triton kernel each way on CUDA."""

from __future__ import annotations

import importlib
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from postlude.ops.kernels.capabilities import Backend, use_kernel
from postlude.ops.linear import DeferredWgrads, linear, wgrad, wgrad_queue

Activation = Literal["silu", "gelu", "gelu_tanh", "relu2"]
Gate = Literal["silu", "gelu", "gelu_tanh", "relu2", "sigmoid"]


def activate(values: Tensor, activation: Gate) -> Tensor:
    """The activation by name, number by number."""
    match activation:
        case "silu":
            return F.silu(values)
        case "gelu":
            return F.gelu(values)
        case "gelu_tanh":
            return F.gelu(values, approximate="tanh")
        case "relu2":
            return F.relu(values).square()
        case "sigmoid":
            return values.sigmoid()
    raise ValueError(f"activation {activation!r} is unknown; use {', '.join(get_args(Activation))}.")


def gated_activation(gate: Tensor | None, up: Tensor, activation: Gate, *, backend: Backend = "auto") -> Tensor:
    """activation(`gate`) · `up`, [..., size] both, or without a gate activation(`up`): [..., size].

    Kept for the backward are the projections alone.
    """
    if not _takes_triton(gate, up, activation, backend):
        return activate(up, activation) if gate is None else activate(gate, activation) * up
    if torch.is_grad_enabled() and (up.requires_grad or (gate is not None and gate.requires_grad)):
        features: Tensor = _Gated.apply(gate, up, activation)
        return features
    return _forward(gate, up, activation)


def gated_linear(
    gate: Tensor | None,
    up: Tensor,
    activation: Gate,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """`linear` of what `gated` gives, [T, in] -> [T, out], by `weight` [out, in].

    Triton's keeps the projections alone for the backward, which makes the features again.
    """
    trains = torch.is_grad_enabled() and up.requires_grad
    if not trains or not _takes_triton(gate, up, activation, backend):
        return linear(gated_activation(gate, up, activation, backend=backend), weight, bias)
    product: Tensor = _GatedLinear.apply(gate, up, activation, weight, bias, wgrad_queue(weight))
    return product


def _takes_triton(gate: Tensor | None, up: Tensor, activation: Gate, backend: Backend) -> bool:
    if not up.is_cuda and backend == "auto":
        return False
    refused = None
    if up.numel() == 0:
        refused = "there are no vectors"
    elif gate is not None and (gate.dtype != up.dtype or gate.shape != up.shape):
        refused = "gate and up are not alike in shape and dtype"
    elif activation not in get_args(Gate):
        refused = f"it has no {activation}"
    return use_kernel("gated", backend, up.device, up.dtype, refused=refused)


def _forward(gate: Tensor | None, up: Tensor, activation: Gate) -> Tensor:
    features: Tensor = importlib.import_module("postlude.ops.kernels.activation").forward(gate, up, activation)
    return features


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor | None, up: Tensor, activation: Gate) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _forward(gate, up, activation)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, None]:
        kernels = importlib.import_module("postlude.ops.kernels.activation")
        return *kernels.backward(*ctx.saved_tensors, ctx.activation, gradients[0], None), None


class _GatedLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor | None,
        up: Tensor,
        activation: Gate,
        weight: Tensor,
        bias: Tensor | None,
        later: DeferredWgrads | None,
    ) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.activation, ctx.weight, ctx.later = activation, weight, later
        return F.linear(_forward(gate, up, activation), weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        gradient, needs = gradients[0], ctx.needs_input_grad
        kernels = importlib.import_module("postlude.ops.kernels.activation")
        of_features = gradient.mm(weight)
        # Each of the features takes the place of its own gradient once that has been read.
        features = of_features if needs[3] else None
        of_gate, of_up = kernels.backward(gate, up, ctx.activation, of_features, features)
        of_weight = None if features is None else wgrad(ctx.weight, gradient, features, ctx.later)
        return of_gate, of_up, None, of_weight, gradient.sum(0) if needs[4] else None, None
