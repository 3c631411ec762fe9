"""Norms, gated activations and rotary: Triton kernels in the interpreter and on a GPU, and backend selection."""

import pytest
import torch

from postlude.ops.activation import activate, gated_activation
from postlude.ops.norm import rms_norm, rms_norm_with_residual
from postlude.ops.rotary import RotaryConfig, rotary_table, rotate, rotate_heads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auto_uses_torch_without_a_gpu(dtype: torch.dtype) -> None:
    rows, weight = torch.randn(3, 2, 8, dtype=dtype), torch.randn(8, dtype=dtype)
    table = rotary_table(RotaryConfig(), torch.arange(3), 8)
    expected = torch.nn.functional.rms_norm(rows, (8,), weight, 1e-6)
    assert torch.equal(rms_norm(rows, weight, 1e-6), expected)
    residual, normed = rms_norm_with_residual(rows, weight, 1e-6)
    assert residual is rows
    assert torch.equal(normed, expected)
    assert torch.equal(gated_activation(rows, rows, "silu"), torch.nn.functional.silu(rows) * rows)
    assert all(torch.equal(heads, rotate(rows, table)) for heads in rotate_heads(rows, rows, table))
    for call in (
        lambda: rms_norm(rows, weight, 1e-6, backend="triton"),
        lambda: gated_activation(rows, rows, "silu", backend="triton"),
        lambda: rotate_heads(rows, rows, table, backend="triton"),
    ):
        with pytest.raises(RuntimeError, match="the tensors are on cpu"):
            call()


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="activation 'swish' is unknown; use silu, gelu, gelu_tanh, relu2"):
        activate(torch.ones(2), "swish")
