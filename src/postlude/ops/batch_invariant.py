"""The batch-invariant mode: each row of a result has the same bits, whatever rows are computed with it.

Inside `batch_invariant(True)` every sum has an order that depends on neither the number of rows nor their place:
products (here, for `ops/linear.py`), attention (`ops/attention.py` and its forms for decoding) and the output head. A
token's results then do not depend on its batch, and those of decoding equal those of the trainer's forward. Norms,
rotary embedding and activations compute each row by itself anyway. The products have no gradient.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.ops.kernels.capabilities import use_kernel

Result = TypeVar("Result")
# Read in forwards only: backwards run in other threads, and their sums may have any order.
_enabled: ContextVar[bool] = ContextVar("batch_invariant", default=False)


@contextlib.contextmanager
def batch_invariant(enabled: bool) -> Iterator[None]:
    """Selects the mode of the operations inside."""
    token = _enabled.set(enabled)
    try:
        yield
    finally:
        _enabled.reset(token)


def is_batch_invariant() -> bool:
    return _enabled.get()


def bind_batch_invariant(function: Callable[..., Result]) -> Callable[..., Result]:
    """Returns the function bound to the current mode: an activation is recomputed with the bits that it had."""
    enabled = _enabled.get()

    def run(*arguments: Any) -> Result:
        with batch_invariant(enabled):
            return function(*arguments)

    return run


def with_batch_invariance_of_model(forward: Callable[..., Result]) -> Callable[..., Result]:
    """Decorates a method of a model: operations in it are batch-invariant if the model's `batch_invariant` is True."""

    @functools.wraps(forward)
    def run(self: Any, *arguments: Any, **options: Any) -> Result:
        with batch_invariant(self.batch_invariant):
            return forward(self, *arguments, **options)

    return run


def invariant_product(rows: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Returns `rows` [T, in] · `weight`ᵀ [out, in] + `bias` [out]: [T, out] in the rows' dtype, or in that of `out`.

    The kernel sums features in one order for every number of rows. Elsewhere each row is a product by itself.
    """
    if use_kernel("invariant_linear", "auto", rows.device, rows.dtype):
        from postlude.ops.kernels import invariant_linear as kernels  # needs triton

        product: Tensor
        if out is None:
            product = torch.ops.postlude.invariant_linear(rows, weight, bias)
        else:
            product = kernels.product(rows, weight, bias, out)
        return product
    return _row_by_row(rows, weight, bias, out)


def invariant_grouped_product(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Returns each of `rows` [R, in], sorted by expert, times its expert's matrix of `weight` [E, out, in]: [R, out].

    `counts` [E] are the rows of each expert.
    """
    if use_kernel("invariant_linear", "auto", rows.device, rows.dtype):
        import postlude.ops.kernels.invariant_linear  # noqa: F401  # defines the operator

        product: Tensor = torch.ops.postlude.invariant_grouped_linear(rows, weight, counts)
        return product
    pieces = rows.split(counts.tolist())
    return torch.cat([_row_by_row(piece, matrix, None) for piece, matrix in zip(pieces, weight, strict=True)])


def _row_by_row(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    # Copies of the rows, since BLAS may depend on the alignment.
    products = [F.linear(row.clone(), weight, bias) for row in rows.split(1)] or [F.linear(rows, weight, bias)]
    return torch.cat(products) if out is None else torch.cat(products, out=out)
