"""Linear layers fused with what surrounds them, for decoding. Nothing here has gradients.

A step of decoding has few rows. A product then takes as long as reading its weights, and a separate kernel for the
norm before it, the activation after it or the sum with the residual stream takes about as long again. On a GPU each of
these functions is then one kernel that reads every weight once. With more rows, and elsewhere, they are torch calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.ops.activation import Activation, gated_activation
from postlude.ops.batch_invariant import is_batch_invariant
from postlude.ops.block_fp8 import FP8Weight, fp8_linear, fp8_mlp
from postlude.ops.kernels.capabilities import EMPTY, Backend, use_kernel
from postlude.ops.linear import forward_product
from postlude.ops.low_rank import LowRank
from postlude.ops.norm import Norm, rms_norm

MAX_ROWS = 16  # rows: one tile of a tensor core. With more, cuBLAS is as fast
SIZE_MULTIPLE = 64  # both sizes of a weight are multiples of this, so that its tiles are whole
COUNTERS = 1024
MAX_RANK = 64  # of adapters: with more, tiles of A take too much shared memory


def norm_linear(
    rows: Tensor,
    norm: Norm,
    weight: Tensor | FP8Weight,
    low_rank: LowRank | None = None,
    counters: Tensor | None = None,
    *,
    activation: Activation | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Returns norm(`rows` [T, in]) · `weight`ᵀ [out, in], with what adapters add: [T, out].

    With an `activation` these are gate and up, and it returns activation(gate) · up, [T, out / 2]. `counters` are those
    of `linear_add`. Adapters use one.
    """
    if isinstance(weight, FP8Weight):
        multiply = partial(fp8_linear, rows, weight, norm=norm, counters=counters)
        normed = rows if low_rank is None else rms_norm(rows, norm.weight, norm.eps, norm.offset)
        return add_low_rank(multiply, normed, low_rank, activation)
    if _use_kernel(rows, weight, low_rank, backend):
        from postlude.ops.kernels.decode_linear import product  # needs triton

        return product(rows, weight, MAX_ROWS, norm=norm, activation=activation, counters=counters, low_rank=low_rank)
    normed = rms_norm(rows, norm.weight, norm.eps, norm.offset)
    return add_low_rank(lambda: forward_product(normed, weight), normed, low_rank, activation)


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
        return add_low_rank(lambda: fp8_linear(rows, weight, residual=residual, counters=counters), rows, low_rank)
    if _use_kernel(rows, weight, low_rank, backend):
        from postlude.ops.kernels.decode_linear import product

        return product(rows, weight, MAX_ROWS, residual=residual, counters=counters, low_rank=low_rank)
    if is_batch_invariant():  # rounds the product before the sum, as the trainer's forward does
        return residual + add_low_rank(lambda: forward_product(rows, weight), rows, low_rank)
    return add_low_rank(lambda: residual.addmm_(rows, weight.t()), rows, low_rank)


def mlp_add(
    hidden: Tensor,
    norm: Norm,
    activation: Activation,
    gate_and_up: tuple[Tensor | FP8Weight, LowRank | None],
    down: tuple[Tensor | FP8Weight, LowRank | None],
    counters: Tensor | None = None,
) -> Tensor:
    """Returns `hidden` [T, H] + `down` of a gated `norm_linear`, [T, H]. See `linear_add`.

    Both layers are given as their weight and adapters.
    """
    (first, first_low_rank), (second, second_low_rank) = gate_and_up, down
    if isinstance(first, FP8Weight) and isinstance(second, FP8Weight) and first_low_rank is second_low_rank is None:
        return fp8_mlp(hidden, norm, activation, first, second, counters=counters)
    features = norm_linear(hidden, norm, *gate_and_up, counters, activation=activation)
    return linear_add(hidden, features, *down, counters)


def _use_kernel(rows: Tensor, weight: Tensor, low_rank: LowRank | None, backend: Backend) -> bool:
    has_few_rows = rows.is_cuda and len(rows) <= MAX_ROWS and rows.dtype == torch.bfloat16
    if backend == "auto" and (not has_few_rows or is_batch_invariant()):
        return False
    unsupported_reason = None
    if not 0 < len(rows) <= MAX_ROWS:
        unsupported_reason = f"its tiles have room for {MAX_ROWS} rows, and these are {len(rows)}"
    elif weight.dtype != rows.dtype or not weight.is_contiguous() or rows.stride(-1) != 1:
        unsupported_reason = "rows and weights are not dense and of one dtype"
    elif weight.shape[0] % SIZE_MULTIPLE or weight.shape[1] % SIZE_MULTIPLE:
        unsupported_reason = f"a weight of {list(weight.shape)} does not divide into tiles of {SIZE_MULTIPLE}"
    elif low_rank is not None:
        unsupported_reason = low_rank.unsupported_reason(rows, MAX_RANK)
    return use_kernel("decode_linear", backend, rows.device, rows.dtype, unsupported_reason=unsupported_reason)


def add_low_rank(
    multiply: Callable[[], Tensor],
    rows: Tensor,
    low_rank: LowRank | None,
    activation: Activation | None = None,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Returns the product [T, out] of `multiply` with B · A · `rows` [T, in] added. It may overwrite the product.

    With an activation, returns activation(gate) · up of it, [T, out / 2]. In a CUDA graph the product with A runs in
    parallel with that of `multiply`.
    """
    if low_rank is None:
        return _activated(multiply(), activation)
    if _use_low_rank_kernel(rows, low_rank, backend):
        from postlude.ops.kernels import decode_linear as kernels  # needs triton

        with _on_side_stream(rows.device) as wait:
            a_products = F.linear(rows, low_rank.a)[None]
        product = multiply()
        wait()
        return kernels.add_low_rank(product, a_products, low_rank, activation=activation)
    product, a_products = multiply(), F.linear(rows, low_rank.a).split(low_rank.rank, -1)
    layers = zip(product.split(low_rank.sizes, -1), a_products, low_rank.b.split(low_rank.sizes), strict=True)
    for layer_product, a_product, b in layers:
        layer_product.addmm_(a_product, b.t())
    return _activated(product, activation)


def _activated(product: Tensor, activation: Activation | None) -> Tensor:
    if activation is None:
        return product
    gate, up = product.chunk(2, -1)
    return gated_activation(gate, up, activation)


@contextmanager
def _on_side_stream(device: torch.device) -> Iterator[Callable[[], None]]:
    """Launches kernels on a second stream while a CUDA graph is captured, so that they run beside later kernels.

    Yields a function that makes the current stream wait for them. Without a graph it does nothing: the host's launches
    would take longer.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        yield lambda: None
        return
    current, side_stream = torch.cuda.current_stream(device), _second_stream(device)
    side_stream.wait_stream(current)
    with torch.cuda.stream(side_stream):
        yield lambda: current.wait_stream(side_stream)


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _use_low_rank_kernel(rows: Tensor, low_rank: LowRank, backend: Backend) -> bool:
    if backend == "auto" and not rows.is_cuda:
        return False
    unsupported_reason = low_rank.unsupported_reason(rows)
    if not len(rows):
        unsupported_reason = EMPTY
    elif rows.stride(-1) != 1 or rows.shape[1] % SIZE_MULTIPLE:
        unsupported_reason = f"rows are not dense, or their features no multiple of {SIZE_MULTIPLE}"
    return use_kernel("decode_linear", backend, rows.device, rows.dtype, unsupported_reason=unsupported_reason)
