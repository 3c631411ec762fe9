"""The product of tokens and a weight, which every linear layer goes through; its weight's gradient can be put off.

A layer's input gradient is what others wait for; nobody waits for the weight's. Inside `putting_off(later)` products
leave the latter undone and append it to `later`, a list that the caller owns. After the backward that appended them,
`make_gradients` adds to the parameters' gradients what the backward would have, to the bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

Later = list[tuple[Tensor, Callable[[], Tensor]]]
"""Weights, and how the gradient of each is made."""
Result = TypeVar("Result")
# Read where a product is made; its backward, perhaps in another thread, keeps the list that it was made under.
_later: ContextVar[Later | None] = ContextVar("later", default=None)


@contextlib.contextmanager
def putting_off(later: Later | None) -> Iterator[None]:
    """The weight gradients of products made inside are appended to `later`; None leaves all as it is."""
    token = _later.set(later)
    try:
        yield
    finally:
        _later.reset(token)


def as_now(function: Callable[..., Result]) -> Callable[..., Result]:
    """The same function for a later time: its products put off what they would put off now."""
    later = _later.get()

    def run(*arguments: Any) -> Result:
        with putting_off(later):
            return function(*arguments)

    return run


def list_for(weight: Tensor) -> Later | None:
    """Where the gradient of this weight is to be put off to, if it has one."""
    return _later.get() if weight.requires_grad and torch.is_grad_enabled() else None


def make_gradients(put_off: Later) -> None:
    """Add each weight's gradient to that of what the weight was made from, all in one backward: each one costs."""
    if put_off:
        torch.autograd.backward([weight for weight, _ in put_off], [gradient() for _, gradient in put_off])


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`rows` [T, in], `weight` [out, in] -> [T, out]."""
    later = list_for(weight)
    if later is None:
        return F.linear(rows, weight, bias)
    product: Tensor = _Linear.apply(rows, weight, bias, later)
    return product


class _Linear(Function):
    """As torch differentiates `F.linear`, but for when."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, later: Later) -> Tensor:
        ctx.save_for_backward(rows, weight)
        # Saved tensors come back without their history where activations are recomputed.
        ctx.weight, ctx.later, ctx.has_bias = weight, later, bias is not None
        return F.linear(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        gradient = gradients[0]
        ctx.later.append((ctx.weight, lambda: gradient.t().mm(rows)))
        for_rows = gradient.mm(weight) if ctx.needs_input_grad[0] else None
        for_bias = gradient.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return for_rows, None, for_bias, None
