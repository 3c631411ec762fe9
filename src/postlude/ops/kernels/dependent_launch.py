"""Programmatic dependent launch: a kernel of a decode step starts while the one before it in the stream still runs.

It may then read weights, which no kernel of a step writes, and waits before it reads or writes anything else. On GPUs
before Hopper, and in Triton's interpreter, kernels start when the one before has ended, and these functions are empty.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from postlude.ops.kernels.capabilities import gpu_of


def starts_early(device: torch.device) -> bool:
    """Whether kernels on this device are launched before the one before them has ended."""
    return gpu_of(device).dependent_launch and os.environ.get("TRITON_INTERPRET") != "1"


def launch_options(device: torch.device) -> dict[str, bool]:
    """Returns Triton's options to launch a kernel that calls `wait_for_previous` in every program."""
    return {"launch_pdl": True} if starts_early(device) else {}


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Waits until the kernels before this one have ended and their results can be read."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def start_next(EARLY: tl.constexpr):
    """Allows the next kernel to start once all programs of this one have called it."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointers):
    """Starts to bring the cache line of each pointer to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
