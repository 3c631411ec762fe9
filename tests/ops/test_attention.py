"""Packed attention equals dense masked softmax in float64: windows, softcaps, sinks, values of another width."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from postlude.ops.attention import (
    ScoreConfig,
    attend,
    attends_along_paths,
    reference_attention,
    triton_packed_attention,
    varlen_attention,
)
from postlude.ops.batch_invariant import batch_invariant
from postlude.ops.packing import Packing
from tests.equality import TOLERANCE, assert_equal

LENGTHS = (5, 1, 9, 5, 3)
PARTS = (2, 1, 1, 5, 2)  # the last so many positions of each


def tensors(
    heads: int, kv_heads: int, width: int, queries=LENGTHS, keys=LENGTHS, *, value_width: int = 0, **options
) -> list[Tensor]:
    """Queries, keys, values and sinks."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(queries), heads, width), (sum(keys), kv_heads, width), (sum(keys), kv_heads, value_width or width)]
    shapes += [(heads,)]
    return [torch.randn(shape, generator=generator).to(**options).requires_grad_() for shape in shapes]


def dense(query: Tensor, key: Tensor, value: Tensor, queries: Packing, keys: Packing, scores: ScoreConfig) -> Tensor:
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
    rated = rated.masked_fill(~visible, float("-inf")).exp()
    denominator = rated.sum(-1, keepdim=True)
    if scores.sinks is not None:
        denominator = denominator + scores.sinks[:, None, None].exp()
    return torch.einsum("hqk,khd->qhd", rated / denominator, value)


def assert_alike(implementation, reference, inputs, queries, keys, scores, tolerance=TOLERANCE) -> None:
    """Asserts that values and gradients equal those of the reference in float64. A fourth input is the sinks."""
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    actual, expected = (
        attention(*operands[:3], queries, keys, replace(scores, sinks=operands[3] if len(operands) > 3 else None))
        for attention, operands in ((implementation, inputs), (reference, exact))
    )
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
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize(("heads", "value_width"), [((6, 2), 3), ((4, 4), 8), ((3, 1), 13)])
@pytest.mark.parametrize("part", [LENGTHS, PARTS, (1,) * 5], ids=["whole", "parts", "last"])
def test_equals_dense_float64(part, heads, value_width, sinks, window, softcap) -> None:
    """In fp32, and in float64, which must not pass through fp32 on its way."""
    queries, keys = Packing.from_lengths(part), Packing.from_lengths(LENGTHS)
    inputs = tensors(*heads, 8, part, value_width=value_width, dtype=torch.float32)[: 4 if sinks else 3]
    scores = ScoreConfig(scale=0.4, window=window, softcap=softcap)
    assert_alike(reference_attention, dense, inputs, queries, keys, scores)
    assert_alike(
        reference_attention, dense, [tensor.detach().double().requires_grad_() for tensor in inputs],
        queries, keys, scores, tolerance=1e-12,
    )  # fmt: skip


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_query_slices_equal_rows_of_full_attention(window, softcap) -> None:
    keys, queries = Packing.from_lengths(LENGTHS), Packing.from_lengths(PARTS)
    query, key, value, _ = tensors(6, 2, 8, dtype=torch.float64)
    rows = torch.cat([torch.arange(stop - part, stop) for part, (_, stop) in zip(PARTS, keys.slices(), strict=True)])
    scores = ScoreConfig(scale=0.4, window=window, softcap=softcap)
    assert_equal(
        attend(query[rows], key, value, queries, keys, scores), attend(query, key, value, keys, keys, scores)[rows]
    )


@pytest.mark.parametrize("implementation", [reference_attention, varlen_attention, triton_packed_attention])
def test_gradients_of_empty_inputs_are_zeros_rather_than_none(implementation) -> None:
    none = Packing.from_lengths(())
    hidden = torch.zeros(0, 5)
    weights = [torch.randn(heads * width, 5, requires_grad=True) for heads, width in ((4, 8), (2, 8), (2, 6))]
    projected = [
        (hidden @ weight.T).unflatten(-1, (heads, -1)) for weight, heads in zip(weights, (4, 2, 2), strict=True)
    ]
    sinks = torch.ones(4, requires_grad=True)
    output = implementation(*projected, none, none, ScoreConfig(scale=1.0, sinks=sinks))
    assert output.shape == (0, 4, 6)
    output.sum().backward()
    for weight in (*weights, sinks):
        assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("implementation", [reference_attention, varlen_attention, triton_packed_attention])
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
            "sequence 1 has 3 queries, but only 2 keys. Every query has its own key: "
            "give at least 3 keys, or at most 2 queries.",
        ),
    ],
)
def test_queries_that_do_not_match_the_keys_are_refused(implementation, queries, keys, sentence) -> None:
    inputs = tensors(2, 2, 8, queries, keys)[:3]
    with pytest.raises(ValueError) as error:  # noqa: PT011
        implementation(*inputs, Packing.from_lengths(queries), Packing.from_lengths(keys), ScoreConfig(scale=1.0))
    assert str(error.value) == sentence


