"""Checks of the head's row kernels. `test_kernels.py` runs this file, on a GPU or in the interpreter.

The interpreter must be chosen before triton is first imported, so these checks have a process of their own.
"""

import functools
from typing import Any

import pytest
import torch

from postlude.ops.kernels import linear_logprobs_fused as fused_kernels
from postlude.ops.kernels import linear_logprobs_quantized as quantized
from postlude.ops.kernels import linear_logprobs_rows as triton_epilogue
from postlude.ops.linear_logprobs import linear_logprobs, torch_epilogue
from postlude.ops.linear_logprobs.statistics import (
    LOWEST,
    TARGET,
    SelectionRule,
    Slab,
    TokenRows,
    Upstream,
    empty_state,
)
from postlude.ops.linear_objective import linear_objective
from tests.ops.dense_head import Operands, assert_close, assert_same_head

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies no bf16

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
    """The vocabulary is no multiple of a block: columns past its end must not count (seen in a peer's kernel)."""
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
        options = {"topk": 4, "top1": True, "softcap": 4.0, "backend": backend, "memory_budget": 900}
        results.append(linear_logprobs(*operands.head, **options))
    triton_result, torch_result = results
    assert torch.equal(triton_result.topk_ids, torch_result.topk_ids)
    assert torch.equal(triton_result.top1, torch_result.top1)
    best = fused(operands.hidden, operands.weight, triton_result.topk_ids[:, 0], top1=True)
    assert best.top1.all()


def test_nan_is_propagated() -> None:
    operands = Operands.random(3, 4, 30, device=DEVICE)
    with torch.no_grad():
        operands.hidden[1, 1] = torch.nan
    stats = fused(*operands.head, entropy=True)
    assert stats.logprob.isnan().tolist() == stats.entropy.isnan().tolist() == [False, True, False]


def test_masking_with_minus_infinity() -> None:
    operands = Operands.random(4, 4, 300, device=DEVICE)
    operands.targets = torch.tensor([1, 2, 4, 299], device=DEVICE)
    bias = torch.zeros(300, device=DEVICE).masked_fill_(torch.arange(300, device=DEVICE) % 3 == 0, -torch.inf)
    results = []
    for mask in (bias, bias.clamp(min=-1e4)):
        stats = fused(*operands.head, bias=mask, entropy=True, lse=True)
        rows = (stats.logprob, stats.entropy, stats.lse)
        results.append((*rows, *operands.gradients(rows)))
    for removed, unlikely in zip(*results, strict=True):
        assert_close(removed, unlikely, "result or gradient")


@pytest.mark.parametrize("tokens", [0, 1, 50, triton_epilogue.SELECTION_BLOCK + 37])
@pytest.mark.parametrize("per_token", [False, True])
def test_target_selection_equals_torch(tokens: int, per_token: bool) -> None:
    """Some targets are ignored, some outside the vocabulary, some temperatures not above 0, and a shard starts late."""
    generator = torch.Generator().manual_seed(tokens)
    targets = torch.randint(-3, 40, (tokens,), generator=generator).to(DEVICE)
    temperature = torch.randint(-1, 9, (2 * tokens,), generator=generator).to(DEVICE, torch.float32)[::2]
    arguments = (targets, temperature if per_token else 0.7, 1.3)
    rule = SelectionRule(7, (2, 33), 2, torch.float32, None)
    triton_selection, torch_selection = (
        module.select(*arguments, rule) for module in (triton_epilogue, torch_epilogue)
    )
    assert triton_selection.counts.tolist() == torch_selection.counts.tolist()
    selected = slice(0, int(triton_selection.counts[0]))
    for name in ("positions", "targets", "factor"):
        # A factor within two roundings: a number over a tensor is, in torch, its inverse times the number.
        torch.testing.assert_close(
            getattr(triton_selection, name)[selected], getattr(torch_selection, name)[selected], rtol=2.0**-22, atol=0
        )


