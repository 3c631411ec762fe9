"""Products of few rows: the kernel's checks on a GPU or through Triton's interpreter, and the plain form on any."""

from __future__ import annotations

import pytest
import torch

from postlude.ops.activation import gated_activation
from postlude.ops.decode_linear import linear_add, norm_gated_linear, norm_linear
from postlude.ops.norm import Norm, rms_norm
from tests.equality import assert_equal
from tests.ops.kernel_checks import interpret_checks, run_checks

CHECKS = "decode_linear_checks.py"


@pytest.mark.thorough
def test_kernels_in_the_interpreter() -> None:
    interpret_checks(CHECKS)


@pytest.mark.gpu
def test_kernels() -> None:
    run_checks(CHECKS)


def test_each_is_what_its_parts_are() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weight, norm_weight, residual = (
        torch.randn(size, generator=generator) for size in ((5, 8), (6, 8), (8,), (5, 6))
    )
    norm = Norm(norm_weight, 1e-5, 1.0)
    normed = rms_norm(rows, norm_weight, 1e-5, 1.0)
    assert_equal(norm_linear(rows, norm, weight), normed @ weight.t(), "normed")
    gate, up = (normed @ weight.t()).chunk(2, -1)
    assert_equal(norm_gated_linear(rows, norm, weight, "silu"), gated_activation(gate, up, "silu"), "gated")
    assert_equal(linear_add(residual.clone(), rows, weight), residual + rows @ weight.t(), "added")
