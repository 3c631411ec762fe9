"""Checks of the head kernels that store logits in 16 bits. `test_kernels.py` runs this file."""

import pytest
import torch

from postlude.ops.kernels import linear_logprobs_quantized as quantized
from postlude.ops.kernels import linear_logprobs_rows as triton_epilogue
from postlude.ops.linear_logprobs import resolved_call, torch_epilogue
from postlude.ops.linear_logprobs.statistics import Slab, TokenRows, Upstream, empty_state
from postlude.ops.linear_objective import linear_objective
from tests.ops.dense_head import Operands, assert_close, dense

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies no bf16


def quantized_head(columns: int, *, bias: bool, softcap: bool) -> tuple[Operands, TokenRows, torch.Tensor]:
    """Returns half-precision operands of six tokens, the other inputs, and the logits in float64."""
    operands = Operands.random(6, 16, columns + 3, bias=bias, device=DEVICE)
    operands.targets = torch.tensor([0, columns - 1, columns // 2, 1, 2, 3], device=DEVICE)
    operands.hidden = (8 * operands.hidden.detach()).to(HALF)
    operands.weight = operands.weight.detach().to(HALF)
    rows = TokenRows(operands.targets, torch.linspace(0.5, 2, 6, device=DEVICE), 0.4 if softcap else None)
    products = operands.hidden.double() @ operands.weight[:columns].double().t()
    return operands, rows, products


BIAS_AND_SOFTCAP = [(bias, softcap) for bias in (False, True) for softcap in (False, True)]
# Several programs decode a row of 4500 columns; which columns, depends on neither bias nor softcap. The interpreter
# takes ten seconds for it.
HEADS = [(columns, *pair) for columns in (5, 300) for pair in BIAS_AND_SOFTCAP]
HEADS += [(4500, *pair) for pair in (BIAS_AND_SOFTCAP if DEVICE == "cuda" else BIAS_AND_SOFTCAP[-1:])]


@pytest.mark.parametrize(("columns", "bias", "softcap"), HEADS)
def test_gradient_from_quantized_logits(columns: int, bias: bool, softcap: bool) -> None:
    """Quantised to 2⁻¹², then rounded to bf16, a relative error of 2⁻⁹. The softmax state is exact."""
    operands, rows, products = quantized_head(columns, bias=bias, softcap=softcap)
    shift = None if operands.bias is None else operands.bias.detach().contiguous()
    if shift is not None and columns > 5:
        shift[4] = -torch.inf
    slab = Slab(
        products=products,
        rows=TokenRows(rows.targets, rows.factor.double(), rows.inner),
        bias=None if shift is None else shift[:columns].double(),
        hidden=products,
        weight=products,
        row_range=slice(0, 6),
        column_range=slice(0, columns),
    )
    expected = empty_state(6, torch.float64, torch.device(DEVICE))
    torch_epilogue.accumulate(slab, expected, entropy=True)
    state = torch.full((4, 6), torch.nan, device=DEVICE)
    buffer = torch.zeros(6, -(-columns // 64) * 64, dtype=HALF, device=DEVICE)
    codes = buffer[:, :columns]
    partial, results = quantized.encode(operands.hidden, operands.weight, shift, rows, columns, codes, state)
    exact, triton_results = torch_epilogue.results(expected), triton_epilogue.results(state)
    for name in ("logprob", "entropy", "normalizer"):
        assert torch.equal(getattr(results, name), getattr(triton_results, name))
    for name in ("logprob", "entropy", "lse"):
        assert_close(getattr(results, name), getattr(exact, name), name, scale=float(exact.state.abs().max()))
    ones = torch.ones(6, device=DEVICE)
    upstream = Upstream(ones, ones, ones)
    expected_coefficients = torch_epilogue.coefficients(slab.rows, exact.normalizer, exact.entropy, upstream, None)
    gradient = torch_epilogue.differentiate(slab, expected_coefficients, torch.float64)
    actual = quantized.decode(codes, partial, rows, results, upstream, masked=bias)
    assert actual.data_ptr() == buffer.data_ptr()
    assert_close(actual, gradient, "gradient", within=2.0**-7)
    if shift is not None and columns > 5 and not softcap:  # a softcap makes minus infinity a number
        assert (actual[:, 4] == 0).all()


def test_quantized_logits_propagate_nan() -> None:
    operands, rows, _ = quantized_head(300, bias=False, softcap=False)
    operands.hidden[1, 1] = torch.nan
    state = torch.zeros(4, 6, device=DEVICE)
    codes = torch.zeros(6, 320, dtype=HALF, device=DEVICE)[:, :300]
    partial, results = quantized.encode(operands.hidden, operands.weight, None, rows, 300, codes, state)
    ones = torch.ones(6, device=DEVICE)
    assert results.logprob.isnan().tolist() == [False, True, False, False, False, False]
    gradient = quantized.decode(codes, partial, rows, results, Upstream(ones, None), masked=False)
    assert gradient.isnan().all(1).tolist() == gradient.isnan().any(1).tolist() == results.logprob.isnan().tolist()


@pytest.mark.parametrize("ignored", [False, True], ids=["all targets", "ignored"])
@pytest.mark.parametrize("memory_budget", [None, 4000], ids=["one slab", "slabs"])
def test_objective_from_quantized_logits(
    memory_budget: int | None, ignored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of `linear_objective`, as a GPU runs it: a few slabs, each rounded once when it is added."""
    monkeypatch.setattr(resolved_call, "operand_dtype", lambda dtype, _: dtype)
    operands = Operands.random(9, 16, 301, device=DEVICE)
    operands.targets[4] = -100 if ignored else 300
    operands.hidden = operands.hidden.detach().to(HALF).requires_grad_()
    operands.weight = operands.weight.detach().to(HALF).requires_grad_()

    def loss(logprob: torch.Tensor, entropy: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        return logprob * column - 0.1 * entropy

    options = {"softcap": 5.0, "temperature": 0.9, "vocab_size": 301}
    result = linear_objective(
        *operands.head,
        loss,
        operands.upstream[0],
        entropy=True,
        backend="triton",
        memory_budget=memory_budget,
        **options,
    )
    logprob, entropy, _ = dense(*operands.head, **options)
    exact = loss(logprob, entropy, operands.upstream[0].double()).sum()
    assert_close(result.loss, exact, "loss", scale=1.0)
    actual, want = (torch.autograd.grad(3 * total, operands.leaves()) for total in (result.loss, exact))
    for gradient, expected_gradient in zip(actual, want, strict=True):
        assert_close(gradient, expected_gradient, "gradient", within=2.0**-6)
