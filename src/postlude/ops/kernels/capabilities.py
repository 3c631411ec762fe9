"""Which kernel runs on which GPU: a table of GPUs, a table of kernels, and one function that says why not.

Every kernel needs Triton 3.6 or newer and an NVIDIA GPU with bf16 tensor cores. Some need more: a tensor memory
accelerator, or more shared memory for their tiles. Some are taken by "auto" only where they were measured;
POSTLUDE_TRY_UNMEASURED=1 in the environment takes them elsewhere too. tests/ops/test_cross_compile.py compiles all of
them for every GPU of the table.
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
Capability = tuple[int, int]

OLDEST_TRITON = (3, 6)  # comes with torch 2.11; older ones lack what kernels and their launches use
BF16_SINCE: Capability = (8, 0)  # bf16 tensor cores
FP8_SINCE: Capability = (8, 9)  # FP8 tensor cores, and conversions to and from e4m3
TMA_SINCE: Capability = (9, 0)  # a tensor memory accelerator, which loads whole tiles
HOPPER = 9  # major compute capability
GATED_DELTA_KEYS = 128  # the widest keys whose states fit a multiprocessor in the gated delta rule's kernels
KERNELS_IMPORT = ("triton.language", "triton.runtime", "triton.tools.tensor_descriptor")
OVERRIDE = "POSTLUDE_TRY_UNMEASURED"
AMD = "this torch is built for AMD GPUs, on which Postlude was never run"
EMPTY = "there is nothing to compute"
"""Why a kernel is not used for tensors without elements. That costs nothing, so nothing warns of it."""
KIB = 1024

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class GPU:
    """What decides which kernels and tiles a GPU gets. `shared_memory` is what one block can have, in bytes."""

    name: str
    capability: Capability
    shared_memory: int

    @property
    def tma(self) -> bool:
        return self.capability >= TMA_SINCE


GPUS: Mapping[str, GPU] = {
    gpu.name: gpu
    for gpu in (
        GPU("A100", (8, 0), 163 * KIB),
        GPU("L40S", (8, 9), 99 * KIB),
        GPU("RTX 4090", (8, 9), 99 * KIB),
        GPU("H100", (9, 0), 227 * KIB),
        GPU("H200", (9, 0), 227 * KIB),
        GPU("B200", (10, 0), 227 * KIB),
    )
}
"""GPUs by name. A GPU that runs is described by its driver, so others work too: see `gpu_of`."""

MEASURED_ON = GPUS["H200"]


@dataclass(frozen=True)
class KernelSpec:
    """What a kernel computes, what its absence costs, and where "auto" takes it."""

    computes: str
    cost: str = "its parts run as kernels of their own, each of which reads and writes memory"
    oldest: Capability = BF16_SINCE
    measured: tuple[int, ...] = ()  # major compute capabilities; empty: "auto" takes it on all
    triton: tuple[Release, Release] | None = None  # releases it was measured with, first and last; None: all


KERNELS: Mapping[str, KernelSpec] = {
    "linear_logprobs": KernelSpec("the output head: log-probs, entropy and their gradients"),
    "linear_logprobs_fused": KernelSpec(
        "the output head, with products and epilogue in one kernel",
        "cuBLAS writes the logits, a slab at a time, and other kernels read them again",
        oldest=TMA_SINCE,
        measured=(HOPPER,),
    ),
    # Tiles were chosen on an H200; on other GPUs flash attention or cuDNN may be faster.
    "attention": KernelSpec(
        "attention on packed sequences",
        "torch's flash attention takes 1.6 times as long on an H200",
        measured=(HOPPER,),
    ),
    "attention_softcap": KernelSpec(
        "attention on packed sequences, with a softcap",
        "no other kernel has a softcap, so the scores of each sequence are written to memory",
    ),
    "attend_pages": KernelSpec(
        "attention of the generator, on its paged cache",
        "the cache of each row is copied at every step, and steps are no CUDA graphs",
    ),
    "attend_pages_fp8": KernelSpec(
        "attention of the generator, on a paged cache in FP8",
        "the cache of each row is copied at every step, and steps are no CUDA graphs",
        oldest=FP8_SINCE,
    ),
    "attend_latent_pages": KernelSpec(
        "latent attention of the generator, on its paged cache",
        "the cache of each row is copied at every step, and steps are no CUDA graphs",
    ),
    "rotate_latents": KernelSpec("the norm and the rotary embedding of latent attention, in the generator"),
    "rotate_heads": KernelSpec("rotary embedding and norms of queries and keys"),
    "rms_norm": KernelSpec("RMSNorm with the residual"),
    "gated_activation": KernelSpec("the activation of a gated MLP"),
    "replicate_rows": KernelSpec("tokens sorted by expert"),
    "merge_rows": KernelSpec("the experts' outputs, weighted and summed"),
    "add_to": KernelSpec("gradients of experts, added up"),
    "embed": KernelSpec(
        "the gradient of the embedding", "it is as large as the embedding, in bf16, before it is added"
    ),
    "grouped_wgrad": KernelSpec(
        "gradients of experts, computed and added up",
        "they are written in bf16, then read again to be added",
        measured=(HOPPER,),
    ),
    "fp8_quantize": KernelSpec("rounding of tokens and weights to FP8", oldest=FP8_SINCE),
    "convolve": KernelSpec(
        "the short convolution of Mamba-2 and gated delta nets", "torch takes 21 times as long on an H200"
    ),
    "ssd": KernelSpec("the scan of Mamba-2", "torch takes 13 times as long on an H200"),
    # Several releases of Triton compile such kernels wrongly for Hopper without an error (flash-linear-attention's
    # issues 640 and 984, Triton's 11366): taken only where tests/ops/test_gated_delta_kernels.py has passed.
    "gated_delta": KernelSpec(
        "the scan of gated delta nets",
        "torch takes 5.5 times as long on an H200",
        oldest=TMA_SINCE,  # for older ones Triton 3.9 compiles the backward for minutes
        measured=(HOPPER,),
        triton=((3, 6), (3, 6)),
    ),
    "recurrent_step": KernelSpec("the next tokens of Mamba-2 and gated delta nets, in the generator"),
    "decode_linear": KernelSpec("products of a few rows, in the generator"),
    "decode_experts": KernelSpec(
        "experts of few rows, in the generator",
        "rows are sorted by expert in a dozen kernels; a step of Qwen3-30B's shape takes 1.4 to 1.7 times as long",
        oldest=TMA_SINCE,
        measured=(HOPPER,),
    ),
    "invariant_linear": KernelSpec(
        "products of the batch-invariant mode", "each row is a product by itself, hundreds of times as slow"
    ),
    "invariant_attention": KernelSpec(
        "attention of the batch-invariant mode", "each query is a product by itself, hundreds of times as slow"
    ),
    "block_fp8": KernelSpec(
        "products of weights in FP8, in the generator",
        "weights are restored to bf16 for every product, which is slower than without FP8",
        oldest=FP8_SINCE,
    ),
    "sample_next": KernelSpec("sampling of the next tokens, in the generator"),
    "adamw_step": KernelSpec("the update of AdamW"),
    # `launch.Launcher` repeats a private part of these releases: 3.6 was run on a GPU, 3.9 was read.
    "fast_launch": KernelSpec(
        "launches that skip part of Triton's own launcher",
        "each launch takes the host 30 µs more",
        triton=((3, 6), (3, 9)),
    ),
}
"""The kernels by the name of their operation."""


@functools.cache
def gpu_of(device: torch.device) -> GPU:
    """Returns what the driver says of a GPU. Elsewhere, in Triton's interpreter, the GPU of the measurements."""
    if device.type != "cuda":
        return MEASURED_ON
    properties = torch.cuda.get_device_properties(device)
    room = int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]
    return GPU(properties.name, (properties.major, properties.minor), room)


