"""The fused head equals the dense head in float64, within its promised memory and products."""

import dataclasses
import functools
import inspect
import logging
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from postlude.ops.kernels import capabilities as backend
from postlude.ops.linear_logprobs import LogitConfig, linear_logprobs
from postlude.ops.linear_logprobs.logits import LogitOptions
from postlude.ops.linear_objective import linear_objective
from postlude.ops.logprobs_at import linear_logprobs_at
from tests.ops.dense_head import Operands, assert_close, assert_same_head, dense
from tests.ops.watch import Waits, Watch

fused = functools.partial(linear_logprobs, backend="torch")


def assert_equal_to_dense(operands: Operands, *, memory_budget: int | None = None, **options: Any) -> None:
    """The fused head with these options equals the dense one, results and gradients."""
    assert_same_head(functools.partial(fused, memory_budget=memory_budget, **options), operands, **options)


@st.composite
def heads(draw: st.DrawFn) -> tuple[Operands, dict[str, Any]]:
    tokens, features, vocabulary = draw(st.integers(0, 12)), draw(st.integers(1, 9)), draw(st.integers(1, 40))
    operands = Operands.random(tokens, features, vocabulary, bias=draw(st.booleans()), seed=draw(st.integers(0, 999)))
    real = draw(st.integers(1, vocabulary))
    operands.targets %= real
    ignored = draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens))
    operands.targets[torch.tensor(ignored, dtype=torch.bool)] = -100
    per_token = 0.5 + torch.rand(tokens, generator=torch.Generator().manual_seed(tokens))
    options = {
        "vocab_size": real,
        "temperature": draw(st.sampled_from([1.0, 0.7, per_token])) if tokens else 1.0,
        "logit_scale": draw(st.sampled_from([1.0, 0.5, 1.7])),
        "softcap": draw(st.sampled_from([None, 30.0, 2.0])),
        "memory_budget": draw(st.sampled_from([None, 1, 1000, 5000, 20000])),
    }
    return operands, options


@settings(max_examples=100)
@given(heads())
def test_equals_the_dense_head(head: tuple[Operands, dict[str, Any]]) -> None:
    operands, options = head
    assert_equal_to_dense(operands, **options)


