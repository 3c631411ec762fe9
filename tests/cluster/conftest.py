"""Fixture `local_ray`: a Ray instance for the tests of one file, in a temporary directory."""

import tempfile
from collections.abc import Iterator

import pytest

QUIET = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}


@pytest.fixture(scope="module")
def local_ray(request: pytest.FixtureRequest) -> Iterator[None]:
    ray = pytest.importorskip("ray", reason="needs ray: pip install 'postlude[ray]'")
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as place:
        for attempts_left in (2, 1, 0):  # Ray gives a node 30 s to start, which a busy machine may need more than once
            try:
                ray.init("local", num_cpus=8, _temp_dir=place, **QUIET)
                break
            except Exception as error:
                ray.shutdown()
                if "timed out during startup" not in str(error) or not attempts_left:
                    raise
        yield
        ray.shutdown()
