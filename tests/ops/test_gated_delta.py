"""The chunked gated delta rule equals its token-by-token recurrence in float64, gradients included."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from postlude.ops.gated_delta import gated_delta, gated_delta_forward, gated_delta_step
from postlude.ops.packing import Packing
from tests.equality import assert_equal
from tests.ops.watch import Waits

NAMES = ("query", "key", "value", "log_decay", "beta")
FP32 = 1e-6  # of the scale: some ten roundings


def inputs(
    tokens: int, heads: int, key_heads: int, dk: int, dv: int, seed: int, decay: float = 1.0, device: str = "cpu"
) -> list[Tensor]:
    """Inputs as in a model: log decays from almost none to more than e^-16, beta between 0 and 1."""
    generator = torch.Generator().manual_seed(seed)

    def random_tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rate = 16 * decay * torch.rand(heads, generator=generator)
    inputs = [
        random_tensor(tokens, key_heads, dk),
        random_tensor(tokens, key_heads, dk),
        random_tensor(tokens, heads, dv),
    ]
    inputs += [-rate * F.softplus(random_tensor(tokens, heads) - 1), random_tensor(tokens, heads).sigmoid()]
    return [tensor.to(device).requires_grad_() for tensor in inputs]


def token_by_token(operands: list[Tensor], lengths: list[int]) -> tuple[Tensor, Tensor]:
    """The definition, one token at a time, with queries and keys of length one."""
    query, key, value, log_decay, beta = operands
    group = value.shape[1] // key.shape[1]
    query, key = (
        (tensor * torch.rsqrt(tensor.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(group, 1)
        for tensor in (query, key)
    )
    query = query / query.shape[-1] ** 0.5
    outputs, states = [], []
    start = 0
    for length in lengths:
        state = value.new_zeros(value.shape[1], key.shape[2], value.shape[2])
        for token in range(start, start + length):
            state = state * log_decay[token].exp()[:, None, None]
            stored = torch.einsum("hkv,hk->hv", state, key[token])
            change = beta[token][:, None] * (value[token] - stored)
            state = state + torch.einsum("hk,hv->hkv", key[token], change)
            outputs.append(torch.einsum("hkv,hk->hv", state, query[token]))
        states.append(state)
        start += length
    return torch.stack(outputs), torch.stack(states)


def check(operands: list[Tensor], lengths: list[int], chunk: int, tolerance: float, backend: str = "auto") -> None:
    packing = Packing.from_lengths(lengths, operands[0].device)
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in operands]
    expected = token_by_token(exact, lengths)
    outputs = gated_delta(*operands, packing, normalise=True, chunk=chunk, last_states=True, backend=backend)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(tensor.shape, generator=generator) for tensor in expected]
    weights[1] *= weights[0].numel() / weights[1].numel() ** 0.5 / 100  # neither drowns the other
    for actual, expected_tensor, tensor_name in zip(outputs, expected, ("outputs", "states"), strict=True):
        assert_equal(actual.cpu(), expected_tensor, tensor_name, tolerance)
    gradients = torch.autograd.grad(outputs, operands, [weight.to(operands[0].device) for weight in weights])
    expected_gradients = torch.autograd.grad(expected, exact, [weight.double() for weight in weights])
    for name, actual, expected_tensor in zip(NAMES, gradients, expected_gradients, strict=True):
        assert_equal(actual.cpu(), expected_tensor, f"gradient of {name}", tolerance)


@settings(max_examples=14, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    chunk=st.sampled_from([1, 2, 7, 16, 64]),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2), (6, 3)]),
    widths=st.sampled_from([(8, 1), (6, 7), (8, 4), (16, 16)]),
    decay=st.sampled_from([0.0, 0.01, 0.1, 0.5]),
    seed=st.integers(0, 999),
)
@example(lengths=[1], chunk=64, heads=(1, 1), widths=(6, 7), decay=0.5, seed=0)
@example(lengths=[64, 65, 63, 1, 128], chunk=64, heads=(2, 1), widths=(8, 8), decay=0.1, seed=0)
def test_chunks_equal_the_recurrence(
    lengths: list[int], chunk: int, heads: tuple[int, int], widths: tuple[int, int], decay: float, seed: int
) -> None:
    check(inputs(sum(lengths), *heads, *widths, seed, decay), lengths, chunk, FP32)


@pytest.mark.slow
@settings(max_examples=16, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    chunk=st.sampled_from([16, 50, 64]),
    decay=st.sampled_from([0.01, 0.5]),
    seed=st.integers(0, 999),
)
def test_long_sequences_equal_the_recurrence(lengths: list[int], chunk: int, decay: float, seed: int) -> None:
    check(inputs(sum(lengths), 2, 1, 16, 8, seed, decay), lengths, chunk, FP32)


def test_strong_decay_does_not_affect_later_tokens() -> None:
    """Sums of log decays reach -2,000 within a chunk; later small decays keep their precision."""
    operands = inputs(150, 2, 1, 16, 8, seed=3, decay=0.01)
    with torch.no_grad():
        operands[3][20::40] = -500.0
    check(operands, [100, 50], 64, FP32)


def test_float64_stays_float64() -> None:
    operands = [tensor.detach().double().requires_grad_() for tensor in inputs(40, 2, 1, 6, 7, seed=0)]
    check(operands, [23, 17], 8, 1e-12)


@pytest.mark.parametrize("normalise", [False, True])
def test_gradients_of_any_vectors_and_scale(normalise: bool) -> None:
    query, key, value, log_decay, beta = (
        tensor.detach().double() for tensor in inputs(11, 2, 1, 3, 2, seed=0, decay=0.1)
    )
    packing = Packing.from_lengths([4, 7])
    operands = [tensor.requires_grad_() for tensor in (query, key / 2, value, log_decay, beta)]
    assert torch.autograd.gradcheck(
        lambda *arguments: gated_delta(*arguments, packing, scale=0.7, normalise=normalise, chunk=3, last_states=True),
        operands,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_steps_equal_the_scan(dtype: torch.dtype) -> None:
    """In bf16 both compute in fp32 from the same rounded inputs, and round the output once."""
    operands = [tensor.detach() for tensor in inputs(30, 4, 2, 8, 5, seed=1, decay=0.1)]
    operands[:3] = [tensor.to(dtype) for tensor in operands[:3]]
    expected, last = gated_delta(*operands, Packing.from_lengths([15, 15]), normalise=True, chunk=4, last_states=True)
    states = torch.zeros_like(last)
    for token in range(15):
        output = gated_delta_step(*(tensor[token::15] for tensor in operands), states, normalise=True)
        assert output.dtype == expected.dtype == dtype
        assert states.dtype == torch.float32
        tolerance = FP32 if dtype == torch.float32 else 2**-8
        assert_equal(output, expected[token::15], f"token {token}", tolerance)
    assert_equal(states, last, "states", FP32)


def test_no_sequences_give_gradients_of_zero() -> None:
    operands = inputs(0, 4, 2, 8, 5, seed=1)
    output, states = gated_delta(*operands, Packing.from_lengths([]), last_states=True)
    assert output.shape == (0, 4, 5)
    assert states.shape == (0, 4, 8, 5)
    assert all(
        tensor.shape == like.shape
        for tensor, like in zip(torch.autograd.grad(output.sum(), operands), operands, strict=True)
    )


def test_scan_does_not_synchronise_and_is_deterministic() -> None:
    operands = inputs(100, 2, 1, 8, 8, seed=2)
    packing = Packing.from_lengths([30, 1, 69])
    results = []
    for _ in range(2):
        with Waits() as waits:
            # What the operator does inside is looked at too.
            inside = gated_delta_forward(
                *(tensor.detach() for tensor in operands), packing.cu_seqlens, [30, 1, 69], 1.0, True, 16, True, False
            )
            output, _ = gated_delta(*operands, packing, scale=1.0, normalise=True, chunk=16)  # without states
            gradients = torch.autograd.grad(output.square().sum(), operands)
        assert waits.sites == []
        results.append((output, *gradients, *inside))
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))
    assert torch.equal(results[0][0], results[0][-2])


def test_wrong_shapes_are_named() -> None:
    query, key, value, log_decay, beta = inputs(6, 3, 3, 4, 4, seed=0)
    packing = Packing.from_lengths([6])
    with pytest.raises(ValueError, match=r"heads a multiple of key_heads, but got query \(6, 2, 4\)"):
        gated_delta(query[:, :2], key[:, :2], value, log_decay, beta, packing)
    with pytest.raises(ValueError, match="holds 5 tokens, but there are values of 6"):
        gated_delta(query, key, value, log_decay, beta, Packing.from_lengths([5]))
    with pytest.raises(ValueError, match="chunk=0"):
        gated_delta(query, key, value, log_decay, beta, packing, chunk=0)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[1], [300, 65, 64, 1, 128]])
def test_equals_the_recurrence_on_cuda_without_synchronising(lengths: list[int]) -> None:
    operands = inputs(sum(lengths), 4, 2, 64, 32, seed=0, decay=0.1, device="cuda")
    check(operands, lengths, 64, FP32)
    packing = Packing.from_lengths(lengths, "cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        output, states = gated_delta(*operands, packing, normalise=True, last_states=True)
        torch.autograd.grad((output.sum(), states.sum()), operands)
    finally:
        torch.cuda.set_sync_debug_mode("default")
