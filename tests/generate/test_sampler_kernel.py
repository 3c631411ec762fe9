"""The sampling kernels: in Triton's interpreter without a GPU, and on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ops.kernel_checks import interpret_checks, run_checks

CHECKS = str(Path(__file__).with_name("sampler_checks.py"))


@pytest.mark.thorough
def test_kernels_in_the_interpreter() -> None:
    interpret_checks(CHECKS)


@pytest.mark.gpu
def test_kernels() -> None:
    run_checks(CHECKS)
