"""The chunked state-space scan equals the recurrence, token by token in float64, and so do its gradients and states."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from postlude.ops import ssd as module
from postlude.ops.packing import Packing
from postlude.ops.ssd import ssd, ssd_step
from tests.equality import assert_equal

NAMES = ("x", "dt", "A", "B", "C", "D")


def inputs(tokens: int, heads=4, width=3, groups=2, states=5, seed=0, strength=1.0, **options) -> list[Tensor]:
    """Inputs as in a model: most time steps are short, some are long, and decays range from slow to immediate."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    drawn = [
        normal(tokens, heads, width),
        (normal(tokens, heads) * 2 - 2).exp() * strength,
        -(normal(heads) * 2).exp(),
        normal(tokens, groups, states),
        normal(tokens, groups, states),
        normal(heads),
    ]
    return [tensor.to(**options).requires_grad_() for tensor in drawn]


def recurrence(x, dt, A, B, C, D, packing: Packing) -> tuple[Tensor, Tensor]:
    """Computes token by token; A and D [T, heads] may differ between tokens."""
    share = x.shape[1] // B.shape[1]
    B, C = B.repeat_interleave(share, 1), C.repeat_interleave(share, 1)
    rows, last = [], []
    for start, stop in packing.slices():
        state = x.new_zeros(x.shape[1], x.shape[2], B.shape[2])
        for t in range(start, stop):
            state = (dt[t] * A[t]).exp()[:, None, None] * state + (dt[t][:, None] * x[t])[..., None] * B[t][:, None]
            rows.append((state * C[t][:, None]).sum(-1) + D[t][:, None] * x[t])
        last.append(state)
    return torch.stack(rows), torch.stack(last)


def assert_alike(operands: list[Tensor], lengths, chunk: int, tolerance: float = 5e-7, backend: str = "auto") -> None:
    """Compares outputs, last states (which Triton's kernels do not return) and every gradient, relative to each scale.

    All are sums that may cancel: their scale is that of what is summed, the same with magnitudes.
    """
    packing = Packing.from_lengths(lengths, device=operands[0].device)
    exact = [tensor.detach().double() for tensor in operands]
    exact[2], exact[5] = (exact[i].expand(len(exact[0]), -1) for i in (2, 5))
    exact = [tensor.clone().requires_grad_() for tensor in exact]
    expected_calls = 1 if backend == "triton" else 2
    actual = ssd(*operands, packing, chunk=chunk, last_states=expected_calls == 2, backend=backend)[:expected_calls]
    expected = recurrence(*exact, packing)[:expected_calls]
    assert actual[0].dtype == operands[0].dtype
    magnitudes = [
        (tensor if name in ("dt", "A") else tensor.abs()).detach().requires_grad_()
        for tensor, name in zip(exact, NAMES, strict=True)
    ]
    summed = recurrence(*magnitudes, packing)[:expected_calls]
    for output, expected_output, scale, name in zip(actual, expected, summed, ("y", "last states"), strict=False):
        off = (output - expected_output).abs().max() / scale.max()
        assert off <= tolerance, f"{name} is off by {off:.2e} of what is summed"
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(tensor.shape, generator=generator).to(tensor) for tensor in actual]
    gradients = torch.autograd.grad(actual, operands, upstream)
    references = torch.autograd.grad(expected, exact, [tensor.double() for tensor in upstream])
    scales = torch.autograd.grad(summed, magnitudes, [tensor.double().abs() for tensor in upstream])
    for gradient, reference, scale, name in zip(gradients, references, scales, NAMES, strict=True):
        tokens = (0,) if gradient.ndim == 1 else ()  # A and D are the same for all of them
        expected_output, largest = (
            gradient.sum(tokens) if tokens else gradient for gradient in (reference, scale.abs())
        )
        off = (gradient - expected_output).abs().max() / largest.max().clamp_min(1e-12)
        assert off <= tolerance, f"the gradient of {name} is off by {off:.2e} of what is summed"


@pytest.mark.slow
@settings(max_examples=12)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=6).filter(lambda lengths: sum(lengths) <= 400),
    chunk=st.sampled_from([1, 2, 7, 16, 64, 128]),
    shape=st.sampled_from([(4, 3, 2, 5), (1, 8, 1, 4), (6, 2, 3, 3), (3, 4, 1, 16), (2, 1, 2, 1)]),
    seed=st.integers(0, 1000),
)
def test_equals_the_recurrence_in_float64(lengths, chunk, shape, seed) -> None:
    heads, width, groups, states = shape
    assert_alike(inputs(sum(lengths), heads, width, groups, states, seed), lengths, chunk)