@settings(max_examples=100)
@given(
    seed=st.integers(0, 999),
    exponent=st.integers(-8, 9),
    offset=st.sampled_from([0, -4096, 4096]),
    pattern=st.sampled_from(["random", "constant", "one hot"]),
    memory_budget=st.sampled_from([None, 1, 2000]),
)
def test_extreme_logits(seed: int, exponent: int, offset: int, pattern: str, memory_budget: int | None) -> None:
    """Small integers times powers of two are projected without rounding, so any error is the head's own."""
    operands = Operands.random(9, 4, 21, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randint(-4, 5, (9, 4), generator=generator).float()
    hidden[:, 0] = 1
    weight = torch.randint(-4, 5, (21, 4), generator=generator).float() * 2.0**exponent
    if pattern == "constant":
        weight[:] = weight[0]
    if pattern == "one hot":
        weight[:], weight[3, 0] = 0, 1024
    weight[:, 0] += offset  # moves every logit of a row alike: the softmax must not notice
    operands.hidden, operands.weight = hidden.requires_grad_(), weight.requires_grad_()
    assert_equal_to_dense(operands, memory_budget=memory_budget)


def test_very_negative_logits_do_not_underflow() -> None:
    """A running maximum that starts at 0 would underflow them all (seen in a peer's kernel)."""
    operands = Operands.random(5, 4, 19)
    with torch.no_grad():  # whole numbers, so that -3000 takes no digits from them
        operands.hidden.round_()
        operands.weight.round_()
    operands.bias = torch.full((19,), -3000.0).requires_grad_()
    assert_equal_to_dense(operands, memory_budget=400)


@pytest.mark.parametrize("memory_budget", [None, 1])
def test_masking_with_minus_infinity(memory_budget: int | None) -> None:
    """A bias of -inf removes an entry from the vocabulary, and gives numbers where dense autograd gives NaN."""
    operands = Operands.random(6, 4, 11)
    masked = torch.arange(11) % 3 == 0
    operands.targets = torch.tensor([1, 2, 4, 5, 7, 8])

    def head(mask: float) -> tuple[Tensor, ...]:
        options = {"bias": torch.zeros(11).masked_fill_(masked, mask), "memory_budget": memory_budget}
        stats = fused(*operands.head, entropy=True, lse=True, **options)
        results = (stats.logprob, stats.entropy, stats.lse)
        return *results, *operands.gradients(results)

    for removed, unlikely in zip(head(-torch.inf), head(-1e4), strict=True):
        assert_close(removed, unlikely, "result or gradient")


def test_float64_passes_gradcheck() -> None:
    operands = Operands.random(5, 3, 7, bias=True)
    hidden, weight, bias = (leaf.detach().double().requires_grad_() for leaf in operands.leaves())
    temperature = torch.linspace(0.5, 1.5, 5)
    operands.targets[2] = -100

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        options = {"temperature": temperature, "softcap": 3.0, "logit_scale": 1.3, "memory_budget": 700}
        stats = fused(hidden, weight, operands.targets, bias=bias, entropy=True, lse=True, **options)
        return stats.logprob, stats.entropy, stats.lse

    assert function(hidden, weight, bias)[0].dtype == torch.float64
    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


@pytest.mark.parametrize("part", [0, 1, 2])
def test_each_result_has_its_gradient_when_used_alone(part: int) -> None:
    operands = Operands.random(7, 4, 13)
    stats = fused(*operands.head, entropy=True, lse=True)
    exact = dense(*operands.head)
    gradients = torch.autograd.grad((stats.logprob, stats.entropy, stats.lse)[part].sum(), operands.leaves())
    want = torch.autograd.grad(exact[part].sum(), operands.leaves())
    for name, gradient, expected_gradient in zip(("hidden", "weight"), gradients, want, strict=True):
        assert_close(gradient, expected_gradient, name)


def test_gradients_add_up_when_results_are_used_twice() -> None:
    operands = Operands.random(6, 4, 13)
    first, second = (fused(*operands.head).logprob.sum() for _ in range(2))
    once = torch.autograd.grad(first, operands.leaves(), retain_graph=True)
    repeated = torch.autograd.grad(first + 2 * second, operands.leaves())
    for gradient, repeated_gradient in zip(once, repeated, strict=True):
        assert_close(repeated_gradient, 3 * gradient, "gradient")


def test_strides_and_leading_dimensions() -> None:
    operands = Operands.random(12, 6, 17)
    hidden = operands.hidden.detach().view(3, 4, 6).transpose(0, 1)
    weight = operands.weight.detach().t().contiguous().t()
    targets = operands.targets.view(3, 4).t()
    temperature = torch.linspace(0.5, 2.0, 12).view(3, 4).t()
    assert not hidden.is_contiguous()
    assert not weight.is_contiguous()
    strided = Operands(
        hidden.requires_grad_(), weight.requires_grad_(), None, targets, tuple(torch.randn(3, 4, 3).unbind(-1))
    )
    strided.upstream = tuple(up.t() for up in strided.upstream)
    for memory_budget in (None, 500):
        assert_equal_to_dense(strided, temperature=temperature, memory_budget=memory_budget)


def test_hidden_states_of_ignored_positions_are_never_read() -> None:
    operands = Operands.random(8, 4, 13)
    operands.targets[[1, 4, 5]] = -100
    with torch.no_grad():
        operands.hidden[[1, 4, 5]] = torch.nan
    stats = fused(*operands.head, entropy=True, lse=True, top1=True, topk=2)
    for row in (stats.logprob, stats.entropy, stats.lse, stats.top1, stats.topk_logprobs, stats.topk_ids):
        assert not row[[1, 4, 5]].any()
        assert torch.isfinite(row).all()
    gradients = torch.autograd.grad((stats.logprob + stats.entropy).sum(), operands.leaves())
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert not gradients[0][[1, 4, 5]].any()


@pytest.mark.parametrize("tokens", [0, 5])
def test_batch_without_targets_gives_zero(tokens: int) -> None:
    """And no division by zero (seen in a peer)."""
    operands = Operands.random(tokens, 4, 13, bias=True)
    operands.targets[:] = -100
    stats = fused(*operands.head, bias=operands.bias, entropy=True, lse=True)
    gradients = torch.autograd.grad((stats.logprob + stats.entropy + stats.lse).sum(), operands.leaves())
    for tensor in (stats.logprob, stats.entropy, stats.lse, *gradients):
        assert not tensor.any()


def test_an_ignore_index_within_the_vocabulary() -> None:
    operands = Operands.random(8, 4, 13)
    operands.targets[::2] = 3
    stats = fused(*operands.head, ignore_index=3)
    expected, _, _ = dense(*operands.head, ignore_index=3)
    assert_close(stats.logprob, expected, "logprob")
    assert not stats.logprob[::2].any()


@pytest.mark.parametrize("memory_budget", [None, 1, 300])
def test_padded_vocabulary_columns_are_excluded(memory_budget: int | None) -> None:
    operands = Operands.random(6, 4, 16, bias=True)
    operands.targets %= 11
    with torch.no_grad():
        operands.weight[11:] = torch.nan
    call = functools.partial(fused, vocab_size=11, memory_budget=memory_budget)
    stats = call(*operands.head, bias=operands.bias, topk=11)
    gradients = torch.autograd.grad(stats.logprob.sum(), operands.leaves())
    assert not gradients[1][11:].any()
    assert not gradients[2][11:].any()
    assert all(torch.isfinite(tensor).all() for tensor in (stats.logprob, stats.topk_logprobs, *gradients))
    assert stats.topk_ids.max() == 10


def test_nan_is_propagated() -> None:
    operands = Operands.random(4, 4, 13)
    with torch.no_grad():
        operands.hidden[2, 1] = torch.nan
    stats = fused(*operands.head, entropy=True)
    assert stats.logprob.isnan().tolist() == stats.entropy.isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize("memory_budget", [None, 1, 400])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_top_k_and_hit(memory_budget: int | None, softcap: float | None) -> None:
    operands = Operands.random(9, 5, 23)
    logits = operands.hidden.double() @ operands.weight.double().t()
    operands.targets[:4] = logits.argmax(1)[:4]
    options = {"topk": 5, "top1": True, "temperature": 0.7, "softcap": softcap, "memory_budget": memory_budget}
    stats = fused(*operands.head, **options)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    values, ids = (logits / 0.7).log_softmax(1).topk(5, dim=1)
    assert torch.equal(stats.topk_ids, ids)
    assert_close(stats.topk_logprobs, values, "top-k")
    assert not stats.topk_logprobs.requires_grad
    assert torch.equal(stats.top1, operands.targets == logits.argmax(1))


@pytest.mark.parametrize(
    ("hidden_dtype", "weight_dtype"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
def test_mixed_dtypes(hidden_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """Results are exact for the values given; every gradient has its own tensor's dtype, rounded once."""
    operands = Operands.random(10, 8, 31, bias=True)
    operands.hidden = operands.hidden.detach().to(hidden_dtype).requires_grad_()
    operands.weight = operands.weight.detach().to(weight_dtype).requires_grad_()
    for memory_budget in (None, 3000):
        call = functools.partial(fused, memory_budget=memory_budget, entropy=True, lse=True, bias=operands.bias)
        stats = call(*operands.head)
        exact = dense(*operands.head, bias=operands.bias)
        for row, expected in zip((stats.logprob, stats.entropy, stats.lse), exact, strict=True):
            assert row.dtype == torch.float32
            assert_close(row, expected, "result")
        gradients = operands.gradients((stats.logprob, stats.entropy, stats.lse))
        for leaf, gradient, want in zip(operands.leaves(), gradients, operands.gradients(exact), strict=True):
            assert gradient.dtype == leaf.dtype
            # One rounding to bf16 is half a unit in the last place, 2^-9 of the value.
            assert_close(gradient, want, "gradient", within=1e-5 if leaf.dtype == torch.float32 else 2.0**-8)


def test_autocast_does_not_change_the_head() -> None:
    operands = Operands.random(10, 8, 31)
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal_to_dense(operands, memory_budget=3000)


# What it does not do.


def test_full_logits_are_never_allocated() -> None:
    tokens, features, vocabulary = 64, 8, 1000
    operands = Operands.random(tokens, features, vocabulary)
    with Watch() as watch:
        stats = fused(*operands.head, entropy=True, topk=3, memory_budget=200_000)
        (stats.logprob + stats.entropy).sum().backward()
    assert watch.largest <= tokens * vocabulary // 3
    assert watch.projections(features) > 6


def test_forward_saves_only_inputs_and_a_few_numbers_per_token() -> None:
    operands = Operands.random(64, 8, 300)
    operands.targets[::2] = -100
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        fused(*operands.head, entropy=True, lse=True)
    inputs = {operands.hidden.data_ptr(), operands.weight.data_ptr()}
    assert sum(tensor.numel() for tensor in saved if tensor.data_ptr() not in inputs) <= 4 * 64


@pytest.mark.parametrize(
    ("frozen", "backward"), [("", 3), ("hidden", 2), ("weight", 2)], ids=["none", "hidden", "weight"]
)
@pytest.mark.parametrize("memory_budget", [None, 30_000])
def test_frozen_operand_needs_no_gemm(frozen: str, backward: int, memory_budget: int | None) -> None:
    operands = Operands.random(32, 8, 300)
    if frozen:
        getattr(operands, frozen).requires_grad_(False)
    with Watch() as forward:
        stats = fused(*operands.head, memory_budget=memory_budget)
    with Watch() as watch:
        stats.logprob.sum().backward()
    slabs = watch.projections(8)
    assert len(forward.products) == forward.projections(8)
    assert len(watch.products) == backward * slabs
    assert (slabs == 1) == (memory_budget is None)
    frozen_gradients = [leaf.grad is None for leaf in operands.leaves()]
    assert frozen_gradients == [frozen == "hidden", frozen == "weight"]


def test_without_gradients_there_is_no_graph() -> None:
    operands = Operands.random(8, 4, 13)
    with torch.no_grad():
        assert not fused(*operands.head).logprob.requires_grad
    frozen = (operands.hidden.detach(), operands.weight.detach())
    assert not fused(*frozen, operands.targets).logprob.requires_grad


def test_ignored_positions_are_not_projected() -> None:
    operands = Operands.random(32, 8, 300)
    with Watch() as every:
        fused(*operands.head)
    operands.targets[::2] = -100
    with Watch() as half:
        fused(*operands.head)
    assert half.operations * 2 == every.operations


# What it says.


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"targets": torch.tensor([0, 13, 2])},
            r"target 13 at position 1 is outside the vocabulary, 0 to 12 .*ignore_",
        ),
        ({"targets": torch.tensor([0, 1, -1])}, "target -1 at position 2 is outside the vocabulary"),
        ({"vocab_size": 9}, r"target 12 at position 0 is outside the vocabulary, 0 to 8 \(1 such of 3\)"),
        ({"targets": torch.tensor([0, 1])}, r"targets \[2\] must have one entry for each of hidden's \[3\] tokens"),
        ({"targets": torch.zeros(3)}, "integer dtype"),
        ({"weight": torch.zeros(13, 5)}, r"hidden \[3, 4\] and weight \[13, 5\] do not fit"),
        ({"bias": torch.zeros(12)}, r"bias \[12\] must have one entry for each of weight's 13 rows"),
        ({"temperature": 0.0}, "temperature must be above 0, but is 0.0"),
        ({"temperature": torch.tensor([1.0, 0.0, 1.0])}, "not at 1 of them"),
        ({"temperature": torch.ones(2)}, "one entry for each of 3 tokens"),
        ({"softcap": 0.0}, "softcap must be above 0"),
        ({"topk": 14}, "between 0 and the vocabulary's 13 entries"),
        ({"backend": "cuda"}, "the head's backend is 'cuda', but the choices are 'auto', 'torch', 'triton', 'logits'"),
        ({"backend": "logits", "memory_budget": 9}, 'memory_budget is 9, but backend="logits" holds all logits'),
        ({"memory_budget": 0}, "memory_budget must be above 0"),
        ({"target_count": 4}, "target_count is 4, but there are 3 targets"),
        (
            {"topk": 13, "vocab_size": 12, "targets": torch.tensor([0, 1, 2])},
            "topk must be between 0 and the vocabulary's 12 entries",
        ),
        ({"topk": 14, "vocab_size": 99}, "13 entries"),
    ],
)
def test_invalid_arguments_give_clear_errors(change: dict[str, Any], sentence: str) -> None:
    hidden, weight, targets = torch.randn(3, 4), torch.randn(13, 4), torch.tensor([12, 1, 2])
    arguments = {"hidden": hidden, "weight": weight, "targets": targets, **change}
    with pytest.raises(ValueError, match=sentence):
        linear_logprobs(**arguments)


