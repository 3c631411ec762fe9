"""Fills memory with NaN before kernels run, since they must not depend on its contents."""

from collections.abc import Iterator

import pytest
import torch

POISON_BYTES = 1 << 30


@pytest.fixture(autouse=True)
def poisoned(request: pytest.FixtureRequest) -> Iterator[None]:
    """Before each kernel check, fills the memory that the kernels will be given with NaN.

    On a GPU it is allocated, filled and given back to torch, which hands it out again. In Triton's interpreter torch
    fills what it hands out itself.
    """
    checks = request.path.name.endswith("_checks.py") or request.node.get_closest_marker("gpu")
    if not checks:
        yield
    elif torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # so that no block of an earlier check is taken before these
        sizes = [POISON_BYTES, *(1 << power for power in range(9, 24) for _ in range(8))]
        blocks = [torch.full((size // 4,), torch.nan, device="cuda") for size in sizes]  # small and large ones
        torch.cuda.synchronize()
        del blocks
        yield
    else:
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)  # which fills uninitialised memory
        yield
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
