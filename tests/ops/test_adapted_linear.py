"""Linear groups with adapters equal the formula, in the forward and in every gradient."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from postlude.model.recompute import recomputed
from postlude.ops.adapted_linear import AdapterOperand, _AdaptedLinears, adapted_linears
from postlude.ops.linear import DeferredWgrads, defer_wgrad, flush_wgrad
from postlude.options import Recompute
from tests.equality import assert_equal

SCALES = (0.5, 0.0, 1.0)  # the second layer has no adapter


class Layers:
    """Three layers of 6, 3 and 2 features, adjacent in memory, the first and last with adapters of rank 2 and 1."""

    def __init__(self, *, bias: bool) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.rows = random(5, 4).requires_grad_()
        self.weights = [part.requires_grad_() for part in random(11, 4).split([6, 3, 2])]
        self.biases = [random(6).requires_grad_(), None, random(2).requires_grad_()] if bias else [None] * 3
        self.a = [random(2, 4).requires_grad_(), None, random(1, 4).requires_grad_()]
        self.b = [random(6, 2).requires_grad_(), None, random(2, 1).requires_grad_()]

    def by_formula(self) -> list[Tensor]:
        outputs = []
        for weight, bias, a, b, scale in zip(self.weights, self.biases, self.a, self.b, SCALES, strict=True):
            output = self.rows @ weight.T + (0 if bias is None else bias)
            outputs.append(output if a is None else output + scale * (self.rows @ a.T) @ b.T)
        return outputs

    def adapted(self, rows: Tensor) -> tuple[Tensor, ...]:
        pairs = zip(self.a, self.b, SCALES, strict=True)
        adapters = [None if a is None else AdapterOperand(a, b, scale) for a, b, scale in pairs]
        return adapted_linears(rows, self.weights, self.biases, adapters)

    def gradients(self, outputs, queue: DeferredWgrads | None = None) -> list[Tensor]:
        torch.cat([output * index for index, output in enumerate(outputs, 1)], 1).square().sum().backward()
        flush_wgrad(queue or [])
        tensors = [self.rows, *self.weights, *self.biases, *self.a, *self.b]
        return [tensor.grad for tensor in tensors if tensor is not None]


@pytest.mark.parametrize("joins", [None, (False, False), (True, False), (True, True)])
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_gradients_equal_the_formula(joins: tuple[bool, bool] | None, deferred: bool, bias: bool) -> None:
    """With `joins`, as on CUDA, adjacent weights are one GEMM in forward and backward."""
    expected, layers = Layers(bias=bias), Layers(bias=bias)
    queue: DeferredWgrads | None = [] if deferred else None
    with defer_wgrad(queue):
        if joins is None:
            outputs = layers.adapted(layers.rows)
        else:
            operands = (*layers.weights, *layers.biases, *layers.a, *layers.b)
            outputs = _AdaptedLinears.apply(layers.rows, queue, *joins, SCALES, None, *operands)
    for actual, expected_output in zip(outputs, expected.by_formula(), strict=True):
        assert_equal(actual, expected_output, "output", 1e-14)
    pairs = zip(layers.gradients(outputs, queue), expected.gradients(expected.by_formula()), strict=True)
    for index, (actual, expected_output) in enumerate(pairs):
        assert_equal(actual, expected_output, f"gradient {index}", 1e-14)
    assert queue is None or len(queue) == 7


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_changes_no_result(recompute: Recompute) -> None:
    """Selective recompute keeps the outputs, so no layer's product is recomputed."""
    expected, layers = Layers(bias=True), Layers(bias=True)
    expected_gradients = expected.gradients(expected.adapted(expected.rows))
    with AdaptedLinearCount() as count:
        gradients = layers.gradients(recomputed(layers.adapted, recompute, layers.rows))
    for index, (actual, gradient) in enumerate(zip(gradients, expected_gradients, strict=True)):
        assert torch.equal(actual, gradient), index
    assert count.calls == (1 if recompute == "selective" else 2)


class AdaptedLinearCount(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += function is torch.ops.postlude.adapted_linears.default
        return function(*args, **(kwargs or {}))


def test_frozen_weights_get_no_gradient() -> None:
    layers = Layers(bias=False)
    for weight in layers.weights:
        weight.requires_grad_(False)
    layers.gradients(layers.adapted(layers.rows))
    assert all(weight.grad is None for weight in layers.weights)
    assert layers.rows.grad is not None
