"""Checks of the kernels of experts with few rows, against float64. `test_kernels.py` runs this file, on a GPU or in
Triton's interpreter, which must be chosen before triton is first imported."""

from typing import Any

import pytest
import torch
from torch import Tensor

from postlude.ops.activation import activate
from postlude.ops.decode_experts import ChosenExperts, ExpertMLPs, add_experts, choose_experts, decodes_experts
from postlude.ops.decode_linear import COUNTERS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies no bf16
WITHIN = 2.0**-7 if DEVICE == "cuda" else 2.0**-9  # features, rows, weights and the sum are rounded


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (scale * drawn).to(DEVICE, HALF)


def make_experts(count: int, hidden: int, inner: int, *, gated: bool, biased: bool, **options: Any) -> ExpertMLPs:
    gate, up = (normal(count, inner, hidden, seed=seed, scale=hidden**-0.5) for seed in (1, 2))
    down = normal(count, hidden, inner, seed=3, scale=inner**-0.5)
    biases = [normal(count, size, seed=4 + size) if biased else None for size in (inner, inner, hidden)]
    return ExpertMLPs(gate if gated else None, up, down, biases[0] if gated else None, *biases[1:], **options)


def exact_output(tokens: Tensor, choice: Tensor, weights: Tensor, experts: ExpertMLPs) -> Tensor:
    """Returns the weighted sum of each token's experts, in float64."""

    def product(rows: Tensor, weight: Tensor, bias: Tensor | None, expert: int) -> Tensor:
        result = rows @ weight[expert].double().T
        return result if bias is None else result + bias[expert].double()

    output = torch.zeros_like(tokens, dtype=torch.float64)
    for expert in range(len(experts.up)):
        token, slot = (choice == expert).nonzero(as_tuple=True)
        rows = tokens[token].double()
        features = product(rows, experts.up, experts.up_bias, expert)
        if experts.gate is not None:
            gate = product(rows, experts.gate, experts.gate_bias, expert)
            if experts.limit is not None:
                gate, features = gate.clamp(max=experts.limit), features.clamp(-experts.limit, experts.limit)
            activated = gate * (experts.alpha * gate).sigmoid() if experts.alpha != 1.0 else None
            activated = activate(gate, experts.activation) if activated is None else activated
            features = activated * (features + experts.up_offset)
        else:
            features = activate(features, experts.activation)
        outputs = product(features, experts.down, experts.down_bias, expert)
        output.index_add_(0, token, outputs * weights[token, slot, None].double())
    return output


PLAIN: dict[str, Any] = {"gated": True, "biased": False, "activation": "silu"}
GPT_OSS: dict[str, Any] = {
    "gated": True, "biased": True, "activation": "silu", "alpha": 1.702, "limit": 2.0, "up_offset": 1.0
}  # fmt: skip
UNGATED: dict[str, Any] = {"gated": False, "biased": False, "activation": "relu2"}


