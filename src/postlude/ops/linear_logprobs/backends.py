"""Which epilogues a call uses."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import cast

import torch
from torch import Tensor

from postlude.ops.kernels.capabilities import Backend, use_kernel
from postlude.ops.linear_logprobs import torch_epilogue
from postlude.ops.linear_logprobs.gemm import HALF
from postlude.ops.linear_logprobs.statistics import Epilogue

__all__ = ["Backend", "can_fuse", "select_epilogue"]

HOPPER = 9  # the only generation the fused kernels were measured on


def select_epilogue(backend: Backend, device: torch.device, dtype: torch.dtype) -> Epilogue:
    """The epilogues for tensors on `device` whose logits are computed in `dtype`."""
    if not use_kernel("linear_logprobs", backend, device, dtype):
        return torch_epilogue
    # Imported here: the module needs triton, and everything else does not.
    return cast(Epilogue, importlib.import_module("postlude.ops.kernels.linear_logprobs_rows"))


def can_fuse(epilogue: Epilogue, operand: torch.dtype, hidden: Tensor, weight: Tensor) -> bool:
    """Whether `fused.py` can take these operands: Hopper's tensor copies want half precision and 16-byte steps."""
    if epilogue is torch_epilogue or not _has_tensor_copies(hidden.device):
        return False
    if hidden.is_cuda and operand not in HALF:
        return False
    return all(
        tensor.dtype == operand
        and tensor.is_contiguous()
        and tensor.data_ptr() % 16 == 0
        and tensor.shape[-1] * tensor.element_size() % 16 == 0
        for tensor in (hidden, weight)
    )


@functools.cache
def _has_tensor_copies(device: torch.device) -> bool:
    if importlib.util.find_spec("triton.tools.tensor_descriptor") is None:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == HOPPER
