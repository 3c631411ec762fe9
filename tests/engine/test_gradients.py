"""Norm, clipping and counts take one pass over everything, and no second copy of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from postlude.engine import gradients
from postlude.mesh import ALONE, Axis


class Made(TorchDispatchMode):
    """The operators that were called, and the most elements of a float64 tensor among their results."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []
        self.widest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operators.append(func.overloadpacket.__name__)
        if isinstance(result, Tensor) and result.dtype == torch.float64:
            self.widest = max(self.widest, result.numel())
        return result


@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
def test_the_norm_is_that_of_float64_without_a_copy_in_float64(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    """Also where the squares are past what fp32 holds."""
    monkeypatch.setattr(gradients, "CHUNK", 100)
    gradient = scale * torch.randn(30, 37, generator=torch.Generator().manual_seed(0))
    with Made() as made:
        squares = gradients.squared_norm(gradient)
    assert squares.dtype == torch.float64
    torch.testing.assert_close(squares, gradient.double().square().sum(), rtol=1e-12, atol=0.0)
    assert made.widest <= 12  # one number a chunk


def test_gradients_are_clipped_together() -> None:
    parameters = [nn.Parameter(torch.ones(size)) for size in (3, 4, 5, 6)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    with Made() as made:
        gradients.clip(parameters, 1.0, 4.0)
    for parameter in parameters:
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 0.5))
    assert made.operators.count("_foreach_mul_") == 1
    assert not {"mul", "mul_"} & set(made.operators[made.operators.index("_foreach_mul_") :])


def test_what_blocks_count_is_summed_at_once() -> None:
    """One all-reduce an axis, however many blocks."""
    axis = Axis(2, 0, group=mock.sentinel.group)
    mesh: Any = SimpleNamespace(dp=axis, cp=ALONE, tp=axis)
    counted = [torch.full((size,), float(size)) for size in (2, 3, 4)]
    with mock.patch.object(gradients.dist, "all_reduce", side_effect=lambda tensor, group: tensor.mul_(2)) as sums:
        gradients.sum_counted(counted, mesh)
    assert sums.call_count == 2
    assert [each.tolist() for each in counted] == [[4.0 * size] * size for size in (2, 3, 4)]
