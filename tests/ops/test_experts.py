"""Sorting tokens by expert and back is exact, and a grouped product equals one product per expert."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from postlude.ops.experts import (
    add_bias,
    alternating,
    alternating_view,
    expert_order,
    grouped_linear,
    grouped_linears,
    replicate_rows,
    restore_rows,
)
from postlude.ops.linear import set_main_grad
from tests.equality import assert_equal


@settings(max_examples=100)
@given(tokens=st.integers(0, 20), top_k=st.integers(1, 4), experts=st.integers(4, 9), seed=st.integers(0, 99))
def test_sorting_by_expert_and_back(tokens: int, top_k: int, experts: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 3, generator=generator, requires_grad=True)
    choice = torch.randint(experts, (tokens, top_k), generator=generator)
    order, inverse, counts = expert_order(choice, experts)
    rows = replicate_rows(hidden, order, inverse, top_k)
    assert counts.sum() == tokens * top_k
    assert torch.equal(choice.flatten()[order], torch.repeat_interleave(torch.arange(experts), counts))
    assert torch.equal(rows, hidden[order // top_k])
    slots = restore_rows(rows, order, inverse)
    assert torch.equal(slots, hidden.repeat_interleave(top_k, 0))
    upstream = torch.randn(slots.shape, generator=generator)
    (gradient,) = torch.autograd.grad(slots, hidden, upstream)
    assert_equal(gradient, upstream.view(tokens, top_k, 3).sum(1))


@pytest.mark.parametrize("counts", [[3, 0, 4, 1], [0, 0, 0, 5], [0, 0, 0, 0], [1, 1, 1, 1]])
@pytest.mark.parametrize(("inside", "outside"), [(7, 5), (8, 16)])
def test_grouped_linear_equals_one_product_per_expert(counts: list[int], inside: int, outside: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(counts), inside, generator=generator, requires_grad=True)
    weight = torch.randn(4, outside, inside, generator=generator, requires_grad=True)
    product = grouped_linear(rows, weight, torch.tensor(counts))
    expected = torch.cat([part @ matrix.T for part, matrix in zip(rows.split(counts), weight, strict=True)])
    assert_equal(product, expected)
    gradients = torch.autograd.grad(product.sum(), (rows, weight))  # an expanded upstream gradient
    for gradient, reference in zip(gradients, torch.autograd.grad(expected.sum(), (rows, weight)), strict=True):
        assert_equal(gradient, reference)


@pytest.mark.parametrize("columns", [True, False])  # whether the gradients of both products are columns of one tensor
def test_interleaved_gate_and_up_equal_two_products(columns: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor([3, 0, 4, 1])
    rows = torch.randn(8, 32, generator=generator, requires_grad=True)
    joined = alternating([(4, 16, 32), (4, 48, 32)], torch.float32, rows.device)
    separate = [torch.randn(weight.shape, generator=generator, requires_grad=True) for weight in joined]
    for weight, values in zip(joined, separate, strict=True):
        weight.copy_(values.detach())
        weight.requires_grad_()
    assert alternating_view(separate) is None
    joined_view = alternating_view(joined)
    assert joined_view is not None
    assert torch.equal(joined_view, torch.cat(separate, 1))
    gradients = torch.randn(8, 64, generator=generator).split((16, 48), 1)
    upstream = gradients if columns else tuple(part.clone() for part in gradients)
    results = []
    for weights, joins in ((joined, True), (separate, False)):
        products = grouped_linears(rows, weights, counts, joins=joins)
        assert (products[0].untyped_storage().data_ptr() == products[1].untyped_storage().data_ptr()) == joins
        results.append((*products, *torch.autograd.grad(products, (rows, *weights), upstream)))
    for actual, expected in zip(*results, strict=True):
        assert_equal(actual, expected)


@pytest.mark.parametrize("counts", [[3, 0, 4, 1], [0, 0, 0, 5], [0, 0, 0, 0]])
def test_rows_get_the_bias_of_their_expert(counts: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(counts), 5, generator=generator, requires_grad=True)
    bias = torch.randn(4, 5, generator=generator, requires_grad=True)
    added = add_bias(rows, bias, torch.tensor(counts))
    expected = torch.cat([part + vector for part, vector in zip(rows.split(counts), bias, strict=True)])
    assert torch.equal(added, expected)
    upstream = torch.randn(added.shape, generator=generator)
    gradients = torch.autograd.grad(added, (rows, bias), upstream)
    for gradient, reference in zip(gradients, torch.autograd.grad(expected, (rows, bias), upstream), strict=True):
        assert_equal(gradient, reference)


@pytest.mark.gpu
@pytest.mark.parametrize(("inside", "outside"), [(64, 96), (60, 33)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_linear_on_cuda_equals_float64(inside: int, outside: int, dtype: torch.dtype) -> None:
    """bf16 holds 1e-2 of the scale; fp32 products may run in TF32-free cuBLAS, so 1e-5."""
    counts = [300, 0, 77, 128]
    rows = torch.randn(sum(counts), inside, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(4, outside, inside, device="cuda", dtype=dtype, requires_grad=True)
    product = grouped_linear(rows, weight, torch.tensor(counts, device="cuda"))
    exact = [tensor.detach().double().requires_grad_() for tensor in (rows, weight)]
    expected = torch.cat([part @ matrix.T for part, matrix in zip(exact[0].split(counts), exact[1], strict=True)])
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    assert_equal(product, expected, tolerance=tolerance)
    upstream = torch.randn_like(product)
    gradients = torch.autograd.grad(product, (rows, weight), upstream)
    for gradient, reference in zip(gradients, torch.autograd.grad(expected, exact, upstream.double()), strict=True):
        assert_equal(gradient, reference, tolerance=tolerance)


@pytest.mark.gpu
def test_weight_gradient_is_accumulated_in_place_on_cuda() -> None:
    counts = torch.tensor([300, 0, 77, 128], device="cuda")
    rows = torch.randn(505, 64, device="cuda", dtype=torch.bfloat16)
    weight, alone = (torch.ones(4, 96, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    total = torch.randn(4, 96, 64, device="cuda")
    before = total.clone()
    set_main_grad(weight, total)
    grouped_linear(rows, weight, counts).sum().backward()
    grouped_linear(rows, alone, counts).sum().backward()
    assert weight.grad is None
    assert_equal(total, before + alone.grad, tolerance=2**-8)  # the other gradient is in bf16
