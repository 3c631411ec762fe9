"""ChecksumComparison: a server whose weights differ from the majority is excluded, with a reason."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from postlude.serving.clients.client import GenerationClient
from postlude.serving.weights.sync import ChecksumComparison, SyncOptions, WeightSync
from tests.serving.fake_vllm import FakeVLLM, Refusal

COMPARISONS: dict[GenerationClient, ChecksumComparison] = {}


class ChecksumServer(FakeVLLM):
    """`weights` are the checksums it reports for its two tensors; None for a vLLM that is too old to report them."""

    weights: tuple[str, str] | None = ("a", "b")
    names = ("dp0:tp0:first", "dp0:tp0:second")

    def reply(self, path: str, body: Any) -> Any:
        if path != "/weight_checker":
            return super().reply(path, body)
        assert body == {"action": "checksum"}
        if self.weights is None:
            raise Refusal(404, "Not Found")
        return {"checksums": dict(zip(self.names, self.weights, strict=True))}


@pytest.fixture
def several() -> Iterator[Callable[..., tuple[GenerationClient, list[ChecksumServer]]]]:
    with ExitStack() as stack:

        def start(count: int) -> tuple[GenerationClient, list[ChecksumServer]]:
            servers = [stack.enter_context(closing(ChecksumServer())) for _ in range(count)]
            engine = stack.enter_context(closing(GenerationClient([server.url for server in servers], backoff=0.01)))
            engine.connect()
            engine.run(engine.pool.connect())
            return engine, servers

        yield start


def compared(engine: GenerationClient, checksum: str) -> int:
    return engine.run(COMPARISONS.setdefault(engine, ChecksumComparison(engine.pool)).compare(checksum))


def states(engine: GenerationClient) -> list[str]:
    return [server.state for server in engine.pool.servers]


def test_server_that_differs_from_the_majority_is_excluded_and_named(several, caplog) -> None:
    engine, servers = several(3)
    assert compared(engine, "first") == 3
    assert states(engine) == ["up"] * 3
    for server in servers:
        server.weights = ("c", "d")
    servers[1].weights = ("c", "x")
    with caplog.at_level(logging.WARNING, "postlude"):
        assert compared(engine, "second") == 3
    assert states(engine) == ["up", "excluded", "up"]
    assert f"{servers[1].url} has other weights than 2 others after the same update: 1 of 2 tensors" in caplog.text
    assert "such as dp0:tp0:second" in caplog.text


def test_a_server_with_unchanged_hashes_is_excluded_even_if_it_is_the_only_one(several, caplog) -> None:
    engine, (server,) = several(1)
    compared(engine, "first")
    compared(engine, "first")
    assert states(engine) == ["up"], "the trainer's are the same, too, as after a step at a rate of 0"
    with caplog.at_level(logging.WARNING, "postlude"):
        compared(engine, "second")
    assert states(engine) == ["excluded"]
    assert f"{server.url} has its previous weights" in caplog.text


def test_without_a_majority_all_servers_stay_and_a_warning_is_logged(several, caplog) -> None:
    engine, servers = several(2)
    servers[1].weights = ("x", "b")
    with caplog.at_level(logging.WARNING, "postlude"):
        compared(engine, "first")
    assert states(engine) == ["up", "up"]
    assert f"{servers[0].url} and {servers[1].url} have different weights after the same update" in caplog.text


class CountedSync(WeightSync):
    """Sends nothing: for when comparisons are made."""

    def close(self) -> None:
        pass

    def _sync(self, version: str) -> int:
        return 0

    def _checksum(self) -> str:
        assert self.version is not None
        return self.version


def test_checksums_are_compared_at_the_first_sync_and_every_nth_after_it(several, tmp_path: Path) -> None:
    engine, (server,) = several(1)
    sync = CountedSync(None, engine, SyncOptions(tmp_path, checksum_every=3))  # type: ignore[arg-type]
    compared_at = []
    for step in range(1, 8):
        server.weights = (f"a{step}", "b")
        before = server.calls.count("/weight_checker")
        sync.sync(f"start.{step}")
        if server.calls.count("/weight_checker") > before:
            compared_at.append(step)
    assert compared_at == [1, 4, 7]


def test_servers_with_other_tensor_layouts_are_not_compared(several, caplog) -> None:
    engine, servers = several(3)
    servers[1].names, servers[1].weights = ("dp0:tp0:first", "dp0:tp1:first"), ("p", "q")
    servers[2].weights = None
    with caplog.at_level(logging.WARNING, "postlude"):
        assert compared(engine, "first") == 2
    assert states(engine) == ["up"] * 3
    assert caplog.text == ""