PROMISED = {"every": torch.tensor([12, 1, 2]), "some": torch.tensor([12, -100, 2]), "none": torch.full((3,), -100)}


@pytest.mark.parametrize("targets", PROMISED.values(), ids=PROMISED)
def test_given_target_count_avoids_synchronisation(targets: Tensor) -> None:
    results, waits = [], []
    for count in (None, int((targets != -100).sum())):
        operands = Operands.random(3, 4, 13)
        with Waits() as watch:
            stats = fused(operands.hidden, operands.weight, targets, entropy=True, lse=True, target_count=count)
            (stats.logprob + stats.entropy + stats.lse).sum().backward()
        results.append((stats.logprob, stats.entropy, stats.lse, operands.hidden.grad, operands.weight.grad))
        waits.append(len(watch.sites))
    assert waits == [1, 0]
    for counted, given_count in zip(*results, strict=True):
        assert torch.equal(counted, given_count)


@pytest.mark.parametrize(
    ("targets", "target_count", "temperature"),
    [
        ([0, 13, 2], 3, [1.0, 1.0, 1.0]),
        ([0, 13, -100], 2, [1.0, 1.0, 1.0]),
        ([0, 13, -100], 1, [1.0, 1.0, 1.0]),
        ([0, 1, -100], 1, [1.0, 1.0, 1.0]),
        ([0, 1, -100], 3, [1.0, 1.0, 1.0]),
        ([0, 1, 2], 0, [1.0, 1.0, 1.0]),
        ([-100, -100, -100], 2, [1.0, 1.0, 1.0]),
        ([0, 1, 2], 3, [1.0, 0.0, 1.0]),
    ],
    ids=["outside", "outside but counted", "outside", "too few", "too many", "none", "none there", "cold"],
)
def test_a_wrong_target_count_makes_nan(targets: list[int], target_count: int, temperature: list[float]) -> None:
    """A wrong count cannot go unnoticed: loss and gradients are NaN."""
    operands = Operands.random(3, 4, 13)
    stats = fused(
        operands.hidden,
        operands.weight,
        torch.tensor(targets),
        temperature=torch.tensor(temperature),
        target_count=target_count,
        entropy=True,
    )
    for row in (stats.logprob, stats.entropy):
        assert row.isnan().any()
    stats.logprob.sum().backward()
    if target_count:
        assert operands.weight.grad.isnan().all()
        assert operands.hidden.grad.isnan().any()


