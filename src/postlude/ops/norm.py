"""RMSNorm over the last dimension, computed in fp32: torch anywhere, one Triton kernel each way on CUDA."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from postlude.ops.kernels.capabilities import Backend, use_kernel
from postlude.ops.linear import main_grad

WIDEST = 16_384  # features that one program of the Triton kernels holds


@dataclass(frozen=True, eq=False)
class Norm:
    """What `rms_norm` takes beside vectors."""

    weight: Tensor
    eps: float
    offset: float


def rms_norm(vectors: Tensor, weight: Tensor, eps: float, offset: float = 0.0, *, backend: Backend = "auto") -> Tensor:
    """`vectors` [..., size] / rms · (offset + `weight` [size]): [..., size], in the dtype of `vectors`.

    A weight around zero is more exact than its sum with the offset would be in bf16.
    """
    if not _takes_triton(vectors, weight, backend):
        return _reference(vectors, weight, eps, offset)
    if torch.is_grad_enabled() and (vectors.requires_grad or weight.requires_grad):
        normed: Tensor = _Norm.apply(vectors, weight, eps, offset)
        return normed
    return _forward(vectors, weight, eps, offset)


def rms_norm_with_residual(
    vectors: Tensor, weight: Tensor, eps: float, offset: float = 0.0, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """`vectors` as they are, for who goes on with them, and `rms_norm` of them.

    Where vectors are used in both ways, taking both from here lets one kernel add their gradients up.
    """
    trains = torch.is_grad_enabled() and (vectors.requires_grad or weight.requires_grad)
    if not trains or not _takes_triton(vectors, weight, backend):
        return vectors, rms_norm(vectors, weight, eps, offset, backend=backend)
    same, normed = _NormBeside.apply(vectors, weight, eps, offset)
    return same, normed


def _reference(vectors: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    if not offset:
        return F.rms_norm(vectors, vectors.shape[-1:], weight, eps)
    wide = torch.promote_types(vectors.dtype, torch.float32)
    return F.rms_norm(vectors.to(wide), vectors.shape[-1:], offset + weight.to(wide), eps).to(vectors.dtype)


def _takes_triton(vectors: Tensor, weight: Tensor, backend: Backend) -> bool:
    if not vectors.is_cuda and backend == "auto":
        return False
    refused = None
    if vectors.shape[-1] > WIDEST:
        refused = f"its kernels hold {WIDEST} features, and these are {vectors.shape[-1]}"
    elif vectors.numel() == 0:
        refused = "there are no vectors"
    elif torch.float64 in (vectors.dtype, weight.dtype):
        refused = "its kernels compute in float32"
    return use_kernel("rms_norm", backend, vectors.device, vectors.dtype, refused=refused)


def uses_kernel(vectors: Tensor, weight: Tensor) -> bool:
    """Whether `rms_norm` of these is Triton's."""
    return _takes_triton(vectors, weight, "auto")


def _forward(vectors: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    normed: Tensor = importlib.import_module("postlude.ops.kernels.norm").forward(vectors, weight, eps, offset)
    return normed


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, vectors: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        ctx.save_for_backward(vectors, weight)
        ctx.how, ctx.total = (eps, offset), main_grad(weight)
        return _forward(vectors, weight, eps, offset)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        kernels = importlib.import_module("postlude.ops.kernels.norm")
        return *kernels.backward(*ctx.saved_tensors, *ctx.how, gradients[0], None, ctx.total), None, None


class _NormBeside(Function):
    @staticmethod
    def forward(ctx: Any, vectors: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(vectors, weight)
        ctx.how, ctx.total = (eps, offset), main_grad(weight)
        ctx.set_materialize_grads(False)
        return vectors, _forward(vectors, weight, eps, offset)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
        of_same, of_normed = gradients
        if of_normed is None:
            return of_same, None, None, None
        kernels = importlib.import_module("postlude.ops.kernels.norm")
        return *kernels.backward(*ctx.saved_tensors, *ctx.how, of_normed, of_same, ctx.total), None, None
