"""RMSNorm over the last dimension, computed in fp32: in torch anywhere, one Triton kernel each way on CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from postlude.ops.kernels.capabilities import EMPTY, Backend, use_kernel
from postlude.ops.linear import main_grad

WIDEST = 16_384  # features that one program of the kernel holds


@dataclass(frozen=True, eq=False)
class Norm:
    weight: Tensor
    eps: float
    offset: float


def rms_norm(vectors: Tensor, weight: Tensor, eps: float, offset: float = 0.0, *, backend: Backend = "auto") -> Tensor:
    """Returns `vectors` [..., size] / rms · (offset + `weight` [size]), [..., size] in the dtype of `vectors`.

    In bf16 a weight around zero is more exact than its sum with the offset would be.
    """
    if not uses_kernel(vectors, weight, backend):
        return _reference(vectors, weight, eps, offset)
    if torch.is_grad_enabled() and (vectors.requires_grad or weight.requires_grad):
        normed: Tensor = _Norm.apply(vectors, weight, eps, offset)
        return normed
    return _forward(vectors, weight, eps, offset)


def rms_norm_with_residual(
    vectors: Tensor, weight: Tensor, eps: float, offset: float = 0.0, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """Returns `vectors` unchanged, for the residual stream, and `rms_norm` of them.

    Where both are used, one kernel adds their gradients.
    """
    trains = torch.is_grad_enabled() and (vectors.requires_grad or weight.requires_grad)
    if not trains or not uses_kernel(vectors, weight, backend):
        return vectors, rms_norm(vectors, weight, eps, offset, backend=backend)
    residual, normed = _NormWithResidual.apply(vectors, weight, eps, offset)
    return residual, normed


def uses_kernel(vectors: Tensor, weight: Tensor, backend: Backend = "auto") -> bool:
    if not vectors.is_cuda and backend == "auto":
        return False
    unsupported_reason = None
    if vectors.shape[-1] > WIDEST:
        unsupported_reason = f"its kernels hold {WIDEST} features, and these are {vectors.shape[-1]}"
    elif vectors.numel() == 0:
        unsupported_reason = EMPTY
    elif torch.float64 in (vectors.dtype, weight.dtype):
        unsupported_reason = "its kernels compute in float32"
    return use_kernel("rms_norm", backend, vectors.device, vectors.dtype, unsupported_reason=unsupported_reason)


def _reference(vectors: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    if not offset:
        return F.rms_norm(vectors, vectors.shape[-1:], weight, eps)
    compute_dtype = torch.promote_types(vectors.dtype, torch.float32)
    return F.rms_norm(vectors.to(compute_dtype), vectors.shape[-1:], offset + weight.to(compute_dtype), eps).to(
        vectors.dtype
    )


def _forward(vectors: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    from postlude.ops.kernels import norm as kernels  # needs triton

    return kernels.forward(vectors, weight, eps, offset)


def _backward(ctx: Any, grad_normed: Tensor, grad_residual: Tensor | None) -> tuple[Tensor, Tensor | None, None, None]:
    from postlude.ops.kernels import norm as kernels

    vectors, weight = ctx.saved_tensors
    eps, offset = ctx.options
    return *kernels.backward(vectors, weight, eps, offset, grad_normed, grad_residual, ctx.main_grad), None, None


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, vectors: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        ctx.save_for_backward(vectors, weight)
        ctx.options, ctx.main_grad = (eps, offset), main_grad(weight)
        return _forward(vectors, weight, eps, offset)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        return _backward(ctx, gradients[0], None)


class _NormWithResidual(Function):
    @staticmethod
    def forward(ctx: Any, vectors: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(vectors, weight)
        ctx.options, ctx.main_grad = (eps, offset), main_grad(weight)
        ctx.set_materialize_grads(False)
        return vectors, _forward(vectors, weight, eps, offset)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_residual, grad_normed = gradients
        return (grad_residual, None, None, None) if grad_normed is None else _backward(ctx, grad_normed, grad_residual)
