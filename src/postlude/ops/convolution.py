"""Causal depthwise convolution over packed sequences, which recurrent blocks apply before their scan."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from postlude.ops.kernels.capabilities import EMPTY, Backend, use_kernel
from postlude.ops.packing import Packing
from postlude.ops.recurrent_step import overwrite, use_step_kernel

WIDEST = 8  # taps of the Triton kernels at most


def convolve(
    inputs: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    packing: Packing,
    *,
    silu: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """Convolves each channel of `inputs` [T, channels] with its own `kernel` [channels, K]: [T, channels].

    A token sees itself, through the kernel's last tap, and the K - 1 tokens before it in its own sequence, zeros before
    the first. With `silu` that activation follows. Sums are fp32, or float64 where the inputs are.
    """
    _check(inputs.shape[-1], kernel)
    unsupported_reason = None
    if kernel.shape[1] > WIDEST:
        unsupported_reason = f"its kernels have {WIDEST} taps at most, and this has {kernel.shape[1]}"
    elif inputs.numel() == 0:
        unsupported_reason = EMPTY
    if use_kernel("convolve", backend, inputs.device, inputs.dtype, unsupported_reason=unsupported_reason):
        convolved: Tensor = _TritonConvolution.apply(inputs, kernel, bias, packing.positions().int(), silu)
        return convolved
    output: Tensor = _Convolution.apply(
        inputs, kernel, bias, _spread(packing, kernel.shape[1] - 1), packing.count, silu
    )
    return output


def last_inputs(inputs: Tensor, packing: Packing, width: int) -> Tensor:
    """Returns the last `width` (K - 1) tokens of each sequence of `inputs` [T, channels], for `convolve_step`.

    [sequences, width, channels], the oldest first, with zeros before the first token of a shorter sequence.
    """
    back = torch.arange(-width, 0, device=inputs.device)
    starts, stops = packing.cu_seqlens[:-1, None], packing.cu_seqlens[1:, None]
    rows = stops + back  # [sequences, width]
    if packing.count == 0 or width == 0:
        return inputs.new_zeros(packing.count, width, inputs.shape[-1])
    return inputs[rows.clamp_min(0)].where((rows >= starts)[..., None], 0.0)


def convolve_step(
    inputs: Tensor,
    state: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    running: Tensor | None = None,
    *,
    silu: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """Convolves one more token of each of n sequences, `inputs` [n, channels], after `state` [n, K - 1, channels].

    Returns the result of `convolve` for that token, [n, channels]. Overwrites the state, of the sequences that are
    `running` [n] bool alone.
    """
    _check(inputs.shape[-1], kernel)
    if use_step_kernel(backend, state, inputs):
        from postlude.ops.kernels import recurrent_step  # needs triton

        return recurrent_step.convolve(inputs, state, kernel, bias, running, silu)
    window = torch.cat((state, inputs[:, None]), 1)  # [n, K, channels]
    output = (window * kernel.T.to(_compute_dtype(inputs))).sum(1)
    if bias is not None:
        output = output + bias
    overwrite(state, window[:, 1:], running)
    return (F.silu(output) if silu else output).to(inputs.dtype)


def _check(channels: int, kernel: Tensor) -> None:
    if kernel.ndim != 2 or kernel.shape[0] != channels or kernel.shape[1] < 1:
        raise ValueError(
            f"a kernel of shape {tuple(kernel.shape)} for {channels} channels: a depthwise convolution has one of "
            f"[{channels}, K], K taps a channel."
        )


def _spread(packing: Packing, gap: int) -> Tensor:
    """Returns [T] int64: each token's row if `gap` empty rows are before, between and after the sequences."""
    return torch.arange(packing.total, device=packing.cu_seqlens.device) + gap * (packing.sequence_index() + 1)


class _Convolution(Function):
    """Separates sequences by K - 1 zeros, so that every tap is one slice without a mask.

    The backward keeps only the inputs: computing the sums again costs less than keeping them.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, kernel: Tensor, bias: Tensor | None, padded_rows: Tensor, sequences: int, silu: bool
    ) -> Tensor:
        ctx.save_for_backward(inputs, kernel, bias, padded_rows)
        ctx.sequences, ctx.silu = sequences, silu
        gap = kernel.shape[1] - 1
        sums = _convolve_rows(_with_gaps(inputs, padded_rows, sequences, gap), kernel, bias)[padded_rows - gap]
        return (F.silu(sums) if silu else sums).to(inputs.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, kernel, bias, padded_rows = ctx.saved_tensors
        gap, needs = kernel.shape[1] - 1, ctx.needs_input_grad
        padded_inputs = _with_gaps(inputs, padded_rows, ctx.sequences, gap)
        grad_sums = gradients[0].to(_compute_dtype(inputs))
        if ctx.silu:
            sums = _convolve_rows(padded_inputs, kernel, bias)[padded_rows - gap]
            sigmoid = sums.sigmoid()
            grad_sums = grad_sums * (sigmoid * (1 + sums * (1 - sigmoid)))
        padded_grads = _with_gaps(grad_sums, padded_rows, ctx.sequences, gap)
        grad_inputs = grad_kernel = grad_bias = None
        if needs[0]:  # a token's gradient comes from itself and the K - 1 after it
            grad_inputs = _convolve_rows(padded_grads, kernel.flip(1), None)[padded_rows].to(inputs.dtype)
        if needs[1]:
            rows = padded_inputs.shape[0] - gap
            taps = [(padded_grads[gap:] * padded_inputs[tap : tap + rows]).sum(0) for tap in range(gap + 1)]
            grad_kernel = torch.stack(taps, 1).to(kernel.dtype)
        if needs[2]:
            grad_bias = grad_sums.sum(0).to(bias.dtype)
        return grad_inputs, grad_kernel, grad_bias, None, None, None


class _TritonConvolution(Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, kernel: Tensor, bias: Tensor | None, positions: Tensor, silu: bool) -> Tensor:
        ctx.save_for_backward(inputs, kernel, bias, positions)
        ctx.silu = silu
        from postlude.ops.kernels import convolution as kernels  # needs triton

        return kernels.forward(inputs, kernel, bias, positions, silu)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from postlude.ops.kernels import convolution as kernels

        inputs, kernel, bias, positions = ctx.saved_tensors
        kernel_gradients = kernels.backward(inputs, kernel, bias, positions, ctx.silu, gradients[0])
        grad_bias = None if bias is None else kernel_gradients[2].to(bias.dtype)
        return kernel_gradients[0], kernel_gradients[1].to(kernel.dtype), grad_bias, None, None


def _with_gaps(tokens: Tensor, padded_rows: Tensor, sequences: int, gap: int) -> Tensor:
    """[T, channels] -> [T + (sequences + 1) · gap, channels], zero where no token lies."""
    rows = tokens.shape[0] + (sequences + 1) * gap
    return tokens.new_zeros(rows, tokens.shape[1]).index_copy_(0, padded_rows, tokens)


def _convolve_rows(padded: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
    """Returns for each row r the sum of rows r to r + K - 1 of `padded` [R, channels] times their taps, in fp32."""
    taps = kernel.T.to(_compute_dtype(padded))
    rows = padded.shape[0] - len(taps) + 1
    sums = padded[:rows] * taps[0]
    for first, tap in enumerate(taps[1:], 1):
        sums.addcmul_(padded[first : first + rows], tap)
    return sums if bias is None else sums.add_(bias)


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
