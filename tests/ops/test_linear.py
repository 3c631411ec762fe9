"""Several products of the same rows equal separate products, with weight gradients deferred or not."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from postlude.ops.linear import (
    DeferredWgrads,
    _Linears,
    adjacent_view,
    defer_wgrad,
    embed,
    flush_wgrad,
    linear,
    linear_group,
    main_grad,
    set_main_grad,
    zero_before_autograd,
)
from tests.equality import assert_equal


def operands() -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    generator = torch.Generator().manual_seed(0)

    def random_tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    return (
        random_tensor(5, 4),
        [random_tensor(6, 4), random_tensor(3, 4), random_tensor(2, 4)],
        [random_tensor(6), None, random_tensor(2)],
    )


def gradients(products, later: list | None = None) -> list[Tensor]:
    rows, weights, biases = operands()
    with defer_wgrad(later):
        outputs = products(rows, weights, biases)
    torch.stack([product.square().sum() * index for index, product in enumerate(outputs, 1)]).sum().backward()
    flush_wgrad(later or [])
    return [tensor.grad for tensor in (rows, *weights, *biases) if tensor is not None]


@pytest.mark.parametrize("deferred", [False, True])
def test_linear_group_equals_separate_products(deferred: bool) -> None:
    """Separate products, `linear_group`, and its CUDA path."""
    later: list | None = [] if deferred else None

    def separately(rows: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
        return [linear(rows, weight, bias) for weight, bias in zip(weights, biases, strict=True)]

    def together(rows: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> tuple[Tensor, ...]:
        return _Linears.apply(rows, later, False, False, None, len(weights), *weights, *biases)

    expected = gradients(separately)
    for index, (actual, expected_gradient) in enumerate(zip(gradients(together, later), expected, strict=True)):
        assert_equal(actual, expected_gradient, f"gradient {index}", 1e-14)
    assert later is None or len(later) == 3
    for actual, expected_gradient in zip(gradients(linear_group), expected, strict=True):
        assert torch.equal(actual, expected_gradient)


def test_gradients_are_accumulated_in_main_grad() -> None:
    """As on CUDA: the weights' own gradients stay empty, whether wgrads are immediate or deferred."""
    expected = gradients(linear_group)
    for later in (None, []):
        rows, weights, biases = operands()
        totals = [torch.ones_like(weight) for weight in weights]
        for weight, total in zip(weights, totals, strict=True):
            weight.main_grad = total
        with defer_wgrad(later):
            outputs = linear_group(rows, weights, biases)
        torch.stack([product.square().sum() * index for index, product in enumerate(outputs, 1)]).sum().backward()
        flush_wgrad(later or [])
        assert all(weight.grad is None for weight in weights)
        gradients_found = [
            rows.grad,
            *(total - 1 for total in totals),
            *(bias.grad for bias in biases if bias is not None),
        ]
        for index, (actual, expected_gradient) in enumerate(zip(gradients_found, expected, strict=True)):
            assert_equal(actual, expected_gradient, f"gradient {index}", 1e-14)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("empty", [(True, True, True), (False, True, False)])
