"""What the steps of recurrent blocks share: `convolve_step`, `ssd_step` and `gated_delta_step`."""

from __future__ import annotations

from torch import Tensor

from postlude.ops.kernels.capabilities import EMPTY, Backend, use_kernel


def overwrite(states: Tensor, after: Tensor, running: Tensor | None) -> None:
    """Writes `after` to `states`, both [n, ...]; of the sequences that are `running` [n] bool alone, if given."""
    if running is None:
        states.copy_(after)
    else:
        states.copy_(after.where(running.view(-1, *(1,) * (states.ndim - 1)), states))


def use_step_kernel(backend: Backend, states: Tensor, *inputs: Tensor) -> bool:
    """Whether a step takes its Triton kernel. `inputs` are [n, ...] each, with contiguous features."""
    unsupported_reason = None
    if inputs[0].numel() == 0:
        unsupported_reason = EMPTY
    elif not states[0].is_contiguous() or any(tensor.stride(-1) != 1 for tensor in inputs):
        unsupported_reason = "the features of a row are not contiguous"
    return use_kernel(
        "recurrent_step", backend, inputs[0].device, inputs[0].dtype, unsupported_reason=unsupported_reason
    )
