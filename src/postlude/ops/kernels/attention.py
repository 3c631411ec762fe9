"""Causal attention over packed sequences, with grouped heads, window, softcap and sinks.

1.6 times as fast as torch's flash attention forward and backward: 4.0 against 6.6 ms for 52,000 tokens in sequences of
up to 4096, 16 heads of 128 and 8 key heads, bf16 on an H200 (docs/benchmarks.md, "Attention over packed
sequences", by benchmarks/attention.py; in no file of benchmarks/results). cuDNN is faster from 8192 tokens on;
`ops/attention.py` takes it there.

A tile of queries holds neighbouring queries and, for each, the heads that share a key head. So it is full where
sequences are short, and no key is read twice for the group. The host lists the tiles in a table, the longest first: no
program is without work. The backward is one kernel for queries and one for keys and values. Neither uses atomics, so
results are the same every time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import Function
from triton.tools.tensor_descriptor import TensorDescriptor

from postlude.ops.batch_invariant import is_batch_invariant
from postlude.ops.kernels import invariant_attention
from postlude.ops.kernels.attention_device import forward_kernel, key_gradient_kernel, query_gradient_kernel
from postlude.ops.kernels.capabilities import gpu_of
from postlude.ops.kernels.launch import Launcher
from postlude.ops.packing import Packing, Rectangle, to_device

Array = NDArray[np.int64]


# Bytes of shared memory for the tiles that were measured on an H200. GPUs with less get smaller ones, which fit in
# 99 KiB and were not measured.
LARGE_SHARED_MEMORY = 147_456


@dataclass(frozen=True)
class AttentionTile:
    """The size of a tile, in rows of queries (heads of a group counted) and keys, and launch options."""

    rows: int
    keys: int
    warps: int
    stages: int
    tma: bool = False  # the loop reads through Hopper's tensor memory accelerator


@dataclass(frozen=True)
class AttentionTiles:
    forward: AttentionTile
    queries: AttentionTile
    keys: AttentionTile


def tiles_for(query: Tensor, key: Tensor, value: Tensor) -> AttentionTiles:
    """Returns the tiles for the wider of key and value heads on the GPU of these tensors.

    The tensor memory accelerator loads whole tiles, where heads are as wide as a tile and rows start at 16 bytes.
    """
    gpu, widths = gpu_of(query.device), (query.shape[-1], value.shape[-1])
    tma = (
        gpu.tma
        and all(width >= 16 and width.bit_count() == 1 for width in widths)
        and all(
            (tensor.stride(0) | tensor.stride(1)) * tensor.element_size() % 16 == 0 and tensor.data_ptr() % 16 == 0
            for tensor in (query, key, value)
        )
    )
    return _tiles(max(widths) > 128, tma, gpu.shared_memory >= LARGE_SHARED_MEMORY)


@functools.cache
def _tiles(wide: bool, tma: bool, large: bool) -> AttentionTiles:
    if wide and large:
        return AttentionTiles(
            AttentionTile(128, 64, 8, 2, tma), AttentionTile(64, 64, 8, 2, tma), AttentionTile(32, 64, 8, 2, tma)
        )
    if wide:
        return AttentionTiles(
            AttentionTile(64, 32, 4, 2, tma), AttentionTile(64, 32, 8, 1, tma), AttentionTile(32, 32, 8, 2, tma)
        )
    return AttentionTiles(
        AttentionTile(64, 64, 4, 3, tma),
        AttentionTile(128, 64, 8, 3 if large else 2, tma),
        AttentionTile(64, 64, 4, 2, tma),
    )


def triton_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Packing,
    keys: Packing,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tiles: AttentionTiles | None = None,
) -> Tensor:
    """See `postlude.ops.attention.PackedAttention`. There is at least one sequence."""
    query, key, value = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value))
    call = AttentionCall.of((query, key, value), queries, keys, scale, window, softcap, tiles)
    output: Tensor = _Attention.apply(query, key, value, sinks, call)
    return output


def _packed_heads(group: int, rows: int) -> int:
    """Returns how many of the `group` heads that share a key head are in one tile: a power of two."""
    return min(group & -group, rows // 16)


def _tile_offsets(packing: Packing, step: int) -> tuple[Array, Array]:
    """Returns the sequence of each tile of `step` rows, and the tile's offset in it."""
    counts = -(-np.array(packing.lengths) // step)
    sequence = np.repeat(np.arange(len(counts)), counts)
    return sequence, (np.arange(len(sequence)) - (counts.cumsum() - counts)[sequence]) * step


def _query_table(
    queries: Packing, keys: Packing, window: int | None, step: int, rectangles: tuple[Rectangle, ...] = ()
) -> Array:
    """[tiles, 4]: first row, rows to the sequence's end, first row of its keys, position of the first query.

    With parents [tiles, 6]: also the first run of keys in front of the segment, and their number.
    """
    sequence, offset = _tile_offsets(queries, step)
    (first, count), (key, key_count) = (_starts_and_lengths(packing, sequence) for packing in (queries, keys))
    rows_left, position = count - offset, key_count - count + offset
    visible_keys = np.minimum(position + np.minimum(rows_left, step), (window or keys.max_length) + step)
    if queries.parents is None:
        return _longest_first(visible_keys, first + offset, rows_left, key, position)
    runs_above = _runs_above(queries, rectangles)
    tokens_above = np.array([sum(length for _, length in runs) for runs in runs_above])
    run_counts = np.array([*map(len, runs_above)])
    runs = run_counts.cumsum() - run_counts, run_counts
    columns = first + offset, rows_left, key, position, *(column[sequence] for column in runs)
    return _longest_first(visible_keys + tokens_above[sequence], *columns)


def _run_table(
    queries: Packing, keys: Packing, window: int | None, step: int, rectangles: tuple[Rectangle, ...]
) -> Array:
    """[runs, 2], first row and length of the keys in front of each segment, those of `rectangles` left out."""
    runs = [run for runs in _runs_above(queries, rectangles) for run in runs]
    return np.array(runs or [(0, 0)], dtype=np.int32)


def _runs_above(queries: Packing, rectangles: tuple[Rectangle, ...]) -> list[list[tuple[int, int]]]:
    skipped = {rectangle.segment: rectangle.keys for rectangle in rectangles}
    rests = [
        (start + skipped.get(s, 0), stop - start - skipped.get(s, 0))
        for s, (start, stop) in enumerate(queries.slices())
    ]
    return [[rests[segment] for segment in path if rests[segment][1]] for path in queries.paths_above()]


def _key_table(
    queries: Packing, keys: Packing, window: int | None, step: int, rectangles: tuple[Rectangle, ...] = ()
) -> Array:
    """[tiles, 6]: first row, rows to the sequence's end, position, first query row, queries, keys before the first.

    With parents the queries are those of the segment and of all that continue it, which follow it: a query sees a key
    unless its row is before the key's.
    """
    sequence, offset = _tile_offsets(keys, step)
    (first, count), (key, key_count) = (_starts_and_lengths(packing, sequence) for packing in (queries, keys))
    before = key_count - count
    if queries.parents is not None:
        skipped = np.zeros(queries.count, dtype=np.int64)
        for rectangle in rectangles:
            skipped[rectangle.segment] = rectangle.keys
        count = np.where(offset < skipped[sequence], count, np.array(queries.tree_lengths())[sequence])
        return _longest_first(count - offset, key + offset, key_count - offset, offset, first, count, before)
    query_count = np.minimum(count - np.maximum(offset - before, 0), (window or keys.max_length) + step)
    return _longest_first(query_count, key + offset, key_count - offset, offset, first, count, before)


def _starts_and_lengths(packing: Packing, sequence: Array) -> tuple[Array, Array]:
    lengths = np.array(packing.lengths)
    return (lengths.cumsum() - lengths)[sequence], lengths[sequence]


def _longest_first(work: Array, *columns: Array) -> Array:
    return np.stack(columns, 1)[np.argsort(-work, kind="stable")].astype(np.int32)


def _table(make: Any, call: AttentionCall, step: int) -> Tensor:
    """Returns the table on the device. It is made once for all layers with the same packing, window and step."""
    queries, keys = call.queries, call.keys
    table_key = (make.__name__, keys.lengths, call.window, step, call.rectangles)
    if table_key not in queries.tables:
        array = make(queries, keys, call.window, step, call.rectangles)
        queries.tables[table_key] = to_device(torch.from_numpy(array), queries.cu_seqlens.device)
    table: Tensor = queries.tables[table_key]
    return table


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    table: Tensor,
    runs: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    tile: list[int],
) -> tuple[Tensor, Tensor]:
    """Returns the output [T, heads, v] and the lse, fp32 [T, heads]."""
    (tokens, heads, _), group = query.shape, query.shape[1] // key.shape[1]
    rows, columns, warps, stages, tma = tile
    tile_sizes = AttentionTile(rows, columns, warps, stages, bool(tma))
    pack = _packed_heads(group, tile_sizes.rows)
    output = torch.empty(tokens, heads, value.shape[-1], dtype=query.dtype, device=query.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=query.device)
    operands = _as_operand(key, tile_sizes.keys, 1, tile_sizes), _as_operand(value, tile_sizes.keys, 1, tile_sizes)
    _launch_forward(
        (heads // pack * len(table), 1, 1),
        (query, *operands, sinks, output, lse, table, runs),
        (scale, window or 0, softcap or 1.0),
        (*_strides_and_heads(query, key, value), *_constants(query, value, group, pack, tile_sizes, window, softcap)),
        tile_sizes.warps,
        num_stages=tile_sizes.stages,
    )
    return output, lse


# An operator, so that selective recompute keeps its result. `custom_op` would take longer than a launch.
_LIBRARY = torch.library.Library("postlude", "FRAGMENT")
_LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor table, Tensor? runs, float scale, "
    "int? window, float? softcap, int[] tile) -> (Tensor, Tensor)"
)
_LIBRARY.impl("attention", _forward, "CompositeExplicitAutograd")


