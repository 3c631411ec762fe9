"""Linear layers with few rows: kernel checks on a GPU or in Triton's interpreter, and the torch form anywhere."""

import torch

from postlude.ops.activation import gated_activation
from postlude.ops.decode_linear import linear_add, norm_linear
from postlude.ops.low_rank import LowRank
from postlude.ops.norm import Norm, rms_norm
from tests.equality import assert_equal


def test_fused_functions_equal_separate_operations() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weight, norm_weight, residual = (
        torch.randn(size, generator=generator) for size in ((5, 8), (6, 8), (8,), (5, 6))
    )
    norm = Norm(norm_weight, 1e-5, 1.0)
    normed = rms_norm(rows, norm_weight, 1e-5, 1.0)
    assert_equal(norm_linear(rows, norm, weight), normed @ weight.t(), "normed")
    gate, up = (normed @ weight.t()).chunk(2, -1)
    assert_equal(norm_linear(rows, norm, weight, activation="silu"), gated_activation(gate, up, "silu"), "gated")
    assert_equal(linear_add(residual.clone(), rows, weight), residual + rows @ weight.t(), "added")


def test_adapters_equal_merged_weights() -> None:
    """With layers of different sizes, in every function."""
    generator = torch.Generator().manual_seed(0)
    sizes = (4, 2)
    rows, weight, norm_weight, residual, a, b = (
        torch.randn(size, generator=generator) for size in ((5, 8), (6, 8), (8,), (5, 6), (6, 8), (6, 3))
    )
    merged = weight + torch.cat([b[:4] @ a[:3], b[4:] @ a[3:]])
    norm, low_rank = Norm(norm_weight, 1e-5, 1.0), LowRank(a, b, sizes)
    assert_equal(norm_linear(rows, norm, weight, low_rank), norm_linear(rows, norm, merged), "normed")
    half = LowRank(a, b, (3, 3))
    merged_half = weight + torch.cat([b[:3] @ a[:3], b[3:] @ a[3:]])
    gated = norm_linear(rows, norm, weight, half, activation="silu")
    assert_equal(gated, norm_linear(rows, norm, merged_half, activation="silu"), "gated")
    added = linear_add(residual.clone(), rows, weight, low_rank)
    assert_equal(added, linear_add(residual.clone(), rows, merged), "added")
