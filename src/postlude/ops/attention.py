"""Causal attention over packed sequences: one protocol, a per-sequence reference and two fused CUDA implementations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.nn.attention import SDPBackend, sdpa_kernel

from postlude.ops.kernels.capabilities import use_kernel
from postlude.ops.packing import Packing, to_device

FLASH_WIDTH = 256  # the widest head that flash attention takes
FLASH_STEP = 8  # and it takes multiples of this alone
LONG = 8192  # tokens of a sequence from which cuDNN is faster than the Triton kernels, by measurement on an H200
LONG_STEP = 512


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """How a query rates the keys it sees: scale · query·key, bounded to softcap · tanh(score / softcap) if asked.

    It sees those before it and its own, `window` of them in all; None means every one. `sinks` [heads] are scores of a
    key that every query sees and whose value is zero: they join the softmax's denominator alone.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class PackedAttention(Protocol):
    """Causal softmax attention that never looks across a sequence border."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, queries: Packing, keys: Packing, scores: Scores
    ) -> Tensor:
        """Query [Tq, heads, width], key [Tk, kv_heads, width], value [Tk, kv_heads, v] -> [Tq, heads, v].

        Query heads share key heads in equal groups. The queries of a sequence stand at the last positions of its keys:
        on whole sequences `queries` and `keys` are one packing, on a part of each the keys are all those up to its end.
        """
        ...


def attend(query: Tensor, key: Tensor, value: Tensor, queries: Packing, keys: Packing, scores: Scores) -> Tensor:
    """The fastest implementation that computes exactly this on the tensors' device and dtype."""
    implementation: PackedAttention = reference_attention
    if query.is_cuda:
        if prefers_triton(query, (query.shape[-1], value.shape[-1]), scores):
            implementation = triton_packed_attention
        elif max(query.shape[-1], value.shape[-1]) <= FLASH_WIDTH and flash_supports(query, scores):
            implementation = varlen_attention
    return implementation(query, key, value, queries, keys, scores)


def prefers_triton(query: Tensor, widths: tuple[int, int], scores: Scores) -> bool:
    """Whether the Triton kernels are the fastest: where they were measured, with heads of a power of two up to 128.

    `widths` are those of keys and values. Only the device and dtype of `query` matter. No other kernel has a softcap.
    """
    if query.dtype not in (torch.bfloat16, torch.float16) or max(widths) > FLASH_WIDTH:
        return False
    fast = all(16 <= width <= 128 and width.bit_count() == 1 for width in widths)
    return (fast or scores.softcap is not None) and use_kernel("attention", "auto", query.device, query.dtype)


def flash_supports(query: Tensor, scores: Scores) -> bool:
    """Whether flash attention has a kernel for this device and dtype, and a word for these scores."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and scores.softcap is None


def reference_attention(
    query: Tensor, key: Tensor, value: Tensor, queries: Packing, keys: Packing, scores: Scores
) -> Tensor:
    """The reference: each sequence by itself, those alike in length side by side, on any device and dtype."""
    _check_lengths(queries, keys)
    if queries.count == 0:
        return _nothing(query, key, value, scores)
    outputs, rows = [], []
    for (asking, asked), starts in _by_lengths(queries, keys).items():
        own_rows, key_rows = (
            to_device(torch.tensor(first), query.device)[:, None] + torch.arange(length, device=query.device)
            for first, length in zip(zip(*starts, strict=True), (asking, asked), strict=True)
        )
        # [sequences, heads, length, width]
        q, k, v = (
            tensor[chosen].transpose(1, 2) for tensor, chosen in ((query, own_rows), (key, key_rows), (value, key_rows))
        )
        plain = asking == asked and (scores.window is None or scores.window >= asked)
        if scores.softcap is None and scores.sinks is None:
            heads = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if plain else _visible(asking, asked, scores.window, query.device),
                is_causal=plain,
                scale=scores.scale,
                enable_gqa=True,
            )
        else:
            heads = _written_out(q, k, v, _visible(asking, asked, scores.window, query.device), scores)
        outputs.append(heads.transpose(1, 2).flatten(0, 1))
        rows.append(own_rows.flatten())
    return torch.cat(outputs)[torch.cat(rows).argsort()]


def triton_packed_attention(
    query: Tensor, key: Tensor, value: Tensor, queries: Packing, keys: Packing, scores: Scores
) -> Tensor:
    """Triton kernels over all sequences at once, for any scores. CUDA, bf16 or fp16, and Triton's interpreter."""
    _check_lengths(queries, keys)
    if queries.count == 0:
        return _nothing(query, key, value, scores)
    if queries is keys and queries.max_length >= LONG and prefers_cudnn(query, value, queries, scores):
        return _long_apart(query, key, value, queries, scores)
    from postlude.ops.kernels.attention import triton_attention  # needs triton

    return triton_attention(
        *(query, key, value, queries, keys),
        scale=scores.scale,
        window=scores.window,
        softcap=scores.softcap,
        sinks=scores.sinks,
    )


