from __future__ import annotations

import importlib.util

import pytest


@pytest.fixture(autouse=True)
def _frameworks() -> None:
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("needs the packages of `make test-peers`")
