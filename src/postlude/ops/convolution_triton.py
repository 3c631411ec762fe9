"""The packed causal convolution and its gradients as one Triton kernel each: what memory can deliver is the limit.

Tokens are masked by their place in their own sequence: of the token `m` before it one may see the value if that place
is at least `m`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Of a tile, by measurement on an H200. One thread has all of its tokens, so that it sums over them alone.
TOKENS, CHANNELS, WARPS = 4, 512, 2
BACK_TOKENS, BACK_CHANNELS, BACK_WARPS = 1, 512, 4
RUN = 256  # tokens that a program of the backward takes, tile after tile


def forward(inputs: Tensor, kernel: Tensor, bias: Tensor | None, positions: Tensor, silu: bool) -> Tensor:
    """See `convolve`. `positions` [T]: each token's place in its sequence."""
    tokens, channels = inputs.shape
    output = torch.empty(tokens, channels, dtype=inputs.dtype, device=inputs.device)
    _forward_kernel[(triton.cdiv(channels, CHANNELS), triton.cdiv(tokens, TOKENS))](
        *(inputs, *inputs.stride(), kernel.T.contiguous(), bias, positions, output),
        *(tokens, channels),
        K=kernel.shape[1],
        SILU=silu,
        TOKENS=TOKENS,
        CHANNELS=CHANNELS,
        TAPS=triton.next_power_of_2(kernel.shape[1] + 1),
        num_warps=WARPS,
    )
    return output