def test_varlen_refuses_softcap() -> None:
    packing = Packing.from_lengths(LENGTHS)
    with pytest.raises(ValueError, match="has no softcap"):
        varlen_attention(*tensors(2, 2, 8)[:3], packing, packing, ScoreConfig(scale=1.0, softcap=3.0))


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_private_flash_attention_operators_exist(sinks: bool) -> None:
    """Runs forward and backward on the meta device, which checks their names and arguments."""
    packing = Packing.from_lengths(LENGTHS)
    packing = replace(packing, cu_seqlens=packing.cu_seqlens.to("meta"))
    inputs = [tensor.detach().requires_grad_() for tensor in tensors(6, 2, 12, device="meta", dtype=torch.bfloat16)]
    scores = ScoreConfig(scale=1.0, window=2, sinks=inputs[3] if sinks else None)
    output = varlen_attention(*inputs[:3], packing, packing, scores)
    assert output.shape == inputs[0].shape
    output.sum().backward()
    assert [tensor.grad is not None and tensor.grad.shape == tensor.shape for tensor in inputs] == [
        True,
        True,
        True,
        sinks,
    ]


def on_cuda(widths, sinks, part, lengths, heads: int, kv_heads: int) -> list[Tensor]:
    inputs = tensors(
        heads, kv_heads, widths[0], part, lengths, value_width=widths[1], device="cuda", dtype=torch.bfloat16
    )
    return [tensor.detach().requires_grad_() for tensor in inputs[: 4 if sinks else 3]]


@pytest.mark.parametrize("invariant", [False, True])
def test_segments_that_continue_others_are_refused_where_no_kernel_takes_them(invariant: bool) -> None:
    packing = Packing.from_lengths((3, 2), parents=(-1, 0))
    query, key, value, _ = tensors(2, 1, 8, packing.lengths, packing.lengths)
    scores = ScoreConfig(scale=0.4)
    with batch_invariant(invariant):
        assert not attends_along_paths(query, (8, 8), packing, scores)
        with pytest.raises(ValueError, match="has no segments that continue others"):
            attend(query, key, value, packing, packing, scores)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 40, 10_000])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2)])
@pytest.mark.parametrize("part", [(130, 1, 517, 64), (65, 1, 130, 1)], ids=["whole", "parts"])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("widths", [(64, 64), (192, 128), (20, 36)])
def test_varlen_equals_the_reference_on_cuda(widths, sinks, part, heads: int, kv_heads: int, window) -> None:
    """bf16 against float64 on the same bf16 inputs: 1e-2 of the scale is the precision of bf16 results."""
    lengths = (130, 1, 517, 64)
    queries, keys = (Packing.from_lengths(packed_lengths, device="cuda") for packed_lengths in (part, lengths))
    inputs = on_cuda(widths, sinks, part, lengths, heads, kv_heads)
    scores = ScoreConfig(scale=0.125, window=window)
    for reference in (dense, reference_attention):
        assert_alike(varlen_attention, reference, inputs, queries, keys, scores, tolerance=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("widths", [(64, 64), (192, 128), (20, 36)])
def test_attend_equals_dense_on_cuda(widths) -> None:
    lengths = (130, 1, 517, 64)
    packing = Packing.from_lengths(lengths, device="cuda")
    inputs = on_cuda(widths, False, lengths, lengths, 8, 2)
    assert_alike(attend, dense, inputs, packing, packing, ScoreConfig(scale=0.125), tolerance=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("widths", [(576, 512), (64, 300)])
def test_attend_with_heads_too_wide_for_flash_equals_dense(widths) -> None:
    lengths = (130, 1, 517, 64)
    packing = Packing.from_lengths(lengths, device="cuda")
    inputs = tensors(8, 1, widths[0], lengths, lengths, value_width=widths[1], device="cuda", dtype=torch.bfloat16)
    inputs = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
    assert_alike(attend, dense, inputs, packing, packing, ScoreConfig(scale=0.05), tolerance=1e-2)


@pytest.mark.gpu
def test_gradients_of_empty_inputs_are_zeros_on_cuda() -> None:
    none = Packing.from_lengths((), device="cuda")
    inputs = tensors(4, 2, 64, (), (), device="cuda", dtype=torch.bfloat16)
    output = attend(*inputs[:3], none, none, ScoreConfig(scale=1.0, sinks=inputs[3]))
    assert [gradient.shape for gradient in torch.autograd.grad(output.sum(), inputs)] == [
        tensor.shape for tensor in inputs
    ]
