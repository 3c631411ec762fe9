"""Activation recompute: what a logical layer keeps for its backward, and what it computes again.

"full" keeps a layer's input alone. "selective" keeps what its products and attention give and makes the cheap rest
again, step by step, without moving a token between ranks twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

Recompute = Literal["none", "selective", "full"]
Result = TypeVar("Result")

# The expensive results: products and attention. All else of a layer is cheap to make again from them.
KEPT = tuple(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_grouped_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_flash_attention_forward",
    )
    if hasattr(torch.ops.aten, name)
)


def check_recompute(recompute: str) -> None:
    """Refuse a name that is none."""
    if recompute not in get_args(Recompute):
        raise ValueError(f"recompute={recompute!r} is unknown; use {', '.join(get_args(Recompute))}.")


def recomputed(function: Callable[..., Result], recompute: Recompute, *arguments: Any) -> Result:
    """`function(*arguments)`, keeping for the backward everything, the expensive results, or its input alone."""
    if recompute == "none" or not torch.is_grad_enabled():
        return function(*arguments)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if recompute == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, list(KEPT))
    result: Result = checkpoint(function, *arguments, **options)
    return result
