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

import torch
from torch import Tensor
from torch.autograd import Function
from triton.tools.tensor_descriptor import TensorDescriptor

from postlude.ops.attention_kernels import forward_kernel, key_gradient_kernel, query_gradient_kernel
from postlude.ops.launch import Launcher
from postlude.ops.packing import Packing, to_device


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
    if window is not None and window >= keys.max_length:
        window = None
    query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
    tiles = tiles or tiles_for(query, key, value)
    output: Tensor = _Attention.apply(query, key, value, sinks, queries, keys, scale, window, softcap, tiles)
    return output


def _packed_heads(group: int, rows: int) -> int:
    """How many of the `group` of heads that share a key head stand side by side in a tile: a power of two."""
    return min(group & -group, rows // 16)


def _cut(packing: Packing, step: int) -> tuple[Tensor, Tensor]:
    """The sequence of each tile of `step` rows, and where in it the tile starts."""
    counts = (torch.tensor(packing.lengths) + step - 1) // step
    sequence = torch.repeat_interleave(counts)
    return sequence, (torch.arange(len(sequence)) - (counts.cumsum(0) - counts)[sequence]) * step


def _query_table(queries: Packing, keys: Packing, window: int | None, step: int) -> Tensor:
    """[tiles, 4]: first row, rows to the sequence's end, first row of its keys, place of the first among its keys."""
    sequence, offset = _cut(queries, step)
    (first, count), (key, asked) = (_laid(packing, sequence) for packing in (queries, keys))
    left, place = count - offset, asked - count + offset
    seen = (place + left.clamp(max=step)).clamp(max=(window or keys.max_length) + step)
    return _longest_first(seen, first + offset, left, key, place)


def _key_table(queries: Packing, keys: Packing, window: int | None, step: int) -> Tensor:
    """[tiles, 6]: first row, rows to the sequence's end, its place, first row of the queries, how many, keys before."""
    sequence, offset = _cut(keys, step)
    (first, count), (key, asked) = (_laid(packing, sequence) for packing in (queries, keys))
    before = asked - count
    seeing = (count - (offset - before).clamp(min=0)).clamp(max=(window or keys.max_length) + step)
    return _longest_first(seeing, key + offset, asked - offset, offset, first, count, before)


def _laid(packing: Packing, sequence: Tensor) -> tuple[Tensor, Tensor]:
    """The first row and the length of each of these sequences."""
    lengths = torch.tensor(packing.lengths)
    return (lengths.cumsum(0) - lengths)[sequence], lengths[sequence]


def _longest_first(work: Tensor, *columns: Tensor) -> Tensor:
    return torch.stack(columns, 1)[work.argsort(descending=True, stable=True)].to(torch.int32)


def _table(make: Any, queries: Packing, keys: Packing, window: int | None, step: int) -> Tensor:
    """Made once for all layers that ask the same of a packing."""
    asked = (make.__name__, keys.lengths, window, step)
    if asked not in queries.tables:
        queries.tables[asked] = to_device(make(queries, keys, window, step), queries.cu_seqlens.device)
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


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        queries: Packing,
        keys: Packing,
        scale: float,
        window: int | None,
        softcap: float | None,
        tiles: Tiles,
    ) -> Tensor:
        pack = _packed_heads(query.shape[1] // key.shape[1], tiles.forward.rows)
        table = _table(_query_table, queries, keys, window, tiles.forward.rows // pack)
        tile = tiles.forward
        how = [tile.rows, tile.keys, tile.warps, tile.stages, tile.tma]
        output, lse = torch.ops.postlude.attention(query, key, value, sinks, table, scale, window, softcap, how)
        ctx.save_for_backward(query, key, value, sinks, output, lse)
        ctx.asked = queries, keys, scale, window, softcap, tiles
        assert isinstance(output, Tensor)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, lse = ctx.saved_tensors
        queries, keys, scale, window, softcap, tiles = ctx.asked
        gradient = gradients[0].contiguous()
        heads, group = query.shape[1], query.shape[1] // key.shape[1]
        for_query, for_key, for_value = (
            torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (query, key, value)
        )
        delta = torch.empty_like(lse)  # Σ output · its gradient

        tile = tiles.queries
        pack = _packed_heads(group, tile.rows)
        table = _table(_query_table, queries, keys, window, tile.rows // pack)
        laid_out, numbers = _laid_out(query, key, value), (scale, window or 0, softcap or 1.0)
        _launch_query_gradient(
            (heads // pack * len(table), 1, 1),
            (
                *(query, _read(key, tile.keys, 1, tile), _read(value, tile.keys, 1, tile)),
                *(output, gradient, lse, delta, for_query, table),
            ),
            numbers,
            (*laid_out, *_constants(query, value, group, pack, tile, window, softcap)),
            tile.warps,
            num_stages=tile.stages,
        )
        tile = tiles.keys
        pack = _packed_heads(group, tile.rows)
        table = _table(_key_table, queries, keys, window, tile.keys)
        asked, upstream = (_read(each, tile.rows // pack, pack, tile) for each in (query, gradient))
        _launch_key_gradient(
            (key.shape[1] * len(table), 1, 1),
            (asked, key, value, upstream, lse, delta, for_key, for_value, table),
            numbers,
            (*laid_out, *_constants(query, value, group, pack, tile, window, softcap)),
            tile.warps,
            num_stages=tile.stages,
        )
        for_sinks = None
        if sinks is not None:
            sunk = (sinks.float() - lse).exp()  # [T, heads], the sink's share of the softmax
            for_sinks = -(sunk * delta).sum(0).to(sinks.dtype)
        return for_query, for_key, for_value, for_sinks, None, None, None, None, None, None


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
