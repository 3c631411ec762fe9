"""Which kernel runs where: one table, one function that says why not, one variable that allows the unmeasured.

Every kernel needs Triton 3.6 or newer and a GPU with bf16 tensor cores. `MEASURED` lists those that "auto" takes only
where they were measured; with POSTLUDE_TRY_UNMEASURED=1 in the environment it takes them elsewhere too.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from postlude.options import Backend as Backend  # noqa: PLC0414
from postlude.options import ScanBackend as ScanBackend  # noqa: PLC0414

Release = tuple[int, ...]

OLDEST_TRITON = (3, 6)  # comes with torch 2.11; older ones lack what kernels and their launches use
OLDEST_DEVICE = (8, 0)  # the first with bf16 tensor cores
HOPPER = 9  # major compute capability
GATED_DELTA_KEYS = 128  # the widest keys whose states fit a multiprocessor in the gated delta rule's kernels
KERNELS_IMPORT = ("triton.language", "triton.runtime", "triton.tools.tensor_descriptor")
OVERRIDE = "POSTLUDE_TRY_UNMEASURED"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measured:
    """Where a kernel was measured: major compute capabilities of NVIDIA GPUs, and Triton releases, first and last."""

    architectures: tuple[int, ...] = ()  # empty: all that Triton's kernels run on
    triton: tuple[Release, Release] | None = None  # (major, minor) both; None: all


MEASURED: Mapping[str, Measured] = {
    # Tiles were chosen on an H200; on other GPUs flash attention or cuDNN may be faster.
    "attention": Measured(architectures=(HOPPER,)),
    # Products and epilogue in one kernel, with Hopper's tensor copies.
    "linear_logprobs_fused": Measured(architectures=(HOPPER,)),
    # Several releases of Triton compile such kernels wrongly for Hopper without an error (flash-linear-attention's
    # issues 640 and 984, Triton's 11366): taken only where tests/ops/test_gated_delta_kernels.py has passed.
    "gated_delta": Measured(architectures=(HOPPER,), triton=((3, 6), (3, 6))),
    # `launch.Launcher` repeats a private part of these releases: 3.6 was run on a GPU, 3.9 was read.
    "fast_launch": Measured(triton=((3, 6), (3, 9))),
}


KERNELS: Mapping[str, str] = {
    "linear_logprobs": "the output head: log-probs, entropy and their gradients",
    "linear_logprobs_fused": "the output head, with products and epilogue in one kernel",
    "attention": "attention on packed sequences",
    "attend_pages": "attention of the generator, on its paged cache",
    "rotate_heads": "rotary embedding and norms of queries and keys",
    "rms_norm": "RMSNorm with the residual",
    "gated_activation": "the activation of a gated MLP",
    "replicate_rows": "tokens sorted by expert",
    "merge_rows": "the experts' outputs, weighted and summed",
    "add_to": "gradients of experts, added up",
    "convolve": "the short convolution of Mamba-2 and gated delta nets",
    "ssd": "the scan of Mamba-2",
    "gated_delta": "the scan of gated delta nets",
    "decode_linear": "products of a few rows, in the generator",
    "sample_next": "sampling of the next tokens, in the generator",
    "adamw_step": "the update of AdamW",
    "fast_launch": "launches that skip part of Triton's own launcher",
}
"""What each kernel computes, by the name of the operation."""


def why_not(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why "auto" does not take the kernel `name` for tensors on `device`; None if it does where shapes allow it."""
    return why_no_triton(device, dtype, False) or why_unmeasured(name, device)


