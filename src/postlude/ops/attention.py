"""Causal attention over packed sequences: `attend` chooses between Triton, cuDNN, flash attention and a reference."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.nn.attention import SDPBackend, sdpa_kernel

from postlude.ops.attention_scores import PackedAttention, explicit_attention
from postlude.ops.attention_scores import ScoreConfig as ScoreConfig  # noqa: PLC0414
from postlude.ops.attention_scores import softmax as softmax  # noqa: PLC0414
from postlude.ops.batch_invariant import is_batch_invariant
from postlude.ops.invariant_attention import invariant_attention
from postlude.ops.kernels.capabilities import use_kernel
from postlude.ops.packing import Packing, to_device
from postlude.ops.segment_attention import segment_attention

FLASH_WIDTH = 256  # the widest head of flash attention
FLASH_STEP = 8  # head sizes are multiples of this
CUDNN_MIN_LENGTH = 8192  # sequences of at least this length are faster with cuDNN than with Triton, on an H200
CUDNN_LENGTH_STEP = 512


def attend(
    query: Tensor, key: Tensor, value: Tensor, queries: Packing, keys: Packing, score_config: ScoreConfig
) -> Tensor:
    implementation: PackedAttention = reference_attention
    if is_batch_invariant():
        return _attend_invariant(query, key, value, queries, keys, score_config)
    if query.is_cuda:
        widths = query.shape[-1], value.shape[-1]
        if queries.parents is not None or prefers_triton(query, widths, score_config):
            implementation = triton_packed_attention
        elif max(widths) <= FLASH_WIDTH and flash_supports(query, score_config):
            implementation = varlen_attention
    return implementation(query, key, value, queries, keys, score_config)


def _attend_invariant(
    query: Tensor, key: Tensor, value: Tensor, queries: Packing, keys: Packing, score_config: ScoreConfig
) -> Tensor:
    """Attends with results that do not depend on the other sequences."""
    _check_lengths(queries, keys)
    half = query.dtype in (torch.bfloat16, torch.float16) and max(query.shape[-1], value.shape[-1]) <= FLASH_WIDTH
    if half and query.is_cuda and use_kernel("invariant_attention", "auto", query.device, query.dtype):
        return triton_packed_attention(query, key, value, queries, keys, score_config)
    if queries.count == 0:
        return _empty_output(query, key, value, score_config)
    return invariant_attention(query, key, value, queries, keys, score_config, reference_attention)


def prefers_triton(query: Tensor, widths: tuple[int, int], score_config: ScoreConfig) -> bool:
    """Whether the Triton kernels are the fastest: where they were measured, with heads of a power of two up to 128.

    `widths` are those of keys and values. Only the device and dtype of `query` matter. With a softcap they are taken on
    every GPU, since no other kernel has one.
    """
    if query.dtype not in (torch.bfloat16, torch.float16) or max(widths) > FLASH_WIDTH:
        return False
    if score_config.softcap is not None:
        return use_kernel("attention_softcap", "auto", query.device, query.dtype)
    fast = all(16 <= width <= 128 and width.bit_count() == 1 for width in widths)
    return fast and use_kernel("attention", "auto", query.device, query.dtype)


def attends_along_paths(query: Tensor, widths: tuple[int, int], packing: Packing, score_config: ScoreConfig) -> bool:
    """Whether `attend` takes a packing whose segments continue others; if not, the keys of each path are gathered.

    The Triton kernels do, unless a window hides keys. `widths` are those of keys and values.
    """
    if packing.parents is None or is_batch_invariant() or max(widths) > FLASH_WIDTH:
        return False
    window, kernel = score_config.window, "attention" if score_config.softcap is None else "attention_softcap"
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and (window is None or window >= packing.longest_path)
        and use_kernel(kernel, "auto", query.device, query.dtype)
    )


def flash_supports(query: Tensor, score_config: ScoreConfig) -> bool:
    """Whether flash attention has a kernel for this device, dtype and config."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and score_config.softcap is None


