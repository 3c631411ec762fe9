"""FP8 quantisation: Triton kernels in the interpreter and on a GPU, where FP8 products are checked too."""

from __future__ import annotations

import pytest

from tests.ops.kernel_checks import interpret_checks, run_checks

CHECKS = "fp8_checks.py"


@pytest.mark.thorough  # on a GPU the same kernels are held to torch
def test_kernels_in_the_interpreter() -> None:
    interpret_checks(CHECKS)


@pytest.mark.gpu
def test_kernels_on_the_gpu() -> None:
    run_checks(CHECKS)
