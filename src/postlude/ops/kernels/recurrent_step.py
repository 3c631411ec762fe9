"""One token of each row through a short convolution, Mamba-2 or the gated delta rule; the states change in place.

Each state is read and written once. In torch the step of Mamba-2 moves about thirteen times a state.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from postlude.ops.kernels.launch import Kernel

CHANNELS, CONVOLUTION_WARPS = 1024, 4  # of a program of the convolution
TILE = 8192  # numbers of a state that a program holds, 64 in each thread
STATE_WARPS = 4


def convolve(
    inputs: Tensor, state: Tensor, kernel: Tensor, bias: Tensor | None, running: Tensor | None, silu: bool
) -> Tensor:
    rows, channels = inputs.shape
    output = torch.empty(rows, channels, dtype=inputs.dtype, device=inputs.device)
    _convolve_kernel[(rows, triton.cdiv(channels, CHANNELS))](
        *(inputs, state, kernel, bias, _bytes(running), output),
        *(inputs.stride(0), *state.stride()[:2], *kernel.stride(), channels),
        K=kernel.shape[1], SILU=silu, CHANNELS=CHANNELS, num_warps=CONVOLUTION_WARPS,
    )  # fmt: skip
    return output


def mamba(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, states: Tensor, running: Tensor | None
) -> Tensor:
    rows, heads, width = x.shape
    groups, size = B.shape[1:]
    n_block = triton.next_power_of_2(size)
    p_block = min(triton.next_power_of_2(width), max(1, TILE // n_block))
    output = torch.empty(rows, heads, width, dtype=x.dtype, device=x.device)
    _mamba_kernel[(rows, heads, triton.cdiv(width, p_block))](
        *(x, dt, A, B, C, D, states, _bytes(running), output), *x.stride()[:2], *dt.stride(),
        *(*B.stride()[:2], *C.stride()[:2], states.stride(0), heads // groups),
        WIDTH=width, SIZE=size, P=p_block, N=n_block, num_warps=STATE_WARPS,
    )  # fmt: skip
    return output


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, states: Tensor, running: Tensor | None,
    scale: float, normalise_eps: float | None,
) -> Tensor:  # fmt: skip
    """See `gated_delta.gated_delta_step`. Vectors of keys and queries are normalised with `normalise_eps`, if any."""
    rows, heads, width = value.shape
    key_size = key.shape[2]
    k_block = triton.next_power_of_2(key_size)
    v_block = min(triton.next_power_of_2(width), max(1, TILE // k_block))
    output = torch.empty(rows, heads, width, dtype=value.dtype, device=value.device)
    _delta_kernel[(rows, heads, triton.cdiv(width, v_block))](
        *(query, key, value, log_decay, beta, states, _bytes(running), output), *query.stride()[:2], *key.stride()[:2],
        *value.stride()[:2], *log_decay.stride(), *beta.stride(), states.stride(0), heads // key.shape[1], scale,
        normalise_eps or 0.0, KEYS=key_size, WIDTH=width, K=k_block, V=v_block, NORMALISE=normalise_eps is not None,
        num_warps=STATE_WARPS,
    )  # fmt: skip
    return output


def _bytes(running: Tensor | None) -> Tensor | None:
    return None if running is None else running.view(torch.uint8)


@triton.jit
def _runs(running, row):
    # 1 if the state of the row changes, else 0.
    result = 1
    if running is not None:
        result = tl.load(running + row).to(tl.int32)
    return result


@Kernel
@triton.jit
def _convolve_kernel(
    inputs, state, kernel, bias, running, output,
    input_stride, state_stride, tap_stride, kernel_channel_stride, kernel_tap_stride, channels,
    K: tl.constexpr, SILU: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = channel < channels
    store = channel < channels * _runs(running, row)
    value = tl.load(inputs + row * input_stride + channel, mask=mask, other=0.0)
    weights = kernel + channel * kernel_channel_stride
    taps = state + row * state_stride + channel
    total = value.to(tl.float32) * tl.load(weights + (K - 1) * kernel_tap_stride, mask=mask, other=0.0).to(tl.float32)
    for tap in tl.static_range(K - 1):
        earlier = tl.load(taps + tap * tap_stride, mask=mask, other=0.0)
        total += earlier.to(tl.float32) * tl.load(weights + tap * kernel_tap_stride, mask=mask, other=0.0).to(
            tl.float32
        )
        if tap > 0:
            tl.store(taps + (tap - 1) * tap_stride, earlier, mask=store)
    if K > 1:
        tl.store(taps + (K - 2) * tap_stride, value, mask=store)
    if bias is not None:
        total += tl.load(bias + channel, mask=mask, other=0.0).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(output + row * channels + channel, total.to(output.dtype.element_ty), mask=mask)


@Kernel
@triton.jit
def _mamba_kernel(
    x, dt, A, B, C, D, states, running, output,
    x_row, x_head, dt_row, dt_head, b_row, b_group, c_row, c_group, state_row, share,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p, n = tl.program_id(2) * P + tl.arange(0, P), tl.arange(0, N)
    p_mask, n_mask = p < WIDTH, n < SIZE
    mask = p_mask[:, None] & n_mask[None, :]
    store = (p < WIDTH * _runs(running, row))[:, None] & n_mask[None, :]
    group = head // share
    inputs = tl.load(x + row * x_row + head * x_head + p, mask=p_mask, other=0.0).to(tl.float32)
    step = tl.load(dt + row * dt_row + head * dt_head).to(tl.float32)
    b = tl.load(B + row * b_row + group * b_group + n, mask=n_mask, other=0.0).to(tl.float32)
    c = tl.load(C + row * c_row + group * c_group + n, mask=n_mask, other=0.0).to(tl.float32)
    at = states + row * state_row + head * (WIDTH * SIZE) + p[:, None] * SIZE + n[None, :]
    state = tl.load(at, mask=mask, other=0.0)
    state = state * tl.exp(step * tl.load(A + head).to(tl.float32)) + (step * inputs)[:, None] * b[None, :]
    tl.store(at, state, mask=store)
    y = tl.sum(state * c[None, :], 1)
    if D is not None:
        y += tl.load(D + head).to(tl.float32) * inputs
    tl.store(output + (row * tl.num_programs(1) + head) * WIDTH + p, y.to(output.dtype.element_ty), mask=p_mask)


@Kernel
@triton.jit
def _delta_kernel(
    query, key, value, log_decay, beta, states, running, output,
    q_row, q_head, k_row, k_head, v_row, v_head, decay_row, decay_head, beta_row, beta_head, state_row, share, scale,
    eps, KEYS: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k, v = tl.arange(0, K), tl.program_id(2) * V + tl.arange(0, V)
    k_mask, v_mask = k < KEYS, v < WIDTH
    mask = k_mask[:, None] & v_mask[None, :]
    store = k_mask[:, None] & (v < WIDTH * _runs(running, row))[None, :]
    key_head = head // share
    q = tl.load(query + row * q_row + key_head * q_head + k, mask=k_mask, other=0.0).to(tl.float32)
    of_key = tl.load(key + row * k_row + key_head * k_head + k, mask=k_mask, other=0.0).to(tl.float32)
    if NORMALISE:
        q = q * tl.rsqrt(tl.sum(q * q, 0) + eps)
        of_key = of_key * tl.rsqrt(tl.sum(of_key * of_key, 0) + eps)
    new = tl.load(value + row * v_row + head * v_head + v, mask=v_mask, other=0.0).to(tl.float32)
    decay = tl.exp(tl.load(log_decay + row * decay_row + head * decay_head).to(tl.float32))
    at = states + row * state_row + head * (KEYS * WIDTH) + k[:, None] * WIDTH + v[None, :]
    state = tl.load(at, mask=mask, other=0.0) * decay
    written = new - tl.sum(of_key[:, None] * state, 0)
    written = written * tl.load(beta + row * beta_row + head * beta_head).to(tl.float32)
    state += of_key[:, None] * written[None, :]
    tl.store(at, state, mask=store)
    result = tl.sum((q * scale)[:, None] * state, 0)
    tl.store(output + (row * tl.num_programs(1) + head) * WIDTH + v, result.to(output.dtype.element_ty), mask=v_mask)