def reference_attention(
    query: Tensor, key: Tensor, value: Tensor, queries: Packing, keys: Packing, score_config: ScoreConfig
) -> Tensor:
    """The reference on any device and dtype: sequences of equal length in one batch."""
    _check_lengths(queries, keys)
    if queries.count == 0:
        return _empty_output(query, key, value, score_config)
    outputs, rows = [], []
    for (tq, tk), starts in _by_lengths(queries, keys).items():
        query_rows, key_rows = (
            to_device(torch.tensor(first), query.device)[:, None] + torch.arange(length, device=query.device)
            for first, length in zip(zip(*starts, strict=True), (tq, tk), strict=True)
        )
        # [sequences, heads, length, width]
        q, k, v = (
            tensor[chosen].transpose(1, 2)
            for tensor, chosen in ((query, query_rows), (key, key_rows), (value, key_rows))
        )
        plain = tq == tk and (score_config.window is None or score_config.window >= tk)
        if score_config.softcap is None and score_config.sinks is None:
            heads = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if plain else _visible(tq, tk, score_config.window, query.device),
                is_causal=plain,
                scale=score_config.scale,
                enable_gqa=True,
            )
        else:
            heads = explicit_attention(q, k, v, _visible(tq, tk, score_config.window, query.device), score_config)
        outputs.append(heads.transpose(1, 2).flatten(0, 1))
        rows.append(query_rows.flatten())
    return torch.cat(outputs)[torch.cat(rows).argsort()]


def triton_packed_attention(
    query: Tensor, key: Tensor, value: Tensor, queries: Packing, keys: Packing, score_config: ScoreConfig
) -> Tensor:
    """Attends to all sequences at once with the Triton kernels, for any config. CUDA, bf16 or fp16."""
    if queries.parents is not None:
        return segment_attention(query, key, value, queries, score_config)
    _check_lengths(queries, keys)
    if queries.count == 0:
        return _empty_output(query, key, value, score_config)
    plain = queries is keys and not is_batch_invariant()
    if plain and queries.max_length >= CUDNN_MIN_LENGTH and prefers_cudnn(query, value, queries, score_config):
        return _split_long(query, key, value, queries, score_config)
    from postlude.ops.kernels.attention import triton_attention  # needs triton

    return triton_attention(
        *(query, key, value, queries, keys),
        scale=score_config.scale,
        window=score_config.window,
        softcap=score_config.softcap,
        sinks=score_config.sinks,
    )


def prefers_cudnn(query: Tensor, value: Tensor, packing: Packing, score_config: ScoreConfig) -> bool:
    """Whether cuDNN has a kernel, forward and backward, for a sequence with this config."""
    plain = score_config.softcap is None and score_config.sinks is None
    fits = query.shape[-1] == value.shape[-1] <= 128 and query.shape[-1] % FLASH_STEP == 0
    return (
        query.is_cuda and plain and fits and (score_config.window is None or score_config.window >= packing.max_length)
    )


def dense_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attends within one sequence, [T, heads, width], with cuDNN, which is the fastest for long ones."""
    tokens = len(query)
    # cuDNN takes 0.1 s to plan each length, so lengths are rounded up. No query sees the padding.
    padding = (0, 0, 0, 0, 0, -tokens % CUDNN_LENGTH_STEP)
    query, key, value = (F.pad(tensor, padding).transpose(0, 1)[None] for tensor in (query, key, value))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return heads[0].transpose(0, 1)[:tokens]


def _split_long(query: Tensor, key: Tensor, value: Tensor, packing: Packing, score_config: ScoreConfig) -> Tensor:
    """Attends to each long sequence with cuDNN, and to runs of shorter ones with the Triton kernels."""
    if "runs" not in packing.tables:
        # Short neighbours form a group; each long one is its own.
        runs = [
            list(run) for _, run in groupby(packing.lengths, key=lambda length: length < CUDNN_MIN_LENGTH or object())
        ]
        packing.tables["runs"] = [Packing.from_lengths(run, packing.cu_seqlens.device) for run in runs]
    runs = packing.tables["runs"]
    sizes = [run.total for run in runs]
    outputs = []
    for run, q, k, v in zip(runs, query.split(sizes), key.split(sizes), value.split(sizes), strict=True):
        long = run.max_length >= CUDNN_MIN_LENGTH
        outputs.append(
            dense_attention(q, k, v, score_config.scale)
            if long
            else triton_packed_attention(q, k, v, run, run, score_config)
        )
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, queries: Packing, keys: Packing, score_config: ScoreConfig
) -> Tensor:
    """Attends to all sequences at once with torch's flash attention. CUDA, bf16 or fp16."""
    if score_config.softcap is not None:
        raise ValueError(f"varlen_attention has no softcap (got {score_config.softcap}); use reference_attention.")
    _check_lengths(queries, keys)
    if queries.count == 0:
        return _empty_output(query, key, value, score_config)
    width = max(query.shape[-1], value.shape[-1])
    width += -width % FLASH_STEP
    # Zeros add nothing to a score, and the padded values are cut off again.
    query, key, padded = (_pad_heads(tensor, width) for tensor in (query, key, value))
    keys_before = (
        -1 if score_config.window is None else score_config.window - 1
    )  # flash counts keys before the query's own
    arguments = queries, keys, score_config.scale, (keys_before, 0)  # aligned at the ends
    if score_config.sinks is None:
        output = _flash(query, key, padded, *arguments)[0]
    else:
        output = _FlashWithSinks.apply(query, key, padded, score_config.sinks, *arguments)
    return output[..., : value.shape[-1]]


