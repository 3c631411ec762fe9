"""Triton's rounding to FP8 equals torch's to the bit; on a GPU, products in FP8 equal those of the rounded values.

Run in a process of their own, through the interpreter or on a GPU: see `kernel_checks`.
"""

import pytest
import torch
from torch import Tensor

from postlude.ops.fp8 import FP8Scaling, Quantized, quantize_columns, quantize_rows
from postlude.ops.linear import linear_group
from tests.equality import assert_equal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
HALF_UNIT = 2**-8  # of bf16, which results are rounded to once
WHERE = (("cpu", torch.float64), ("cuda", torch.bfloat16))
NOT_FINITE = (float("nan"), float("inf"))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows of different magnitudes with outliers; the second row is zero.

    Triton's interpreter does not round to e4m3 as a GPU does, so there the numbers need no rounding.
    """
    generator = torch.Generator().manual_seed(seed)
    if DEVICE == "cpu":
        digits, powers = (torch.randint(*limits, shape, generator=generator) for limits in ((8, 16), (0, 7)))
        numbers = digits * torch.exp2(powers + torch.arange(shape[-2])[:, None] % 3)
        numbers[..., ::3] *= -1
        numbers[..., 1, :] = 0
        return numbers.to(dtype)
    numbers = torch.randn(shape, generator=generator)
    numbers *= torch.exp2(torch.randint(-20, 20, shape[:-1], generator=generator).float())[..., None]
    numbers[..., ::5, 3] *= 1000
    numbers[..., 1, :] = 0
    return numbers.to(DEVICE, dtype)


def assert_same(actual: Quantized, expected: Quantized) -> None:
    assert actual.values.shape == expected.values.shape
    assert actual.values.is_contiguous()
    assert torch.equal(actual.scales.isnan(), expected.scales.isnan())
    assert torch.equal(actual.scales.nan_to_num(), expected.scales.nan_to_num())
    actual_values, expected_values = actual.values.float(), expected.values.float()
    assert DEVICE == "cpu" or torch.equal(
        actual_values.isnan(), expected_values.isnan()
    )  # the interpreter has no NaN in e4m3
    differ = (actual_values != expected_values) & ~expected_values.isnan()
    assert not differ.any(), (
        f"{int(differ.sum())} differ: {actual_values[differ][:4]} for {expected_values[differ][:4]}"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(7, 48), (3, 1024), (2, 40000)], ids=str)
def test_row_quantization_equals_torch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrix = random(*shape, dtype=dtype)
    if shape[0] > 4:
        matrix[3, 5], matrix[4, 0] = NOT_FINITE
    assert_same(quantize_rows([matrix], backend="triton"), quantize_rows([matrix], backend="torch"))


def test_row_quantization_of_strided_slices() -> None:
    """Columns of a wider tensor, several tensors at once, and the row maxima of other ranks."""
    wide, narrow = random(7, 96), random(7, 32, seed=1)
    parts = [wide[:, 16:64], narrow]
    assert_same(quantize_rows(parts, backend="triton"), quantize_rows(parts, backend="torch"))
    power = 127 + (15 if DEVICE == "cpu" else 40)  # above these numbers, but in the interpreter none becomes subnormal
    bits = torch.arange(7, device=DEVICE, dtype=torch.int32) + (power << 23)
    assert_same(quantize_rows(parts, bits, backend="triton"), quantize_rows(parts, bits, backend="torch"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(48, 80), (400, 144), (3, 48, 80)], ids=str)
def test_column_quantization_equals_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    matrix = random(*shape, dtype=dtype)
    matrix[..., 3, 5], matrix[..., 4, 0] = NOT_FINITE
    assert_same(quantize_columns([matrix], backend="triton"), quantize_columns([matrix], backend="torch"))
    parts = [matrix, random(*shape, seed=1, dtype=dtype)[..., :16, :]]
    assert_same(quantize_columns(parts, backend="triton"), quantize_columns(parts, backend="torch"))


def test_quantization_of_odd_sizes_and_strided_values() -> None:
    """Sizes that no tile divides, and values with others between them in memory."""
    matrix = random(130, 66)
    room = torch.zeros(3, 66, 130, device=DEVICE, dtype=torch.float8_e4m3fn)
    from postlude.ops.kernels import fp8 as kernels

    scales = torch.zeros(1, 66, device=DEVICE)
    kernels.quantize_columns(matrix[None], kernels.column_amax(matrix[None]), room[1:2], scales)
    assert not room[0].float().any()
    assert not room[2].float().any()
    assert_same(Quantized(room[1], scales[0]), quantize_columns([matrix], backend="torch"))


@ON_GPU
@pytest.mark.gpu
@pytest.mark.parametrize("adjacent", [False, True])
@pytest.mark.parametrize("tokens", [1, 100, 4096])
def test_products_equal_products_of_rounded_values(tokens: int, adjacent: bool) -> None:
    """Compared with float64 on the CPU to half a unit of bf16: outputs, gradients of rows and of weights."""
    outs = (256, 64, 64)
    weights = [torch.randn(out, 512).bfloat16() for out in outs]
    rows, upstream = torch.randn(tokens, 512).bfloat16(), [torch.randn(tokens, out).bfloat16() for out in outs]
    rows[0] *= 1000
    results = []
    for device, dtype in WHERE:
        device_weights = [weight.to(device, dtype) for weight in weights]
        if adjacent:
            device_weights = list(torch.cat(device_weights).split(outs))
        for weight in device_weights:
            weight.requires_grad_()
        device_rows = rows.to(device, dtype).requires_grad_()
        outputs = linear_group(device_rows, device_weights, [None] * 3, single_gemm=adjacent, fp8=FP8Scaling())
        gradients = torch.autograd.grad(
            outputs, (device_rows, *device_weights), [tensor.to(device, dtype) for tensor in upstream]
        )
        results.append([*outputs, *gradients])
    for index, (expected, actual) in enumerate(zip(*results, strict=True)):
        assert_equal(actual.cpu(), expected, f"result {index}", HALF_UNIT)


@ON_GPU
@pytest.mark.gpu
@pytest.mark.parametrize("bad", NOT_FINITE)
def test_non_finite_value_affects_only_its_row(bad: float) -> None:
    rows, weight = random(64, 256), torch.randn(128, 256, device="cuda").bfloat16()
    clean = linear_group(rows, [weight], [None], fp8=FP8Scaling())[0]
    rows[7, 30] = bad
    product = linear_group(rows, [weight], [None], fp8=FP8Scaling())[0]
    assert product[7].isnan().all()
    product[7] = clean[7]
    assert torch.equal(product, clean)
