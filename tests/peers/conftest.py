import importlib.util

import pytest

from tests.conftest import Ranks
from tests.nccl.conftest import nccl_ranks  # noqa: F401


@pytest.fixture(autouse=True)
def _frameworks() -> None:
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("needs the packages of `make test-peers`")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def workers(request: pytest.FixtureRequest, device: str) -> Ranks:
    """Ranks on the device: over gloo on the CPU, over NCCL on the GPU, which they share."""
    return request.getfixturevalue("ranks" if device == "cpu" else "nccl_ranks")
