"""Blocks fused into one autograd function equal the same blocks written out in float64, with every gradient.

Run in a process of their own, through the interpreter or on a GPU: see `kernel_checks`.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from postlude.ops.activation import gated_activation, gated_linear
from postlude.ops.attention import ScoreConfig, attend, reference_attention
from postlude.ops.fp8 import FP8Scaling
from postlude.ops.fused_block import fused_attention_block, fused_mlp_block
from postlude.ops.linear import defer_wgrad, flush_wgrad, linear, linear_group
from postlude.ops.norm import Norm, rms_norm
from postlude.ops.packing import Packing
from postlude.ops.rotary import HeadNorms, RotaryConfig, rotary_table, rotate_heads
from tests.equality import assert_equal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE, TOLERANCE = (torch.bfloat16, 2e-2) if DEVICE == "cuda" else (torch.float32, 1e-5)
EPS, SIZE = 1e-6, 32
LENGTHS = (7, 1, 20)
LAYOUTS = pytest.mark.parametrize("layout", ["apart", "laid together", "summed where made", "put off"])


def random_tensor(*shape: int, seed: int) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5
    return values.to(DEVICE, DTYPE)


def layers(layout: str, *widths: int) -> list[Tensor]:
    """Returns weights [width, SIZE]; those laid together are adjacent in memory."""
    fused = random_tensor(sum(widths), SIZE, seed=1)
    parts = [part if layout != "apart" else part.clone() for part in fused.split(list(widths))]
    return [part.requires_grad_() for part in parts]


def check(step, reference, weights: list[Tensor], layout: str) -> None:
    """Returns outputs and the gradients of `hidden` and `weights`, by autograd or accumulated in place."""
    hidden = (random_tensor(sum(LENGTHS), SIZE, seed=0) * SIZE**0.5).requires_grad_()
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, *weights)]
    upstream = random_tensor(*hidden.shape, seed=9)
    totals = []
    if layout == "summed where made":
        room = torch.ones(sum(weight.numel() for weight in weights), device=DEVICE)
        totals = [
            part.view_as(weight) for part, weight in zip(room.split([w.numel() for w in weights]), weights, strict=True)
        ]
        for weight, total in zip(weights, totals, strict=True):
            weight.main_grad = total
    later: list | None = [] if layout == "put off" else None
    with defer_wgrad(later):
        output = step(hidden, *weights)
    expected = reference(*exact)
    assert_equal(output, expected, "output", TOLERANCE)
    output.backward(upstream)
    flush_wgrad(later or [])
    expected.backward(upstream.double())
    assert_equal(hidden.grad, exact[0].grad, "gradient of hidden", TOLERANCE)
    for index, (weight, exact_weight) in enumerate(zip(weights, exact[1:], strict=True)):
        gradient = totals[index] - 1 if totals else weight.grad
        assert_equal(gradient, exact_weight.grad, f"gradient of weight {index}", TOLERANCE)
        assert not totals or weight.grad is None


@LAYOUTS
@pytest.mark.parametrize(("activation", "count"), [("silu", 2), ("relu2", 1)])
def test_fused_mlp_equals_float64(layout: str, activation: str, count: int) -> None:
    def step(hidden: Tensor, norm: Tensor, down: Tensor, *projections: Tensor) -> Tensor:
        return fused_mlp_block(hidden, Norm(norm, EPS, 1.0), projections, down, activation)

    def reference(hidden: Tensor, norm: Tensor, down: Tensor, *projections: Tensor) -> Tensor:
        normed = rms_norm(hidden, norm, EPS, 1.0, backend="torch")
        gate, up = [None, *(normed @ projection.T for projection in projections)][-2:]
        return hidden + gated_activation(gate, up, activation, backend="torch") @ down.T

    norm, down = random_tensor(SIZE, seed=2).requires_grad_(), random_tensor(SIZE, 48, seed=3).requires_grad_()
    check(step, reference, [norm, down, *layers(layout, *[48] * count)], layout)


@LAYOUTS
@pytest.mark.parametrize(("normed", "window"), [(True, None), (False, 5)])
def test_fused_attention_equals_float64(layout: str, normed: bool, window: int | None) -> None:
    packing = Packing.from_lengths(LENGTHS, device=DEVICE)
    scores = ScoreConfig(scale=0.3, window=window)
    table = rotary_table(RotaryConfig(), packing.positions(), 16)

    def step(operator: bool, hidden: Tensor, norm: Tensor, down: Tensor, *projections: Tensor) -> Tensor:
        *of_heads, query, key, value = projections
        norms = HeadNorms(*of_heads, EPS, 0.0) if of_heads else None
        layers = query, key, value
        return fused_attention_block(
            hidden, Norm(norm, EPS, 0.0), layers, down, 16, table, norms, packing, scores, operator=operator
        )  # fmt: skip

    def reference(hidden: Tensor, norm: Tensor, down: Tensor, *projections: Tensor) -> Tensor:
        *of_heads, query, key, value = projections
        norms = HeadNorms(*of_heads, EPS, 0.0) if of_heads else None
        rows = rms_norm(hidden, norm, EPS, backend="torch")
        q, k, v = ((rows @ projection.T).unflatten(-1, (-1, 16)) for projection in (query, key, value))
        q, k = rotate_heads(q, k, table, norms, backend="torch")
        return hidden + reference_attention(q, k, v, packing, packing, scores).flatten(-2) @ down.T

    norm, down = random_tensor(SIZE, seed=2).requires_grad_(), random_tensor(SIZE, 64, seed=3).requires_grad_()
    of_heads = [(1 + random_tensor(16, seed=seed)).requires_grad_() for seed in (4, 5)] if normed else []
    operands = [norm, down, *of_heads, *layers(layout, 64, 32, 32)]
    for operator in (False, True):
        for operand in operands:
            operand.grad = None
        check(functools.partial(step, operator), reference, operands, layout)


@pytest.mark.parametrize("block", ["mlp", "attention"])
def test_fused_fp8_block_equals_separate_operations(block: str) -> None:
    """The same numbers are rounded. Where kernels differ in a last bit a rounding flips, so the whole is compared."""
    packing = Packing.from_lengths(LENGTHS, device=DEVICE)
    scores, table, fp8 = ScoreConfig(scale=0.3), rotary_table(RotaryConfig(), packing.positions(), 16), FP8Scaling()
    options = {"operator": False, "fp8": fp8}

    def fused(hidden: Tensor, norm: Tensor, down: Tensor, *projections: Tensor) -> Tensor:
        normed = Norm(norm, EPS, 0.0)
        if block == "mlp":
            return fused_mlp_block(hidden, normed, projections, down, "silu", fp8)
        return fused_attention_block(hidden, normed, projections, down, 16, table, None, packing, scores, **options)

    def operations(hidden: Tensor, norm: Tensor, down: Tensor, *projections: Tensor) -> Tensor:
        projected = linear_group(
            rms_norm(hidden, norm, EPS), projections, [None] * len(projections), single_gemm=True, fp8=fp8
        )
        if block == "mlp":
            return hidden + gated_linear(*projected, "silu", down, fp8=fp8)
        q, k, v = (part.unflatten(-1, (-1, 16)) for part in projected)
        heads = attend(*rotate_heads(q, k, table), v, packing, packing, scores)
        return hidden + linear(heads.flatten(-2), down, fp8=fp8)

    widths = (48, 48) if block == "mlp" else (64, 32, 32)
    results = []
    for function in (operations, fused):
        norm, down = (
            random_tensor(SIZE, seed=2).requires_grad_(),
            random_tensor(SIZE, widths[0], seed=3).requires_grad_(),
        )
        operands = [
            (random_tensor(sum(LENGTHS), SIZE, seed=0) * SIZE**0.5).requires_grad_(),
            norm,
            down,
            *layers("apart", *widths),
        ]
        output = function(*operands)
        results.append([output, *torch.autograd.grad(output, operands, random_tensor(*output.shape, seed=9))])
    for index, (expected, actual) in enumerate(zip(*results, strict=True)):
        off = (actual.double() - expected.double()).norm() / expected.double().norm()
        assert off <= (1e-2 if DEVICE == "cuda" else 1e-5), f"result {index} is off by {off:.1e}"
