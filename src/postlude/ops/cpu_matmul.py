"""Which library multiplies matrices on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def blas_fp32_matmul(dtype: torch.dtype) -> Iterator[None]:
    """Inside, fp32 products on an Arm CPU go to BLAS instead of oneDNN, which prepares each anew.

    That costs it 0.2 ms a product, and 0.7 ms on a busy machine: several times what a small one takes, and a large one
    gains little. Other dtypes and other CPUs are left alone. The switch is the process's; it is put back afterwards.
    """
    library: Any = torch.backends.mkldnn  # its switches are declared as descriptors, not as what they hold
    before = library.enabled
    if dtype == torch.float32 and library.is_acl_available():
        library.enabled = False
    try:
        yield
    finally:
        library.enabled = before
