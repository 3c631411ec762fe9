"""The packed causal convolution equals a loop over tokens and taps in float64, and so do gradients and decode steps."""

import pytest
import torch
from torch import Tensor

from postlude.ops.convolution import convolve, convolve_step, last_inputs
from postlude.ops.packing import Packing
from tests.equality import TOLERANCE, assert_equal

LENGTHS = (5, 1, 9, 2, 3, 4, 1)
CHANNELS = 6


def tensors(width: int, bias: bool = True, lengths=LENGTHS, **options) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), CHANNELS), (CHANNELS, width), (CHANNELS,)]
    drawn = [torch.randn(shape, generator=generator).to(**options).requires_grad_() for shape in shapes]
    return drawn if bias else [*drawn[:2], None]


def convolve_by_loop(inputs: Tensor, kernel: Tensor, bias: Tensor | None, packing: Packing, silu: bool) -> Tensor:
    """Computes token by token and tap by tap."""
    width = kernel.shape[1]
    rows = []
    for start, stop in packing.slices():
        for token in range(start, stop):
            window = range(max(start, token - width + 1), token + 1)
            row = sum(inputs[position] * kernel[:, position - token + width - 1] for position in window)
            rows.append(row if bias is None else row + bias)
    output = torch.stack(rows)
    return output * output.sigmoid() if silu else output


def assert_alike(
    inputs: list[Tensor | None], packing: Packing, silu: bool, tolerance: float, backend: str = "auto"
) -> None:
    exact = [None if tensor is None else tensor.detach().cpu().double().requires_grad_() for tensor in inputs]
    actual, expected = convolve(*inputs, packing, silu=silu, backend=backend), convolve_by_loop(*exact, packing, silu)
    assert actual.dtype == inputs[0].dtype
    assert_equal(actual.cpu(), expected, "output", tolerance)
    upstream = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1)).to(actual)
    gradients = torch.autograd.grad(actual, [tensor for tensor in inputs if tensor is not None], upstream)
    references = torch.autograd.grad(
        expected, [tensor for tensor in exact if tensor is not None], upstream.cpu().double()
    )
    for gradient, reference, name in zip(gradients, references, ("inputs", "kernel", "bias"), strict=False):
        assert_equal(gradient.cpu(), reference, f"gradient of {name}", tolerance)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_equals_a_loop_in_float64(dtype, tolerance, width: int, bias: bool, silu: bool) -> None:
    assert_alike(tensors(width, bias, dtype=dtype), Packing.from_lengths(LENGTHS), silu, tolerance)


def test_low_precision_rounds_once() -> None:
    """bf16 inputs are summed in fp32: the error is that of rounding the result, half of 2^-7 of its size."""
    assert_alike(tensors(4, dtype=torch.bfloat16), Packing.from_lengths(LENGTHS), True, 2**-8)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_decode_steps_from_a_state_equal_the_full_sequence(width: int) -> None:
    inputs, kernel, bias = (tensor.detach() for tensor in tensors(width, dtype=torch.float64))
    packing = Packing.from_lengths(LENGTHS)
    full_outputs = convolve(inputs, kernel, bias, packing, silu=True).split(LENGTHS)
    halves = [length // 2 for length in LENGTHS]  # 0 of a sequence of 1: then the state is that of no token
    parts = [row[:half] for row, half in zip(inputs.split(LENGTHS), halves, strict=True) if half]
    prefixes = Packing.from_lengths([len(part) for part in parts])
    states = iter(last_inputs(torch.cat(parts), prefixes, width - 1))
    for rows, expected, half in zip(inputs.split(LENGTHS), full_outputs, halves, strict=True):
        state = (next(states) if half else torch.zeros(width - 1, CHANNELS, dtype=torch.float64))[None]
        for token in range(half, len(rows)):
            output = convolve_step(rows[token : token + 1], state, kernel, bias, silu=True)
            assert_equal(output[0], expected[token], f"token {token}", 1e-14)
        assert torch.equal(state, last_inputs(rows, Packing.from_lengths([len(rows)]), width - 1))


def test_sequences_are_isolated_even_from_non_finite_values() -> None:
    inputs, kernel, bias = (tensor.detach() for tensor in tensors(4))
    packing = Packing.from_lengths(LENGTHS)
    expected = convolve(inputs, kernel, bias, packing).split(LENGTHS)
    for index, rows in enumerate(inputs.split(LENGTHS)):
        rows.fill_(float("nan"))
        actual = convolve(inputs, kernel, bias, packing).split(LENGTHS)
        for later in range(index + 1, len(LENGTHS)):
            assert torch.equal(actual[later], expected[later])


def test_gradients_of_empty_inputs_are_zeros_rather_than_none() -> None:
    inputs, kernel, bias = tensors(4, lengths=())
    none = Packing.from_lengths(())
    convolve(inputs, kernel, bias, none, silu=True).sum().backward()
    assert torch.equal(kernel.grad, torch.zeros_like(kernel))
    assert torch.equal(bias.grad, torch.zeros_like(bias))
    assert last_inputs(inputs, none, 3).shape == (0, 3, CHANNELS)


@pytest.mark.parametrize("shape", [(CHANNELS + 1, 4), (CHANNELS, 1, 4)])
def test_kernel_with_wrong_channel_count_is_refused(shape) -> None:
    inputs, _, bias = tensors(4)
    with pytest.raises(ValueError, match=r"one of \[6, K\]"):
        convolve(inputs, torch.zeros(shape), bias, Packing.from_lengths(LENGTHS))


@pytest.mark.gpu
@pytest.mark.parametrize("silu", [False, True])
def test_equals_a_loop_on_cuda(silu: bool) -> None:
    packing = Packing.from_lengths(LENGTHS, device="cuda")
    inputs = [tensor.detach().requires_grad_() for tensor in tensors(4, device="cuda")]
    assert_alike(inputs, packing, silu, TOLERANCE)
