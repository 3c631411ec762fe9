"""Which epilogues a call uses. `auto` takes Triton where it can run and says once why it could not."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from typing import Literal, cast

import torch
from torch import Tensor

from postlude.ops.linear_logprobs import torch_epilogue
from postlude.ops.linear_logprobs.gemm import HALF
from postlude.ops.linear_logprobs.statistics import Epilogue

Backend = Literal["auto", "torch", "triton"]

OLDEST_TRITON = (3, 2)
OLDEST_DEVICE = (8, 0)  # the first with bf16 tensor cores
HOPPER = 9  # the only generation the fused kernels were measured on

log = logging.getLogger(__name__)


def select_epilogue(backend: Backend, device: torch.device, dtype: torch.dtype) -> Epilogue:
    """The epilogues for tensors on `device` whose logits are computed in `dtype`."""
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f'backend is "auto", "torch" or "triton", but {backend!r} was given.')
    if backend == "torch":
        return torch_epilogue
    # Triton's interpreter runs kernels on any device, slowly: for tests that ask for it, never by itself.
    interpreted = backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    obstacle = _obstacle(device, dtype, interpreted)
    if obstacle is None:
        # Imported here: the module needs triton, and everything else does not.
        return cast(Epilogue, importlib.import_module("postlude.ops.linear_logprobs.triton_epilogue"))
    if backend == "triton":
        raise RuntimeError(f'backend="triton" cannot run: {obstacle}. Use backend="auto" or backend="torch".')
    _say_once(logging.WARNING if device.type == "cuda" else logging.INFO, obstacle)
    return torch_epilogue


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


@functools.cache
def _obstacle(device: torch.device, dtype: torch.dtype, interpreted: bool) -> str | None:
    """Why Triton's kernels cannot be used, or None if they can."""
    if dtype == torch.float64:
        return "its kernels compute in float32, and these tensors are float64"
    if device.type != "cuda" and not interpreted:
        return f"the tensors are on {device.type}, not cuda"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    version = importlib.import_module("triton").__version__
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TRITON:
        return f"triton {version} is older than {'.'.join(map(str, OLDEST_TRITON))}"
    if device.type == "cuda" and torch.version.cuda and torch.cuda.get_device_capability(device) < OLDEST_DEVICE:
        return (
            f"{torch.cuda.get_device_name(device)} is older than compute capability {'.'.join(map(str, OLDEST_DEVICE))}"
        )
    return None


@functools.cache
def _say_once(level: int, obstacle: str) -> None:
    log.log(level, "linear_logprobs uses the torch backend: %s", obstacle)
