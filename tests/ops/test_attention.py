"""Packed attention equals dense masked softmax in float64, window and softcap included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from postlude.ops.attention import Scores, attend, per_sequence_attention, varlen_attention
from postlude.ops.packing import Packing
from tests.equality import assert_equal

LENGTHS = (5, 1, 9, 5, 3)


def tensors(heads: int, kv_heads: int, width: int, lengths=LENGTHS, **options) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    shapes = [(total, heads, width), (total, kv_heads, width), (total, kv_heads, width)]
    return [torch.randn(shape, generator=generator).to(**options).requires_grad_() for shape in shapes]


def dense(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float, window, softcap) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    sequence, position = packing.sequence_index(), torch.arange(packing.total, device=query.device)
    distance = position[:, None] - position[None, :]
    visible = (sequence[:, None] == sequence[None, :]) & (distance >= 0)
    if window is not None:
        visible &= distance < window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, float("-inf")).softmax(-1), value)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_per_sequence_attention_equals_dense_float64(heads: int, kv_heads: int, window, softcap) -> None:
    packing = Packing.from_lengths(LENGTHS)
    inputs = tensors(heads, kv_heads, 8)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    actual = per_sequence_attention(*inputs, packing, Scores(scale=0.4, window=window, softcap=softcap))
    expected = dense(*exact, packing, 0.4, window, softcap)
    assert_equal(actual, expected)
    upstream = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(actual, inputs, upstream)
    references = torch.autograd.grad(expected, exact, upstream.double())
    # Of one scale together: with a single visible key the gradients of query and key are exactly zero.
    assert_equal(torch.cat(gradients, dim=1), torch.cat(references, dim=1))


def test_varlen_refuses_softcap() -> None:
    with pytest.raises(ValueError, match="has no softcap"):
        varlen_attention(*tensors(2, 2, 8), Packing.from_lengths(LENGTHS), Scores(scale=1.0, softcap=3.0))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 40, 10_000])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2)])
def test_varlen_equals_the_reference_on_cuda(heads: int, kv_heads: int, window) -> None:
    """bf16 against float64 on the same bf16 inputs: 1e-2 of the scale, what bf16 outputs and gradients can hold."""
    lengths = (130, 1, 517, 64)
    packing = Packing.from_lengths(lengths, device="cuda")
    inputs = tensors(heads, kv_heads, 64, lengths, device="cuda", dtype=torch.bfloat16)
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    actual = attend(*inputs, packing, Scores(scale=0.125, window=window))
    expected = dense(*exact, packing, 0.125, window, None)
    assert_equal(actual, expected, tolerance=1e-2)
    upstream = torch.randn_like(actual)
    gradients = torch.autograd.grad(actual, inputs, upstream)
    references = torch.autograd.grad(expected, exact, upstream.double())
    assert_equal(torch.cat(gradients, dim=1), torch.cat(references, dim=1), tolerance=1e-2)
