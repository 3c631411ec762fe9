"""The product of the batch-invariant mode: a row's result does not depend on the other rows. It has no gradient."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.ops.kernels.capabilities import use_kernel


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
