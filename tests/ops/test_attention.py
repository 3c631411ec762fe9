"""Packed attention equals dense masked softmax in float64, window and softcap included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from postlude.ops.attention import Scores, attend, per_sequence_attention, varlen_attention
from postlude.ops.packing import Packing
from tests.equality import TOLERANCE, assert_equal

LENGTHS = (5, 1, 9, 5, 3)
PARTS = (2, 1, 1, 5, 2)  # the last so many positions of each


def tensors(heads: int, kv_heads: int, width: int, queries=LENGTHS, keys=LENGTHS, **options) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(queries), heads, width), (sum(keys), kv_heads, width), (sum(keys), kv_heads, width)]
    return [torch.randn(shape, generator=generator).to(**options).requires_grad_() for shape in shapes]


def dense(query: Tensor, key: Tensor, value: Tensor, queries: Packing, keys: Packing, scores: Scores) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    rated = torch.einsum("qhd,khd->hqk", query, key) * scores.scale
    if scores.softcap is not None:
        rated = scores.softcap * torch.tanh(rated / scores.softcap)
    before = (keys.cu_seqlens.diff() - queries.cu_seqlens.diff())[
        queries.sequence_index()
    ]  # keys before the first query
    distance = (before + queries.positions())[:, None] - keys.positions()[None, :]
    visible = (queries.sequence_index()[:, None] == keys.sequence_index()[None, :]) & (distance >= 0)
    if scores.window is not None:
        visible &= distance < scores.window
    return torch.einsum("hqk,khd->qhd", rated.masked_fill(~visible, float("-inf")).softmax(-1), value)


def assert_alike(implementation, reference, inputs, queries, keys, scores, tolerance=TOLERANCE) -> None:
    """Values and gradients equal those of the reference in float64."""
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    actual = implementation(*inputs, queries, keys, scores)
    expected = reference(*exact, queries, keys, scores)
    assert actual.dtype == inputs[0].dtype
    assert_equal(actual, expected, tolerance=tolerance)
    upstream = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1)).to(actual)
    gradients = torch.autograd.grad(actual, inputs, upstream)
    references = torch.autograd.grad(expected, exact, upstream.double())
    # Of one scale together: with a single visible key the gradients of query and key are exactly zero.
    assert_equal(
        *(torch.cat([part.flatten() for part in parts]) for parts in (gradients, references)), tolerance=tolerance
    )


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("part", [LENGTHS, PARTS, (1,) * 5], ids=["whole", "parts", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_per_sequence_attention_equals_dense_float64(dtype, part, heads: int, kv_heads: int, window, softcap) -> None:
    queries, keys = Packing.from_lengths(part), Packing.from_lengths(LENGTHS)
    inputs = tensors(heads, kv_heads, 8, part, dtype=dtype)
    scores = Scores(scale=0.4, window=window, softcap=softcap)
    tolerance = TOLERANCE if dtype == torch.float32 else 1e-12  # float64 must not pass through float32 on its way
    assert_alike(per_sequence_attention, dense, inputs, queries, keys, scores, tolerance)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_parts_equal_the_same_rows_of_the_whole(window, softcap) -> None:
    keys, queries = Packing.from_lengths(LENGTHS), Packing.from_lengths(PARTS)
    query, key, value = tensors(6, 2, 8, dtype=torch.float64)
    rows = torch.cat([torch.arange(stop - part, stop) for part, (_, stop) in zip(PARTS, keys.slices(), strict=True)])
    scores = Scores(scale=0.4, window=window, softcap=softcap)
    assert_equal(
        attend(query[rows], key, value, queries, keys, scores), attend(query, key, value, keys, keys, scores)[rows]
    )


@pytest.mark.parametrize("implementation", [per_sequence_attention, varlen_attention])
def test_of_nothing_the_gradients_are_zeros_rather_than_none(implementation) -> None:
    none = Packing.from_lengths(())
    hidden = torch.zeros(0, 5)
    weights = [torch.randn(heads * 8, 5, requires_grad=True) for heads in (4, 2, 2)]
    query, key, value = ((hidden @ weight.T).unflatten(-1, (-1, 8)) for weight in weights)
    output = implementation(query, key, value, none, none, Scores(scale=1.0))
    assert output.shape == (0, 4, 8)
    output.sum().backward()
    for weight in weights:
        assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("implementation", [per_sequence_attention, varlen_attention])
@pytest.mark.parametrize(
    ("queries", "keys", "sentence"),
    [
        (
            (1, 2),
            (3,),
            "there are queries of 2 sequences, but keys of 1. Pack the queries and the keys of the same sequences.",
        ),
        (
            (1, 3),
            (2, 2),
            "sequence 1 has 3 queries, but only 2 keys. A query stands at a key of its own: "
            "give at least 3 keys, or at most 2 queries.",
        ),
    ],
)
def test_queries_without_their_keys_are_refused(implementation, queries, keys, sentence) -> None:
    inputs = tensors(2, 2, 8, queries, keys)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        implementation(*inputs, Packing.from_lengths(queries), Packing.from_lengths(keys), Scores(scale=1.0))
    assert str(error.value) == sentence


def test_varlen_refuses_softcap() -> None:
    packing = Packing.from_lengths(LENGTHS)
    with pytest.raises(ValueError, match="has no softcap"):
        varlen_attention(*tensors(2, 2, 8), packing, packing, Scores(scale=1.0, softcap=3.0))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 40, 10_000])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2)])
@pytest.mark.parametrize("part", [(130, 1, 517, 64), (65, 1, 130, 1)], ids=["whole", "parts"])
@pytest.mark.parametrize("reference", [dense, per_sequence_attention])
def test_varlen_equals_the_reference_on_cuda(reference, part, heads: int, kv_heads: int, window) -> None:
    """bf16 against float64 on the same bf16 inputs: 1e-2 of the scale, what bf16 outputs and gradients can hold."""
    lengths = (130, 1, 517, 64)
    queries, keys = (Packing.from_lengths(each, device="cuda") for each in (part, lengths))
    inputs = tensors(heads, kv_heads, 64, part, lengths, device="cuda", dtype=torch.bfloat16)
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    scores = Scores(scale=0.125, window=window)
    assert_alike(varlen_attention, reference, inputs, queries, keys, scores, tolerance=1e-2)
    assert torch.equal(attend(*inputs, queries, keys, scores), varlen_attention(*inputs, queries, keys, scores))


@pytest.mark.gpu
def test_on_cuda_of_nothing_the_gradients_are_zeros() -> None:
    none = Packing.from_lengths((), device="cuda")
    inputs = tensors(4, 2, 64, (), (), device="cuda", dtype=torch.bfloat16)
    output = attend(*inputs, none, none, Scores(scale=1.0))
    assert [gradient.shape for gradient in torch.autograd.grad(output.sum(), inputs)] == [each.shape for each in inputs]
