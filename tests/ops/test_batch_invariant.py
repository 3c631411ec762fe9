"""The batch-invariant kernels: checks in Triton's interpreter without a GPU, and on a GPU."""

import pytest
import torch

from postlude.ops.attention import ScoreConfig, attend, reference_attention
from postlude.ops.batch_invariant import batch_invariant, bind_batch_invariant, is_batch_invariant
from postlude.ops.linear import linear
from postlude.ops.linear_logprobs import linear_logprobs
from postlude.ops.linear_logprobs.invariant import invariant_logits, logprobs_of_logits
from postlude.ops.packing import Packing
from tests.equality import assert_equal


def test_mode_ends_with_its_context_and_is_kept_by_bound_functions() -> None:
    assert not is_batch_invariant()
    with batch_invariant(True):
        bound = bind_batch_invariant(is_batch_invariant)
        with batch_invariant(False):
            assert not is_batch_invariant()
        assert is_batch_invariant()
    assert not is_batch_invariant()
    assert bound()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_row_is_bit_identical_in_every_batch_on_cpu(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(size, 33, generator=generator).to(dtype) for size in (65, 70))
    with batch_invariant(True):
        full_output = linear(rows, weight)
        for start, stop in ((0, 1), (5, 12), (64, 65)):
            assert torch.equal(linear(rows[start:stop], weight), full_output[start:stop])
    assert_equal(
        full_output.float(), (rows.float() @ weight.float().t()), tolerance=1e-5 if dtype == torch.float32 else 1e-2
    )


def test_gradients_equal_those_without_the_mode() -> None:
    generator = torch.Generator().manual_seed(0)
    packing = Packing.from_lengths([5, 1, 9])
    rows, weight, bias, *parts = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((7, 12), (5, 12), (5,), (15, 4, 8), (15, 2, 8), (15, 2, 6), (4,))
    )
    scores = ScoreConfig(scale=0.3, window=4, softcap=2.0, sinks=parts.pop())
    inputs = [rows, weight, bias, *parts, scores.sinks]

    def gradients() -> list[torch.Tensor]:
        total = linear(rows, weight, bias).square().sum() + attend(*parts, packing, packing, scores).square().sum()
        return list(torch.autograd.grad(total, inputs))

    ordinary = gradients()
    with batch_invariant(True):
        for actual, expected in zip(gradients(), ordinary, strict=True):
            assert_equal(actual, expected, tolerance=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128, 256])
def test_bf16_attention_gradients_equal_those_without_the_mode(width: int) -> None:
    """bf16 keeps 8 bits: 2e-2 of the scale."""
    packing = Packing.from_lengths([300, 1, 777], "cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    parts = [
        torch.randn(packing.total, heads, width, generator=generator, device="cuda", requires_grad=True)
        for heads in (8, 4, 4)
    ]
    scores, probe = ScoreConfig(scale=0.1), torch.randn(packing.total, 8, width, generator=generator, device="cuda")
    exact = torch.autograd.grad(reference_attention(*parts, packing, packing, scores), parts, probe)
    half = [part.detach().bfloat16().requires_grad_() for part in parts]
    with batch_invariant(True):
        output = attend(*half, packing, packing, scores)
    for actual, expected in zip(torch.autograd.grad(output, half, probe.bfloat16()), exact, strict=True):
        assert_equal(actual.float(), expected, tolerance=2e-2)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("vocab", [40, 264, 5003])  # loads of rows this long are wider if the rows are aligned
def test_logprobs_of_logits_are_bit_identical_to_those_of_the_head(device: str, entropy: bool, vocab: int) -> None:
    hidden, weight = (torch.randn(count, 64, device=device).bfloat16() for count in (50, vocab))
    targets, temperature = torch.randint(vocab, (50,), device=device), 0.8
    with batch_invariant(True), torch.no_grad():
        expected = linear_logprobs(hidden, weight, targets, temperature=temperature, entropy=entropy).logprob
        logits = invariant_logits(hidden, weight)
        strided = torch.stack((logits, logits), 1)[:, 0]
        for rows in (logits, logits.contiguous(), strided, logits[:7]):
            count = len(rows)
            actual = logprobs_of_logits(rows, targets[:count], torch.full((count,), temperature, device=device))
            assert torch.equal(actual, expected[:count])