def prefers_cudnn(query: Tensor, value: Tensor, packing: Packing, scores: Scores) -> bool:
    """Whether cuDNN has a kernel, backward included, for a sequence with these scores."""
    plain = scores.softcap is None and scores.sinks is None
    widths = query.shape[-1] == value.shape[-1] <= 128 and query.shape[-1] % FLASH_STEP == 0
    return query.is_cuda and plain and widths and (scores.window is None or scores.window >= packing.max_length)


def dense_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """One whole sequence, [T, heads, width], by cuDNN, which is the fastest where it is long."""
    tokens = len(query)
    # cuDNN makes a plan for every length, in a tenth of a second: lengths are rounded up. Nobody sees what is added.
    more = (0, 0, 0, 0, 0, -tokens % LONG_STEP)
    query, key, value = (F.pad(each, more).transpose(0, 1)[None] for each in (query, key, value))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return heads[0].transpose(0, 1)[:tokens]


def _long_apart(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scores: Scores) -> Tensor:
    """Each long sequence by itself, and what lies between two of them together."""
    if "runs" not in packing.tables:
        # Short ones are alike, and a long one is like no other.
        runs = [list(run) for _, run in groupby(packing.lengths, key=lambda length: length < LONG or object())]
        packing.tables["runs"] = [Packing.from_lengths(run, packing.cu_seqlens.device) for run in runs]
    runs = packing.tables["runs"]
    sizes = [run.total for run in runs]
    outputs = []
    for run, q, k, v in zip(runs, query.split(sizes), key.split(sizes), value.split(sizes), strict=True):
        long = run.max_length >= LONG
        outputs.append(
            dense_attention(q, k, v, scores.scale) if long else triton_packed_attention(q, k, v, run, run, scores)
        )
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, queries: Packing, keys: Packing, scores: Scores
) -> Tensor:
    """Flash attention over all sequences at once. CUDA, bf16 or fp16."""
    if scores.softcap is not None:
        raise ValueError(f"varlen_attention has no softcap (got {scores.softcap}); use reference_attention.")
    _check_lengths(queries, keys)
    if queries.count == 0:
        return _nothing(query, key, value, scores)
    width = max(query.shape[-1], value.shape[-1])
    width += -width % FLASH_STEP
    # Zeros add nothing to a score, and what they make of the values is cut off again.
    query, key, padded = (_widened(each, width) for each in (query, key, value))
    left = -1 if scores.window is None else scores.window - 1  # flash counts the keys before the query's own
    asked = queries, keys, scores.scale, (left, 0)  # counted from the ends: the last query stands at the last key
    if scores.sinks is None:
        output = _flash(query, key, padded, *asked)[0]
    else:
        output = _FlashWithSinks.apply(query, key, padded, scores.sinks, *asked)
    return output[..., : value.shape[-1]]


def _flash(
    query: Tensor, key: Tensor, value: Tensor, queries: Packing, keys: Packing, scale: float, window: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """[Tq, heads, width] and lse [heads, Tq], with a gradient of the former.

    By the operator's private name, as its backward below: what torch 2.11 makes public of it takes no grouped heads,
    so that keys would be repeated, and has no way to give its backward another output than the forward's own.
    """
    lengths = (queries.cu_seqlens, keys.cu_seqlens, queries.max_length, keys.max_length)
    causal = {"window_size_left": window[0], "window_size_right": window[1]}
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, *lengths, 0.0, window == (-1, 0), False, scale=scale, **causal
    )
    return output, lse


def _flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    borders: Sequence[Tensor],
    longest: tuple[int, int],
    scale: float,
    window: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """What query, key and value get of a `gradient`, by an output and an lse [heads, Tq] that need not be `_flash`'s.

    `borders` are the packings' cu_seqlens and `longest` their longest sequences, of queries and of keys.
    """
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        gradient,
        query,
        key,
        value,
        output,
        lse,
        *borders,
        *longest,
        0.0,  # dropout
        window == (-1, 0),
        torch.zeros(2, dtype=torch.uint64, device=query.device),  # dropout's random state
        torch.empty(0, device=query.device),  # unused
        scale=scale,
        window_size_left=window[0],
        window_size_right=window[1],
    )
    return found


