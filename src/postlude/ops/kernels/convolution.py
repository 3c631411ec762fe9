"""The packed causal convolution and its gradients, one kernel each, limited by memory bandwidth.

18 times as fast as torch forward and 21 times both ways: 0.30 against 5.5 ms and 0.96 against 19.9 ms for 16,384 tokens
of 10,240 channels, bf16 on an H200 (benchmarks/results/scans_h200.json).

A token sees the value `m` tokens before it if its position in its own sequence is at least `m`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"
# ruff: noqa: RUF005 (Triton joins tuples, but does not unpack them)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from postlude.ops.kernels.launch import Kernel

# Tiles of the forward, measured on an H200. One thread has all tokens of its channels and sums over them alone.
TOKENS, CHANNELS, WARPS = 4, 512, 2
# The backward: tokens that a program takes one after the other, and its channels, four a thread. Two tokens are
# unrolled, which moves fewer numbers between registers; three leave no registers for four programs. Chosen by what
# Triton 3.6 compiles for Hopper: 210 instructions for a token's four channels, and 128 registers.
BACKWARD_TOKENS, BACKWARD_CHANNELS, BACKWARD_WARPS, UNROLL = 128, 512, 4, 2


def forward(inputs: Tensor, kernel: Tensor, bias: Tensor | None, positions: Tensor, silu: bool) -> Tensor:
    """See `convolve`. `positions` [T] are the tokens' positions in their sequences."""
    tokens, channels = inputs.shape
    output = torch.empty(tokens, channels, dtype=inputs.dtype, device=inputs.device)
    _forward_kernel[(triton.cdiv(channels, CHANNELS) * triton.cdiv(tokens, TOKENS),)](
        *(inputs, *inputs.stride(), kernel.T.contiguous(), bias, positions, output), *(tokens, channels),
        K=kernel.shape[1], SILU=silu, TOKENS=TOKENS, CHANNELS=CHANNELS,
        TAPS=triton.next_power_of_2(kernel.shape[1] + 1), num_warps=WARPS,
    )  # fmt: skip
    return output


