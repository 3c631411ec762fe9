"""The head with all of its logits, and hidden states that are cast to the dtype of the head's weight."""

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from postlude.ops.batch_invariant import batch_invariant
from postlude.ops.linear_logprobs import linear_logprobs
from postlude.ops.linear_objective import linear_objective
from postlude.ops.logprobs_at import linear_logprobs_at
from tests.ops.dense_head import Operands, assert_close, assert_same_head, dense
from tests.ops.test_linear_logprobs import heads

plain = functools.partial(linear_logprobs, backend="logits")


@settings(max_examples=100)
@given(heads())
def test_plain_head_equals_the_dense_head(head: tuple[Operands, dict[str, Any]]) -> None:
    operands, options = head
    options.pop("memory_budget")
    assert_same_head(functools.partial(plain, **options), operands, **options)


def test_plain_head_has_all_results_of_the_fused_one() -> None:
    operands = Operands.random(6, 4, 11, bias=True)
    operands.targets[1] = -100
    with torch.no_grad():
        assert operands.bias is not None
        operands.bias[:3] = -torch.inf
    operands.targets[operands.targets >= 0] %= 8
    operands.targets[operands.targets >= 0] += 3
    results = {}
    for backend in ("logits", "torch"):
        stats = linear_logprobs(
            *operands.head, bias=operands.bias, entropy=True, lse=True, top1=True, topk=3, backend=backend
        )
        gradients = operands.gradients((stats.logprob, stats.entropy, stats.lse))
        results[backend] = {**vars(stats), **dict(zip(("hidden", "weight", "bias"), gradients, strict=True))}
    for name, expected in results["torch"].items():
        assert_close(results["logits"][name].double(), expected, name)


def loss(logprob: Tensor, entropy: Tensor | None, columns: Tensor) -> Tensor:
    return -(logprob * columns)


@pytest.mark.parametrize("changes", [{"backend": "logits"}, {"cast_hidden": True}], ids=str)
def test_objectives_and_given_ids_equal_those_of_the_fused_head(changes: dict[str, Any]) -> None:
    operands = Operands.random(6, 4, 11)
    operands.targets[1] = -100
    ids = torch.randint(11, (6, 3), generator=torch.Generator().manual_seed(1))
    results = []
    for options in ({}, changes):
        head = operands.head
        objective = linear_objective(*head, loss, operands.upstream[0], **options)
        stats, at = linear_logprobs_at(*head, ids, **options)
        totals = objective.loss, stats.logprob.sum() + at.sum()
        gradients = [gradient for total in totals for gradient in torch.autograd.grad(total, operands.leaves())]
        results.append([objective.token_loss, at, *gradients])
    for fused, other in zip(*results, strict=True):
        assert_close(other, fused, "result or gradient")


def test_wrong_target_count_makes_nan_and_batch_invariance_is_refused() -> None:
    operands = Operands.random(4, 4, 11)
    operands.targets[0] = -100
    call = functools.partial(plain, *operands.head)
    assert torch.equal(call(target_count=3).logprob, call().logprob)
    assert call(target_count=4).logprob.isnan().all()
    with batch_invariant(True), pytest.raises(ValueError, match=r'backend="logits" computes all tokens in one'):
        call()


def mixed(device: str, tokens: int, features: int, vocabulary: int) -> tuple[Operands, Operands]:
    """Returns fp32 hidden states with a bf16 weight, and the same with hidden states of the rounded values."""
    drawn = Operands.random(tokens, features, vocabulary, device=device)
    drawn.targets[::5] = -100
    drawn.weight = drawn.weight.detach().bfloat16().requires_grad_()
    rounded = Operands(**vars(drawn))
    rounded.hidden = drawn.hidden.detach().bfloat16().requires_grad_()
    return drawn, rounded


def test_cast_hidden_gives_the_bits_of_hidden_in_the_weights_dtype() -> None:
    drawn, rounded = mixed("cpu", 7, 16, 33)
    results = []
    for operands, options in ((drawn, {"cast_hidden": True}), (rounded, {}), (drawn, {})):
        stats = linear_logprobs(*operands.head, entropy=True, lse=True, **options)
        rows = stats.logprob, stats.entropy, stats.lse
        results.append([*rows, *operands.gradients(rows)])
    for name, cast, expected in zip(("logprob", "entropy", "lse", "hidden", "weight"), *results[:2], strict=True):
        assert torch.equal(cast, expected.to(cast.dtype)), name
    assert results[0][3].dtype == torch.float32, "the dtype of hidden"
    assert not torch.equal(results[0][0], results[2][0]), "without it, fp32 hidden states are not rounded"


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "torch", "logits"])
def test_cast_hidden_equals_float64_of_the_rounded_values_on_gpu(backend: Any) -> None:
    """Products of bf16 operands are exact in fp32, so log-probs differ by the rounding of their sums alone."""
    drawn, rounded = mixed("cuda", 384, 512, 9000)
    stats = linear_logprobs(*drawn.head, entropy=True, lse=True, backend=backend, cast_hidden=True)
    results = stats.logprob, stats.entropy, stats.lse
    exact = dense(*rounded.head)
    for name, result, want in zip(("logprob", "entropy", "lse"), results, exact, strict=True):
        off = float((result.double() - want).norm() / want.norm())
        assert off <= 1e-6, f"{name} is off by {off:.1e}"
    gradients, expected = drawn.gradients(results), rounded.gradients(exact)
    assert [gradient.dtype for gradient in gradients] == [torch.float32, torch.bfloat16]
    for name, gradient, want in zip(("hidden", "weight"), gradients, expected, strict=True):
        off = float((gradient.double() - want.double()).norm() / want.double().norm())
        assert off <= 3e-3, f"gradient of {name} is off by {off:.1e}"