@pytest.mark.parametrize("target_count", [3, 4, 5])
@pytest.mark.parametrize("wrong", [None, "outside", "cold"])
def test_a_target_count_is_checked_on_the_device(target_count: int, wrong: str | None) -> None:
    """Four of six tokens have a target. Whatever the count, each entry before it holds a position."""
    targets = torch.tensor([3, 7, 5, 4, 7, 6], device=DEVICE)
    temperature = torch.ones(6, device=DEVICE)
    if wrong == "outside":
        targets[2] = 50
    if wrong == "cold":
        temperature[3] = 0
    for module in (triton_epilogue, torch_epilogue):
        rule = SelectionRule(7, (2, 33), 2, torch.float32, target_count)
        selection = module.select(targets, temperature, 1.3, rule)
        is_valid = wrong is None and target_count == 4
        assert bool(selection.wrong_count) != is_valid
        assert selection.factor[:target_count].isnan().tolist() == [not is_valid] * target_count
        assert ((selection.positions[:target_count] >= 0) & (selection.positions[:target_count] < 6)).all()
        if is_valid:
            assert selection.positions[:4].tolist() == [0, 2, 3, 5]


@pytest.mark.parametrize("requested", ["logprob", "entropy", "lse", "everything"])
@pytest.mark.parametrize("inner", [None, 0.4])
def test_results_and_coefficients_equal_torch(requested: str, inner: float | None) -> None:
    """Upstream gradients have their own strides and cover only some of the tokens."""
    count = triton_epilogue.ROW_BLOCK + 5
    generator = torch.Generator().manual_seed(2)
    state = torch.randn(4, count, generator=generator).exp().to(DEVICE)
    state[2].neg_()
    rows = TokenRows(torch.zeros(count, dtype=torch.int64, device=DEVICE), state[3].clone(), inner)
    positions = torch.randperm(2 * count, generator=generator)[:count].sort().values.to(DEVICE)
    arriving = torch.randn(2 * count, 3, generator=generator).to(DEVICE)
    gradients = dict(zip(("logprob", "entropy", "lse"), arriving.unbind(1), strict=True))
    if requested != "everything":
        gradients = {name: row if name == requested else None for name, row in gradients.items()}
    outputs = []
    for module in (triton_epilogue, torch_epilogue):
        results = module.results(state)
        for places in (None, positions):
            upstream = {n: row if row is None or places is not None else row[:count] for n, row in gradients.items()}
            coefficients = module.coefficients(rows, results.normalizer, results.entropy, Upstream(**upstream), places)
            outputs.append((results.logprob, results.entropy, results.lse, coefficients))
    for triton_answer, torch_answer in zip(outputs[:2], outputs[2:], strict=True):
        for name, actual, want in zip(
            ("logprob", "entropy", "lse", "coefficients"), triton_answer, torch_answer, strict=True
        ):
            assert_close(actual, want, name)


