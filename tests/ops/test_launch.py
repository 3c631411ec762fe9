"""Kernels are launched without Triton's dispatch on verified versions, on the tensors' device, in valid grids."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from postlude.ops.convolution import convolve
from postlude.ops.kernels import convolution as convolution_kernels
from postlude.ops.kernels import launch, ssd_device
from postlude.ops.kernels import ssd as ssd_kernels
from postlude.ops.norm import rms_norm
from postlude.ops.packing import Packing


class FakeKernel:
    """Records the arguments of each launch, through Triton and of the compiled kernel directly."""

    def __init__(self) -> None:
        self.slow_launches: list[tuple[Any, ...]] = []
        self.fast_launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: launch.Grid) -> Any:
        def run(*arguments: Any, num_warps: int) -> SimpleNamespace:
            self.slow_launches.append((grid, *arguments, num_warps))
            return SimpleNamespace(
                run=lambda *arguments: self.fast_launches.append(arguments),
                function="function",
                packed_metadata="metadata",
            )

        return run


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    launch.launches_fast.cache_clear()
    monkeypatch.setattr(
        launch, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda index: "stream"))
    )
    return FakeKernel()


def launch_three_times(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch, version: str) -> torch.Tensor:
    """Launches three times with the same tensor."""
    monkeypatch.setattr(launch, "version_of", lambda package: version)
    launcher, tensor = launch.Launcher(kernel), torch.zeros(8)
    for number in range(3):
        launcher((2, 1, 1), (tensor, None), (number,), (64,), warps=4)
    return tensor


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1+git123", "3.9.0"])
def test_later_launches_bypass_triton_on_verified_versions(kernel, monkeypatch, caplog, version: str) -> None:
    tensor = launch_three_times(kernel, monkeypatch, version)
    assert kernel.slow_launches == [((2, 1, 1), tensor, None, 0, 64, 4)]
    before = (2, 1, 1, "stream", "function", "metadata", None, None, None)
    assert kernel.fast_launches == [(*before, tensor.data_ptr(), None, number, 64) for number in (1, 2)]
    assert not caplog.records


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0"])
def test_unverified_triton_launches_itself_with_one_warning(kernel, monkeypatch, caplog, version: str) -> None:
    with caplog.at_level(logging.WARNING):
        launch_three_times(kernel, monkeypatch, version)
    assert (len(kernel.slow_launches), kernel.fast_launches) == (3, [])
    (message,) = caplog.messages  # once
    assert version in message
    assert "3.6 to 3.9" in message


def test_is_current_device(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    current = {name: launch.is_current(torch.device(name)) for name in ("cpu", "cuda:0", "cuda:1")}
    assert current == {"cpu": True, "cuda:0": False, "cuda:1": True}


@pytest.mark.parametrize("current", [True, False])
def test_a_kernel_is_launched_on_the_device_of_its_tensors(kernel, monkeypatch, current: bool) -> None:
    """Every launch path enters the tensors' device, but only if it is not the current one."""
    entered, inside, devices = [], [current], []

    @contextmanager
    def device(target: torch.device) -> Iterator[None]:
        entered.append(target)
        inside[0] = True
        yield
        inside[0] = False

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(launch, "is_current", lambda target: inside[0])
    tensor = torch.zeros(8)
    launch.Launcher(kernel)((2, 1, 1), (None, tensor), (3,), (64,), warps=4)

    class Function:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **options: devices.append((inside[0], grid, arguments, options))

    launch.Kernel(Function())[(5,)](None, tensor, 7, BLOCK=16)
    assert kernel.slow_launches == [((2, 1, 1), None, tensor, 3, 64, 4)]
    assert devices == [(True, (5,), (None, tensor, 7), {"BLOCK": 16})]
    assert entered == ([] if current else [tensor.device] * 2)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_on_a_gpu_other_than_the_current_one() -> None:
    inputs, kernel, norm = torch.randn(9, 8), torch.randn(8, 4), torch.randn(8)

    def result_on(device: str) -> Tensor:
        convolved = convolve(inputs.to(device), kernel.to(device), None, Packing.from_lengths([9], device))
        return rms_norm(convolved, norm.to(device), 1e-6, 0.0).cpu()  # one launch of each kind

    with torch.cuda.device(0):
        torch.testing.assert_close(result_on("cuda:1"), result_on("cpu"), rtol=1e-4, atol=1e-5)


def test_grids_of_many_tokens_stay_within_cuda_limits(monkeypatch) -> None:
    """CUDA takes 2 ** 31 - 1 programs along the first dimension, and 65,535 along the others."""
    grids: list[tuple[int, ...]] = []

    class RecordingKernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *arguments, **options: None

    for module in (convolution_kernels, ssd_device):
        for name, value in vars(module).items():
            if isinstance(value, launch.Kernel):
                monkeypatch.setattr(module, name, RecordingKernel())
    tokens, heads, width = 5_000_000, 8, 16
    with torch.device("meta"):
        inputs, kernel, positions = torch.empty(tokens, 96), torch.empty(96, 4), torch.empty(tokens, dtype=torch.int64)
        convolution_kernels.forward(inputs, kernel, None, positions, True)
        convolution_kernels.backward(inputs, kernel, None, positions, True, inputs)
        x, dt, keys = torch.empty(tokens, heads, width), torch.empty(tokens, heads), torch.empty(tokens, 2, 16)
        scan = ssd_kernels.Scan.of(x, dt, torch.empty(heads), keys, keys, positions.int(), 64)
        scan.outputs(None)
        scan.gradients(None, x)
    assert len(grids) == 11
    assert all(grid[0] < 2**31 and max((0, *grid[1:])) <= 65_535 for grid in grids), grids
