"""Tests of Triton's kernels of convolution and scan. `test_kernels.py` runs this file: on a GPU, or through
Triton's interpreter, which must be chosen before triton is first imported. Here products are fp32."""

import pytest
import torch

from postlude.ops.convolution import convolve
from postlude.ops.packing import Packing
from postlude.ops.ssd import ssd
from tests.ops import test_convolution, test_ssd

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("lengths", "chunk", "shape"),
    [
        ((20, 1, 12), 16, (4, 3, 2, 5)),  # one sequence lies in three chunks, one ends within each
        ((16, 1, 15), 16, (1, 8, 1, 16)),  # ends of sequences are ends of chunks
        ((100,), 128, (2, 20, 1, 33)),  # blocks within a chunk; width and state fill none
        ((1,), 64, (1, 1, 1, 1)),
        ((30,) * 3, 1, (3, 16, 3, 70)),  # a state of two tiles, and a chunk shorter than a product may be
    ],
)
def test_scan_equals_the_recurrence(lengths, chunk: int, shape) -> None:
    heads, width, groups, states = shape
    operands = test_ssd.inputs(sum(lengths), heads, width, groups, states, device=DEVICE)
    operands = [tensor.detach().requires_grad_() for tensor in operands]
    test_ssd.assert_alike(operands, lengths, chunk, backend="triton")


def test_scan_is_accurate_for_extreme_decays() -> None:
    operands = [tensor.detach() for tensor in test_ssd.inputs(60, heads=2, seed=3, device=DEVICE)]
    operands[1][::9] *= 1e5
    test_ssd.assert_alike([tensor.requires_grad_() for tensor in operands], (40, 20), chunk=64, backend="triton")


def test_scan_of_strided_inputs_and_without_d() -> None:
    """As in a model: x, B and C are slices of the convolution's output, and a gradient may be expanded."""
    channels = torch.randn(40, 2 * 3 + 5 + 5, generator=torch.Generator().manual_seed(0)).to(DEVICE).requires_grad_()
    _, dt, A, *_ = (tensor.detach() for tensor in test_ssd.inputs(40, heads=2, device=DEVICE))

    def gradient(backend: str) -> torch.Tensor:
        x, B, C = channels.split((6, 5, 5), 1)
        x, B, C = x.unflatten(1, (2, 3)), B[:, None], C[:, None]
        y, _ = ssd(x, dt, A, B, C, None, Packing.from_lengths((25, 15), DEVICE), chunk=16, backend=backend)
        return torch.autograd.grad(y.sum(), channels)[0]

    test_ssd.assert_equal(gradient("triton"), gradient("torch"), "gradient", 1e-6)


@pytest.mark.parametrize(
    ("width", "bias", "silu"), [(1, True, True), (4, True, True), (4, False, True), (4, True, False)]
)
def test_convolution_equals_a_loop(width: int, bias: bool, silu: bool) -> None:
    inputs = test_convolution.tensors(width, bias, device=DEVICE)
    inputs = [None if tensor is None else tensor.detach().requires_grad_() for tensor in inputs]
    packing = Packing.from_lengths(test_convolution.LENGTHS, DEVICE)
    test_convolution.assert_alike(inputs, packing, silu, 1e-6, backend="triton")


@pytest.mark.parametrize("run", [1, 2, 6, 24])
@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_convolution_backward_in_chunks_of_any_length(monkeypatch: pytest.MonkeyPatch, width: int, run: int) -> None:
    monkeypatch.setattr("postlude.ops.kernels.convolution.BACKWARD_TOKENS", run)
    inputs = [tensor.detach().requires_grad_() for tensor in test_convolution.tensors(width, device=DEVICE)]
    packing = Packing.from_lengths(test_convolution.LENGTHS, DEVICE)
    test_convolution.assert_alike(inputs, packing, True, 1e-6, backend="triton")


def test_convolution_of_strided_inputs() -> None:
    wide = torch.randn(25, 20, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    _, kernel, bias = (tensor.detach() for tensor in test_convolution.tensors(2, device=DEVICE))
    packing = Packing.from_lengths(test_convolution.LENGTHS, DEVICE)
    inputs = [tensor.requires_grad_() for tensor in (wide[:, 3:15:2], kernel.flip(1), bias)]
    test_convolution.assert_alike(inputs, packing, True, 1e-6, backend="triton")


def test_sequences_are_isolated_even_from_non_finite_values() -> None:
    inputs, kernel, bias = (tensor.detach() for tensor in test_convolution.tensors(4, device=DEVICE))
    packing = Packing.from_lengths(test_convolution.LENGTHS, DEVICE)

    def parts() -> list[tuple[torch.Tensor, ...]]:
        leaves = [tensor.clone().requires_grad_() for tensor in (inputs, kernel, bias)]
        output = convolve(*leaves, packing, silu=True, backend="triton")
        (gradient,) = torch.autograd.grad(output.sum(), leaves[:1])
        return [tensor.split(test_convolution.LENGTHS) for tensor in (output, gradient)]

    expected = parts()
    inputs.split(test_convolution.LENGTHS)[2].fill_(float("nan"))
    for actual, expected_part in zip(parts(), expected, strict=True):
        for index in {*range(len(actual))} - {2}:
            assert torch.equal(actual[index], expected_part[index])