def test_invalid_temperature_at_an_ignored_token_is_accepted() -> None:
    stats = fused(torch.randn(2, 4), torch.randn(13, 4), torch.tensor([1, -100]), temperature=torch.tensor([1.0, 0.0]))
    assert torch.isfinite(stats.logprob).all()


def test_auto_logs_once_why_it_uses_torch(caplog: pytest.LogCaptureFixture) -> None:
    backend._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger=backend.log.name):
        for _ in range(3):
            linear_logprobs(torch.randn(2, 4), torch.randn(13, 4), torch.tensor([1, 2]))
    assert [record.getMessage() for record in caplog.records] == [
        "linear_logprobs uses the torch backend: the tensors are on cpu, not cuda"
    ]


def test_second_derivative_is_refused() -> None:
    operands = Operands.random(3, 4, 7)
    stats = linear_logprobs(*operands.head)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(stats.logprob.sum(), operands.hidden, create_graph=True)


def test_logit_options_equal_the_config_fields() -> None:
    fields = {field.name: field.type for field in dataclasses.fields(LogitConfig)}
    assert fields == {name: annotation.__forward_arg__ for name, annotation in LogitOptions.__annotations__.items()}
    assert LogitConfig.__doc__ is not None
    assert all(f"\n        {name}: " in LogitConfig.__doc__ for name in fields)
    for function in (linear_logprobs, linear_objective, linear_logprobs_at):
        assert not set(fields) & set(inspect.signature(function).parameters), function


