"""Causal attention over packed sequences as Triton kernels: grouped heads, window, softcap and sinks alike.

A tile of queries holds some neighbouring ones and, of each, the heads that share a key head, so that it is full where
sequences are short, and no key is read twice for the group. Which tiles there are is known on the host: a table lists
them, the longest first, and no program is without work. The backward is one kernel for queries and one for keys and
values, each of which sums by itself, in one order: no atomics.
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

from postlude.ops.kernels.attention_device import forward_kernel, key_gradient_kernel, query_gradient_kernel
from postlude.ops.kernels.launch import Launcher
from postlude.ops.packing import Packing, to_device

Array = NDArray[np.int64]


@dataclass(frozen=True)
class Tile:
    """Rows of queries (heads of a group counted) against keys, and how a kernel runs it."""

    rows: int
    keys: int
    warps: int
    stages: int
    tma: bool = False  # what a kernel's loop reads comes by the copy engine


@dataclass(frozen=True)
class Tiles:
    """Of the three kernels."""

    forward: Tile
    queries: Tile
    keys: Tile


def tiles_for(query: Tensor, key: Tensor, value: Tensor) -> Tiles:
    """By measurement on an H200, by the wider of the heads of keys and of values.

    Tiles come as a whole by Hopper's copy engine where heads are as wide as a tile and rows start at whole 16 bytes.
    """
    widths = query.shape[-1], value.shape[-1]
    tma = all(width >= 16 and width.bit_count() == 1 for width in widths) and all(
        (each.stride(0) | each.stride(1)) * each.element_size() % 16 == 0 and each.data_ptr() % 16 == 0
        for each in (query, key, value)
    )
    return _tiles(max(widths) > 128, tma)


@functools.cache
def _tiles(wide: bool, tma: bool) -> Tiles:
    if wide:
        return Tiles(Tile(128, 64, 8, 2, tma), Tile(64, 64, 8, 2, tma), Tile(32, 64, 8, 2, tma))
    return Tiles(Tile(64, 64, 4, 3, tma), Tile(128, 64, 8, 3, tma), Tile(64, 64, 4, 2, tma))


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
    tiles: Tiles | None = None,
) -> Tensor:
    """See `postlude.ops.attention.PackedAttention`. There is at least one sequence; the last dimensions are dense."""
    query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
    asked = AttentionCall.of((query, key, value), queries, keys, scale, window, softcap, tiles)
    output: Tensor = _Attention.apply(query, key, value, sinks, asked)
    return output


def _packed_heads(group: int, rows: int) -> int:
    """How many of the `group` of heads that share a key head stand side by side in a tile: a power of two."""
    return min(group & -group, rows // 16)


def _cut(packing: Packing, step: int) -> tuple[Array, Array]:
    """The sequence of each tile of `step` rows, and where in it the tile starts."""
    counts = -(-np.array(packing.lengths) // step)
    sequence = np.repeat(np.arange(len(counts)), counts)
    return sequence, (np.arange(len(sequence)) - (counts.cumsum() - counts)[sequence]) * step


def _query_table(queries: Packing, keys: Packing, window: int | None, step: int) -> Array:
    """[tiles, 4]: first row, rows to the sequence's end, first row of its keys, place of the first among its keys."""
    sequence, offset = _cut(queries, step)
    (first, count), (key, asked) = (_laid(packing, sequence) for packing in (queries, keys))
    left, place = count - offset, asked - count + offset
    seen = np.minimum(place + np.minimum(left, step), (window or keys.max_length) + step)
    return _longest_first(seen, first + offset, left, key, place)


def _key_table(queries: Packing, keys: Packing, window: int | None, step: int) -> Array:
    """[tiles, 6]: first row, rows to the sequence's end, its place, first row of the queries, how many, keys before."""
    sequence, offset = _cut(keys, step)
    (first, count), (key, asked) = (_laid(packing, sequence) for packing in (queries, keys))
    before = asked - count
    seeing = np.minimum(count - np.maximum(offset - before, 0), (window or keys.max_length) + step)
    return _longest_first(seeing, key + offset, asked - offset, offset, first, count, before)


