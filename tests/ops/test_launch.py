"""Launches go past Triton's own where its version was looked at, and are Triton's own, aloud, where it was not."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from postlude.ops import launch


class Kernel:
    """Notes the arguments of each launch: by Triton itself, and of what it compiled by itself."""

    def __init__(self) -> None:
        self.own: list[tuple[Any, ...]] = []
        self.short: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: launch.Grid) -> Any:
        def run(*arguments: Any, num_warps: int) -> SimpleNamespace:
            self.own.append((grid, *arguments, num_warps))
            return SimpleNamespace(
                run=lambda *given: self.short.append(given), function="function", packed_metadata="metadata"
            )

        return run


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    launch.has_short_way.cache_clear()
    monkeypatch.setattr(
        launch, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda index: "stream"))
    )
    return Kernel()


def launched(kernel: Kernel, monkeypatch: pytest.MonkeyPatch, version: str) -> torch.Tensor:
    """Three times with the same tensor."""
    monkeypatch.setattr(launch, "version_of", lambda package: version)
    launcher, tensor = launch.Launcher(kernel), torch.zeros(8)
    for number in range(3):
        launcher((2, 1, 1), (tensor, None), (number,), (64,), warps=4)
    return tensor


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1+git123", "3.9.0"])
def test_what_was_compiled_is_launched_again_by_itself(kernel, monkeypatch, caplog, version: str) -> None:
    tensor = launched(kernel, monkeypatch, version)
    assert kernel.own == [((2, 1, 1), tensor, None, 0, 64, 4)]
    before = (2, 1, 1, "stream", "function", "metadata", None, None, None)
    assert kernel.short == [(*before, tensor.data_ptr(), None, number, 64) for number in (1, 2)]
    assert not caplog.records


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0"])
def test_a_triton_that_was_not_looked_at_launches_itself_aloud(kernel, monkeypatch, caplog, version: str) -> None:
    with caplog.at_level(logging.WARNING):
        launched(kernel, monkeypatch, version)
    assert (len(kernel.own), kernel.short) == (3, [])
    (said,) = caplog.messages  # once
    assert version in said
    assert "3.6 to 3.9" in said
