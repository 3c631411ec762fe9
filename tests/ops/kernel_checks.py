"""Runs checks of Triton kernels in a subprocess, since the interpreter is chosen before triton is first imported."""

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

triton = pytest.importorskip("triton")
VERSIONS = [tuple(int(part) for part in module.__version__.split(".")[:2]) for module in (triton, numpy)]


def run_checks(name: str, selected: str = "", **environment: str) -> None:
    """Runs the tests of a file in this directory, or at another path, with kernels compiled as usual.

    `selected` is pytest's -k: all tests by default.
    """
    path = str(Path(__file__).parent / name)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", selected, path]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def interpret_checks(name: str, selected: str = "") -> None:
    """Runs the same through Triton's interpreter, without a GPU."""
    if VERSIONS[0] < (3, 7) and VERSIONS[1] >= (2, 4):
        pytest.skip("Triton's interpreter before 3.7 needs numpy before 2.4")
    run_checks(name, selected, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
