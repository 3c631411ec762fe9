"""Triton's kernels between tokens and rows equal torch in float64. Run by `test_kernels.py`,
in a process of its own."""

import pytest
import torch

from postlude.ops.experts import add_grouped_products, expert_order, merge_rows, replicate_rows
from postlude.ops.linear import add_to, embed
from tests.equality import assert_equal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies no bf16


@pytest.mark.parametrize(("tokens", "copies", "width"), [(7, 3, 20), (5, 1, 16), (0, 2, 8)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_dispatch_to_rows_and_combine_equal_float64(
    tokens: int, copies: int, width: int, dtype, tolerance: float
) -> None:
    """bf16 sums are fp32 and rounded once: off by 2^-9 of the largest, and so are the rows that they are made of."""
    generator = torch.Generator().manual_seed(0)
    hidden, weights = (
        torch.randn(tokens, size, generator=generator).to(DEVICE, dtype).requires_grad_() for size in (width, copies)
    )
    choice = torch.randint(4, (tokens, copies), generator=generator).to(DEVICE)
    order, inverse, _ = expert_order(choice, 4)
    scale = torch.arange(tokens * copies, device=DEVICE)[:, None] % 4 * 0.25 + 0.5  # what experts make of their rows
    upstream = torch.randn(tokens, width, generator=generator).to(DEVICE, dtype)

    def to_rows_and_back(hidden, weights, backend):
        rows = replicate_rows(hidden, order, inverse, copies, backend=backend)
        merged = merge_rows(rows * scale.to(rows.dtype), weights, order, inverse, backend=backend)
        return rows, merged, *torch.autograd.grad(merged, (hidden, weights), upstream.to(merged.dtype))

    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weights)]
    names = ("rows", "merged", "for tokens", "for weights")
    for name, actual, expected in zip(
        names, to_rows_and_back(hidden, weights, "triton"), to_rows_and_back(*exact, "torch"), strict=True
    ):
        assert actual.dtype == dtype
        assert_equal(actual, expected, name, tolerance)


@pytest.mark.parametrize("size", [(3, 5), (2, 4097)])
def test_gradients_are_accumulated_in_the_accumulator_dtype(size: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    total, gradient = (torch.randn(size, generator=generator).to(DEVICE) for _ in range(2))
    expected = total + gradient.bfloat16()
    add_to(total, gradient.bfloat16(), backend="triton")
    assert torch.equal(total, expected)
    scale = torch.tensor(0.3, device=DEVICE)
    add_to(total, gradient.bfloat16(), scale, backend="triton")
    assert_equal(total, expected.double() + gradient.bfloat16().double() * scale.double(), tolerance=1e-6)
    add_to(total.fill_(torch.nan), gradient.bfloat16(), is_empty=True, backend="triton")
    assert torch.equal(total, gradient.bfloat16().float())


@pytest.mark.parametrize("repeated", [1, 7, 8, 9, 40])  # times that one token occurs
def test_embedding_gradient_is_added_to_token_rows(repeated: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.cat([torch.randint(50, (30,), generator=generator), torch.full((repeated,), 3)]).to(DEVICE)
    table = torch.randn(50, 520, generator=generator).to(DEVICE, HALF).requires_grad_()
    before = torch.randn(50, 520, generator=generator).to(DEVICE)
    upstream = torch.randn(len(tokens), 520, generator=generator).to(DEVICE, HALF)
    total = before.clone()
    table.main_grad = total  # type: ignore[attr-defined]
    embedded = embed(tokens, table, backend="triton")
    assert torch.equal(embedded, table[tokens])
    embedded.backward(upstream)
    assert table.grad is None
    assert_equal(total, before.double().index_add(0, tokens, upstream.double()), tolerance=1e-6)


@pytest.mark.parametrize(("outputs", "inputs"), [(24, 40), (256, 512), (136, 264)])
@pytest.mark.parametrize("counts", [[3, 0, 64, 130], [0, 0, 0, 65], [128, 64, 1, 0]])
def test_expert_weight_gradients_are_accumulated_in_fp32(counts: list[int], outputs: int, inputs: int) -> None:
    """Half-precision products are exact in fp32: only sums round. Gradients are columns of a larger tensor.

    NaN in the rows of one expert reaches that expert alone. Sums that are empty are not read.
    """
    generator = torch.Generator().manual_seed(0)
    total, gradient, rows = (
        torch.randn(size, generator=generator).to(DEVICE)
        for size in ((4, outputs, inputs), (sum(counts), outputs + 16), (sum(counts), inputs))
    )
    gradient, rows = gradient.to(HALF)[:, 8:-8], rows.to(HALF)
    pieces = zip(gradient.double().split(counts), rows.double().split(counts), strict=True)
    expected = total.double() + torch.stack([left.T @ right for left, right in pieces])
    ends = torch.tensor(counts, device=DEVICE).cumsum(0).to(torch.int32)
    empty = torch.full_like(total, torch.nan)
    add_grouped_products(empty, gradient, rows, ends, is_empty=True, backend="triton")
    assert_equal(empty, expected - total.double(), tolerance=1e-6)
    invalid_expert = max(range(4), key=counts.__getitem__)
    for value in (0.0, float("nan")):
        actual = total.clone()
        rows[ends[invalid_expert] - 1] = rows[ends[invalid_expert] - 1] + value
        add_grouped_products(actual, gradient, rows, ends, backend="triton")
        others = [expert for expert in range(4) if value == 0.0 or expert != invalid_expert]
        assert_equal(actual[others], expected[others], tolerance=1e-6)
    assert actual[invalid_expert].isnan().any()