def _laid(packing: Packing, sequence: Array) -> tuple[Array, Array]:
    """The first row and the length of each of these sequences."""
    lengths = np.array(packing.lengths)
    return (lengths.cumsum() - lengths)[sequence], lengths[sequence]


def _longest_first(work: Array, *columns: Array) -> Array:
    return np.stack(columns, 1)[np.argsort(-work, kind="stable")].astype(np.int32)


def _table(make: Any, queries: Packing, keys: Packing, window: int | None, step: int) -> Tensor:
    """Made once for all layers that ask the same of a packing."""
    asked = (make.__name__, keys.lengths, window, step)
    if asked not in queries.tables:
        queries.tables[asked] = to_device(
            torch.from_numpy(make(queries, keys, window, step)), queries.cu_seqlens.device
        )
    table: Tensor = queries.tables[asked]
    return table


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    table: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    tile: list[int],
) -> tuple[Tensor, Tensor]:
    """[T, heads, v] and the logarithms of the softmax's denominators, fp32 [T, heads]."""
    (tokens, heads, _), group = query.shape, query.shape[1] // key.shape[1]
    rows, columns, warps, stages, tma = tile
    how = Tile(rows, columns, warps, stages, bool(tma))
    pack = _packed_heads(group, how.rows)
    output = torch.empty(tokens, heads, value.shape[-1], dtype=query.dtype, device=query.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=query.device)
    read = _read(key, how.keys, 1, how), _read(value, how.keys, 1, how)
    _launch_forward(
        (heads // pack * len(table), 1, 1),
        (query, *read, sinks, output, lse, table),
        (scale, window or 0, softcap or 1.0),
        (*_laid_out(query, key, value), *_constants(query, value, group, pack, how, window, softcap)),
        how.warps,
        num_stages=how.stages,
    )
    return output, lse


# An operator, so that selective recompute keeps what it gives. Defined by hand: `custom_op` takes longer than a launch.
_LIBRARY = torch.library.Library("postlude", "FRAGMENT")
_LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor table, float scale, int? window, "
    "float? softcap, int[] tile) -> (Tensor, Tensor)"
)
_LIBRARY.impl("attention", _forward, "CompositeExplicitAutograd")


@dataclass(frozen=True)
class AttentionCall:
    """What is computed of queries, keys and values: where their sequences lie, and how keys are rated."""

    queries: Packing
    keys: Packing
    scale: float
    window: int | None
    softcap: float | None
    tiles: Tiles

    @classmethod
    def of(
        cls,
        inputs: tuple[Tensor, Tensor, Tensor],
        queries: Packing,
        keys: Packing,
        scale: float,
        window: int | None,
        softcap: float | None,
        tiles: Tiles | None = None,
    ) -> AttentionCall:
        """For `inputs`, queries, keys and values, with the tiles of their widths unless given."""
        seen = None if window is not None and window >= keys.max_length else window
        return cls(queries, keys, scale, seen, softcap, tiles or tiles_for(*inputs))

    @property
    def numbers(self) -> tuple[float, int, float]:
        """As the kernels take them."""
        return self.scale, self.window or 0, self.softcap or 1.0


