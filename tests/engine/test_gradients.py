"""The norm of a gradient and its clipping, on plain tensors: right where fp32 is not, a bounded piece at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from postlude.engine import gradients
from postlude.engine.gradients import clip, squared_norm


def test_the_norm_is_summed_in_float64_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, sizes = torch.linalg.vector_norm, list[int]()

    def watched(chunk: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
        sizes.append(chunk.numel())
        return whole(chunk, dtype=dtype)

    monkeypatch.setattr(gradients, "CHUNK", 7)
    monkeypatch.setattr(torch.linalg, "vector_norm", watched)
    drawn = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    for scale in (1.0, 1e25, 1e-25):  # squares that fp32 has no room for
        values = drawn * scale
        torch.testing.assert_close(squared_norm(values), values.double().square().sum(), rtol=1e-12, atol=0.0)
    assert sum(sizes) == 3 * drawn.numel()
    assert max(sizes) <= 7


def test_clipping_scales_every_gradient_alike_and_leaves_out_what_has_none() -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in (3, 4, 2)]
    for parameter in parameters[:2]:
        parameter.grad = torch.full_like(parameter, 3.0)
    clip(parameters, 1.5, 30.0)
    for parameter in parameters[:2]:
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 0.15), rtol=1e-6, atol=0.0)
    assert parameters[2].grad is None