@pytest.mark.parametrize(
    ("tokens", "count", "top_k", "hidden", "inner", "kind"),
    [(3, 6, 2, 64, 48, PLAIN), (40, 5, 3, 80, 64, GPT_OSS), (17, 4, 4, 144, 96, UNGATED), (70, 3, 1, 64, 64, PLAIN)],
)
def test_experts_equal_float64(tokens: int, count: int, top_k: int, hidden: int, inner: int, kind: Any) -> None:
    """With most rows at one expert and perhaps none at another. The counters are zero again afterwards."""
    experts, normed = make_experts(count, hidden, inner, **kind), normal(tokens, hidden, seed=8)
    residual = normal(tokens, hidden, seed=9)
    shared = normal(tokens, hidden, seed=10) if kind is GPT_OSS else None
    logits = torch.randn(tokens, count, generator=torch.Generator().manual_seed(11)).to(DEVICE)
    logits[:, 1] += 3.0
    counters = torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE)
    assert decodes_experts(residual, top_k, experts, None, backend="triton")
    chosen = choose_experts(logits, None, counters, top_k, softmax=True, normalise=True, scale=1.0, dtype=HALF)
    assert torch.equal(chosen.counts.long(), chosen.choice.flatten().bincount(minlength=count))
    exact = residual.double() + exact_output(normed, chosen.choice, chosen.weights, experts)
    actual = add_experts(residual.clone(), normed, chosen, experts, shared)
    exact = exact if shared is None else exact + shared.double()
    assert actual.dtype == HALF
    off = float((actual.double() - exact).norm() / exact.norm())
    assert off <= WITHIN, f"off by {off:.1e}"
    assert not counters.any()


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("experts", "top_k"), [(8, 3), (5, 5), (33, 2)])
def test_choice_equals_torch(experts: int, top_k: int, scores: str) -> None:
    """Also with a bias that the choice alone has, of either sign. Of equal experts the first is chosen."""
    generator, tokens = torch.Generator().manual_seed(0), 6
    logits, bias = torch.randn(tokens, experts, generator=generator), torch.randn(experts, generator=generator)
    logits[0] = 0.5
    for used in (None, bias.to(DEVICE)):
        counters = torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE)
        options: dict[str, Any] = {"softmax": scores == "softmax", "normalise": used is None, "scale": 2.5}
        chosen = choose_experts(logits.to(DEVICE), used, counters, top_k, dtype=torch.float32, **options)
        values = logits.softmax(-1) if scores == "softmax" else logits.sigmoid()
        ranking = values if used is None else values + bias
        expected = ranking.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
        weights = values.gather(-1, expected)
        weights = weights / weights.sum(-1, keepdim=True) if used is None else weights
        assert torch.equal(chosen.choice.cpu(), expected)
        torch.testing.assert_close(chosen.weights.cpu(), weights * 2.5, rtol=1e-5, atol=1e-6)
        for expert, count in enumerate(chosen.counts.tolist()):
            slots = sorted(chosen.slots[expert, :count].tolist())
            assert slots == (expected.flatten() == expert).nonzero()[:, 0].tolist()


def test_order_of_rows_does_not_change_results() -> None:
    experts, normed, residual = make_experts(4, 128, 64, **PLAIN), normal(50, 128, seed=8), normal(50, 128, seed=9)
    logits = torch.randn(50, 4, generator=torch.Generator().manual_seed(11)).to(DEVICE)
    counters = torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE)
    chosen = choose_experts(logits, None, counters, 2, softmax=True, normalise=True, scale=1.0, dtype=HALF)
    turned = chosen.slots.clone()
    for expert, count in enumerate(chosen.counts.tolist()):
        turned[expert, :count] = turned[expert, :count].flip(0)
    other = ChosenExperts(chosen.choice, chosen.weights, turned, chosen.counts.clone())
    first = add_experts(residual.clone(), normed, chosen, experts, None)
    assert torch.equal(add_experts(residual.clone(), normed, other, experts, None), first)


def test_nan_affects_only_its_token() -> None:
    experts, normed, residual = make_experts(4, 64, 32, **PLAIN), normal(6, 64, seed=8), normal(6, 64, seed=9)
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(11)).to(DEVICE)
    normed[2, 5], logits[4] = torch.nan, torch.nan
    counters = torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE)
    chosen = choose_experts(logits, None, counters, 2, softmax=True, normalise=True, scale=1.0, dtype=HALF)
    output = add_experts(residual, normed, chosen, experts, None)
    assert output.isnan().any(1).tolist() == [False, False, True, False, True, False]


def test_unsupported_experts_are_refused() -> None:
    residual = normal(3, 64, seed=1)
    with pytest.raises(RuntimeError, match=r"features of experts are no multiples of 16: \[40, 64\]"):
        decodes_experts(residual, 2, make_experts(4, 64, 40, **PLAIN), None, backend="triton")
    bias = torch.zeros(4, dtype=HALF, device=DEVICE)
    with pytest.raises(RuntimeError, match="the selection bias is in torch"):
        decodes_experts(residual, 2, make_experts(4, 64, 48, **PLAIN), bias, backend="triton")