def forward(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, asked: AttentionCall, *, operator: bool = True
) -> tuple[Tensor, Tensor]:
    """[T, heads, v] and the logarithms of the softmax's denominators, fp32 [T, heads].

    As an `operator` unless that is not asked for: selective recompute looks for it, and a call of it takes time.
    """
    tile = asked.tiles.forward
    pack = _packed_heads(query.shape[1] // key.shape[1], tile.rows)
    table = _table(_query_table, asked.queries, asked.keys, asked.window, tile.rows // pack)
    how = [tile.rows, tile.keys, tile.warps, tile.stages, tile.tma]
    rated = asked.scale, asked.window, asked.softcap
    call = torch.ops.postlude.attention if operator else _forward
    output, lse = call(query, key, value, sinks, table, *rated, how)
    return output, lse


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    output: Tensor,
    lse: Tensor,
    gradient: Tensor,
    asked: AttentionCall,
    for_value: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of query, key, value and sinks. `for_value` may be given, with heads that are dense in a token."""
    queries, keys, window, softcap = asked.queries, asked.keys, asked.window, asked.softcap
    gradient = gradient.contiguous()
    heads, group = query.shape[1], query.shape[1] // key.shape[1]
    for_query, for_key = (torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (query, key))
    if for_value is None:
        for_value = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    delta = torch.empty_like(lse)  # Σ output · its gradient
    laid_out = _laid_out(query, key, value)

    tile = asked.tiles.queries
    pack = _packed_heads(group, tile.rows)
    table = _table(_query_table, queries, keys, window, tile.rows // pack)
    _launch_query_gradient(
        (heads // pack * len(table), 1, 1),
        (
            *(query, _read(key, tile.keys, 1, tile), _read(value, tile.keys, 1, tile)),
            *(output, gradient, lse, delta, for_query, table),
        ),
        asked.numbers,
        (*laid_out, *_constants(query, value, group, pack, tile, window, softcap)),
        tile.warps,
        num_stages=tile.stages,
    )
    tile = asked.tiles.keys
    pack = _packed_heads(group, tile.rows)
    table = _table(_key_table, queries, keys, window, tile.keys)
    read = [_read(each, tile.rows // pack, pack, tile) for each in (query, gradient)]
    _launch_key_gradient(
        (key.shape[1] * len(table), 1, 1),
        (read[0], key, value, read[1], lse, delta, for_key, for_value, table),
        asked.numbers,
        (for_value.stride(0), *laid_out, *_constants(query, value, group, pack, tile, window, softcap)),
        tile.warps,
        num_stages=tile.stages,
    )
    for_sinks = None
    if sinks is not None:
        sunk = (sinks.float() - lse).exp()  # [T, heads], the sink's share of the softmax
        for_sinks = -(sunk * delta).sum(0).to(sinks.dtype)
    return for_query, for_key, for_value, for_sinks


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, asked: AttentionCall
    ) -> Tensor:
        output, lse = forward(query, key, value, sinks, asked)
        ctx.save_for_backward(query, key, value, sinks, output, lse)
        ctx.asked = asked
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, lse = ctx.saved_tensors
        return *backward(query, key, value, sinks, output, lse, gradients[0], ctx.asked), None


def _read(tensor: Tensor, rows: int, heads: int, tile: Tile) -> Tensor | TensorDescriptor:
    """[T, heads, width] as a kernel reads it, so many rows and heads at a time."""
    if not tile.tma:
        return tensor
    shape = tensor.shape
    return TensorDescriptor(tensor, list(shape), list(tensor.stride()), [rows, heads, shape[-1]])


def _laid_out(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """Strides of tokens and heads, and how many heads ask."""
    return (*query.stride()[:2], *key.stride()[:2], *value.stride()[:2], query.shape[1])


def _constants(
    query: Tensor, value: Tensor, group: int, pack: int, tile: Tile, window: int | None, softcap: float | None
) -> tuple[int, ...]:
    """What a kernel is compiled for, from WIDTH on."""
    width, value_width = query.shape[-1], value.shape[-1]
    wide, value_wide = (max(16, 1 << (each - 1).bit_length()) for each in (width, value_width))
    tiles = (pack, tile.rows // pack, tile.keys)
    return (width, value_width, wide, value_wide, group, *tiles, window is not None, softcap is not None, tile.tma)


_launch_forward = Launcher(forward_kernel)
_launch_query_gradient = Launcher(query_gradient_kernel)
_launch_key_gradient = Launcher(key_gradient_kernel)