@pytest.mark.parametrize("strength", [1e3, 1e5])
def test_accurate_for_extreme_decays(strength: float) -> None:
    """A token that forgets everything is followed by ones that forget nothing: sums of logarithms are huge, and what
    matters is a small difference of two of them."""
    operands = inputs(200, seed=3)
    with torch.no_grad():
        operands[1][::9] *= strength
    assert_alike(operands, (120, 80), chunk=64)


@pytest.mark.parametrize("chunk", [1, 16])
def test_float64_is_computed_in_float64(chunk: int) -> None:
    lengths = (50, 1, 23)
    assert_alike(inputs(sum(lengths), dtype=torch.float64), lengths, chunk, tolerance=1e-13)


@pytest.mark.parametrize("room", [1, 3 * 74 * 8, 4 * 74 * 8])
def test_number_of_heads_at_a_time_does_not_change_the_result(monkeypatch, room: int) -> None:
    """One, three (part of a group) or four heads (a group) at a time."""
    lengths = (50, 1, 23)
    operands, packing = inputs(sum(lengths), heads=8), Packing.from_lengths(lengths)
    expected = ssd(*operands, packing, chunk=8, last_states=True)
    monkeypatch.setattr(module, "WORKSPACE", room)
    actual = ssd(*operands, packing, chunk=8, last_states=True)
    for output, expected_output in zip(actual, expected, strict=True):
        assert_equal(output, expected_output, tolerance=1e-6)
    assert_alike(operands, lengths, chunk=8)


def test_scan_is_deterministic() -> None:
    operands, packing = inputs(74), Packing.from_lengths((50, 1, 23))

    def once() -> tuple[Tensor, ...]:
        y, _ = ssd(*operands, packing, chunk=8)
        return y, *torch.autograd.grad(y.square().sum(), operands)

    for first, second in zip(once(), once(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_decode_steps_from_last_states_equal_the_full_sequence(dtype) -> None:
    x, dt, A, B, C, D = (tensor.detach() for tensor in inputs(20))
    x, B, C = (tensor.to(dtype) for tensor in (x, B, C))
    wide = torch.promote_types(dtype, torch.float32)
    dt, A, D = (tensor.to(wide) for tensor in (dt, A, D))
    full_output, last = ssd(x, dt, A, B, C, D, Packing.from_lengths([20]), chunk=4, last_states=True)
    _, states = ssd(x[:7], dt[:7], A, B[:7], C[:7], D, Packing.from_lengths([7]), chunk=4, last_states=True)
    assert full_output.dtype == dtype
    assert states.dtype == wide
    for t in range(7, 20):
        token = slice(t, t + 1)
        y = ssd_step(x[token], dt[token], A, B[token], C[token], D, states)
        assert y.dtype == dtype
        assert_equal(y, full_output[token], f"token {t}", 2**-8 if dtype == torch.bfloat16 else 1e-13)
    assert_equal(states, last, "states", 1e-6 if dtype == torch.bfloat16 else 1e-13)


def test_gradients_of_empty_inputs_are_zeros_rather_than_none() -> None:
    operands = inputs(0)
    y, states = ssd(*operands, Packing.from_lengths(()), last_states=True)
    assert y.shape == (0, 4, 3)
    assert states.shape == (0, 4, 3, 5)
    y.sum().backward()
    for tensor in operands:
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({1: torch.ones(9, 4)}, r"give x \[T, heads, p\], dt \[T, heads\]"),
        (
            {3: torch.ones(10, 3, 5), 4: torch.ones(10, 3, 5)},
            "3 groups of B and C for 4 heads: groups divide the heads.",
        ),
    ],
)
def test_inconsistent_shapes_are_refused(changed, sentence: str) -> None:
    operands = [changed.get(place, tensor) for place, tensor in enumerate(inputs(10))]
    with pytest.raises(ValueError, match=sentence):
        ssd(*operands, Packing.from_lengths([10]))


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [16, 128])
def test_equals_the_recurrence_on_cuda(chunk: int) -> None:
    lengths = (130, 1, 77)
    assert_alike(inputs(sum(lengths), device="cuda"), lengths, chunk)