@dataclass(frozen=True)
class AttentionCall:
    """One call: where the sequences lie, how keys are scored, and the tiles."""

    queries: Packing
    keys: Packing
    scale: float
    window: int | None
    softcap: float | None
    tiles: AttentionTiles
    rectangles: tuple[Rectangle, ...] = ()
    """What is left out, since another kernel computes it."""

    @classmethod
    def of(
        cls,
        inputs: tuple[Tensor, Tensor, Tensor],
        queries: Packing,
        keys: Packing,
        scale: float,
        window: int | None,
        softcap: float | None,
        tiles: AttentionTiles | None = None,
        rectangles: tuple[Rectangle, ...] = (),
    ) -> AttentionCall:
        needed_window = None if window is not None and window >= keys.longest_path else window
        if needed_window is not None and queries.parents is not None:
            raise ValueError(
                f"a window of {window} tokens hides keys of segments that others continue. Gather the keys of paths."
            )
        return cls(queries, keys, scale, needed_window, softcap, tiles or tiles_for(*inputs), rectangles)

    @property
    def runs(self) -> Tensor | None:
        """The runs of keys in front of segments; None where sequences share nothing."""
        return None if self.queries.parents is None else _table(_run_table, self, 0)

    @property
    def numbers(self) -> tuple[float, int, float]:
        """Scale, window and softcap as the kernels take them."""
        return self.scale, self.window or 0, self.softcap or 1.0


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    attention_call: AttentionCall,
) -> tuple[Tensor, Tensor]:
    """Returns the output [T, heads, v] and the lse, fp32 [T, heads]."""
    group, score_options = (
        query.shape[1] // key.shape[1],
        (attention_call.scale, attention_call.window, attention_call.softcap),
    )
    if is_batch_invariant():
        step = invariant_attention.ROWS // invariant_attention.packed_heads(group)
        table = _table(_query_table, attention_call, step)
        output, lse = torch.ops.postlude.invariant_attention(query, key, value, sinks, table, *score_options)
        return output, lse
    tile = attention_call.tiles.forward
    pack = _packed_heads(group, tile.rows)
    table = _table(_query_table, attention_call, tile.rows // pack)
    tile_sizes = [tile.rows, tile.keys, tile.warps, tile.stages, tile.tma]
    runs = attention_call.runs
    output, lse = torch.ops.postlude.attention(query, key, value, sinks, table, runs, *score_options, tile_sizes)
    return output, lse


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    output: Tensor,
    lse: Tensor,
    gradient: Tensor,
    call: AttentionCall,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    window, softcap = call.window, call.softcap
    gradient = gradient.contiguous()
    heads, group = query.shape[1], query.shape[1] // key.shape[1]
    grad_query, grad_key, grad_value = (
        torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (query, key, value)
    )
    delta = torch.empty_like(lse)  # Σ output · its gradient
    strides_and_heads = _strides_and_heads(query, key, value)

    tile = call.tiles.queries
    pack = _packed_heads(group, tile.rows)
    table = _table(_query_table, call, tile.rows // pack)
    _launch_query_gradient(
        (heads // pack * len(table), 1, 1),
        (
            *(query, _as_operand(key, tile.keys, 1, tile), _as_operand(value, tile.keys, 1, tile)),
            *(output, gradient, lse, delta, grad_query, table, call.runs),
        ),
        call.numbers,
        (*strides_and_heads, *_constants(query, value, group, pack, tile, window, softcap)),
        tile.warps,
        num_stages=tile.stages,
    )
    tile = call.tiles.keys
    pack = _packed_heads(group, tile.rows)
    table = _table(_key_table, call, tile.keys)
    operands = [_as_operand(tensor, tile.rows // pack, pack, tile) for tensor in (query, gradient)]
    _launch_key_gradient(
        (key.shape[1] * len(table), 1, 1),
        (operands[0], key, value, operands[1], lse, delta, grad_key, grad_value, table),
        call.numbers,
        (grad_value.stride(0), *strides_and_heads, *_constants(query, value, group, pack, tile, window, softcap)),
        tile.warps,
        num_stages=tile.stages,
    )
    grad_sinks = None
    if sinks is not None:
        sink_share = (sinks.float() - lse).exp()  # [T, heads], the sink's share of the softmax
        grad_sinks = -(sink_share * delta).sum(0).to(sinks.dtype)
    return grad_query, grad_key, grad_value, grad_sinks


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, call: AttentionCall
    ) -> Tensor:
        output, lse = forward(query, key, value, sinks, call)
        ctx.save_for_backward(query, key, value, sinks, output, lse)
        ctx.call = call
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, lse = ctx.saved_tensors
        return *backward(query, key, value, sinks, output, lse, gradients[0], ctx.call), None


def _as_operand(tensor: Tensor, rows: int, heads: int, tile: AttentionTile) -> Tensor | TensorDescriptor:
    """Returns the tensor, or a descriptor that loads blocks of so many rows and heads."""
    if not tile.tma:
        return tensor
    shape = tensor.shape
    return TensorDescriptor(tensor, list(shape), list(tensor.stride()), [rows, heads, shape[-1]])


def _strides_and_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """Returns strides of tokens and heads, and the number of query heads."""
    return (*query.stride()[:2], *key.stride()[:2], *value.stride()[:2], query.shape[1])


def _constants(
    query: Tensor, value: Tensor, group: int, pack: int, tile: AttentionTile, window: int | None, softcap: float | None
) -> tuple[int, ...]:
    width, value_width = query.shape[-1], value.shape[-1]
    wide, value_wide = (max(16, 1 << (size - 1).bit_length()) for size in (width, value_width))
    tiles = (pack, tile.rows // pack, tile.keys)
    return (width, value_width, wide, value_wide, group, *tiles, window is not None, softcap is not None, tile.tma)


_launch_forward = Launcher(forward_kernel)
_launch_query_gradient = Launcher(query_gradient_kernel)
_launch_key_gradient = Launcher(key_gradient_kernel)