def backward(
    inputs: Tensor, kernel: Tensor, bias: Tensor | None, positions: Tensor, silu: bool, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of inputs [T, channels] and, in fp32, of the kernel [channels, K] and bias [channels]."""
    (tokens, channels), width = inputs.shape, kernel.shape[1]
    grad_inputs = torch.empty(tokens, channels, dtype=inputs.dtype, device=inputs.device)
    programs = triton.cdiv(tokens, BACKWARD_TOKENS)
    partial = torch.empty(programs, width + 1, channels, dtype=torch.float32, device=inputs.device)
    _backward_kernel[(triton.cdiv(channels, BACKWARD_CHANNELS) * programs,)](
        *(inputs, *inputs.stride(), kernel.T.contiguous(), bias, positions),
        *(gradient, *gradient.stride(), grad_inputs, partial), *(tokens, channels, BACKWARD_TOKENS), K=width, SILU=silu,
        CHANNELS=BACKWARD_CHANNELS, UNROLL=UNROLL, num_warps=BACKWARD_WARPS,
    )  # fmt: skip
    sums = partial.sum(0)
    return grad_inputs, sums[:-1].T, sums[-1]


@triton.jit
def _load_tokens(tensor, token_stride, channel_stride, token, tokens, channel, channels):
    mask = ((token >= 0) & (token < tokens))[:, None] & (channel < channels)[None, :]
    at = tensor + token.to(tl.int64)[:, None] * token_stride + channel[None, :] * channel_stride
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _select_row(table, row, index: tl.constexpr):
    # Returns row `index`. A thread has all rows of the tile, so the compiler picks one and sums nothing.
    return tl.sum(tl.where((row == index)[:, None], table, 0.0), 0)


@triton.jit
def _convolve_tile(
    inputs, token_stride, channel_stride, taps, tap, token, position, tokens, channel, channels,
    K: tl.constexpr,
):  # fmt: skip
    # Returns the sums before the activation, [TOKENS, CHANNELS].
    sums = tl.zeros((token.shape[0], channel.shape[0]), tl.float32) + _select_row(taps, tap, K)[None, :]
    for lag in tl.static_range(K):
        value = _load_tokens(inputs, token_stride, channel_stride, token - lag, tokens, channel, channels)
        sums += tl.where((position >= lag)[:, None], value, 0.0) * _select_row(taps, tap, K - 1 - lag)[None, :]
    return sums


@triton.jit
def _load_taps(kernel, bias, tap, channel, channels, K: tl.constexpr):
    # Returns [TAPS, CHANNELS]: a row for each tap, then the bias or zeros.
    mask = (channel < channels)[None, :]
    at = kernel + tap[:, None] * channels + channel[None, :]
    taps = tl.load(at, mask=(tap < K)[:, None] & mask, other=0.0).to(tl.float32)
    if bias is not None:
        at = bias + channel[None, :] + tap[:, None] * 0
        taps += tl.load(at, mask=(tap == K)[:, None] & mask, other=0.0).to(tl.float32)
    return taps


@Kernel
@triton.jit
def _forward_kernel(
    inputs, token_stride, channel_stride, kernel, bias, positions, output, tokens, channels,
    K: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    # A grid of one dimension: CUDA limits the others to 65,535.
    channel_tiles = tl.cdiv(channels, CHANNELS)
    channel = tl.program_id(0) % channel_tiles * CHANNELS + tl.arange(0, CHANNELS)
    token = tl.program_id(0) // channel_tiles * TOKENS + tl.arange(0, TOKENS)
    position = tl.load(positions + token, mask=token < tokens, other=0)
    tap = tl.arange(0, TAPS)
    taps = _load_taps(kernel, bias, tap, channel, channels, K)
    sums = _convolve_tile(
        inputs, token_stride, channel_stride, taps, tap, token, position, tokens, channel, channels, K
    )
    if SILU:
        sums *= tl.sigmoid(sums)
    at = output + token.to(tl.int64)[:, None] * channels + channel[None, :]
    mask = (token < tokens)[:, None] & (channel < channels)[None, :]
    tl.store(at, sums.to(output.dtype.element_ty), mask=mask)


@triton.jit
def _load_token(tensor, token_stride, channel_stride, token, tokens, channel, channels):
    # Returns one token's channels, as they are stored; zeros where there is no such token.
    valid_channels = tl.where((token >= 0) & (token < tokens), channels, 0)
    at = tensor + token.to(tl.int64) * token_stride + channel * channel_stride
    return tl.load(at, mask=channel < valid_channels, other=0.0)


@Kernel
@triton.jit
def _backward_kernel(  # noqa: PLR0915
    inputs, token_stride, channel_stride, kernel, bias, positions, gradient, gradient_token, gradient_channel,
    grad_inputs, partial, tokens, channels, program_tokens,
    K: tl.constexpr, SILU: tl.constexpr, CHANNELS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    # A program takes `program_tokens` tokens, one after another, each read once. The values of the K - 1 tokens before,
    # and what is summed of their gradients (`pending_grads`), stay in registers: entry `lag` of a tuple is of the token
    # so many before. A token adds to its own gradient and to theirs, so the K - 1 tokens after the program's are read
    # too. A tap's gradient is the sum over tokens of the gradient times the value that the tap multiplies.
    channel_tiles = tl.cdiv(channels, CHANNELS)
    channel = tl.program_id(0) % channel_tiles * CHANNELS + tl.arange(0, CHANNELS)
    program = tl.program_id(0) // channel_tiles
    first = program * program_tokens
    count = tl.minimum(program_tokens, tokens - first)
    mask = channel < channels
    bias_row = tl.zeros((CHANNELS,), tl.float32)
    grad_bias = tl.zeros((CHANNELS,), tl.float32)
    if bias is not None:
        bias_row += tl.load(bias + channel, mask=mask, other=0.0).to(tl.float32)
    taps, grad_taps, previous_values, pending_grads = (), (), (), ()
    for lag in tl.static_range(K):
        taps = taps + (tl.load(kernel + (K - 1 - lag) * channels + channel, mask=mask, other=0.0).to(tl.float32),)
        grad_taps = grad_taps + (grad_bias,)
    for lag in tl.static_range(1, K):
        previous_value = _load_token(inputs, token_stride, channel_stride, first - lag, tokens, channel, channels)
        previous_values = previous_values + (previous_value.to(tl.float32),)
        pending_grads = pending_grads + (grad_bias,)

    # Two tokens are loaded while one is processed.
    value = _load_token(inputs, token_stride, channel_stride, first, tokens, channel, channels)
    next_value = _load_token(inputs, token_stride, channel_stride, first + 1, tokens, channel, channels)
    grad = _load_token(gradient, gradient_token, gradient_channel, first, tokens, channel, channels)
    next_grad = _load_token(gradient, gradient_token, gradient_channel, first + 1, tokens, channel, channels)
    for step in tl.range(0, count + K - 1, loop_unroll_factor=UNROLL):
        token = first + step
        second_next_value = _load_token(inputs, token_stride, channel_stride, token + 2, tokens, channel, channels)
        second_next_grad = _load_token(gradient, gradient_token, gradient_channel, token + 2, tokens, channel, channels)
        position = tl.load(positions + token, mask=token < tokens, other=0)
        grad_sum = grad.to(tl.float32)
        tap_inputs = (value.to(tl.float32),)
        for lag in tl.static_range(1, K):
            tap_inputs = tap_inputs + (tl.where(position >= lag, previous_values[lag - 1], 0.0),)
        if SILU:
            sums = bias_row
            for lag in tl.static_range(K):
                sums += tap_inputs[lag] * taps[lag]
            sigmoid = tl.sigmoid(sums)
            grad_sum *= sigmoid * (1 + sums * (1 - sigmoid))
        own_grad = tl.where(step < count, grad_sum, 0.0)  # tokens after the program's belong to another one
        grad_bias += own_grad
        new_grad_taps = ()
        for lag in tl.static_range(K):
            new_grad_taps = new_grad_taps + (grad_taps[lag] + own_grad * tap_inputs[lag],)
        grad_taps = new_grad_taps
        grad_input = (
            grad_sum * taps[0]
        )  # of this token; then of the one before, and so on; that of the last is complete
        new_pending_grads = ()
        for lag in tl.static_range(1, K):
            new_pending_grads = new_pending_grads + (grad_input,)
            grad_input = pending_grads[lag - 1] + tl.where(position >= lag, grad_sum, 0.0) * taps[lag]
        pending_grads = new_pending_grads
        finished_token = token - (K - 1)
        at = grad_inputs + finished_token.to(tl.int64) * channels + channel
        finished_mask = channel < tl.where(finished_token >= first, channels, 0)
        tl.store(at, grad_input.to(grad_inputs.dtype.element_ty), mask=finished_mask)
        previous_values = tap_inputs[: K - 1]
        value, next_value = next_value, second_next_value
        grad, next_grad = next_grad, second_next_grad

    at = partial + program.to(tl.int64) * (K + 1) * channels + channel
    for lag in tl.static_range(K):
        tl.store(at + (K - 1 - lag) * channels, grad_taps[lag], mask=mask)
    tl.store(at + K * channels, grad_bias, mask=mask)
