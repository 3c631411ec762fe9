"""Tests of the kernels of block-scaled FP8. `test_kernels.py` runs this file: on a GPU, or through Triton's
interpreter, which must be chosen before triton is first imported."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.ops import decode_linear
from postlude.ops.activation import gated_activation
from postlude.ops.adapted_linear import AdapterOperand
from postlude.ops.block_fp8 import FP8Weight, fp8_linear, fp8_linears, fp8_mlp, round_rows
from postlude.ops.decode_linear import COUNTERS, linear_add, mlp_add, norm_linear
from postlude.ops.kernels.capabilities import GPUS
from postlude.ops.low_rank import LowRank
from postlude.ops.norm import Norm, rms_norm
from tests.equality import assert_equal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def outlier_rows(count: int, width: int) -> Tensor:
    """Tokens of which every third is 1,000 times as large, with one feature 100 times as large as the others."""
    rows = normal(count, width, seed=1)
    rows[::3] *= 1e3
    rows[:, 5] *= 100
    return rows


def fp8(weight: Tensor) -> FP8Weight:
    quantized = FP8Weight.like(weight)
    quantized.write(weight)
    return quantized


@pytest.mark.parametrize(("backend", "gpu"), [("torch", "H200"), ("triton", "H200"), ("triton", "L40S")])
@pytest.mark.parametrize("count", [1, 16, 70, 130])
@pytest.mark.parametrize("case", ["plain", "norm", "residual"])
def test_products_equal_float64_products_of_rounded_tensors(
    backend, gpu: str, count: int, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tiles and loads of GPUs with and without a tensor memory accelerator."""
    if backend == "triton":
        monkeypatch.setattr("postlude.ops.kernels.block_fp8.gpu_of", lambda device: GPUS[gpu])
    check_product(backend, count, case)


def check_product(backend, count: int, case: str) -> None:
    width, features = (512, 256) if case == "residual" else (256, 384)
    rows, weight = outlier_rows(count, width), normal(features, width, seed=2)
    weight[:, 7] *= 300  # an outlier feature
    quantized = fp8(weight)
    norm = Norm(1 + 0.1 * normal(width, seed=3), 1e-6, 0.0) if case == "norm" else None
    residual = normal(count, features, seed=4) if case == "residual" else None
    counters = torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE) if case == "residual" else None
    expected = round_rows(rows if norm is None else rms_norm(rows, norm.weight, norm.eps)).double()
    expected = expected @ quantized.rounded(torch.float64).t()
    if residual is not None:
        expected += residual.double()
    before = None if residual is None else residual.clone()
    actual = fp8_linear(rows, quantized, norm=norm, residual=before, counters=counters, backend=backend)
    scale = expected.abs().amax(-1, keepdim=True)
    # A norm's last bit moves a value to the next FP8 number now and then: by an eighth of one of the products.
    # A Hopper's FP8 tensor cores add 128 products with fewer bits than fp32: cuBLAS's scaled_mm is as far from float64.
    tolerance = 2e-2 if norm is not None else 4e-3 if backend == "triton" and DEVICE == "cuda" else 1e-5
    assert ((actual - expected).abs() / scale).max() < tolerance
    if counters is not None:
        assert not counters.any()


@pytest.mark.parametrize("residual", [False, True])
def test_products_of_many_tokens_in_bf16(residual: bool) -> None:
    """On Hopper these are torch's products, whose tokens are padded."""
    rows, weight = outlier_rows(150, 512).bfloat16(), fp8(normal(256, 512, seed=2))
    added = normal(150, 256, seed=4).bfloat16() if residual else None
    actual = fp8_linear(rows, weight, residual=None if added is None else added.clone(), backend="triton")
    expected = round_rows(rows).double() @ weight.rounded(torch.float64).t() + (0 if added is None else added.double())
    assert actual.dtype == torch.bfloat16
    assert ((actual - expected).abs() / expected.abs().amax(-1, keepdim=True)).max() < 1e-2


