"""Triton's kernels between tokens and rows equal torch in float64. Run by test_expert_kernels.py,
in a process of its own."""

from __future__ import annotations

import pytest
import torch

from postlude.ops.experts import add_to, expert_order, merge_rows, replicate_rows
from tests.equality import assert_equal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("tokens", "copies", "width"), [(7, 3, 20), (5, 1, 16), (0, 2, 8)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_to_rows_and_back_equals_float64(tokens: int, copies: int, width: int, dtype, tolerance: float) -> None:
    """bf16 sums are fp32 and rounded once: off by 2^-9 of the largest, and so are the rows that they are made of."""
    generator = torch.Generator().manual_seed(0)
    hidden, weights = (
        torch.randn(tokens, size, generator=generator).to(DEVICE, dtype).requires_grad_() for size in (width, copies)
    )
    choice = torch.randint(4, (tokens, copies), generator=generator).to(DEVICE)
    order, inverse, _ = expert_order(choice, 4)
    scale = torch.arange(tokens * copies, device=DEVICE)[:, None] % 4 * 0.25 + 0.5  # what experts make of their rows
    upstream = torch.randn(tokens, width, generator=generator).to(DEVICE, dtype)

    def both(hidden, weights, backend):
        rows = replicate_rows(hidden, order, inverse, copies, backend=backend)
        merged = merge_rows(rows * scale.to(rows.dtype), weights, order, inverse, backend=backend)
        return rows, merged, *torch.autograd.grad(merged, (hidden, weights), upstream.to(merged.dtype))

    exact = [each.detach().double().requires_grad_() for each in (hidden, weights)]
    names = ("rows", "merged", "for tokens", "for weights")
    for name, actual, expected in zip(names, both(hidden, weights, "triton"), both(*exact, "torch"), strict=True):
        assert actual.dtype == dtype
        assert_equal(actual, expected, name, tolerance)


@pytest.mark.parametrize("size", [(3, 5), (2, 4097)])
def test_gradients_are_added_in_the_dtype_of_their_sum(size: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    total, gradient = (torch.randn(size, generator=generator).to(DEVICE) for _ in range(2))
    expected = total + gradient.bfloat16()
    add_to(total, gradient.bfloat16(), backend="triton")
    assert torch.equal(total, expected)