@pytest.mark.parametrize("tokens", [slice(0, 5), slice(4, 5)], ids=["some", "one"])
def test_shard_without_the_target_reports_it(tokens: slice) -> None:
    """For any previous contents of memory, and for launches of one tile or one token."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(size, 16, generator=generator).to(DEVICE, dtype) for size in (5, 300))
    logits = hidden.double() @ weight.double().t()
    targets = torch.tensor([0, 299, 140, 300, -3], device=DEVICE)
    at_target = logits.gather(1, targets.clamp(0, 299)[:, None])[:, 0]
    at_target[3:] = LOWEST
    rows = TokenRows(targets, torch.ones(5, device=DEVICE), None)[tokens]
    state = torch.full((4, rows.targets.shape[0]), torch.nan, device=DEVICE)
    for columns in (slice(0, 128), slice(128, 300)):
        fused_kernels.accumulate(hidden[tokens], weight, None, rows, columns, state)
    torch.testing.assert_close(state[TARGET].double(), at_target[tokens], rtol=1e-5, atol=1e-5)
    assert_close(torch_epilogue.results(state).lse, logits[tokens].logsumexp(1), "lse")


def make_slab(columns: int) -> Slab:
    """Returns five rows whose targets lie before, in and past the slab, in a buffer with padding on the right."""
    generator = torch.Generator().manual_seed(1)
    buffer = torch.randn(5, columns + 27, generator=generator).to(DEVICE) * 3
    factor = torch.linspace(0.5, 2, 5, device=DEVICE)
    targets = torch.tensor([3, 10, 10 + columns - 1, 10 + columns, 12], device=DEVICE)
    products = buffer[:, :columns]
    return Slab(
        products=products,
        rows=TokenRows(targets, factor, None),
        bias=None,
        hidden=products,
        weight=products,
        row_range=slice(0, 5),
        column_range=slice(10, 10 + columns),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [5, 300, 5000])
def test_in_place_gradient_equals_torch(columns: int, dtype: torch.dtype) -> None:
    """Half-precision gradients overwrite logits of the same row that the kernel still has to read."""
    state = empty_state(5, torch.float32, torch.device(DEVICE))
    torch_epilogue.accumulate(make_slab(columns), state, entropy=True)
    running_state = empty_state(5, torch.float32, torch.device(DEVICE))
    slab = make_slab(columns)
    triton_epilogue.accumulate(slab, running_state, entropy=True)
    assert_close(running_state, state, "state")
    results = torch_epilogue.results(state)
    ones = torch.ones(5, device=DEVICE)
    upstream = Upstream(ones, ones, ones)
    coefficients = torch_epilogue.coefficients(slab.rows, results.normalizer, results.entropy, upstream, None)
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
    outputs = []
    for backend in ("torch", "triton"):
        result = linear_objective(
            *operands.head,
            lambda logprob, entropy, c: logprob.exp() * c - 0.1 * entropy,
            operands.upstream[0],
            bias=operands.bias,
            entropy=True,
            backend=backend,
            memory_budget=memory_budget,
        )
        outputs.append((result.loss, result.token_loss, *torch.autograd.grad(result.loss, operands.leaves())))
    for triton_answer, torch_answer in zip(*outputs, strict=True):
        assert_close(triton_answer, torch_answer, "loss or gradient", scale=0.1)


@pytest.mark.parametrize("factor", [1.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradient_is_scaled_in_place(factor: float, dtype: torch.dtype) -> None:
    size = 2 * triton_epilogue.SCALE_BLOCK * triton_epilogue.SCALE_BLOCKS + 5
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    expected = tensor.float() * factor
    assert triton_epilogue.scale(tensor, torch.tensor(factor, device=DEVICE)) is tensor
    assert_close(tensor.float(), expected, "scaled", within=1e-6 if dtype == torch.float32 else 2.0**-7)


def test_target_outside_the_vocabulary_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """target_count is larger than the number of targets: uninitialised memory is not read as a target."""
    vocabulary, count, garbage = 300, 4, 320 * 1500 + 7
    memory = torch.zeros(count + 2000, 320, dtype=HALF, device=DEVICE)  # the slab, and what lies behind it
    empty_like = torch.empty_like

    def poisoned(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        created = empty_like(tensor, **options)
        return created.fill_(garbage) if created.dtype == torch.int64 else created

    monkeypatch.setattr(torch, "empty_like", poisoned)
    selection = triton_epilogue.select(
        torch.tensor([5, 17, vocabulary + 3, 9], device=DEVICE),
        *(1.0, 1.0),
        SelectionRule(-100, (0, vocabulary), 0, torch.float32, count),
    )
    monkeypatch.undo()
    assert selection.wrong_count
    assert selection.targets.tolist() == [5, 17, 9, 0]
    assert selection.factor.isnan().all()
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 16, generator=generator).to(DEVICE, HALF) for size in (count, vocabulary))
    for targets in (selection.targets, torch.tensor([5, -1, garbage, 9], device=DEVICE)):
        rows = TokenRows(targets, selection.factor, None)
        codes, state = memory[:count, :vocabulary], torch.empty(4, count, device=DEVICE)
        partial, results = quantized.encode(hidden, weight, None, rows, vocabulary, codes, state)
        upstream = Upstream(torch.ones(count, device=DEVICE), None)
        quantized.decode(codes, partial, rows, results, upstream, masked=False)
        assert not memory[count:].any()
        assert codes.isnan().all()  # whoever looks, sees that something is wrong
