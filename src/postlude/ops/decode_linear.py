"""Products together with what stands around them, as generation wants them: nothing here has gradients.

With few rows, as a step of generation has them, a product takes as long as its weights take to be read, and a kernel of
its own for the norm before it, the activation after it or the sum with the residual stream takes about as long again.
On a GPU each of these functions is then one kernel, in which every weight is read once.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.ops.activation import Activation, gated_activation
from postlude.ops.kernels.capabilities import Backend, use_kernel
from postlude.ops.norm import Norm, rms_norm

MOST = 16  # rows: one tile of a tensor core. With more, cuBLAS's own products are as fast
STEP = 64  # features that a weight has some multiple of, for tiles of it to be whole
COUNTERS = 1024


def norm_linear(rows: Tensor, norm: Norm, weight: Tensor, *, backend: Backend = "auto") -> Tensor:
    """`rows` [T, in], normalised, by `weight` [out, in]: [T, out]."""
    if _takes_triton(rows, weight, backend):
        return _kernels().product(rows, weight, norm=norm)  # type: ignore[no-any-return]
    return F.linear(rms_norm(rows, norm.weight, norm.eps, norm.offset), weight)


def norm_gated_linear(
    rows: Tensor, norm: Norm, weight: Tensor, activation: Activation, *, backend: Backend = "auto"
) -> Tensor:
    """`rows` [T, in], normalised, by `weight` [2 · out, in]: activation(first half) · second half, [T, out]."""
    if _takes_triton(rows, weight, backend):
        return _kernels().product(rows, weight, norm=norm, activation=activation)  # type: ignore[no-any-return]
    gate, up = norm_linear(rows, norm, weight, backend="torch").chunk(2, -1)
    return gated_activation(gate, up, activation)


def linear_add(
    residual: Tensor, rows: Tensor, weight: Tensor, counters: Tensor | None = None, *, backend: Backend = "auto"
) -> Tensor:
    """`residual` [T, out] + `rows` [T, in] by `weight` [out, in]. The memory of `residual` may be that of the sum.

    `counters` [COUNTERS] int32 are zero, and are so afterwards: programs that share a sum count themselves there. What
    runs at the same time needs others. Without them programs share no sum.
    """
    if _takes_triton(rows, weight, backend):
        return _kernels().product(rows, weight, residual=residual, counters=counters)  # type: ignore[no-any-return]
    return residual.addmm_(rows, weight.t())


def _takes_triton(rows: Tensor, weight: Tensor, backend: Backend) -> bool:
    if backend == "auto" and (not rows.is_cuda or len(rows) > MOST or rows.dtype != torch.bfloat16):
        return False
    refused = None
    if not 0 < len(rows) <= MOST:
        refused = f"its tiles have room for {MOST} rows, and these are {len(rows)}"
    elif weight.dtype != rows.dtype or not weight.is_contiguous() or rows.stride(-1) != 1:
        refused = "rows and weights are not dense and of one dtype"
    elif weight.shape[0] % STEP or weight.shape[1] % STEP:
        refused = f"a weight of {list(weight.shape)} is not made of tiles of {STEP}"
    return use_kernel("decode_linear", backend, rows.device, rows.dtype, refused=refused)


def _kernels() -> Any:
    return importlib.import_module("postlude.ops.kernels.decode_linear")
