"""Checks of the gated delta rule's kernels. `test_kernels.py` runs this file, on a GPU or in Triton's
interpreter, which must be chosen before triton is first imported. Here products are fp32."""

import pytest
import torch

from postlude.ops.gated_delta import gated_delta
from postlude.ops.packing import Packing
from tests.equality import assert_equal
from tests.ops.test_gated_delta import FP32, NAMES, check, inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("lengths", "chunk", "heads", "widths"),
    [
        ([17, 1, 33], 16, (2, 1), (6, 20)),  # chunks of one token; widths fill no tile
        ([16, 32], 16, (1, 1), (16, 16)),  # ends of sequences are ends of chunks
        ([40], 32, (2, 2), (20, 7)),  # inverses of two blocks
        ([65, 63], 64, (1, 1), (8, 130)),  # of four, and values of two slices and more
        ([1], 64, (1, 1), (6, 7)),
    ],
)
def test_kernels_equal_the_recurrence(
    lengths: list[int], chunk: int, heads: tuple[int, int], widths: tuple[int, int]
) -> None:
    operands = inputs(sum(lengths), *heads, *widths, seed=0, decay=0.1, device=DEVICE)
    check([tensor.detach().requires_grad_() for tensor in operands], lengths, chunk, FP32, backend="triton")


def test_strong_decay_does_not_affect_later_tokens() -> None:
    operands = [tensor.detach() for tensor in inputs(70, 2, 1, 16, 8, seed=3, decay=0.01, device=DEVICE)]
    operands[3][20::40] = -500.0
    check([tensor.requires_grad_() for tensor in operands], [64, 6], 64, FP32, backend="triton")


def test_identical_keys_stay_finite() -> None:
    """Each token replaces the value written by the one before. Powers of A would reach 10^18 here."""
    operands = [tensor.detach() for tensor in inputs(64, 1, 1, 8, 8, seed=0, decay=1e-5, device=DEVICE)]
    operands[1][:] = operands[1][0]
    operands[4][:] = 0.99
    packing = Packing.from_lengths([64], DEVICE)
    exact = gated_delta(*(tensor.double() for tensor in operands), packing, normalise=True, chunk=1, last_states=True)
    actual = gated_delta(*operands, packing, normalise=True, last_states=True, backend="triton")
    for actual_tensor, expected_tensor, name in zip(actual, exact, ("outputs", "states"), strict=True):
        assert actual_tensor is not None
        assert expected_tensor is not None
        assert_equal(actual_tensor, expected_tensor, name, 1e-5)


def test_strided_inputs_custom_scale_and_unnormalised_vectors() -> None:
    """As in a model: query, key and value are slices of one tensor. A gradient may be expanded."""
    channels = torch.randn(20, 2, 6 + 6 + 10, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    _, _, _, log_decay, beta = (tensor.detach() for tensor in inputs(20, 4, 2, 6, 5, seed=1, decay=0.1, device=DEVICE))
    leaves = [tensor.requires_grad_() for tensor in (channels / 3, log_decay, beta)]

    def gradients(backend: str) -> tuple[torch.Tensor, ...]:
        query, key, value = leaves[0].split((6, 6, 10), -1)
        value = value.reshape(20, 4, 5)
        packing = Packing.from_lengths([12, 8], DEVICE)
        output, states = gated_delta(
            query, key, value, *leaves[1:], packing, scale=0.7, chunk=16, last_states=True, backend=backend
        )
        assert states is not None
        return torch.autograd.grad((output.sum(), states.sum()), leaves)

    for name, triton_gradient, torch_gradient in zip(
        ("channels", *NAMES[3:]), gradients("triton"), gradients("torch"), strict=True
    ):
        assert_equal(triton_gradient, torch_gradient, f"gradient of {name}", FP32)
