"""The choice of epilogue and fused kernels."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from postlude.checks import check_choice
from postlude.ops.kernels.capabilities import gpu_of, use_kernel, warn_of_fallback, why_unmeasured
from postlude.ops.linear_logprobs import torch_epilogue
from postlude.ops.linear_logprobs.gemm import HALF
from postlude.ops.linear_logprobs.statistics import Epilogue
from postlude.options import HeadBackend as HeadBackend  # noqa: PLC0414


def select_epilogue(backend: HeadBackend, device: torch.device, dtype: torch.dtype) -> Epilogue:
    """Returns the epilogue for tensors on `device` whose logits are computed in `dtype`."""
    check_choice("the head's backend", backend, get_args(HeadBackend))
    if backend == "logits" or not use_kernel("linear_logprobs", backend, device, dtype):
        return torch_epilogue
    from postlude.ops.kernels import linear_logprobs_rows  # needs triton

    return linear_logprobs_rows


def can_fuse(epilogue: Epilogue, operand: torch.dtype, hidden: Tensor, weight: Tensor) -> bool:
    """Whether the fused kernels can take these operands: tensor copies need half precision and 16-byte steps."""
    if epilogue is torch_epilogue or (hidden.is_cuda and operand not in HALF):
        return False
    if reason := why_unmeasured("linear_logprobs_fused", gpu_of(hidden.device)):
        warn_of_fallback("linear_logprobs_fused", reason)
        return False
    return all(
        tensor.dtype == operand
        and tensor.is_contiguous()
        and tensor.data_ptr() % 16 == 0
        and tensor.shape[-1] * tensor.element_size() % 16 == 0
        for tensor in (hidden, weight)
    )
