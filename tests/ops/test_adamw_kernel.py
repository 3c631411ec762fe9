"""The Triton AdamW kernel equals the reference: in Triton's interpreter on any machine, compiled on a GPU."""

from __future__ import annotations

import pytest

from tests.ops.kernel_checks import interpret_checks, run_checks


@pytest.mark.thorough
def test_kernel_in_the_interpreter() -> None:
    interpret_checks("adamw_checks.py")


@pytest.mark.gpu
def test_kernel_on_a_gpu() -> None:
    run_checks("adamw_checks.py")
