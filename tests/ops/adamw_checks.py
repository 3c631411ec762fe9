"""Tests of the Triton kernel of a step. `test_kernels.py` runs this file: on a GPU, or through Triton's
interpreter, which must be chosen before triton is first imported."""

import pytest
import torch

from postlude.ops.adamw import adamw_step, bias_corrections
from postlude.ops.adamw_storage import (
    AdamWHyperparameters,
    QuantizedMoment,
    TensorSlice,
    dequantize_first,
    dequantize_second,
)
from tests.ops.test_adamw import DEVICE, initial_state, normal

RATES = AdamWHyperparameters(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, decay=0.1)


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
@pytest.mark.parametrize("weights", ["fp32", "split", "rounded"])
def test_kernel_equals_reference(weights: str, moments: str) -> None:
    """Both get the same random bits. Values at the border between two roundings may round either way."""
    shape, region = (5, 6, 200), (slice(2, 4), slice(1, 6), slice(64, 200))
    weight = normal(*shape)[region].contiguous()
    gradients = [normal(*shape, seed=seed)[region].contiguous() for seed in (1, 2, 3)]
    gradients[1][:, 0] = 0.0
    states = {backend: initial_state(weight, weights=weights, moments=moments) for backend in ("torch", "triton")}
    for number, gradient in enumerate(gradients, start=1):
        correction = bias_corrections(torch.tensor([float(number)], device=DEVICE), RATES)[0]
        for backend, state in states.items():
            scale = torch.tensor([0.5, float(number != 2)], device=DEVICE)
            adamw_step(
                state["weight"], gradient, state["first"], state["second"], correction, RATES,
                low=state["low"], scale=scale, seed=0x9ABCDEF0, bounds=TensorSlice.of(region, shape), backend=backend,
            )  # fmt: skip
    torch_state, triton_state = states["torch"], states["triton"]
    if weights == "rounded":
        assert (torch_state["weight"] != triton_state["weight"]).float().mean() < 0.01
        torch.testing.assert_close(triton_state["weight"], torch_state["weight"], rtol=2.0**-7, atol=1e-6)
    else:
        torch.testing.assert_close(triton_state["weight"], torch_state["weight"], rtol=1e-5, atol=1e-6)
    for name, widened in (("first", dequantize_first), ("second", dequantize_second)):
        actual, expected = triton_state[name], torch_state[name]
        if isinstance(actual, QuantizedMoment):
            torch.testing.assert_close(actual.scales, expected.scales, rtol=1e-5, atol=0.0)
            assert (actual.codes != expected.codes).float().mean() < 0.01
            actual, expected = (
                widened(moment.codes.view(-1, 136), moment.scales.view(-1, 3)) for moment in (actual, expected)
            )
            torch.testing.assert_close(actual, expected, rtol=0.1, atol=1e-12)
        else:
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-8)
