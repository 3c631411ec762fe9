"""Launches small Triton kernels without the 30 µs in which Triton looks up which compilation to take.

A layer launches a dozen kernels of a few µs each, so the host's time per launch is a step's time. The fast path repeats
the last line of `triton.JITFunction.run`, which is private: it is taken for the Triton releases in
`capabilities.KERNELS["fast_launch"]`, and others log a warning.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from postlude.ops.kernels.capabilities import KERNELS, dotted, version_of, was_measured

ALIGNED = 16  # bytes: Triton compiles another kernel for addresses that are no multiples

Grid = tuple[int, int, int]

log = logging.getLogger(__name__)


class Kernel:
    """Decorates a Triton kernel (above `triton.jit`) so that it is launched on the device of its tensors."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Any:
        device = next(argument.device for argument in arguments if isinstance(argument, Tensor))
        if is_current(device):
            return self.function[grid](*arguments, **options)
        with torch.cuda.device(device):
            return self.function[grid](*arguments, **options)


def is_current(device: torch.device) -> bool:
    return device.type != "cuda" or device.index == torch.cuda.current_device()


class Launcher:
    """Launches one kernel, whose parameters are tensors, then numbers, then constants, in this order.

    The kernel names its numbers in `do_not_specialize`. A compilation then depends on dtypes, None in place of a
    tensor, alignment and constants only. Strides are best constants: a model has few, and Triton then knows what
    divides them. The block shape of a tensor descriptor follows from the constants.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[Any, tuple[Callable[..., None], Any, Any]] = {}

    def __call__(
        self,
        grid: Grid,
        tensors: tuple[Tensor | TensorDescriptor | None, ...],
        numbers: tuple[int | float, ...],
        constants: tuple[Any, ...],
        warps: int,
        **options: int,
    ) -> None:
        """Launches `grid` programs on the device of the tensors. `options` are Triton's."""
        device, addresses = None, 0
        dtypes: list[torch.dtype | None] = []
        values: list[Any] = []
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                address = tensor.data_ptr()
                device, addresses = tensor.device, addresses | address
                dtypes.append(tensor.dtype)
                values.append(address)  # a tensor would make Triton ask the driver whether the device can read it
            else:
                dtypes.append(None if tensor is None else tensor.base.dtype)
                values.append(tensor)
        assert device is not None  # there is a tensor
        if not is_current(device):
            with torch.cuda.device(device):
                self(grid, tensors, numbers, constants, warps, **options)
            return
        key = (constants, warps, *options.values(), device, *dtypes)
        launch = self._compiled.get(key)
        if launch is None or addresses % ALIGNED:
            compiled = self.kernel[grid](*tensors, *numbers, *constants, num_warps=warps, **options)
            # The interpreter compiles nothing.
            if compiled is not None and addresses % ALIGNED == 0 and launches_fast(version_of("triton")):
                self._compiled[key] = compiled.run, compiled.function, compiled.packed_metadata
            return
        run, function, metadata = launch
        stream = driver.active.get_current_stream(device.index)
        run(*grid, stream, function, metadata, None, None, None, *values, *numbers, *constants)


@functools.cache
def launches_fast(version: str) -> bool:
    """Whether the fast path is known for this Triton. If not, logs a warning once."""
    if was_measured("fast_launch", version):
        return True
    log.warning(
        "triton %s launches each kernel 30 µs slower than triton %s to %s, whose fast path is known. Use one of those "
        "where steps wait for the host.",
        version,
        *(dotted(release) for release in KERNELS["fast_launch"].triton or ()),
    )
    return False


def contiguous_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)
