"""A model on a GPU equals the same model on the CPU."""

import pytest
import torch

from postlude import load_model, pack
from tests.equality import assert_equal

pytestmark = pytest.mark.gpu

SEQUENCES = [list(b"the quick brown fox"), list(b"jumps"), list(b"over the lazy dog, twice and then once more")]


def losses_and_gradients(name: str, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = load_model(name, dtype=torch.float32).to(device, dtype)
    (microbatch,) = pack(SEQUENCES, budget=128)
    losses = model(microbatch.to(device), targets=True)
    (losses.sum() / microbatch.batch_targets).backward()
    return losses.cpu(), {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-moe"])
def test_fp32_equals_the_cpu(name: str) -> None:
    expected, expected_gradients = losses_and_gradients(name, "cpu", torch.float32)
    actual, gradients = losses_and_gradients(name, "cuda", torch.float32)
    assert_equal(actual, expected, "losses")
    for parameter, gradient in gradients.items():
        assert_equal(gradient, expected_gradients[parameter], f"gradient of {parameter}")


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-moe"])
def test_bf16_kernels_stay_near_fp32(name: str) -> None:
    """Flash attention, grouped products and the fused head, against fp32 without any of them.

    bf16 keeps 8 bits, and four layers add their roundings up: 2e-2 of the losses' scale. A wrong mask, a dropped expert
    or a shifted target is off by far more.
    """
    expected, _ = losses_and_gradients(name, "cpu", torch.float32)
    actual, gradients = losses_and_gradients(name, "cuda", torch.bfloat16)
    assert_equal(actual, expected, "losses", tolerance=2e-2)
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
