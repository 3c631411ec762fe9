"""Block-scaled FP8: checks in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest

from tests.ops import block_fp8_checks
from tests.ops.kernel_checks import interpret_checks, run_checks

CHECKS = "block_fp8_checks.py"


def test_layers_without_kernels() -> None:
    """The checks that need no interpreter, on any machine."""
    block_fp8_checks.test_fp8_weight_error_is_below_one_sixteenth()
    block_fp8_checks.test_adapters_and_biases_are_added_in_their_own_dtype()
    block_fp8_checks.test_decode_layers_with_fp8_weights_equal_their_parts()
    for case in ("plain", "norm", "residual"):
        block_fp8_checks.check_product("torch", 16, case)


@pytest.mark.thorough
def test_kernels_in_the_interpreter() -> None:
    interpret_checks(CHECKS)


@pytest.mark.gpu
def test_kernels() -> None:
    run_checks(CHECKS)
