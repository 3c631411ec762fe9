"""flash-linear-attention's kernels for both scans: an optional extra, `pip install 'postlude[fla]'`.

"auto" prefers Postlude's own kernels. Where those of the gated delta rule were not measured, it takes these instead of
plain torch, if they are installed and known to be right.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging

import torch
from torch import Tensor

from postlude.ops.kernels.capabilities import HOPPER, gpu_of, numbers_of, version_of, why_no_triton
from postlude.ops.packing import Packing

CHECKED = "0.6"  # the releases whose results were compared with ours
# Triton releases, from the first to before the second, that miscompile fla's backward for Hopper (its issue 640).
WRONG_TRITON = ((3, 4, 0), (3, 7, 1))
WIDEST = 256  # key dimension

log = logging.getLogger(__name__)


@functools.cache
def installed() -> bool:
    return importlib.util.find_spec("fla") is not None


def refusal(*tensors: Tensor, width: int, gradient: bool) -> str | None:
    """Returns why fla cannot scan these with keys of `width`, or None. `gradient`: a backward will follow."""
    if not installed():
        return "flash-linear-attention is not installed (pip install 'postlude[fla]')"
    device, dtypes = tensors[0].device, {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1 or dtypes.isdisjoint((torch.bfloat16, torch.float16)):
        return f"flash-linear-attention is for one half precision, and these are {', '.join(map(str, dtypes))}"
    if width > WIDEST:
        return f"flash-linear-attention has room for keys {WIDEST} wide, and these are {width}"
    reason = why_no_triton(device, tensors[0].dtype, False)
    return reason or _refusal(version_of("fla"), version_of("triton"), gpu_of(device).capability, gradient)


def _refusal(fla: str, triton: str, capability: tuple[int, int], gradient: bool) -> str | None:
    if not fla.startswith(f"{CHECKED}."):
        return f"flash-linear-attention was checked in its releases {CHECKED}, and this is {fla}"
    if not gradient or capability[0] != HOPPER or not WRONG_TRITON[0] <= numbers_of(triton) < WRONG_TRITON[1]:
        return None
    return (
        f"flash-linear-attention {fla} refuses a backward on Hopper with Triton 3.4.0 to 3.7.0, which compile it "
        f"wrongly, and this is Triton {triton}"
    )


def auto_selects(name: str, own_kernels: str, *tensors: Tensor, width: int) -> bool:
    """Whether "auto" takes fla for `name`. `own_kernels` says why ours are not taken. Logs the choice once.

    It always requires the backward, so that passes with and without gradient give the same results.
    """
    if not tensors[0].is_cuda or not installed():
        return False
    reason = refusal(*tensors, width=width, gradient=True)
    _log_once(name, own_kernels, reason)
    return reason is None


@functools.cache
def _log_once(name: str, own_kernels: str, reason: str | None) -> None:
    if reason is None:
        log.info(
            "%s uses flash-linear-attention %s instead of its own kernels: %s", name, version_of("fla"), own_kernels
        )
    else:
        log.warning("%s cannot use flash-linear-attention in place of its own kernels: %s", name, reason)


def check(*tensors: Tensor, width: int) -> None:
    gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if reason := refusal(*tensors, width=width, gradient=gradient):
        raise RuntimeError(f'backend="fla" cannot run: {reason}. Use backend="auto", which takes what can run.')


def ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, packing: Packing, last_states: bool
) -> tuple[Tensor, Tensor | None]:
    """See `postlude.ops.ssd.ssd`. In fla it is linear attention with decay, with B and C repeated for each head."""
    kernels = importlib.import_module("fla.ops.simple_gla")
    share = x.shape[1] // B.shape[1]
    output, states = kernels.chunk_simple_gla(
        C.repeat_interleave(share, 1)[None],
        B.repeat_interleave(share, 1)[None],
        (x * dt[..., None]).to(x.dtype)[None],
        g=(dt.float() * A.float())[None],
        scale=1.0,
        output_final_state=last_states,
        cu_seqlens=packing.cu_seqlens,
        cu_seqlens_cpu=_on_the_host(packing.lengths),
    )
    y = output[0] if D is None else output[0] + D[:, None] * x
    return y.to(x.dtype), states.mT if last_states else None


def gated_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    packing: Packing,
    scale: float | None,
    normalise: bool,
    last_states: bool,
) -> tuple[Tensor, Tensor | None]:
    kernels = importlib.import_module("fla.ops.gated_delta_rule")
    output, states = kernels.chunk_gated_delta_rule(
        *(tensor[None] for tensor in (query, key, value)),
        g=log_decay.float()[None],
        beta=beta.float()[None],
        scale=scale,
        output_final_state=last_states,
        use_qk_l2norm_in_kernel=normalise,
        cu_seqlens=packing.cu_seqlens,
        cu_seqlens_cpu=_on_the_host(packing.lengths),
    )
    return output[0], states if last_states else None


@functools.lru_cache(maxsize=8)
def _on_the_host(lengths: tuple[int, ...]) -> Tensor:
    """Returns the host copy of cu_seqlens, which fla would otherwise wait for; it caches by tensor identity."""
    return Packing.from_lengths(lengths).cu_seqlens
