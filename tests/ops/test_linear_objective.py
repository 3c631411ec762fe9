"""The single-pass objective equals statistics, objective and backward run one after another."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from postlude.ops.linear_logprobs import linear_logprobs
from postlude.ops.linear_objective import linear_objective
from tests.ops.dense_head import Operands, assert_close
from tests.ops.watch import Watch

fused = functools.partial(linear_objective, backend="torch")


@dataclass(frozen=True)
class PolicyColumns:
    old_logprobs: Tensor
    advantages: Tensor
    clip: float = 0.2


def policy_loss(logprob: Tensor, entropy: Tensor | None, columns: PolicyColumns) -> Tensor:
    """The clipped policy loss with an entropy bonus, as a user would write it."""
    ratio = (logprob - columns.old_logprobs).exp()
    clipped = ratio.clamp(1 - columns.clip, 1 + columns.clip)
    loss = -torch.minimum(ratio * columns.advantages, clipped * columns.advantages)
    return loss if entropy is None else loss - 0.1 * entropy


def policy_columns(operands: Operands) -> PolicyColumns:
    with torch.no_grad():
        old = linear_logprobs(*operands.head, backend="torch").logprob
    return PolicyColumns(old + 0.2 * operands.upstream[0], operands.upstream[1])


def two_passes(operands: Operands, columns: PolicyColumns, **options: Any) -> tuple[Tensor, Tensor]:
    stats = linear_logprobs(*operands.head, bias=operands.bias, backend="torch", **options)
    losses = torch.where(operands.targets != -100, policy_loss(stats.logprob, stats.entropy, columns), 0.0)
    return losses.sum(), losses


@settings(max_examples=60)
@given(
    tokens=st.integers(0, 14),
    vocabulary=st.integers(1, 40),
    seed=st.integers(0, 999),
    bias=st.booleans(),
    entropy=st.booleans(),
    softcap=st.sampled_from([None, 3.0]),
    ignored=st.integers(0, 4),
    memory_budget=st.sampled_from([None, 1, 4000]),
)
def test_equals_two_passes(
    tokens: int,
    vocabulary: int,
    seed: int,
    bias: bool,
    entropy: bool,
    softcap: float | None,
    ignored: int,
    memory_budget: int | None,
) -> None:
    operands = Operands.random(tokens, 5, vocabulary, bias=bias, seed=seed)
    columns = policy_columns(operands)
    operands.targets[:ignored] = -100
    options = {"entropy": entropy, "softcap": softcap, "temperature": 0.8, "vocab_size": vocabulary}
    result = fused(*operands.head, policy_loss, columns, bias=operands.bias, memory_budget=memory_budget, **options)
    expected, losses = two_passes(operands, columns, **options)
    assert_close(result.loss, expected, "loss", scale=1.0)
    assert_close(result.token_loss, losses, "token losses", scale=1.0)
    gradients = torch.autograd.grad(3 * result.loss, operands.leaves())
    want = torch.autograd.grad(3 * expected, operands.leaves())
    for name, gradient, expected_gradient in zip(("hidden", "weight", "bias"), gradients, want, strict=False):
        assert_close(gradient, expected_gradient, f"gradient of {name}", scale=1.0)


@pytest.mark.parametrize("memory_budget", [None, 20_000])
def test_bf16_gradients_are_summed_in_fp32_and_rounded_once(memory_budget: int | None) -> None:
    operands = Operands.random(40, 8, 300)
    columns = policy_columns(operands)
    operands.hidden = operands.hidden.detach().bfloat16().requires_grad_()
    operands.weight = operands.weight.detach().bfloat16().requires_grad_()
    exact = Operands(
        operands.hidden.detach().double().requires_grad_(),
        operands.weight.detach().double().requires_grad_(),
        None,
        operands.targets,
        operands.upstream,
    )
    result = fused(*operands.head, policy_loss, columns, memory_budget=memory_budget)
    expected, _ = two_passes(exact, columns)
    assert_close(result.loss, expected, "loss")
    gradients = torch.autograd.grad(0.3 * result.loss, operands.leaves())
    want = torch.autograd.grad(0.3 * expected, exact.leaves())
    for gradient, expected_gradient in zip(gradients, want, strict=True):
        assert gradient.dtype == torch.bfloat16
        assert_close(gradient, expected_gradient, "gradient", within=2.0**-8)


@pytest.mark.parametrize("memory_budget", [None, 20_000])
def test_three_products_per_slab(memory_budget: int | None) -> None:
    """Logits, dX and dW: no slab is projected twice."""
    operands = Operands.random(40, 8, 300)
    with Watch() as watch:
        result = fused(*operands.head, lambda logprob, _, __: -logprob, memory_budget=memory_budget)
        result.loss.backward()
    assert watch.operations == 3 * 40 * 8 * 300
    assert (watch.projections(8) == 1) == (memory_budget is None)
    if memory_budget is not None:
        assert watch.largest < 40 * 300


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_operand_needs_no_gemm(frozen: str) -> None:
    operands = Operands.random(40, 8, 300)
    getattr(operands, frozen).requires_grad_(False)
    with Watch() as watch:
        fused(*operands.head, lambda logprob, _, __: -logprob).loss.backward()
    assert watch.operations == 2 * 40 * 8 * 300


def test_without_gradients_only_statistics_are_computed() -> None:
    operands = Operands.random(10, 4, 23)
    columns = policy_columns(operands)
    call = functools.partial(fused, *operands.head, policy_loss, columns)
    with torch.no_grad():
        quiet = call(lse=True, top1=True)
    loud = call(lse=True, top1=True)
    assert not quiet.loss.requires_grad
    assert loud.loss.requires_grad
    assert not loud.token_loss.requires_grad
    assert not loud.stats.logprob.requires_grad
    assert_close(quiet.loss, loud.loss, "loss")
    assert_close(quiet.stats.lse, loud.stats.lse, "lse")
    assert torch.equal(quiet.stats.top1, loud.stats.top1)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def test_columns_of_every_kind() -> None:
    operands = Operands.random(10, 4, 23)
    operands.targets[3] = -100
    first, two, _ = operands.upstream
    wide = torch.stack((first, two), 1)
    kinds = {
        "tensor": (wide, lambda c: c[:, 0] + c[:, 1]),
        "mapping": ({"one": first, "two": two}, lambda c: c["one"] + c["two"]),
        "tuple": ((first, [two]), lambda c: c[0] + c[1][0]),
        "named tuple": (Pair(first, two), lambda c: c.first + c.second),
        "dataclass": (PolicyColumns(first, two), lambda c: c.old_logprobs + c.advantages),
        "scalars too": ((first, two, torch.tensor(1.0), 1.0, None), lambda c: c[0] * c[2] + c[1] * c[3]),
    }
    losses = {}
    for kind, (columns, weigh) in kinds.items():
        losses[kind] = fused(
            *operands.head, lambda logprob, _, c, weigh=weigh: logprob * weigh(c), columns, memory_budget=3000
        ).loss
    for kind, loss in losses.items():
        assert_close(loss, losses["tensor"], kind)


def test_leading_dimensions() -> None:
    operands = Operands.random(12, 4, 23)
    shaped = fused(
        operands.hidden.view(3, 4, 4),
        operands.weight,
        operands.targets.view(3, 4),
        lambda logprob, _, c: logprob * c,
        operands.upstream[0].view(3, 4),
    )
    flat = fused(*operands.head, lambda logprob, _, c: logprob * c, operands.upstream[0])
    assert shaped.token_loss.shape == shaped.stats.logprob.shape == (3, 4)
    assert_close(shaped.token_loss.flatten(), flat.token_loss, "token losses")


def test_an_objective_may_ignore_the_logprob() -> None:
    operands = Operands.random(6, 4, 23)
    for objective in (lambda logprob, _, c: c, lambda logprob, entropy, _: entropy):
        result = fused(*operands.head, objective, operands.upstream[0], entropy=True)
        gradients = torch.autograd.grad(result.loss, operands.leaves())
        assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_invalid_arguments_give_clear_errors() -> None:
    operands = Operands.random(6, 4, 23)
    call = functools.partial(fused, *operands.head)
    with pytest.raises(ValueError, match=r"one loss a token, \[6\], but returned \[\].*Leave the sum"):
        call(lambda logprob, _, __: logprob.mean())
    with pytest.raises(ValueError, match=r"columns hold a tensor \[5\], which does not begin with targets' \[6\]"):
        call(lambda logprob, _, c: logprob * c, torch.zeros(5))


@pytest.mark.parametrize("frozen", [False, True], ids=["one sweep", "two passes"])
def test_no_gradient_reaches_the_columns(frozen: bool) -> None:
    operands = Operands.random(4, 3, 9)
    weight = operands.upstream[0].clone().requires_grad_()
    hidden = operands.hidden.detach() if frozen else operands.hidden
    head = operands.weight.detach() if frozen else operands.weight
    result = linear_objective(hidden, head, operands.targets, lambda logprob, _, column: logprob * column, weight)
    assert result.loss.requires_grad != frozen
    if not frozen:
        result.loss.backward()
    assert weight.grad is None


def test_an_objective_that_returns_no_tensor_is_refused() -> None:
    operands = Operands.random(4, 3, 9)
    with pytest.raises(TypeError, match="must return a tensor of losses, but returned a float"):
        linear_objective(*operands.head, lambda *_: 1.0)


@pytest.mark.parametrize("ignored", [0, 9])
@pytest.mark.parametrize("one_sweep", [True, False])
def test_weight_gradient_is_added_to_main_grad(one_sweep: bool, ignored: int) -> None:
    """Scaled by the loss's own gradient. The gradient of the hidden states is as without main_grad."""
    gradients = []
    for has_main_grad, is_empty in ((False, False), (True, False), (True, True)):
        operands = Operands.random(9, 5, 23, seed=1)
        columns = policy_columns(operands)
        operands.targets[:ignored] = -100
        before = torch.zeros_like(operands.weight) if is_empty else torch.ones_like(operands.weight)
        total = torch.full_like(before, torch.nan) if is_empty else before.clone()
        if has_main_grad:
            operands.weight.main_grad = total  # type: ignore[attr-defined]
            operands.weight.main_grad_is_empty = is_empty  # type: ignore[attr-defined]
        arguments = operands.head
        loss = fused(*arguments, policy_loss, columns).loss if one_sweep else two_passes(operands, columns)[0]
        (0.3 * loss).backward()
        assert (operands.weight.grad is None) == has_main_grad
        gradients.append((operands.hidden.grad, total - before if has_main_grad else operands.weight.grad))
    for name, expected, actual, written in zip(("hidden", "weight"), *gradients, strict=True):
        assert_close(actual, expected, name)
        assert_close(written, expected, name)
