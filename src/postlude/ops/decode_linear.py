"""Linear layers fused with what surrounds them, for decoding. Nothing here has gradients.

A step of decoding has few rows. A product then takes as long as reading its weights, and a separate kernel for the
norm before it, the activation after it or the sum with the residual stream takes about as long again. On a GPU each of
these functions is then one kernel that reads every weight once. With more rows, and elsewhere, they are torch calls.
"""

from __future__ import annotations

from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.ops.activation import Activation, gated_activation
from postlude.ops.batch_invariant import is_batch_invariant
from postlude.ops.block_fp8 import FP8Weight, fp8_linear
from postlude.ops.kernels.capabilities import EMPTY, Backend, use_kernel
from postlude.ops.linear import forward_product
from postlude.ops.low_rank import LowRank
from postlude.ops.norm import Norm, rms_norm

MOST = 16  # rows: one tile of a tensor core. With more, cuBLAS is as fast
STEP = 64  # both sizes of a weight are multiples of this, so that its tiles are whole
COUNTERS = 1024
SPAN = 256  # columns that a program of `add_low_rank` takes at most
MOST_RANK = 64  # of adapters: with more, tiles of A take too much shared memory


def norm_linear(
    rows: Tensor, norm: Norm, weight: Tensor | FP8Weight, low_rank: LowRank | None = None, *, backend: Backend = "auto"
) -> Tensor:
    """Returns norm(`rows` [T, in]) · `weight`ᵀ [out, in], with what adapters add: [T, out]."""
    if isinstance(weight, FP8Weight):
        return add_low_rank(fp8_linear(rows, weight, norm=norm), *_normed(rows, norm, low_rank))
    if _use_kernel(rows, weight, low_rank, backend):
        from postlude.ops.kernels.decode_linear import product  # needs triton

        return product(rows, weight, MOST, norm=norm, low_rank=low_rank)
    normed = rms_norm(rows, norm.weight, norm.eps, norm.offset)
    return add_low_rank(forward_product(normed, weight), normed, low_rank)


def norm_gated_linear(
    rows: Tensor,
    norm: Norm,
    activation: Activation,
    weight: Tensor | FP8Weight,
    low_rank: LowRank | None = None,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Returns activation(gate) · up, [T, out], of (gate, up) = `norm_linear` with `weight` [2 · out, in]."""
    if isinstance(weight, FP8Weight):
        return gated_low_rank(fp8_linear(rows, weight, norm=norm), *_normed(rows, norm, low_rank), activation)
    if _use_kernel(rows, weight, low_rank, backend):
        from postlude.ops.kernels.decode_linear import product

        return product(rows, weight, MOST, norm=norm, activation=activation, low_rank=low_rank)
    normed = rms_norm(rows, norm.weight, norm.eps, norm.offset)
    return gated_low_rank(forward_product(normed, weight), normed, low_rank, activation)


def linear_add(
    residual: Tensor,
    rows: Tensor,
    weight: Tensor | FP8Weight,
    low_rank: LowRank | None = None,
    counters: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Returns `residual` [T, out] + `rows` [T, in] · `weight`ᵀ [out, in], with what adapters add.

    It may overwrite `residual`.

    `counters` [COUNTERS] int32 are zero before and after: programs that share a sum count themselves there. Calls that
    run at the same time need different ones. Without counters, programs share no sum.
    """
    if isinstance(weight, FP8Weight):
        return add_low_rank(fp8_linear(rows, weight, residual=residual, counters=counters), rows, low_rank)
    if _use_kernel(rows, weight, low_rank, backend):
        from postlude.ops.kernels.decode_linear import product

        return product(rows, weight, MOST, residual=residual, counters=counters, low_rank=low_rank)
    if is_batch_invariant():  # rounds the product before the sum, as the trainer's forward does
        return residual + add_low_rank(forward_product(rows, weight), rows, low_rank)
    return add_low_rank(residual.addmm_(rows, weight.t()), rows, low_rank)


def _normed(rows: Tensor, norm: Norm, low_rank: LowRank | None) -> tuple[Tensor, LowRank | None]:
    """Returns the norm of the rows if there are adapters to apply to it, and the adapters."""
    return rows if low_rank is None else rms_norm(rows, norm.weight, norm.eps, norm.offset), low_rank


def _use_kernel(rows: Tensor, weight: Tensor, low_rank: LowRank | None, backend: Backend) -> bool:
    few = rows.is_cuda and len(rows) <= MOST and rows.dtype == torch.bfloat16
    if backend == "auto" and (not few or is_batch_invariant()):
        return False
    refused = None
    if not 0 < len(rows) <= MOST:
        refused = f"its tiles have room for {MOST} rows, and these are {len(rows)}"
    elif weight.dtype != rows.dtype or not weight.is_contiguous() or rows.stride(-1) != 1:
        refused = "rows and weights are not dense and of one dtype"
    elif weight.shape[0] % STEP or weight.shape[1] % STEP:
        refused = f"a weight of {list(weight.shape)} does not divide into tiles of {STEP}"
    elif low_rank is not None:
        refused = low_rank.refused(rows, MOST_RANK)
    return use_kernel("decode_linear", backend, rows.device, rows.dtype, refused=refused)


def add_low_rank(product: Tensor, rows: Tensor, low_rank: LowRank | None, *, backend: Backend = "auto") -> Tensor:
    """Returns `product` [T, out] with B · A · `rows` [T, in] added. It may overwrite `product`."""
    if low_rank is None:
        return product
    if _use_low_rank_kernel(product, rows, low_rank, backend):
        from postlude.ops.kernels.decode_linear import add_low_rank as add

        return add(product, rows, low_rank, _span(low_rank))
    down = F.linear(rows, low_rank.a).split(low_rank.rank, -1)
    parts = zip(product.split(low_rank.sizes, -1), down, low_rank.b.split(low_rank.sizes), strict=True)
    for part, low, b in parts:
        part.addmm_(low, b.t())
    return product


def gated_low_rank(
    product: Tensor, rows: Tensor, low_rank: LowRank | None, activation: Activation, *, backend: Backend = "auto"
) -> Tensor:
    """Returns activation(gate) · up, [T, out], of (gate, up) = `add_low_rank`: [T, 2 · out]."""
    if low_rank is not None and _use_low_rank_kernel(product, rows, low_rank, backend):
        from postlude.ops.kernels.decode_linear import add_low_rank as add

        return add(product, rows, low_rank, _span(low_rank), activation=activation)
    gate, up = add_low_rank(product, rows, low_rank, backend=backend).chunk(2, -1)
    return gated_activation(gate, up, activation)


def _span(low_rank: LowRank) -> int:
    return gcd(SPAN, *low_rank.sizes)


def _use_low_rank_kernel(product: Tensor, rows: Tensor, low_rank: LowRank, backend: Backend) -> bool:
    if backend == "auto" and not rows.is_cuda:
        return False
    refused = low_rank.refused(rows)
    if not len(rows):
        refused = EMPTY
    elif rows.stride(-1) != 1 or product.stride(-1) != 1 or rows.shape[1] % STEP:
        refused = f"rows are not dense, or their features no multiple of {STEP}"
    return use_kernel("decode_linear", backend, rows.device, rows.dtype, refused=refused)