def backward(
    inputs: Tensor, kernel: Tensor, bias: Tensor | None, positions: Tensor, silu: bool, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of inputs [T, channels] and, fp32, of the kernel [channels, K] and of a bias [channels]."""
    (tokens, channels), width = inputs.shape, kernel.shape[1]
    of_inputs = torch.empty(tokens, channels, dtype=inputs.dtype, device=inputs.device)
    turns = triton.cdiv(min(RUN, tokens), BACK_TOKENS)
    programs = triton.cdiv(tokens, BACK_TOKENS * turns)
    partial = torch.empty(programs, width + 1, channels, dtype=torch.float32, device=inputs.device)
    _backward_kernel[(triton.cdiv(channels, BACK_CHANNELS), programs)](
        *(inputs, *inputs.stride(), kernel.T.contiguous(), bias, positions),
        *(gradient, *gradient.stride(), of_inputs, partial),
        *(tokens, channels, turns),
        K=width,
        SILU=silu,
        TOKENS=BACK_TOKENS,
        CHANNELS=BACK_CHANNELS,
        TAPS=triton.next_power_of_2(width + 1),
        num_warps=BACK_WARPS,
    )
    sums = partial.sum(0)
    return of_inputs, sums[:-1].T, sums[-1]


@triton.jit
def _rows(tensor, token_stride, channel_stride, token, tokens, channel, channels):
    held = ((token >= 0) & (token < tokens))[:, None] & (channel < channels)[None, :]
    at = tensor + token.to(tl.int64)[:, None] * token_stride + channel[None, :] * channel_stride
    return tl.load(at, mask=held, other=0.0).to(tl.float32)


@triton.jit
def _row(table, row, index: tl.constexpr):
    # One row of a tile whose rows a thread has all of: the compiler knows which, and nothing is summed in the end.
    return tl.sum(tl.where((row == index)[:, None], table, 0.0), 0)


@triton.jit
def _sums(
    inputs,
    token_stride,
    channel_stride,
    taps,
    tap,
    token,
    position,
    tokens,
    channel,
    channels,
    AHEAD: tl.constexpr,
    K: tl.constexpr,
):
    # Before the activation, [TOKENS, CHANNELS], of the tokens AHEAD of `token`, whose places are `position`. Rows are
    # named by their distance from `token`, so that the compiler sees which are the same and loads them once.
    sums = tl.zeros((token.shape[0], channel.shape[0]), tl.float32) + _row(taps, tap, K)[None, :]
    for back in tl.static_range(K):
        value = _rows(inputs, token_stride, channel_stride, token + (AHEAD - back), tokens, channel, channels)
        sums += tl.where((position >= back)[:, None], value, 0.0) * _row(taps, tap, K - 1 - back)[None, :]
    return sums


@triton.jit
def _taps(kernel, bias, tap, channel, channels, K: tl.constexpr):
    # [rows, CHANNELS]: a row for each tap, and the bias, or zeros, behind them.
    own = (channel < channels)[None, :]
    at = kernel + tap[:, None] * channels + channel[None, :]
    taps = tl.load(at, mask=(tap < K)[:, None] & own, other=0.0).to(tl.float32)
    if bias is not None:
        at = bias + channel[None, :] + tap[:, None] * 0
        taps += tl.load(at, mask=(tap == K)[:, None] & own, other=0.0).to(tl.float32)
    return taps


@triton.jit
def _forward_kernel(
    inputs,
    token_stride,
    channel_stride,
    kernel,
    bias,
    positions,
    output,
    tokens,
    channels,
    K: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
):
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    position = tl.load(positions + token, mask=token < tokens, other=0)
    tap = tl.arange(0, TAPS)
    taps = _taps(kernel, bias, tap, channel, channels, K)
    sums = _sums(inputs, token_stride, channel_stride, taps, tap, token, position, tokens, channel, channels, 0, K)
    if SILU:
        sums *= tl.sigmoid(sums)
    at = output + token.to(tl.int64)[:, None] * channels + channel[None, :]
    held = (token < tokens)[:, None] & (channel < channels)[None, :]
    tl.store(at, sums.to(output.dtype.element_ty), mask=held)


@triton.jit
def _backward_kernel(
    inputs,
    token_stride,
    channel_stride,
    kernel,
    bias,
    positions,
    gradient,
    gradient_token,
    gradient_channel,
    of_inputs,
    partial,
    tokens,
    channels,
    turns,
    K: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
):
    # A token's gradient comes from itself and the K - 1 after it, whose sums are made again here rather than kept. A
    # tap's is the sum over tokens of their value times what arrives at the token that sees it by that tap.
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    program = tl.program_id(1)
    tap = tl.arange(0, TAPS)
    taps = _taps(kernel, bias, tap, channel, channels, K)
    of_taps = tl.zeros((TAPS, CHANNELS), tl.float32)
    for turn in range(turns):
        token = (program * turns + turn) * TOKENS + tl.arange(0, TOKENS)
        value = _rows(inputs, token_stride, channel_stride, token, tokens, channel, channels)
        total = tl.zeros((TOKENS, CHANNELS), tl.float32)
        for ahead in tl.static_range(K):
            position = tl.load(positions + token + ahead, mask=token + ahead < tokens, other=-1)
            upstream = _rows(gradient, gradient_token, gradient_channel, token + ahead, tokens, channel, channels)
            if SILU:
                sums = _sums(
                    inputs,
                    token_stride,
                    channel_stride,
                    taps,
                    tap,
                    token,
                    position,
                    tokens,
                    channel,
                    channels,
                    ahead,
                    K,
                )
                gate = tl.sigmoid(sums)
                upstream *= gate * (1 + sums * (1 - gate))
            seen = (position >= ahead)[:, None]
            total += tl.where(seen, upstream, 0.0) * _row(taps, tap, K - 1 - ahead)[None, :]
            product = tl.sum(tl.where(seen, upstream * value, 0.0), 0)
            of_taps = tl.where((tap == K - 1 - ahead)[:, None], of_taps + product[None, :], of_taps)
            if ahead == 0:
                of_taps = tl.where((tap == K)[:, None], of_taps + tl.sum(upstream, 0)[None, :], of_taps)
        at = of_inputs + token.to(tl.int64)[:, None] * channels + channel[None, :]
        held = (token < tokens)[:, None] & (channel < channels)[None, :]
        tl.store(at, total.to(of_inputs.dtype.element_ty), mask=held)
    at = partial + (program * (K + 1) + tap).to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(at, of_taps, mask=(tap <= K)[:, None] & (channel < channels)[None, :])