def _flash(
    query: Tensor, key: Tensor, value: Tensor, queries: Packing, keys: Packing, scale: float, window: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Returns the output [Tq, heads, width], with gradient, and the lse [heads, Tq].

    It calls a private operator, as does the backward below. The public `varlen_attn` of torch 2.11 takes no grouped
    heads, so keys would have to be repeated, and its backward takes only its own output, which sinks change.
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
    """Returns the gradients of query, key and value for a given output and lse [heads, Tq].

    `borders` are cu_seqlens and `longest` the longest sequences, of queries and of keys.
    """
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
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
    return gradients


def _pad_heads(tensor: Tensor, width: int) -> Tensor:
    return tensor if tensor.shape[-1] == width else F.pad(tensor, (0, width - tensor.shape[-1]))


def _check_lengths(queries: Packing, keys: Packing) -> None:
    """Raises ValueError for queries that are not at the last positions of their keys."""
    if queries.parents is not None:
        raise ValueError(
            "this attention has no segments that continue others. Gather the keys of each path, see "
            "`attends_along_paths`."
        )
    if queries is keys:
        return
    if queries.count != keys.count:
        raise ValueError(
            f"there are queries of {queries.count} sequences, but keys of {keys.count}. "
            "Pack the queries and the keys of the same sequences."
        )
    for index, (tq, tk) in enumerate(zip(queries.lengths, keys.lengths, strict=True)):
        if tq > tk:
            raise ValueError(
                f"sequence {index} has {tq} queries, but only {tk} keys. Every query has its own key: "
                f"give at least {tq} keys, or at most {tk} queries."
            )


def _empty_output(query: Tensor, key: Tensor, value: Tensor, score_config: ScoreConfig) -> Tensor:
    """Returns [0, heads, v] that depends on all inputs, so that they get zero gradients rather than none."""
    nothing = query.sum(-1, keepdim=True).expand(-1, -1, value.shape[-1]) + key.sum() + value.sum()
    return nothing if score_config.sinks is None else nothing + 0 * score_config.sinks.sum()


class _FlashWithSinks(Function):
    """Flash attention with one more key per query, with score `sinks` and value zero.

    That key scales the output by sigmoid(lse - sink) and joins the lse. With those two, flash attention's backward is
    correct: it uses the softmax only through its output and lse.
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
        grads = _flash_backward(gradient, query, key, value, output, lse, borders, ctx.longest, ctx.scale, ctx.window)
        sink_share = (sinks[:, None].float() - lse).exp()  # [heads, Tq], the sink's share of the softmax
        grad_sinks = -(sink_share * (gradient.float() * output.float()).sum(-1).T).sum(-1)
        return *grads, grad_sinks.to(sinks.dtype), None, None, None, None


def with_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Adds `sinks` [heads, 1 or T] to the denominator of output [T, heads, v] and lse [heads, T]."""
    sinks = sinks.float()
    kept_weight = (lse - sinks).sigmoid().T[..., None]
    return (output * kept_weight).to(output.dtype), torch.logaddexp(lse, sinks)


def _by_lengths(queries: Packing, keys: Packing) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Returns, by (queries, keys) lengths, where the queries and the keys of those sequences start."""
    starts: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for (query, query_stop), (key, key_stop) in zip(queries.slices(), keys.slices(), strict=True):
        starts.setdefault((query_stop - query, key_stop - key), []).append((query, key))
    return starts


def _visible(tq: int, tk: int, window: int | None, device: torch.device) -> Tensor:
    """Returns [tq, tk], True where the query (row) sees the key (column); both are aligned at the end."""
    query_positions = torch.arange(tk - tq, tk, device=device)
    distance = query_positions[:, None] - torch.arange(tk, device=device)[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)
