"""The product of the batch-invariant mode: a row's result does not depend on the other rows. It has no gradient."""

from __future__ import annotations

import importlib

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.ops.kernels.capabilities import use_kernel


def invariant_product(rows: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Returns `rows` [T, in] · `weight`ᵀ [out, in] + `bias` [out]: [T, out] in the rows' dtype, or in that of `out`.

    The kernel sums features in one order for every number of rows. Elsewhere each row is a product by itself.
    """
    if use_kernel("invariant_linear", "auto", rows.device, rows.dtype):
        kernels = importlib.import_module("postlude.ops.kernels.invariant_linear")  # needs triton
        product: Tensor
        if out is None:
            product = torch.ops.postlude.invariant_linear(rows, weight, bias)
        else:
            product = kernels.product(rows, weight, bias, out)
        return product
    # Copies of the rows, since BLAS may depend on the alignment.
    products = [F.linear(row.clone(), weight, bias) for row in rows.split(1)] or [F.linear(rows, weight, bias)]
    return torch.cat(products) if out is None else torch.cat(products, out=out)