def use_kernel(
    name: str,
    backend: Backend,
    device: torch.device,
    dtype: torch.dtype,
    *,
    refused: str | None = None,
    unwise: str | None = None,
    shared_memory: int = 0,
) -> bool:
    """Whether operation `name` takes its kernel for tensors on `device` computed in `dtype`.

    `refused` is why the kernel cannot do this call. `unwise` is why "auto" prefers torch although it could. A kernel
    that needs more than `shared_memory` bytes of a block cannot run. What "auto" decides against is logged once.
    """
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f'backend is "auto", "torch" or "triton", but {backend!r} was given.')
    if backend == "torch":
        return False
    # Triton's interpreter runs kernels on any device, slowly: for tests that ask for it, never by itself.
    interpreted = backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    impossible = why_no_triton(device, dtype, interpreted)
    refused = refused or (_too_little_memory(device, shared_memory) if shared_memory and not impossible else None)
    if backend == "triton":
        if impossible or refused:
            raise RuntimeError(
                f'backend="triton" cannot run: {impossible or refused}. Use backend="auto" or backend="torch".'
            )
        return True
    if impossible and device.type == "cuda" and dtype != torch.float64:
        _warn_once(impossible)  # of the machine, whatever the operation
        return False
    why = impossible or refused or unwise or why_unmeasured(name, device)
    if why:
        _log_once(logging.WARNING if impossible and device.type == "cuda" else logging.INFO, name, why)
    return why is None


@functools.cache
def why_no_triton(device: torch.device, dtype: torch.dtype, interpreted: bool) -> str | None:
    """Why no kernel can be used for tensors like these; None if kernels can."""
    if dtype == torch.float64:
        return "its kernels compute in float32, and these tensors are float64"
    if device.type != "cuda" and not interpreted:
        return f"the tensors are on {device.type}, not cuda"
    if (why := _no_triton()) is not None:
        return why
    if device.type == "cuda" and torch.version.cuda and torch.cuda.get_device_capability(device) < OLDEST_DEVICE:
        return (
            f"{torch.cuda.get_device_name(device)} is older than compute capability {'.'.join(map(str, OLDEST_DEVICE))}"
        )
    return None


@functools.cache
def why_unmeasured(name: str, device: torch.device) -> str | None:
    """Why "auto" does not take the kernel `name` on this GPU; None where it was measured, and with the override."""
    measured = MEASURED.get(name)
    if measured is None or device.type != "cuda" or os.environ.get(OVERRIDE) == "1":
        return None
    if measured.triton is not None and not was_measured(name, version_of("triton")):
        releases = " to ".join(dict.fromkeys(".".join(map(str, each)) for each in measured.triton))
        return f"its kernels were measured with triton {releases}, and this is {version_of('triton')}"
    capability = torch.cuda.get_device_capability(device)
    if measured.architectures and (not torch.version.cuda or capability[0] not in measured.architectures):
        majors = " and ".join(f"{each}.x" for each in measured.architectures)
        return (
            f"its kernels were measured on NVIDIA GPUs of compute capability {majors}, and this is "
            f"{torch.cuda.get_device_name(device)}; set {OVERRIDE}=1 to try them"
        )
    return None


def was_measured(name: str, triton: str) -> bool:
    """Whether the kernel `name` was measured with this release of Triton."""
    releases = MEASURED[name].triton
    return releases is None or releases[0] <= numbers_of(triton)[:2] <= releases[1]


@functools.cache
def _too_little_memory(device: torch.device, needed: int) -> str | None:
    if device.type != "cuda":
        return None
    room = int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]
    if needed <= room:
        return None
    return f"its kernels need {needed} bytes of shared memory, more than {torch.cuda.get_device_name(device)} has"


def _no_triton() -> str | None:
    """Why the installed Triton cannot be used; None if it can."""
    try:
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        version = version_of("triton")
        if numbers_of(version) < OLDEST_TRITON:
            return f"triton {version} is older than {'.'.join(map(str, OLDEST_TRITON))}"
        for name in KERNELS_IMPORT:
            importlib.import_module(name)
    except Exception as error:  # whatever a Triton raises that does not fit its driver, its LLVM or its Python
        first_line = str(error).strip().split("\n", 1)[0].rstrip(".")
        return f"triton cannot be imported ({type(error).__name__}: {first_line})"
    return None


def version_of(package: str) -> str:
    """The version of an installed package."""
    version: str = importlib.import_module(package).__version__
    return version


def numbers_of(version: str) -> Release:
    """3.7.1+git123 -> (3, 7, 1)."""
    return tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".")[:3] if part.isdigit())


@functools.cache
def _log_once(level: int, name: str, why: str) -> None:
    log.log(level, "%s uses the torch backend: %s", name, why)


@functools.cache
def _warn_once(why: str) -> None:
    log.warning("operations run without Triton's kernels, and slower: %s", why)
