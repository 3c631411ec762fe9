"""Triton's attention equals dense masked softmax in float64, with all gradients. Run by `test_kernels.py`, in
a process of its own."""

import functools
from dataclasses import replace

import pytest
import torch

from postlude.model.recompute import recomputed
from postlude.ops import segment_attention as segments
from postlude.ops.attention import ScoreConfig
from postlude.ops.kernels import attention as attention_kernels
from postlude.ops.kernels.attention import AttentionTile, AttentionTiles, triton_attention
from postlude.ops.packing import Packing
from tests.ops.test_attention import LENGTHS, PARTS, assert_alike, dense, tensors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = AttentionTiles(AttentionTile(16, 16, 1, 1), AttentionTile(16, 16, 1, 1), AttentionTile(16, 16, 1, 1))
BY_TMA = AttentionTiles(
    AttentionTile(16, 16, 1, 1, True), AttentionTile(16, 16, 1, 1, True), AttentionTile(16, 16, 1, 1, True)
)
LONGER = (70, 1, 33, 5)
TAILS = (40, 1, 2, 5)


def attention(query, key, value, queries, keys, scores, tiles):
    options = {"scale": scores.scale, "window": scores.window, "softcap": scores.softcap, "sinks": scores.sinks}
    return triton_attention(query, key, value, queries, keys, **options, tiles=tiles)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "widths", "lengths", "parts", "window", "softcap", "sinks"),
    [
        (2, 2, (16, 16), LONGER, LONGER, None, None, False),
        (4, 2, (16, 16), LONGER, TAILS, None, None, True),
        (6, 1, (16, 32), LONGER, LONGER, 20, None, False),  # three parts of two heads
        (4, 1, (20, 12), LONGER, TAILS, 3, 1.5, True),  # widths that are no power of two
        (2, 1, (16, 16), LONGER, LONGER, 1, None, True),
        (3, 3, (16, 16), LENGTHS, PARTS, 40, 1.5, False),
        (2, 1, (16, 16), (64, 32), (64, 32), 33, None, False),
        (4, 1, (16, 16), (64, 16), (64, 16), 17, None, False),
    ],
)
def test_equals_dense_float64(heads, kv_heads, widths, lengths, parts, window, softcap, sinks) -> None:
    """fp32 on the CPU; half precision on a GPU, whose kernel has no fp32 products."""
    keys, queries = (Packing.from_lengths(packed_lengths, device=DEVICE) for packed_lengths in (lengths, parts))
    dtype, tolerance = (torch.bfloat16, 1e-2) if DEVICE == "cuda" else (torch.float32, 1e-5)
    operands = tensors(heads, kv_heads, widths[0], parts, lengths, value_width=widths[1], dtype=dtype, device=DEVICE)
    inputs = [tensor.detach().requires_grad_() for tensor in operands[: 4 if sinks else 3]]
    scores = ScoreConfig(scale=0.4, window=window, softcap=softcap)
    assert_alike(functools.partial(attention, tiles=SMALL), dense, inputs, queries, keys, scores, tolerance)


TREE = (-1, 0, 1, 1, 0, -1, 5, 5, -1)
TREE_LENGTHS = (40, 1, 33, 17, 5, 16, 1, 20, 3)


def dense_along_paths(query, key, value, packing, _, scores):
    rows, paths = [], []
    for segment, (start, stop) in enumerate(packing.slices()):
        above = [] if packing.parents[segment] < 0 else paths[packing.parents[segment]]
        paths.append([*above, *range(start, stop)])
        rows += paths[-1]
    queries, keys = (Packing.from_lengths(lengths, DEVICE) for lengths in (packing.lengths, [*map(len, paths)]))
    return dense(query, key[rows], value[rows], queries, keys, scores)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "widths", "window", "softcap", "sinks", "tiles"),
    [
        (2, 2, (16, 16), None, None, False, SMALL),
        (4, 1, (20, 12), None, 1.5, True, SMALL),
        (6, 2, (16, 32), 200, None, False, BY_TMA),
    ],
)
def test_segments_see_what_they_continue(heads, kv_heads, widths, window, softcap, sinks, tiles) -> None:
    packing = Packing.from_lengths(TREE_LENGTHS, DEVICE, parents=TREE)
    dtype, tolerance = (torch.bfloat16, 1e-2) if DEVICE == "cuda" else (torch.float32, 1e-5)
    shape = (TREE_LENGTHS, TREE_LENGTHS)
    operands = tensors(heads, kv_heads, widths[0], *shape, value_width=widths[1], dtype=dtype, device=DEVICE)
    inputs = [tensor.detach().requires_grad_() for tensor in operands[: 4 if sinks else 3]]
    scores = ScoreConfig(scale=0.4, window=window, softcap=softcap)
    run = functools.partial(attention, tiles=tiles)
    assert_alike(run, dense_along_paths, inputs, packing, packing, scores, tolerance)