@pytest.mark.parametrize("count", [1, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_mlp_equals_separate_products(count: int, dtype: torch.dtype) -> None:
    """One kernel applies the gate and rounds."""
    hidden, norm = 0.01 * normal(count, 256, seed=1).to(dtype), Norm(1 + 0.1 * normal(256, seed=3).to(dtype), 1e-6, 0.0)
    gate_and_up, down = fp8(normal(512, 256, seed=4).to(dtype) / 16), fp8(normal(256, 256, seed=5).to(dtype))
    counters = torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE)
    actual = fp8_mlp(hidden, norm, "silu", gate_and_up, down, counters=counters, backend="triton")
    gate, up = fp8_linear(hidden, gate_and_up, norm=norm, backend="triton").chunk(2, -1)
    features = gated_activation(gate, up, "silu", backend="triton")
    expected = fp8_linear(features, down, residual=hidden, backend="triton")
    error = (actual.float() - expected.float()).norm() / expected.float().norm()
    assert error < (3e-3 if dtype == torch.bfloat16 else 1e-5)
    assert not counters.any()


def test_fp8_weight_error_is_below_one_sixteenth() -> None:
    weight = normal(300, 200, seed=5)
    weight[130] *= 1e3
    quantized = fp8(weight)
    rounded = quantized.rounded(torch.float32)
    assert ((rounded - weight).abs() <= (weight.abs() / 16).maximum(weight.abs().amax() * 2**-17)).all()
    assert torch.equal(rounded.bfloat16().float(), rounded)
    rounded_twice = fp8(rounded)
    assert torch.equal(rounded_twice.values.view(torch.uint8), quantized.values.view(torch.uint8))


def test_adapters_and_biases_are_added_in_their_own_dtype() -> None:
    rows, weight, bias = outlier_rows(6, 256), normal(384, 256, seed=2), normal(128, seed=3)
    fp8_weight = fp8(weight)
    parts = fp8_weight.split([256, 128])
    adapter = AdapterOperand(normal(4, 256, seed=5), normal(256, 4, seed=6), 0.5)
    first, second = fp8_linears(rows, parts, [None, bias], [adapter, None])
    product = fp8_linear(rows, fp8_weight)
    assert_equal(first, product[:, :256] + 0.5 * rows @ adapter.a.t() @ adapter.b.t(), "adapter")
    assert_equal(second, product[:, 256:] + bias, "bias")


def test_decode_layers_with_fp8_weights_equal_their_parts() -> None:
    """The parts: a norm, the product, adapters, an activation or the residual."""
    rows, norm = normal(5, 256, seed=1), Norm(1 + 0.1 * normal(256, seed=2), 1e-6, 0.0)
    gate_up, down = fp8(normal(512, 256, seed=3)), fp8(normal(256, 256, seed=4))
    low = LowRank(normal(8, 256, seed=5), normal(512, 4, seed=6), (256, 256))
    low_down = LowRank(normal(4, 256, seed=7), normal(256, 4, seed=8), (256,))
    normed = rms_norm(rows, norm.weight, norm.eps)
    product = fp8_linear(normed, gate_up)
    assert_equal(norm_linear(rows, norm, gate_up), product, "norm")
    adapted = decode_linear.add_low_rank(product.clone, normed, low)
    assert_equal(norm_linear(rows, norm, gate_up, low), adapted, "adapters")
    gated = F.silu(adapted[:, :256]) * adapted[:, 256:]
    assert_equal(norm_linear(rows, norm, gate_up, low, activation="silu"), gated, "gated")
    residual = normal(5, 256, seed=9)
    expected = residual + fp8_linear(gated, down) + gated @ low_down.a.t() @ low_down.b.t()
    assert_equal(linear_add(residual.clone(), gated, down, low_down), expected, "residual")
    without = F.silu(product[:, :256]) * product[:, 256:]
    assert_equal(mlp_add(rows, norm, "silu", (gate_up, None), (down, None)), rows + fp8_linear(without, down), "MLP")
    adapted_mlp = rows + fp8_linear(gated, down) + gated @ low_down.a.t() @ low_down.b.t()
    assert_equal(mlp_add(rows.clone(), norm, "silu", (gate_up, low), (down, low_down)), adapted_mlp, "adapted MLP")