def why_not(name: str, gpu: GPU | None, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Why "auto" does not take the kernel `name` on a GPU (None: a machine without); None if it does."""
    if gpu is None:
        return why_no_triton(torch.device("cpu"), dtype, False)
    return _no_triton() or _too_old(gpu) or why_unmeasured(name, gpu)


def why_no_fp8(gpu: GPU) -> str | None:
    if torch.version.hip:
        return AMD
    if not hasattr(torch.nn.functional, "scaled_mm"):
        return f"torch {version_of('torch')} has no torch.nn.functional.scaled_mm, which torch 2.11 has"
    if gpu.capability < FP8_SINCE:
        return f"it needs compute capability {dotted(FP8_SINCE)}, and {gpu.name} has {dotted(gpu.capability)}"
    return None


def use_kernel(
    name: str,
    backend: Backend,
    device: torch.device,
    dtype: torch.dtype,
    *,
    unsupported_reason: str | None = None,
    slower_reason: str | None = None,
    shared_memory: int = 0,
) -> bool:
    """Whether operation `name` takes its kernel for tensors on `device` computed in `dtype`.

    `unsupported_reason` is why the kernel cannot do this call, `slower_reason` why "auto" prefers torch although it
    could. The kernel needs `shared_memory` bytes for a block, and cannot run on a GPU with less. Where a GPU goes
    without its kernel, "auto" warns once for each reason, with the cost.
    """
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f'backend is "auto", "torch" or "triton", but {backend!r} was given.')
    if backend == "torch":
        return False
    # Triton's interpreter runs kernels on any device, slowly: for tests that ask for it, never by itself.
    interpreted = backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    unavailable_reason = why_no_triton(device, dtype, interpreted)
    if not (unavailable_reason or unsupported_reason):
        unsupported_reason = _unfit(name, gpu_of(device), shared_memory)
    if backend == "triton":
        if unavailable_reason or unsupported_reason:
            reason = unavailable_reason or unsupported_reason
            raise RuntimeError(f'backend="triton" cannot run: {reason}. Use backend="auto" or backend="torch".')
        return True
    if unavailable_reason and device.type == "cuda" and dtype != torch.float64:
        _warn_once(unavailable_reason)  # of the machine, whatever the operation
        return False
    if unavailable_reason:
        _log_once(logging.INFO, name, unavailable_reason)
        return False
    missing = unsupported_reason or why_unmeasured(name, gpu_of(device)) or slower_reason
    if missing and missing != EMPTY:
        warn_of_fallback(name, missing)
    return missing is None


@functools.cache
def why_no_triton(device: torch.device, dtype: torch.dtype, interpreted: bool) -> str | None:
    """Why no kernel can be used for tensors like these; None if kernels can."""
    if dtype == torch.float64:
        return "its kernels compute in float32, and these tensors are float64"
    if device.type != "cuda" and not interpreted:
        return f"the tensors are on {device.type}, not cuda"
    return _no_triton() or (_too_old(gpu_of(device)) if device.type == "cuda" else None)


@functools.cache
def why_unmeasured(name: str, gpu: GPU) -> str | None:
    """Why "auto" does not take the kernel `name` on this GPU; None where it was measured, and with the override."""
    kernel = KERNELS[name]
    if (reason := _unfit(name, gpu, 0)) is not None:
        return reason
    if os.environ.get(OVERRIDE) == "1":
        return None
    if not was_measured(name, version_of("triton")):
        releases = " to ".join(dict.fromkeys(dotted(release) for release in kernel.triton or ()))
        return f"its kernels were measured with triton {releases}, and this is {version_of('triton')}"
    if kernel.measured and gpu.capability[0] not in kernel.measured:
        majors = " and ".join(f"{major}.x" for major in kernel.measured)
        return (
            f"its kernels were measured on NVIDIA GPUs of compute capability {majors}, and this is {gpu.name}; "
            f"set {OVERRIDE}=1 to try them"
        )
    return None


def was_measured(name: str, triton: str) -> bool:
    releases = KERNELS[name].triton
    return releases is None or releases[0] <= numbers_of(triton)[:2] <= releases[1]


@functools.cache
def _unfit(name: str, gpu: GPU, needed: int) -> str | None:
    """Why the kernel `name`, which needs so much shared memory, cannot run on this GPU; None if it can."""
    oldest = KERNELS[name].oldest
    if gpu.capability < oldest:
        return f"its kernels need compute capability {dotted(oldest)}, and {gpu.name} has {dotted(gpu.capability)}"
    if needed > gpu.shared_memory:
        return f"its kernels need {needed} bytes of shared memory, and {gpu.name} has {gpu.shared_memory}"
    return None


def _too_old(gpu: GPU) -> str | None:
    return f"{gpu.name} is older than compute capability {dotted(BF16_SINCE)}" if gpu.capability < BF16_SINCE else None


def _no_triton() -> str | None:
    if torch.version.hip:
        return AMD
    try:
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        version = version_of("triton")
        if numbers_of(version) < OLDEST_TRITON:
            return f"triton {version} is older than {dotted(OLDEST_TRITON)}"
        for name in KERNELS_IMPORT:
            importlib.import_module(name)
    except Exception as error:  # whatever a Triton raises that does not fit its driver, its LLVM or its Python
        first_line = str(error).strip().split("\n", 1)[0].rstrip(".")
        return f"triton cannot be imported ({type(error).__name__}: {first_line})"
    return None


def version_of(package: str) -> str:
    version: str = importlib.import_module(package).__version__
    return version


def numbers_of(version: str) -> Release:
    """3.7.1+git123 -> (3, 7, 1)."""
    return tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".")[:3] if part.isdigit())


def dotted(release: Release) -> str:
    """(3, 7) -> 3.7."""
    return ".".join(map(str, release))


def warn_of_fallback(name: str, reason: str) -> None:
    """Warns, once for each reason, that a GPU goes without the kernel `name`, and what that costs."""
    _log_once(logging.WARNING, name, f"{reason}. The cost: {KERNELS[name].cost}")


@functools.cache
def _log_once(level: int, name: str, reason: str) -> None:
    log.log(level, "%s uses the torch backend: %s", name, reason)


@functools.cache
def _warn_once(reason: str) -> None:
    log.warning("operations run without Triton's kernels, and slower: %s", reason)
