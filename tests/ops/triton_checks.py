"""What the Triton kernels must do. `test_linear_triton.py` runs this file: on a GPU, or through Triton's interpreter.

The interpreter must be chosen before triton is first imported, so these checks have a process of their own.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from postlude.ops.linear_logprobs import linear_logprobs, torch_epilogue, triton_epilogue
from postlude.ops.linear_logprobs.statistics import (
    Results,
    Rows,
    Slab,
    Upstream,
    empty_state,
    gradient_coefficients,
)
from postlude.ops.linear_objective import linear_objective
from tests.ops.dense_head import Operands, assert_close, assert_same_head

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

fused = functools.partial(linear_logprobs, backend="triton")

OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 3.0, "logit_scale": 1.7},
    "silenced": {"softcap": 3.0, "logit_scale": 0.0},
    "temperature": {"temperature": torch.linspace(0.5, 1.5, 7, device=DEVICE), "vocab_size": 290},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("memory_budget", [None, 3000])
def test_equals_the_dense_head(options: dict[str, Any], bias: bool, memory_budget: int | None) -> None:
    """A vocabulary that fills no block: columns past its end must not be counted (seen in a peer's kernel)."""
    operands = Operands.random(7, 8, 301, bias=bias, device=DEVICE)
    operands.targets %= 290
    operands.targets[3] = -100
    assert_same_head(functools.partial(fused, memory_budget=memory_budget, **options), operands, **options)


@pytest.mark.parametrize("offset", [-3000.0, 0.0, 3000.0])
def test_extreme_logits(offset: float) -> None:
    operands = Operands.random(5, 4, 40, device=DEVICE)
    with torch.no_grad():
        operands.hidden.mul_(3).round_()
        operands.weight.mul_(3).round_()
    operands.bias = torch.full((40,), offset, device=DEVICE).requires_grad_()
    for memory_budget in (None, 200):
        assert_same_head(functools.partial(fused, memory_budget=memory_budget), operands)


def test_strided_operands() -> None:
    operands = Operands.random(7, 8, 300, device=DEVICE)
    operands.bias = torch.randn(600, generator=torch.Generator().manual_seed(0)).to(DEVICE)[::2].requires_grad_()
    operands.weight = operands.weight.detach().t().contiguous().t().requires_grad_()
    temperature = torch.tensor([0.5, 2.0] * 7, device=DEVICE)[::2]
    assert_same_head(functools.partial(fused, temperature=temperature), operands, temperature=temperature)


def test_rows_longer_than_a_block() -> None:
    columns = 2 * triton_epilogue.GRADIENT_BLOCK + 37
    operands = Operands.random(3, 4, columns, device=DEVICE)
    operands.targets = torch.tensor([0, columns - 1, triton_epilogue.GRADIENT_BLOCK], device=DEVICE)
    assert_same_head(fused, operands)


def test_top_k_and_hit_equal_the_torch_backend() -> None:
    operands = Operands.random(6, 5, 77, device=DEVICE)
    results = []
    for backend in ("torch", "triton"):
        options = {"topk": 4, "hit": True, "softcap": 4.0, "backend": backend, "memory_budget": 900}
        results.append(linear_logprobs(operands.hidden, operands.weight, operands.targets, **options))
    ours, theirs = results
    assert torch.equal(ours.topk_ids, theirs.topk_ids)
    assert torch.equal(ours.hit, theirs.hit)
    best = fused(operands.hidden, operands.weight, ours.topk_ids[:, 0], hit=True)
    assert best.hit.all()


def test_not_a_number_is_not_hidden() -> None:
    operands = Operands.random(3, 4, 30, device=DEVICE)
    with torch.no_grad():
        operands.hidden[1, 1] = torch.nan
    stats = fused(operands.hidden, operands.weight, operands.targets, entropy=True)
    assert stats.logprob.isnan().tolist() == stats.entropy.isnan().tolist() == [False, True, False]


def test_masking_with_minus_infinity() -> None:
    operands = Operands.random(4, 4, 300, device=DEVICE)
    operands.targets = torch.tensor([1, 2, 4, 299], device=DEVICE)
    bias = torch.zeros(300, device=DEVICE).masked_fill_(torch.arange(300, device=DEVICE) % 3 == 0, -torch.inf)
    results = []
    for mask in (bias, bias.clamp(min=-1e4)):
        stats = fused(operands.hidden, operands.weight, operands.targets, bias=mask, entropy=True, lse=True)
        rows = (stats.logprob, stats.entropy, stats.lse)
        results.append((*rows, *operands.gradients(rows)))
    for removed, unlikely in zip(*results, strict=True):
        assert_close(removed, unlikely, "result or gradient")


def make_slab(columns: int) -> Slab:
    """Five rows whose targets lie before, in and past the slab, in a buffer with room to the right."""
    generator = torch.Generator().manual_seed(1)
    buffer = torch.randn(5, columns + 27, generator=generator).to(DEVICE) * 3
    factor = torch.linspace(0.5, 2, 5, device=DEVICE)
    targets = torch.tensor([3, 10, 10 + columns - 1, 10 + columns, 12], device=DEVICE)
    products = buffer[:, :columns]
    return Slab(
        products=products,
        rows=Rows(targets, factor, factor, None),
        bias=None,
        hidden=products,
        weight=products,
        row_range=slice(0, 5),
        column_range=slice(10, 10 + columns),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [5, 300, 5000])
def test_the_gradient_in_place_equals_torch(columns: int, dtype: torch.dtype) -> None:
    """Half precision overwrites products of the same row that the kernel has yet to leave behind."""
    state = empty_state(5, torch.float32, torch.device(DEVICE))
    torch_epilogue.accumulate(make_slab(columns), state, entropy=True)
    ours = empty_state(5, torch.float32, torch.device(DEVICE))
    slab = make_slab(columns)
    triton_epilogue.accumulate(slab, ours, entropy=True)
    assert_close(ours, state, "state")
    results = Results.of(state)
    ones = torch.ones(5, device=DEVICE)
    coefficients = gradient_coefficients(slab.rows, results.normalizer, results.entropy, Upstream(ones, ones, ones))
    expected = torch_epilogue.differentiate(make_slab(columns), coefficients, torch.float32)
    actual = triton_epilogue.differentiate(slab, coefficients, dtype)
    assert actual.dtype == dtype
    assert actual.data_ptr() == slab.products.data_ptr()
    # Half precision is rounded to within 2^-8; the interpreter cuts digits off instead, which doubles that.
    assert_close(actual.float(), expected, "gradient", within=1e-5 if dtype == torch.float32 else 2.0**-7)


@pytest.mark.parametrize("memory_budget", [None, 20_000])
def test_objective_equals_the_torch_backend(memory_budget: int | None) -> None:
    operands = Operands.random(9, 6, 301, bias=True, device=DEVICE)
    operands.targets[4] = -100
    answers = []
    for backend in ("torch", "triton"):
        result = linear_objective(
            operands.hidden,
            operands.weight,
            operands.targets,
            lambda logprob, entropy, c: logprob.exp() * c - 0.1 * entropy,
            operands.upstream[0],
            bias=operands.bias,
            entropy=True,
            backend=backend,
            memory_budget=memory_budget,
        )
        answers.append((result.loss, result.token_loss, *torch.autograd.grad(result.loss, operands.leaves())))
    for ours, theirs in zip(*answers, strict=True):
        assert_close(ours, theirs, "loss or gradient", scale=0.1)
