"""Triton attention: checks in the interpreter without a GPU; on a GPU also at model sizes."""

from dataclasses import replace

import pytest
import torch

from postlude.ops.attention import (
    CUDNN_LENGTH_STEP,
    CUDNN_MIN_LENGTH,
    ScoreConfig,
    reference_attention,
    triton_packed_attention,
)
from postlude.ops.packing import Packing
from postlude.ops.segment_attention import CUDNN_MIN_ROWS, find_rectangles
from tests.ops.test_attention import assert_alike, dense, on_cuda

LENGTHS, PART = (130, 1, 517, 64), (65, 1, 130, 1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "kv_heads", "widths", "part", "window", "softcap", "sinks"),
    [
        (8, 8, (64, 64), LENGTHS, None, None, False),
        (8, 2, (128, 128), PART, None, None, True),
        (12, 2, (128, 128), LENGTHS, 200, None, False),
        (16, 1, (64, 64), LENGTHS, 40, 20.0, True),
        (8, 2, (256, 256), PART, None, 20.0, False),
        (8, 8, (192, 128), LENGTHS, 10_000, 20.0, False),
        (8, 2, (128, 64), PART, 1, None, False),
    ],
)
def test_equals_dense_float64(heads, kv_heads, widths, part, window, softcap, sinks) -> None:
    """With production tiles in bf16: 1e-2 of the scale is the precision of outputs and gradients.

    And what is computed again is the same to the bit: there are no atomics.
    """
    queries, keys = (Packing.from_lengths(packed_lengths, device="cuda") for packed_lengths in (part, LENGTHS))
    inputs = on_cuda(widths, sinks, part, LENGTHS, heads, kv_heads)
    scores = ScoreConfig(scale=0.125, window=window, softcap=softcap)
    assert_alike(triton_packed_attention, dense, inputs, queries, keys, scores, tolerance=1e-2)
    twice = []
    for _ in range(2):
        output = triton_packed_attention(
            *inputs[:3], queries, keys, replace(scores, sinks=inputs[3] if sinks else None)
        )
        twice.append((output, *torch.autograd.grad(output, inputs, torch.ones_like(output))))
    assert all(torch.equal(*pair) for pair in zip(*twice, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "lengths",
    [
        (CUDNN_MIN_LENGTH + 5,),
        (70, CUDNN_MIN_LENGTH, 9, 130, CUDNN_MIN_LENGTH + 1, CUDNN_LENGTH_STEP + CUDNN_MIN_LENGTH),
    ],
)
def test_long_sequences_among_short_ones_equal_float64(lengths) -> None:
    packing = Packing.from_lengths(lengths, device="cuda")
    inputs = on_cuda((64, 64), False, lengths, lengths, 4, 2)
    assert_alike(
        triton_packed_attention, reference_attention, inputs, packing, packing, ScoreConfig(scale=0.125), tolerance=1e-2
    )


def attention_along_paths(query, key, value, packing, _, scores):
    """The reference: every segment's queries, and the keys of its path."""
    rows = [torch.arange(*part) for part in packing.slices()]
    paths = [
        torch.cat([*(rows[above] for above in path), own])
        for path, own in zip(packing.paths_above(), rows, strict=True)
    ]
    queries, keys = (Packing.from_lengths(lengths, "cuda") for lengths in (packing.lengths, [*map(len, paths)]))
    gathered = torch.cat(paths).cuda()
    return reference_attention(query, key[gathered], value[gathered], queries, keys, scores)


@pytest.mark.gpu
@pytest.mark.parametrize(("widths", "softcap"), [((128, 128), None), ((64, 64), None), ((192, 128), 20.0)])
@pytest.mark.parametrize("sinks", [False, True])
def test_segments_equal_float64(widths, softcap, sinks) -> None:
    """The first has a rectangle of queries and keys for cuDNN, if there is no softcap."""
    lengths = (4700, 2500, 700, 1900, 300, 100, 50)
    packing = Packing.from_lengths(lengths, "cuda", parents=(-1, 0, 1, 0, 3, -1, 5))
    assert len(find_rectangles(packing, CUDNN_MIN_ROWS)) == 1
    inputs = on_cuda(widths, sinks, lengths, lengths, 4, 2)
    scores = ScoreConfig(scale=0.125, softcap=softcap)
    assert_alike(triton_packed_attention, attention_along_paths, inputs, packing, packing, scores, tolerance=1e-2)