def _widened(tensor: Tensor, width: int) -> Tensor:
    return tensor if tensor.shape[-1] == width else F.pad(tensor, (0, width - tensor.shape[-1]))


def _check_lengths(queries: Packing, keys: Packing) -> None:
    """Refuse queries that do not stand at the last positions of their keys."""
    if queries is keys:
        return
    if queries.count != keys.count:
        raise ValueError(
            f"there are queries of {queries.count} sequences, but keys of {keys.count}. "
            "Pack the queries and the keys of the same sequences."
        )
    for index, (asking, asked) in enumerate(zip(queries.lengths, keys.lengths, strict=True)):
        if asking > asked:
            raise ValueError(
                f"sequence {index} has {asking} queries, but only {asked} keys. A query stands at a key of its own: "
                f"give at least {asking} keys, or at most {asked} queries."
            )


def _nothing(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """[0, heads, v] that hangs on all of them, so that what made them gets a gradient of zero rather than none."""
    nothing = query.sum(-1, keepdim=True).expand(-1, -1, value.shape[-1]) + key.sum() + value.sum()
    return nothing if scores.sinks is None else nothing + 0 * scores.sinks.sum()


def softmax(rated: Tensor, sinks: Tensor | None) -> Tensor:
    """Over the last dimension, in fp32 or wider, with a sink [..., 1] in the denominator where there is one."""
    dtype = torch.promote_types(rated.dtype, torch.float32)
    if sinks is None:
        return rated.softmax(dim=-1, dtype=dtype)
    joined = torch.cat((rated.to(dtype), sinks.to(dtype).expand(*rated.shape[:-1], 1)), dim=-1)
    return joined.softmax(dim=-1)[..., :-1]


def _written_out(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scores: Scores) -> Tensor:
    """[n, heads, asking, width] and keys and values [n, kv_heads, asked, ...], step by step, for any scores."""
    grouped = query.unflatten(1, (key.shape[1], -1))  # [n, kv_heads, group, asking, width]
    rated = grouped @ key[:, :, None].transpose(-1, -2) * scores.scale
    if scores.softcap is not None:
        rated = scores.softcap * torch.tanh(rated / scores.softcap)
    sinks = None if scores.sinks is None else scores.sinks.view(*grouped.shape[1:3], 1, 1)
    weights = softmax(rated.masked_fill(~visible, float("-inf")), sinks)
    return (weights.to(value.dtype) @ value[:, :, None]).flatten(1, 2)


class _FlashWithSinks(Function):
    """Flash attention as if each query saw one more key, rated `sinks` and of value zero.

    That key scales the output by sigmoid(lse - sink) and joins the lse. Given those, flash attention's own backward is
    the right one: it needs no more of the softmax than its output and its lse.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        queries: Packing,
        keys: Packing,
        scale: float,
        window: tuple[int, int],
    ) -> Tensor:
        output, lse = _flash(query, key, value, queries, keys, scale, window)
        output, lse = with_sinks(output, lse, sinks[:, None])
        ctx.save_for_backward(query, key, value, sinks, output, lse, queries.cu_seqlens, keys.cu_seqlens)
        ctx.longest, ctx.scale, ctx.window = (queries.max_length, keys.max_length), scale, window
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, lse, *borders = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        found = _flash_backward(gradient, query, key, value, output, lse, borders, ctx.longest, ctx.scale, ctx.window)
        sunk = (sinks[:, None].float() - lse).exp()  # [heads, Tq], the sink's share of the softmax
        for_sinks = -(sunk * (gradient.float() * output.float()).sum(-1).T).sum(-1)
        return *found, for_sinks.to(sinks.dtype), None, None, None, None


def with_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output [T, heads, v] and lse [heads, T] of flash attention, with `sinks` [heads, 1 or T] in the denominator."""
    sinks = sinks.float()
    kept = (lse - sinks).sigmoid().T[..., None]
    return (output * kept).to(output.dtype), torch.logaddexp(lse, sinks)


def _by_lengths(queries: Packing, keys: Packing) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """By number of queries and of keys: where the queries and the keys of those sequences start."""
    starts: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for (query, query_stop), (key, key_stop) in zip(queries.slices(), keys.slices(), strict=True):
        starts.setdefault((query_stop - query, key_stop - key), []).append((query, key))
    return starts


def _visible(asking: int, asked: int, window: int | None, device: torch.device) -> Tensor:
    """[asking, asked], True where the query (row) may see the key (column); the last of each stand together."""
    own = torch.arange(asked - asking, asked, device=device)
    distance = own[:, None] - torch.arange(asked, device=device)[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)