class Rectangles:
    """Attention of queries that see all keys, written out."""

    def __init__(self) -> None:
        self.calls = 0

    def weights(self, query, key, scale):
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1).float()
        return torch.einsum("qhd,khd->qhk", query.float(), key) * scale

    def forward(self, query, key, value, scale):
        self.calls += 1
        scores = self.weights(query, key, scale)
        value = value.repeat_interleave(query.shape[1] // key.shape[1], 1).float()
        return torch.einsum("qhk,khd->qhd", scores.softmax(-1), value).to(query.dtype), scores.logsumexp(-1)

    def backward(self, gradient, query, key, value, output, lse, scale):
        group = query.shape[1] // key.shape[1]
        weights = (self.weights(query, key, scale) - lse[..., None]).exp()
        repeated = [tensor.repeat_interleave(group, 1).float() for tensor in (key, value)]
        delta = (gradient.float() * output.float()).sum(-1, keepdim=True)
        slopes = weights * (torch.einsum("qhd,khd->qhk", gradient.float(), repeated[1]) - delta) * scale
        grad_query = torch.einsum("qhk,khd->qhd", slopes, repeated[0])
        grad_key = torch.einsum("qhk,qhd->khd", slopes, query.float()).unflatten(1, (-1, group)).sum(2)
        grad_value = torch.einsum("qhk,qhd->khd", weights, gradient.float()).unflatten(1, (-1, group)).sum(2)
        return tuple(tensor.to(query.dtype) for tensor in (grad_query, grad_key, grad_value))


@pytest.mark.parametrize("sinks", [False, True])
def test_rectangles_of_another_kernel_are_merged(monkeypatch: pytest.MonkeyPatch, sinks: bool) -> None:
    monkeypatch.setattr(segments, "LENGTH_STEP", 16)  # two of three rectangles leave keys to the kernels
    lengths = (40, 35, 33, 17, 5, 16, 1, 20, 3)
    packing = Packing.from_lengths(lengths, DEVICE, parents=TREE)
    dtype, tolerance = (torch.bfloat16, 1e-2) if DEVICE == "cuda" else (torch.float32, 1e-5)
    operands = tensors(4, 2, 16, lengths, lengths, value_width=16, dtype=dtype, device=DEVICE)
    inputs = [tensor.detach().requires_grad_() for tensor in operands[: 4 if sinks else 3]]
    kernel = Rectangles()

    def run(query, key, value, queries, _, scores):
        options = {"rectangle_kernel": kernel, "min_rows": 16, "tiles": SMALL}
        return segments.segment_attention(query, key, value, queries, scores, **options)

    assert_alike(run, dense_along_paths, inputs, packing, packing, ScoreConfig(scale=0.4), tolerance)
    assert kernel.calls == 3


def test_a_window_that_hides_keys_of_a_path_is_refused() -> None:
    packing = Packing.from_lengths(TREE_LENGTHS, DEVICE, parents=TREE)
    query, key, value, _ = tensors(2, 2, 16, TREE_LENGTHS, TREE_LENGTHS, device=DEVICE)
    with pytest.raises(ValueError, match="a window of 60 tokens hides keys of segments that others continue"):
        attention(query, key, value, packing, packing, ScoreConfig(scale=0.4, window=60), SMALL)


def test_strided_inputs_are_read_in_place() -> None:
    packing = Packing.from_lengths(LONGER, device=DEVICE)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    query, key, value, _ = tensors(4, 2, 16, LONGER, LONGER, dtype=dtype, device=DEVICE)
    key_value = torch.cat((key, value), -1)
    parts = key_value.split(16, dim=-1)
    run = functools.partial(attention, queries=packing, keys=packing, scores=ScoreConfig(scale=0.4), tiles=SMALL)
    assert torch.equal(run(query, *parts), run(query, key, value))
    assert torch.equal(run(query.transpose(0, 1).contiguous().transpose(0, 1), key, value), run(query, key, value))


def test_packing_caches_its_tables() -> None:
    packing = Packing.from_lengths(LONGER, device=DEVICE)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    query, key, value, _ = tensors(2, 2, 16, LONGER, LONGER, dtype=dtype, device=DEVICE)
    scores = ScoreConfig(scale=0.4, window=10)
    for _ in range(2):
        attention(query, key, value, packing, packing, scores, SMALL).sum().backward()
        attention(query, key, value, packing, packing, replace(scores, window=None), SMALL).sum().backward()
    assert len(packing.tables) == 4


def test_tma_tiles_equal_dense_float64() -> None:
    keys, queries = (Packing.from_lengths(packed_lengths, device=DEVICE) for packed_lengths in (LONGER, TAILS))
    dtype, tolerance = (torch.bfloat16, 1e-2) if DEVICE == "cuda" else (torch.float32, 1e-5)
    operands = tensors(4, 2, 16, TAILS, LONGER, value_width=32, dtype=dtype, device=DEVICE)
    inputs = [tensor.detach().requires_grad_() for tensor in operands[:3]]
    assert_alike(
        functools.partial(attention, tiles=BY_TMA),
        dense,
        inputs,
        queries,
        keys,
        ScoreConfig(scale=0.4, window=20),
        tolerance,
    )


def test_selective_recompute_keeps_attention_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    packing = Packing.from_lengths(LONGER, device=DEVICE)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    inputs = tensors(2, 2, 16, LONGER, LONGER, dtype=dtype, device=DEVICE)[:3]
    calls = []
    launch = attention_kernels._launch_forward
    monkeypatch.setattr(
        attention_kernels,
        "_launch_forward",
        lambda *arguments, **options: calls.append(options) or launch(*arguments, **options),
    )

    def work(query, key, value):
        return attention(query * 2, key, value, packing, packing, ScoreConfig(scale=0.4), SMALL).square()

    gradients = [
        torch.autograd.grad(recomputed(work, recompute, *inputs).sum(), inputs) for recompute in ("none", "selective")
    ]
    assert len(calls) == 2
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