def test_first_product_overwrites_an_empty_accumulator(deferred: bool, empty: tuple[bool, ...]) -> None:
    """Later products add to it; so do both where one of two accumulators written together is not empty."""
    rows, separate, _ = operands()
    weights = [weight.detach() for weight in torch.cat(separate).split([6, 3, 2])]
    joint = torch.where(torch.tensor(empty).repeat_interleave(torch.tensor([6, 3, 2])), torch.nan, 0.0)
    totals = joint[:, None].double().repeat(1, 4).split([6, 3, 2])
    for weight, total, is_empty in zip(weights, totals, empty, strict=True):
        weight.requires_grad_().main_grad, weight.main_grad_is_empty = total, is_empty
    upstream = torch.randn(5, 11, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    later: DeferredWgrads = []
    for _ in range(2):
        outputs = _Linears.apply(rows, later if deferred else None, True, False, None, 3, *weights, *[None] * 3)
        torch.cat(outputs, 1).backward(upstream)
        flush_wgrad(later)
        later.clear()
    assert_equal(torch.cat(totals), 2 * upstream.T @ rows.detach(), "sums", 1e-14)


def test_empty_accumulator_is_zeroed_before_other_additions() -> None:
    """By `main_grad`, which zeroes once, and before autograd adds the gradient of another operation."""
    weight = torch.ones(2, 3, requires_grad=True)
    weight.main_grad, weight.main_grad_is_empty = torch.full((2, 3), torch.nan), True  # type: ignore[attr-defined]
    total = main_grad(weight)
    assert total is not None
    assert torch.equal(total, torch.zeros(2, 3))
    total += 1
    assert torch.equal(main_grad(weight), torch.ones(2, 3))

    zero_before_autograd(weight)
    weight.grad = weight.main_grad = torch.full((2, 3), torch.nan)  # type: ignore[attr-defined]
    weight.main_grad_is_empty = True  # type: ignore[attr-defined]
    for _ in range(2):
        (weight * 3).sum().backward()
    assert torch.equal(weight.grad, torch.full((2, 3), 6.0))
    linear(torch.ones(1, 3), weight).sum().backward()  # adds to what autograd added
    assert torch.equal(weight.grad, torch.full((2, 3), 7.0))


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize(
    ("weight_layout", "gradient_layout", "products"),
    [("weights", "columns", 1), ("weights", "apart", 3), ("apart", "columns", 3)],
)
def test_adjacent_weights_are_one_product(
    deferred: bool, single: bool, weight_layout: str, gradient_layout: str, products: int
) -> None:
    """As on CUDA: weights, their accumulators, and gradients that are columns of one tensor; also deferred."""
    rows, separate, _ = operands()
    upstream = torch.randn(5, 11, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected_rows = upstream @ torch.cat(separate).detach()
    expected_totals = 1 + upstream.T @ rows.detach()
    joint = torch.cat([weight.detach() for weight in separate]).split([6, 3, 2])
    weights = [tensor.detach().clone() if weight_layout == "apart" else tensor for tensor in joint]
    totals = torch.ones(11, 4, dtype=torch.float64).split([6, 3, 2])
    for weight, total in zip(weights, totals, strict=True):
        weight.requires_grad_().main_grad = total
    later: DeferredWgrads = []
    with ProductCounter() as forward:
        outputs = _Linears.apply(rows, later if deferred else None, True, single, None, 3, *weights, *[None] * 3)
    for product, weight in zip(outputs, weights, strict=True):
        assert_equal(product, rows @ weight.T, "product", 1e-14)
    parts = (
        torch.cat(outputs, 1) if gradient_layout == "columns" else torch.cat([tensor * 1.0 for tensor in outputs], 1)
    )
    with ProductCounter() as backward:
        parts.backward(upstream)
        flush_wgrad(later)
    assert_equal(rows.grad, expected_rows, "gradient of rows", 1e-14)
    assert_equal(torch.cat(totals), expected_totals, "sums", 1e-14)
    assert forward.count == (1 if single and weight_layout == "weights" else 3)
    assert backward.count == 2 * products


class ProductCounter(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def test_negative_tokens_are_refused_without_gradients_too() -> None:
    """Indexing would take them from the end of the vocabulary."""
    with pytest.raises(IndexError):
        embed(torch.tensor([1, -1]), torch.zeros(4, 2))


def test_cpu_accumulates_through_autograd() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    set_main_grad(weight, torch.zeros(2, 2))
    linear(torch.ones(1, 2), weight).sum().backward()
    assert torch.equal(weight.grad, torch.ones(2, 2))


def test_frozen_weight_defers_no_gradient() -> None:
    later: DeferredWgrads = []
    with defer_wgrad(later):
        linear(torch.ones(2, 3, requires_grad=True), torch.ones(4, 3)).sum().backward()
    assert not later


@pytest.mark.gpu
def test_bf16_products_are_accumulated_in_fp32_on_cuda() -> None:
    """Two products of one weight are added to its fp32 accumulator, and the weight's own gradient stays empty."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random_tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    weight, gradients = random_tensor(48, 64).requires_grad_(), [random_tensor(700, 48), random_tensor(300, 48)]
    rows = [random_tensor(700, 64).requires_grad_(), random_tensor(300, 64).requires_grad_()]
    total = torch.full((48, 64), torch.nan, device="cuda")
    set_main_grad(weight, total, is_empty=True)
    linear_group(rows[0], [weight], [None])[0].backward(gradients[0])
    linear(rows[1], weight).backward(gradients[1])
    assert weight.grad is None
    products = [gradient.double().t() @ row.detach().double() for gradient, row in zip(gradients, rows, strict=True)]
    assert_equal(total, sum(products), "sum")
    for gradient, row in zip(gradients, rows, strict=True):
        assert_equal(row.grad, gradient.double() @ weight.detach().double(), "gradient of rows", 2**-8)


def test_adjacent_weights_are_one_product_on_cuda() -> None:
    rows, weights, _ = operands()
    separate = [weight.detach() for weight in weights]
    joint = torch.cat(separate)
    laid = joint.split([6, 3, 2])
    assert adjacent_view(separate) is None
    assert adjacent_view(laid[1:]) is not None
    assert adjacent_view((laid[0], laid[2])) is None
    assert adjacent_view((laid[1], laid[0])) is None
    joined = adjacent_view(laid)
    assert joined is not None
    assert torch.equal(joined, joint)
    with torch.no_grad():
        for first, second in zip(
            linear_group(rows, laid, [None] * 3), linear_group(rows, separate, [None] * 3), strict=True
        ):
            assert_equal(first, second, "product")
