"""Matrix products that are summed in fp32 (or better) and rounded once, whatever the operands' dtype."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
ALIGNMENT = 64  # elements


def operand_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Returns the dtype of GEMM operands. Half precision stays where the hardware can sum its products in fp32."""
    if dtype in HALF and not (device.type == "cuda" and torch.version.cuda):
        return torch.float32
    return dtype


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def product(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Computes out = left @ right: [a, b] @ [b, c] -> [a, c], in out's dtype."""
    if left.dtype == out.dtype:
        return torch.mm(left, right, out=out)
    if left.dtype in HALF and out.dtype == torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32, out=out)
    return out.copy_(torch.mm(left, right))


def aligned(columns: int) -> int:
    """Returns the row stride of a slab: rows start at whole steps, for GEMM tiles and vector loads."""
    return columns if columns < ALIGNMENT else whole_steps(columns)


def whole_steps(columns: int) -> int:
    return -(-columns // ALIGNMENT) * ALIGNMENT


def add_product(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Computes out += left @ right inside the GEMM, so that the product is never stored."""
    if left.dtype == out.dtype:
        return out.addmm_(left, right)
    return torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
