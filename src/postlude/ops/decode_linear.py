"""Linear layers fused with what surrounds them, for decoding. Nothing here has gradients.

A step of decoding has few rows. A product then takes as long as reading its weights, and a separate kernel for the
norm before it, the activation after it or the sum with the residual stream takes about as long again. On a GPU each of
these functions is then one kernel that reads every weight once. With more rows, and elsewhere, they are torch calls.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.ops.activation import Activation, gated_activation
from postlude.ops.kernels.capabilities import Backend, use_kernel
from postlude.ops.norm import Norm, rms_norm

MOST = 16  # rows: one tile of a tensor core. With more, cuBLAS is as fast
STEP = 64  # both sizes of a weight are multiples of this, so that its tiles are whole
COUNTERS = 1024


def norm_linear(rows: Tensor, norm: Norm, weight: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Returns norm(`rows` [T, in]) · `weight`ᵀ [out, in]: [T, out]."""
    if _use_kernel(rows, weight, backend):
        from postlude.ops.kernels.decode_linear import product  # needs triton

        return product(rows, weight, MOST, norm=norm)
    return F.linear(rms_norm(rows, norm.weight, norm.eps, norm.offset), weight)


def norm_gated_linear(
    rows: Tensor, norm: Norm, weight: Tensor, activation: Activation, *, backend: Backend = "auto"
) -> Tensor:
    """Returns activation(gate) · up, [T, out], of (gate, up) = norm(`rows` [T, in]) · `weight`ᵀ [2 · out, in]."""
    if _use_kernel(rows, weight, backend):
        from postlude.ops.kernels.decode_linear import product

        return product(rows, weight, MOST, norm=norm, activation=activation)
    gate, up = norm_linear(rows, norm, weight, backend="torch").chunk(2, -1)
    return gated_activation(gate, up, activation)


def linear_add(
    residual: Tensor, rows: Tensor, weight: Tensor, counters: Tensor | None = None, *, backend: Backend = "auto"
) -> Tensor:
    """Returns `residual` [T, out] + `rows` [T, in] · `weight`ᵀ [out, in]. It may overwrite `residual`.

    `counters` [COUNTERS] int32 are zero before and after: programs that share a sum count themselves there. Calls that
    run at the same time need different ones. Without counters, programs share no sum.
    """
    if _use_kernel(rows, weight, backend):
        from postlude.ops.kernels.decode_linear import product

        return product(rows, weight, MOST, residual=residual, counters=counters)
    return residual.addmm_(rows, weight.t())


def _use_kernel(rows: Tensor, weight: Tensor, backend: Backend) -> bool:
    if backend == "auto" and (not rows.is_cuda or len(rows) > MOST or rows.dtype != torch.bfloat16):
        return False
    refused = None
    if not 0 < len(rows) <= MOST:
        refused = f"its tiles have room for {MOST} rows, and these are {len(rows)}"
    elif weight.dtype != rows.dtype or not weight.is_contiguous() or rows.stride(-1) != 1:
        refused = "rows and weights are not dense and of one dtype"
    elif weight.shape[0] % STEP or weight.shape[1] % STEP:
        refused = f"a weight of {list(weight.shape)} does not divide into tiles of {STEP}"
    return use_kernel("decode_linear", backend, rows.device, rows.dtype, refused=refused)