@pytest.mark.parametrize("function", ["linear_logprobs", "linear_objective", "linear_logprobs_at"])
def test_options_object_equals_keywords_and_unknown_keyword_is_refused(function: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(5, 4, generator=generator), torch.randn(7, 4, generator=generator)
    targets, ids = torch.tensor([0, 6, -100, 3, 2]), torch.tensor([[1], [0], [5], [6], [2]])
    call = {
        "linear_logprobs": lambda **options: linear_logprobs(hidden, weight, targets, **options).logprob,
        "linear_objective": lambda **options: (
            linear_objective(hidden, weight, targets, lambda logprob, _, __: -logprob, **options).token_loss
        ),
        "linear_logprobs_at": lambda **options: linear_logprobs_at(hidden, weight, targets, ids, **options)[1],
    }[function]
    keywords = {"temperature": 0.7, "softcap": 2.0, "logit_scale": 1.5, "vocab_size": 7}
    expected = call(**keywords)
    assert not torch.equal(expected, call())
    torch.testing.assert_close(call(logit_config=LogitConfig(**keywords)), expected, rtol=0, atol=0)
    torch.testing.assert_close(
        call(logit_config=LogitConfig(**{**keywords, "softcap": 9.0}), softcap=2.0), expected, rtol=0, atol=0
    )
    with pytest.raises(TypeError, match="temprature"):
        call(temprature=0.7)
