"""Activation recompute: what a logical layer keeps for its backward and what it computes again.

"full" keeps only a layer's input, so the backward repeats all of its forward, expert exchanges included: keeping their
results would take top_k times that memory. "selective" keeps the results of products, attention, scans and exchanges,
and computes the cheap rest again, step by step; gathers within a step are repeated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from postlude.ops.batch_invariant import bind_batch_invariant
from postlude.ops.linear import bind_wgrad
from postlude.options import Recompute as Recompute  # noqa: PLC0414

Result = TypeVar("Result")

# Operators whose results selective recompute keeps. The rest of a layer is cheap to compute again.
KEPT = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.baddbmm",
    "aten._grouped_mm",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._flash_attention_forward",
    "torch_attn._varlen_attn",
    "postlude.adapted_linears",
    "postlude.attention",
    "postlude.fp8_products",
    "postlude.invariant_attention",
    "postlude.invariant_grouped_linear",
    "postlude.invariant_linear",
    "postlude.ssd",
    "postlude.ssd_triton",
    "postlude.gated_delta",
)


def recomputed(function: Callable[..., Result], recompute: Recompute, *arguments: Any) -> Result:
    """Returns `function(*arguments)`, keeping for the backward everything, the expensive results, or only the input."""
    if recompute == "none" or not torch.is_grad_enabled():
        return function(*arguments)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if recompute == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _kept_operators())
    result: Result = checkpoint(bind_batch_invariant(bind_wgrad(function)), *arguments, **options)
    return result


def _kept_operators() -> list[Any]:
    operators = []
    for name in KEPT:
        namespace, operator = name.split(".")
        packet = getattr(getattr(torch.ops, namespace), operator, None)
        if packet is not None:
            operators.append(packet.default)
    return operators
