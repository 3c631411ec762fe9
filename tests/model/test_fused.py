"""A model's fused CUDA path, with torch in place of the kernels, equals its unfused path.

The kernels themselves are held to float64 in tests/ops; here it is how they are called: what is kept, what is made
again, what is added to what, and what is put off.
"""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from postlude import LanguageModel
from postlude.model.blocks import AttentionConfig
from postlude.model.schedule_plan import interleave
from postlude.ops import activation as gating
from postlude.ops import kernels, linear, norm, rotary
from tests.equality import assert_equal
from tests.model.small import small_config, small_microbatch

CONFIG = small_config(
    "[*-][S-][*E][M-]G+",
    norm_offset=1.0,
    blocks={"*": AttentionConfig(heads=4, kv_heads=2, head_dim=6, qk_norm="head", output_gate=True)},
)


def differentiated(function: Any, inputs: tuple[Tensor, ...], upstream: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        outputs = function(*leaves)
        return torch.autograd.grad(outputs, leaves, upstream)


def added(gradient: Tensor, total: Tensor | None) -> Tensor | None:
    if total is None:
        return gradient
    total.add_(gradient)
    return None


def fake_norm_kernels(module: Any) -> None:
    def backward(vectors, weight, eps, offset, gradient, beside, total):
        actual = differentiated(lambda x, w: norm._reference(x, w, eps, offset), (vectors, weight), (gradient,))
        return actual[0] if beside is None else actual[0] + beside, added(actual[1], total)

    module.forward, module.backward = norm._reference, backward


def fake_activation_kernels(module: Any) -> None:
    def forward(gate, up, activation):
        return gating.activate(up, activation) if gate is None else gating.activate(gate, activation) * up

    def backward(gate, up, activation, gradient, features):
        assert gate is not None
        actual = differentiated(lambda g, u: forward(g, u, activation), (gate, up), (gradient,))
        if features is not None:
            features.copy_(forward(gate, up, activation))
        return actual

    module.forward, module.backward = forward, backward


def fake_rotary_kernels(module: Any) -> None:
    def forward(query, key, table, weights, eps, offset):
        if weights is not None:
            query, key = (norm._reference(x, w, eps, offset) for x, w in zip((query, key), weights, strict=True))
        return rotary.rotate(query, table), rotary.rotate(key, table)

    def backward(query, key, table, weights, eps, offset, gradients, totals):
        if weights is None:
            zeros = torch.zeros_like(gradients[0]), torch.zeros_like(gradients[1])
            actual = differentiated(lambda q, k: forward(q, k, table, None, eps, offset), zeros, gradients)
            return *actual, None, None
        operands = (query, key, *weights)
        actual = differentiated(lambda q, k, *w: forward(q, k, table, w, eps, offset), operands, gradients)
        return *actual[:2], *(added(tensor, total) for tensor, total in zip(actual[2:], totals, strict=True))

    module.forward, module.backward = forward, backward


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behaves as on CUDA, except for the kernels."""
    fakes = {"norm": fake_norm_kernels, "activation": fake_activation_kernels, "rotary": fake_rotary_kernels}
    for name, fill in fakes.items():
        module = ModuleType(f"postlude.ops.kernels.{name}")
        fill(module)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(kernels, name, module, raising=False)
    for operations, name in ((norm, "uses_kernel"), (gating, "_use_kernel"), (rotary, "_use_kernel")):
        monkeypatch.setattr(operations, name, lambda *_: True)
    monkeypatch.setattr(linear, "_adds_in_product", lambda rows: rows.requires_grad and torch.is_grad_enabled())


def losses_and_gradients(recompute: Any = "none", *, plan: bool = False, total: bool = False) -> list[Tensor]:
    model = LanguageModel(CONFIG, recompute=recompute)
    for parameter in model.parameters() if total else ():
        parameter.grad = torch.zeros_like(parameter)
        parameter.main_grad = parameter.grad
    microbatch = small_microbatch(5, 1, 8, 3)
    if plan:
        plan_result = model.build_schedule_plan(microbatch, targets=True)
        losses = interleave(plan_result.forward_steps())[0]
        interleave(plan_result.backward_steps(losses.sum()))
    else:
        losses = model(microbatch, targets=True)
        losses.sum().backward()
    with torch.no_grad():
        assert torch.equal(model(microbatch, targets=True), losses)
    return [losses, *(parameter.grad for parameter in model.parameters())]


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    return losses_and_gradients()


@pytest.mark.parametrize(
    ("recompute", "plan"), [("none", False), ("selective", False), ("full", False), ("none", True)]
)
@pytest.mark.parametrize("total", [False, True])
def test_fused_equals_unfused(expected: list[Tensor], fused: None, recompute: str, plan: bool, total: bool) -> None:
    results = losses_and_gradients(recompute, plan=plan, total=total)
    for index, (actual, expected_tensor) in enumerate(zip(results, expected, strict=True)):
        assert_equal(actual, expected_tensor, f"result {index}")
