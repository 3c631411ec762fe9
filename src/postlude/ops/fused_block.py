"""An attention or MLP block, with its norm and the residual sum, as one autograd function.

One autograd step takes the host several times as long as a launch, and eight of them with two sums per layer kept a GPU
waiting. These functions run the kernels and products of `rms_norm_with_residual`, `linear_group`, `rotate_heads`,
`attend` and `gated_linear` in the same order and keep the same tensors for the backward. Blocks choose them in
`Block.fused_forward`, where all of these would run as Triton kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

from postlude.ops.activation import GateActivation
from postlude.ops.attention import ScoreConfig
from postlude.ops.fp8 import FP8Scaling
from postlude.ops.kernels import activation as activation_kernels
from postlude.ops.kernels import attention as attention_kernels
from postlude.ops.kernels import norm as norm_kernels
from postlude.ops.kernels import rotary as rotary_kernels
from postlude.ops.linear import (
    DeferredWgrads,
    input_gradient,
    linear_products,
    main_grad,
    product_gradients,
    wgrad,
    wgrad_queue,
)
from postlude.ops.norm import Norm
from postlude.ops.packing import Packing
from postlude.ops.rotary import HeadNorms, RotaryTable


def fused_mlp_block(
    hidden: Tensor,
    norm: Norm,
    layers: Sequence[Tensor],
    down: Tensor,
    activation: GateActivation,
    fp8: FP8Scaling | None = None,
) -> Tensor:
    """Returns `hidden` [T, H] + the MLP of its norm. `layers` are gate and up, or up alone."""
    output: Tensor = _MLP.apply(hidden, norm.weight, down, norm, activation, fp8, wgrad_queue(down), *layers)
    return output


def fused_attention_block(
    hidden: Tensor,
    norm: Norm,
    layers: tuple[Tensor, Tensor, Tensor],
    down: Tensor,
    width: int,
    table: RotaryTable,
    norms: HeadNorms | None,
    packing: Packing,
    score_config: ScoreConfig,
    *,
    operator: bool,
    fp8: FP8Scaling | None = None,
) -> Tensor:
    """Returns `hidden` [T, H] + attention of its norm, [T, H].

    `layers` project queries, keys and values of heads of this `width`, which are rotated by `rotate_heads`. No sinks.
    With `operator`, attention is called as a torch operator, whose result selective recompute keeps.
    """
    head_norm_weights = (None, None) if norms is None else (norms.query, norms.key)
    arguments = (
        hidden,
        norm.weight,
        down,
        *head_norm_weights,
        *table,
        norm,
        norms,
        width,
        packing,
        score_config,
        operator,
        fp8,
        wgrad_queue(down),
    )
    output: Tensor = _Attention.apply(*arguments, *layers)
    return output


class _MLP(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        norm_weight: Tensor,
        down: Tensor,
        norm: Norm,
        activation: GateActivation,
        fp8: FP8Scaling | None,
        queue: DeferredWgrads | None,
        *layers: Tensor,
    ) -> Tensor:
        normed = norm_kernels.forward(hidden, norm_weight, norm.eps, norm.offset)
        projected = linear_products(normed, layers, single_gemm=True, fp8=fp8)
        gate, up = projected if len(projected) == 2 else (None, projected[0])
        ctx.save_for_backward(hidden, norm_weight, normed, gate, up, down, *layers)
        ctx.arguments = norm, layers, down, activation, fp8, queue
        return (
            hidden
            + linear_products(activation_kernels.forward(gate, up, activation), (down,), single_gemm=False, fp8=fp8)[0]
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, norm_weight, normed, gate, up, down, *layers = ctx.saved_tensors
        norm, layer_parameters, down_parameter, activation, fp8, queue = ctx.arguments
        gradient, needs = gradients[0], ctx.needs_input_grad
        grad_features = input_gradient(gradient, down, fp8)
        features = grad_features if needs[2] else None  # the kernel overwrites their gradient with them
        grad_gate, grad_up = activation_kernels.backward(gate, up, activation, grad_features, features)
        grad_down = None if features is None else wgrad(down_parameter, gradient, features, queue)
        grad_projected = (grad_up,) if grad_gate is None else (grad_gate, grad_up)
        grad_normed, grad_layers = product_gradients(
            normed, layers, layer_parameters, grad_projected, queue, needs[7:], fp8=fp8
        )
        grad_hidden, grad_norm = _norm_backward(hidden, norm_weight, norm, grad_normed, gradient)
        return grad_hidden, grad_norm, grad_down, None, None, None, None, *grad_layers


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        norm_weight: Tensor,
        down: Tensor,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        norm: Norm,
        norms: HeadNorms | None,
        width: int,
        packing: Packing,
        score_config: ScoreConfig,
        operator: bool,
        fp8: FP8Scaling | None,
        queue: DeferredWgrads | None,
        *layers: Tensor,
    ) -> Tensor:
        tokens = len(hidden)
        normed = norm_kernels.forward(hidden, norm_weight, norm.eps, norm.offset)
        projected = linear_products(normed, layers, single_gemm=norms is not None, fp8=fp8)
        query, key, value = (features.view(tokens, features.shape[1] // width, width) for features in projected)
        rotated = rotary_kernels.forward(query, key, (cos, sin), _weights(query_norm, key_norm), *_norm_options(norms))
        call = attention_kernels.AttentionCall.of(
            (*rotated, value), packing, packing, score_config.scale, score_config.window, score_config.softcap
        )
        heads, lse = attention_kernels.forward(*rotated, value, None, call, operator=operator)
        before_norm = (query, key) if norms is not None else (None, None)
        ctx.save_for_backward(
            hidden,
            norm_weight,
            normed,
            down,
            query_norm,
            key_norm,
            cos,
            sin,
            *before_norm,
            *rotated,
            value,
            heads,
            lse,
            *layers,
        )
        ctx.arguments = norm, norms, call, layers, down, fp8, queue
        return hidden + linear_products(heads.view(tokens, -1), (down,), single_gemm=False, fp8=fp8)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, norm_weight, normed, down, query_norm, key_norm, cos, sin, *others = ctx.saved_tensors
        query, key, rotated_query, rotated_key, value, heads, lse, *layers = others
        norm, norms, call, layer_parameters, down_parameter, fp8, queue = ctx.arguments
        gradient, needs = gradients[0], ctx.needs_input_grad
        tokens, count, size = heads.shape
        grad_heads = input_gradient(gradient, down, fp8).view(heads.shape)
        grad_down = wgrad(down_parameter, gradient, heads.view(tokens, -1), queue) if needs[2] else None
        # Gradients of queries, keys and values as columns of one tensor.
        grad_qkv = heads.new_empty(tokens, count + 2 * value.shape[1], size)
        grad_rotated = attention_kernels.backward(
            rotated_query, rotated_key, value, None, heads, lse, grad_heads, call, grad_qkv[:, -value.shape[1] :]
        )[:2]
        totals = (None, None) if norms is None else (main_grad(norms.query), main_grad(norms.key))
        *_, grad_query_norm, grad_key_norm = rotary_kernels.backward(
            query,
            key,
            (cos, sin),
            _weights(query_norm, key_norm),
            *_norm_options(norms),
            grad_rotated,
            totals,
            grad_qkv,
        )
        grad_projected = grad_qkv.view(tokens, -1).split([layer.shape[0] for layer in layers], 1)
        grad_normed, grad_layers = product_gradients(
            normed, layers, layer_parameters, grad_projected, queue, needs[15:], fp8=fp8
        )
        grad_hidden, grad_norm = _norm_backward(hidden, norm_weight, norm, grad_normed, gradient)
        return grad_hidden, grad_norm, grad_down, grad_query_norm, grad_key_norm, *(None,) * 10, *grad_layers


def _weights(query: Tensor | None, key: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return None if query is None or key is None else (query, key)


def _norm_options(norms: HeadNorms | None) -> tuple[float, float]:
    return (0.0, 0.0) if norms is None else (norms.eps, norms.offset)


def _norm_backward(
    hidden: Tensor, weight: Tensor, norm: Norm, grad_normed: Tensor | None, gradient: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of the block's input, the residual's included, and of the norm's weight."""
    assert grad_normed is not None  # the input has a gradient
    total = main_grad(norm.weight)
    return norm_kernels.backward(hidden, weight, norm.eps, norm.offset, grad_normed, gradient, total)
