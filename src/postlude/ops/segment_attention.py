"""Attention where sequences share segments: the Triton kernels, and cuDNN where many queries see a long segment.

Such queries and keys are a rectangle without a mask, which cuDNN computes faster. The two results are merged by their
log-sum-exps, and each backward gets the merged ones: it uses the softmax only through them.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from postlude.ops.attention_scores import ScoreConfig
from postlude.ops.packing import Packing, Rectangle

CUDNN_MIN_ROWS = 4096  # queries and keys of a rectangle
LENGTH_STEP = 512  # cuDNN takes 0.1 s to plan each pair of lengths, so they are rounded to this at least
LENGTHS_PER_OCTAVE = 8


class RectangleKernel(Protocol):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Returns the output [Tq, heads, v] and the lse [Tq, heads], fp32."""
        ...

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of query, key and value, given the merged output and lse."""
        ...


def segment_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    score_config: ScoreConfig,
    *,
    rectangle_kernel: RectangleKernel | None = None,
    min_rows: int = CUDNN_MIN_ROWS,
    tiles: Any = None,
) -> Tensor:
    """Attends along the paths of segments. No window hides keys. Rectangles have at least `min_rows` queries and keys.

    By default they are cuDNN's, if it has a kernel.
    """
    from postlude.ops.kernels.attention import AttentionCall, triton_attention  # needs triton

    query, key, value = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value))
    if rectangle_kernel is None and _cudnn_supports(query, value, score_config):
        rectangle_kernel = CUDNN
    rectangles = () if rectangle_kernel is None else find_rectangles(packing, min_rows)
    config = score_config
    if not rectangles:
        return triton_attention(
            *(query, key, value, packing, packing),
            scale=config.scale,
            window=config.window,
            softcap=config.softcap,
            sinks=config.sinks,
            tiles=tiles,
        )
    inputs = query, key, value
    call = AttentionCall.of(inputs, packing, packing, config.scale, config.window, None, tiles, rectangles)
    output: Tensor = _Merged.apply(*inputs, config.sinks, call, rectangle_kernel)
    return output


def _cudnn_supports(query: Tensor, value: Tensor, score_config: ScoreConfig) -> bool:
    widths = query.shape[-1] == value.shape[-1] <= 128 and query.shape[-1] % 8 == 0
    return query.is_cuda and widths and score_config.softcap is None


def find_rectangles(packing: Packing, min_rows: int) -> tuple[Rectangle, ...]:
    """Returns the rectangles of at least so many queries and keys. They are found once for all layers."""
    if ("rectangles", min_rows) not in packing.tables:
        packing.tables["rectangles", min_rows] = _rectangles(packing, min_rows)
    rectangles: tuple[Rectangle, ...] = packing.tables["rectangles", min_rows]
    return rectangles


def _rectangles(packing: Packing, min_rows: int) -> tuple[Rectangle, ...]:
    tree_lengths, rectangles = packing.tree_lengths(), []
    for segment, ((start, stop), length) in enumerate(zip(packing.slices(), tree_lengths, strict=True)):
        keys = (stop - start) // length_step(stop - start) * length_step(stop - start)
        queries = length - (stop - start)
        if min(keys, queries) >= min_rows:
            rectangles.append(Rectangle(segment, start, keys, stop, queries))
    return tuple(rectangles)


class _Merged(Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, call: Any, kernel: RectangleKernel
    ) -> Tensor:
        from postlude.ops.kernels import attention

        # Copies, since selective recompute keeps what the operator returned.
        output, lse = (tensor.clone() for tensor in attention.forward(query, key, value, sinks, call))
        for rectangle in call.rectangles:
            rows, columns = rectangle.query_rows, rectangle.key_rows
            part, part_lse = kernel.forward(query[rows], key[columns], value[columns], call.scale)
            weight = (part_lse - lse[rows]).sigmoid()[..., None]
            output[rows] = torch.lerp(output[rows].float(), part.float(), weight)
            lse[rows] = torch.logaddexp(lse[rows], part_lse)
        ctx.save_for_backward(query, key, value, sinks, output, lse)
        ctx.call, ctx.kernel = call, kernel
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from postlude.ops.kernels import attention

        query, key, value, sinks, output, lse = ctx.saved_tensors
        call, gradient = ctx.call, gradients[0].contiguous()
        grads = attention.backward(query, key, value, sinks, output, lse, gradient, call)
        for rectangle in call.rectangles:
            rows, columns = rectangle.query_rows, rectangle.key_rows
            inputs = query[rows], key[columns], value[columns], output[rows], lse[rows]
            parts = ctx.kernel.backward(gradient[rows], *inputs, call.scale)
            for total, part, chosen in zip(grads, parts, (rows, columns, columns), strict=False):
                assert total is not None  # only that of the sinks may be
                total[chosen] += part
        return *grads, None, None


class _CuDNN:
    """cuDNN's kernel. It calls private operators: the public function returns no lse."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        tokens = len(query)
        operands = _as_batch(_padded(query)), _as_batch(key), _as_batch(value)
        output, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *operands, None, True, 0.0, False, False, scale=scale
        )
        return output[0].transpose(0, 1)[:tokens], lse.reshape(query.shape[1], -1).T[:tokens]

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens = len(query)
        operands = _as_batch(_padded(query)), _as_batch(key), _as_batch(value), _as_batch(_padded(output))
        padded_lse = F.pad(lse, (0, 0, 0, _padding(tokens))).T.contiguous()[None, :, :, None]
        seed = torch.zeros((), dtype=torch.int64, device=query.device)  # of the dropout that there is not
        gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(_as_batch(_padded(gradient)), *operands, padded_lse, seed, seed, None, None, None),
            *(operands[0].shape[2], len(key), 0.0, False),
            scale=scale,
        )
        grad_query, grad_key, grad_value = (part[0].transpose(0, 1) for part in gradients)
        return grad_query[:tokens], grad_key, grad_value


CUDNN = _CuDNN()


def length_step(length: int) -> int:
    """Returns what a length is rounded to a multiple of, so that there are few."""
    octave = 1 << (length.bit_length() - 1)
    return max(LENGTH_STEP, octave // LENGTHS_PER_OCTAVE)


def _padding(tokens: int) -> int:
    return -tokens % length_step(tokens)


def _padded(tensor: Tensor) -> Tensor:
    """Returns the rows [T, heads, width] with zeros behind them, whose gradient is zero."""
    padding = _padding(len(tensor))
    return F.pad(tensor, (0, 0, 0, 0, 0, padding)) if padding else tensor


def _as_batch(tensor: Tensor) -> Tensor:
    """Returns [1, heads, T, width] of [T, heads, width]."""
    return tensor.transpose(0, 1)[None]
