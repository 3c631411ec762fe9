"""Triton kernels between tokens and expert rows: checks in the interpreter and on a GPU."""

from __future__ import annotations

import pytest

from tests.ops.kernel_checks import interpret_checks, run_checks

CHECKS = "expert_checks.py"


@pytest.mark.thorough  # seconds in the interpreter; what the blocks do by these rows is tested by torch, too
def test_kernels_in_the_interpreter() -> None:
    interpret_checks(CHECKS)


@pytest.mark.gpu
def test_kernels() -> None:
    run_checks(CHECKS)
