"""Triton's norm, gated activation and rotary embedding equal torch in float64, forward and every gradient.

Run in a process of their own, through the interpreter or on a GPU: see `kernel_checks`.
"""

import pytest
import torch
from torch import Tensor

from postlude.ops.activation import gated_activation, gated_linear
from postlude.ops.linear import defer_wgrad, flush_wgrad
from postlude.ops.norm import rms_norm, rms_norm_with_residual
from postlude.ops.rotary import HeadNorms, RotaryConfig, rotary_table, rotate_heads
from tests.equality import assert_equal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
# A bf16 result is rounded once, by 2^-9 of a number at most; the interpreter cuts off instead.
# Every case is compiled for itself, so bf16 is looked at in one of each kind.
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 2**-8 if DEVICE == "cuda" else 2**-7}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def random_tensor(*shape: int, seed: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return values.to(DEVICE, dtype).requires_grad_()


def compare(function, reference, inputs: list[Tensor | None], tolerance: float) -> None:
    """Compares outputs and gradients of `function` with those of `reference` on the same inputs in float64."""
    exact = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in inputs]
    actual, expected = function(*inputs), reference(*exact)
    upstream = [torch.randn(tensor.shape, generator=torch.Generator().manual_seed(9)).to(tensor) for tensor in actual]
    gradients = torch.autograd.grad(actual, [tensor for tensor in inputs if tensor is not None], upstream)
    expected_gradients = torch.autograd.grad(
        expected, [tensor for tensor in exact if tensor is not None], [tensor.double() for tensor in upstream]
    )
    for index, (a, b) in enumerate(zip((*actual, *gradients), (*expected, *expected_gradients), strict=True)):
        assert_equal(a, b, f"result {index}", tolerance)
    for a, b in zip(gradients, (tensor for tensor in inputs if tensor is not None), strict=True):
        assert a.dtype == b.dtype
    with torch.no_grad():  # nothing is kept, and nothing is different
        for a, b in zip(function(*inputs), actual, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(
    "shape", [(9, 96), (3, 5, 33), (1, 2048), (70, 16) if DEVICE == "cpu" else (70_000, 16)], ids=str
)
def test_norm(shape, offset: float) -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    for dtype, of_weight in [(fp32, fp32)] if shape != (9, 96) else [(fp32, fp32), (bf16, bf16), (bf16, fp32)]:
        tolerance = TOLERANCES[dtype]
        vectors = random_tensor(*shape, seed=0, dtype=dtype, scale=3.0)
        weight = random_tensor(shape[-1], seed=1, dtype=of_weight)
        compare(
            lambda x, w: [rms_norm(x, w, EPS, offset, backend="triton")],
            lambda x, w: [rms_norm(x, w, EPS, offset, backend="torch")],
            [vectors, weight],
            tolerance,
        )
        compare(
            lambda x, w: rms_norm_with_residual(x * 1, w, EPS, offset, backend="triton"),
            lambda x, w: [x, rms_norm(x, w, EPS, offset, backend="torch")],
            [vectors, weight],
            tolerance,
        )


def test_norm_of_strided_rows() -> None:
    """A slice of a wider projection, and an expanded gradient."""
    wide, weight = random_tensor(7, 50, seed=0, dtype=torch.float32), random_tensor(40, seed=1, dtype=torch.float32)
    gradients = torch.autograd.grad(rms_norm(wide[:, 3:43], weight, EPS, backend="triton").sum(), [wide, weight])
    expected_gradients = torch.autograd.grad(
        rms_norm(wide[:, 3:43], weight, EPS, backend="torch").sum(), [wide, weight]
    )
    for actual, expected in zip(gradients, expected_gradients, strict=True):
        assert_equal(actual, expected)


def test_gradient_accumulation_in_fp32() -> None:
    """Gradients of bf16 weights are accumulated in fp32 without intermediate rounding."""
    rows, table = (
        random_tensor(6, 3, 16, seed=0, dtype=torch.float32),
        rotary_table(RotaryConfig(), torch.arange(6), 16),
    )
    table = tuple(tensor.to(DEVICE) for tensor in table)
    weights = [random_tensor(16, seed=seed, dtype=torch.bfloat16) for seed in (1, 2)]

    def run(backend: str, used: list[Tensor]) -> None:
        normed = rms_norm(rows, used[0], EPS, backend=backend)
        turned = rotate_heads(rows, normed, table, HeadNorms(*used, EPS), backend=backend)
        (turned[0] * normed + turned[1].square()).sum().backward()

    exact = [weight.detach().float().requires_grad_() for weight in weights]
    run("torch", exact)
    for weight in weights:
        weight.main_grad = torch.ones(16, device=DEVICE)
    run("triton", weights)
    for weight, expected_weight in zip(weights, exact, strict=True):
        assert weight.grad is None
        assert_equal(weight.main_grad - 1, expected_weight.grad)


def test_norm_with_residual_when_one_output_is_unused() -> None:
    vectors, weight = random_tensor(5, 24, seed=0, dtype=torch.float32), random_tensor(24, seed=1, dtype=torch.float32)
    residual, normed = rms_norm_with_residual(vectors * 1, weight, EPS, backend="triton")
    (alone,) = torch.autograd.grad(residual.square().sum(), vectors, retain_graph=True)
    assert torch.equal(alone, 2 * vectors)
    gradient = torch.autograd.grad(normed.square().sum(), vectors)[0]
    expected_gradient = torch.autograd.grad(rms_norm(vectors, weight, EPS, backend="torch").square().sum(), vectors)[0]
    assert_equal(gradient, expected_gradient)


@pytest.mark.parametrize(
    ("activation", "shape", "dtype"),
    [
        *((activation, (5, 48), torch.float32) for activation in ("silu", "gelu", "gelu_tanh", "relu2", "sigmoid")),
        *(("silu", shape, torch.bfloat16) for shape in ((2, 3, 33), (3, 3072), (1, 130))),
    ],
    ids=str,
)
def test_gated(shape, activation: str, dtype: torch.dtype) -> None:
    gate, up = (random_tensor(*shape, seed=seed, dtype=dtype, scale=2.0) for seed in (0, 1))
    for gate_or_none in (gate, None):
        compare(
            lambda g, u: [gated_activation(g, u, activation, backend="triton")],
            lambda g, u: [gated_activation(g, u, activation, backend="torch")],
            [gate_or_none, up],
            TOLERANCES[dtype],
        )


@DTYPES
@pytest.mark.parametrize("deferred", [False, True])
def test_linear_of_gated_activation(deferred: bool, dtype: torch.dtype) -> None:
    """The activations are recomputed for the weight's gradient, immediately or deferred."""
    gate, up = (random_tensor(5, 48, seed=seed, dtype=dtype) for seed in (0, 1))
    weight, bias = random_tensor(7, 48, seed=2, dtype=dtype), random_tensor(7, seed=3, dtype=dtype)

    def run(inputs: list[Tensor | None], backend: str, later: list | None) -> list[Tensor | None]:
        used = [None if tensor is None else tensor.detach().requires_grad_() for tensor in inputs]
        with defer_wgrad(later):
            gate, up, *bias_inputs = used
            product = gated_linear(gate, up, "silu", *bias_inputs, backend=backend)
        product.backward(torch.linspace(-1, 1, product.numel()).view(product.shape).to(product))
        flush_wgrad(later or [])
        return [product, *(None if tensor is None else tensor.grad for tensor in used)]

    # Features and their gradients are rounded on the way to and from a product of 48.
    for gate_or_none in (gate, None):
        inputs = [gate_or_none, up, weight, bias]
        exact = [None if tensor is None else tensor.double() for tensor in inputs]
        results, expected_results = run(inputs, "triton", [] if deferred else None), run(exact, "torch", None)
        for index, (actual, expected) in enumerate(zip(results, expected_results, strict=True)):
            if expected is not None:
                assert_equal(actual, expected, f"result {index}", 2 * TOLERANCES[dtype])


def test_gated_activation_of_slices_of_one_product() -> None:
    gate_and_up = random_tensor(6, 96, seed=0, dtype=torch.float32)
    gradient = torch.autograd.grad(
        gated_activation(*gate_and_up.chunk(2, -1), "silu", backend="triton").sum(), gate_and_up
    )[0]
    expected_gradient = torch.autograd.grad(
        gated_activation(*gate_and_up.chunk(2, -1), "silu", backend="torch").sum(), gate_and_up
    )[0]
    assert_equal(gradient, expected_gradient)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "turned", "dtype"),
    [
        (3, 1, 12, 12, torch.float32),
        (5, 5, 24, 8, torch.float32),
        (20, 4, 128, 128, torch.bfloat16),
        (2, 1, 256, 64, torch.float32),
    ],
)
def test_rotated_heads(heads: int, kv_heads: int, width: int, turned: int, dtype: torch.dtype, normed: bool) -> None:
    tokens = 6 if DEVICE == "cpu" else 1500  # more than programs, of which each then takes several
    query, key = (
        random_tensor(tokens, head_count, width, seed=head_count, dtype=dtype, scale=2.0)
        for head_count in (heads, kv_heads)
    )
    weights = [random_tensor(width, seed=seed, dtype=dtype) for seed in (1, 2)] if normed else []
    table = rotary_table(RotaryConfig(attention_factor=1.25), torch.arange(tokens, device=DEVICE) * 17, turned)
    exact = tuple(tensor.double() for tensor in table)

    def run(table, backend: str):
        def of(query: Tensor, key: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
            norms = HeadNorms(*weights, EPS, 1.0) if weights else None
            return rotate_heads(query, key, table, norms, backend=backend)

        return of

    compare(run(table, "triton"), run(exact, "torch"), [query, key, *weights], TOLERANCES[dtype])


def test_rotated_heads_of_one_product() -> None:
    """Queries and keys that are adjacent in memory are read in place."""
    packed = random_tensor(6, 7 * 16, seed=0, dtype=torch.float32)
    table = rotary_table(RotaryConfig(), torch.arange(6, device=DEVICE), 16)

    def run(backend: str) -> Tensor:
        heads = packed.unflatten(-1, (7, 16))
        turned = rotate_heads(heads[:, :4], heads[:, 4:6], table, backend=backend)
        return torch.autograd.grad(sum(part.square().sum() * (1 + part[..., 3].sum()) for part in turned), packed)[0]

    assert_equal(run("triton"), run("torch"))
