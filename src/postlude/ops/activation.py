"""activation(gate) · up, the inner part of an MLP: in torch anywhere, one Triton kernel each way on CUDA."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from postlude.ops.fp8 import FP8Scaling
from postlude.ops.kernels.capabilities import EMPTY, Backend, use_kernel
from postlude.ops.linear import DeferredWgrads, input_gradient, linear, linear_products, wgrad, wgrad_queue

Activation = Literal["silu", "gelu", "gelu_tanh", "relu2"]
GateActivation = Literal["silu", "gelu", "gelu_tanh", "relu2", "sigmoid"]


def activate(values: Tensor, activation: GateActivation) -> Tensor:
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


def gated_activation(
    gate: Tensor | None, up: Tensor, activation: GateActivation, *, backend: Backend = "auto"
) -> Tensor:
    """Returns activation(`gate`) · `up`, or activation(`up`) without a gate. All are [..., size].

    The backward keeps the projections only.
    """
    if not _use_kernel(gate, up, activation, backend):
        return activate(up, activation) if gate is None else activate(gate, activation) * up
    if torch.is_grad_enabled() and (up.requires_grad or (gate is not None and gate.requires_grad)):
        features: Tensor = _GatedActivation.apply(gate, up, activation)
        return features
    return _forward(gate, up, activation)


def gated_linear(
    gate: Tensor | None,
    up: Tensor,
    activation: GateActivation,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    fp8: FP8Scaling | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Returns `linear` of `gated_activation`, [T, in] -> [T, out], with `weight` [out, in].

    The kernel keeps the projections only; its backward computes the features again.
    """
    trains = torch.is_grad_enabled() and up.requires_grad
    if not trains or not _use_kernel(gate, up, activation, backend):
        return linear(gated_activation(gate, up, activation, backend=backend), weight, bias, fp8=fp8)
    product: Tensor = _GatedLinear.apply(gate, up, activation, weight, bias, wgrad_queue(weight), fp8)
    return product


def _use_kernel(gate: Tensor | None, up: Tensor, activation: GateActivation, backend: Backend) -> bool:
    if not up.is_cuda and backend == "auto":
        return False
    unsupported_reason = None
    if up.numel() == 0:
        unsupported_reason = EMPTY
    elif gate is not None and (gate.dtype != up.dtype or gate.shape != up.shape):
        unsupported_reason = "gate and up differ in shape or dtype"
    elif activation not in get_args(GateActivation):
        unsupported_reason = f"it has no {activation}"
    return use_kernel("gated_activation", backend, up.device, up.dtype, unsupported_reason=unsupported_reason)


def _forward(gate: Tensor | None, up: Tensor, activation: GateActivation) -> Tensor:
    from postlude.ops.kernels import activation as kernels  # needs triton

    return kernels.forward(gate, up, activation)


class _GatedActivation(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor | None, up: Tensor, activation: GateActivation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _forward(gate, up, activation)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, None]:
        from postlude.ops.kernels import activation as kernels

        gate, up = ctx.saved_tensors
        return *kernels.backward(gate, up, ctx.activation, gradients[0], None), None


class _GatedLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor | None,
        up: Tensor,
        activation: GateActivation,
        weight: Tensor,
        bias: Tensor | None,
        deferred: DeferredWgrads | None,
        fp8: FP8Scaling | None,
    ) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.activation, ctx.weight, ctx.deferred, ctx.fp8 = activation, weight, deferred, fp8
        return linear_products(_forward(gate, up, activation), (weight,), (bias,), single_gemm=False, fp8=fp8)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from postlude.ops.kernels import activation as kernels

        gate, up, weight = ctx.saved_tensors
        gradient, needs = gradients[0], ctx.needs_input_grad
        grad_features = input_gradient(gradient, weight, ctx.fp8)
        # The kernel overwrites each gradient of the features, once it is read, with the feature itself.
        features = grad_features if needs[3] else None
        grad_gate, grad_up = kernels.backward(gate, up, ctx.activation, grad_features, features)
        grad_weight = None if features is None else wgrad(ctx.weight, gradient, features, ctx.deferred)
        return grad_gate, grad_up, None, grad_weight, gradient.sum(0) if needs[4] else None, None, None
