"""Checks of the kernel of linear layers with few rows. `test_kernels.py` runs this file, on a GPU or in Triton's
interpreter, which must be chosen before triton is first imported."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.ops import decode_linear
from postlude.ops.activation import activate
from postlude.ops.decode_linear import COUNTERS, add_low_rank, linear_add, norm_linear
from postlude.ops.low_rank import LowRank
from postlude.ops.norm import Norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies no bf16
WITHIN = 2.0**-8 if DEVICE == "cuda" else 2.0**-10


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (scale * drawn).to(DEVICE, HALF)


def assert_near(actual: Tensor, exact: Tensor) -> None:
    """Compares up to one rounding of the results."""
    assert actual.dtype == HALF
    off = float((actual.double() - exact).norm() / exact.norm())
    assert off <= WITHIN, f"off by {off:.1e}"


def make_operands(rows: int, width: int, features: int, offset: float) -> tuple[Tensor, Norm, Tensor, Tensor]:
    """Rows, a norm, a weight, and in float64 the rows normalised: rounded where a product takes them, divided after.

    Unrounded, a gate of relu2 would be off by twice what its operands are.
    """
    x, weight = normal(rows, width, seed=1, scale=3.0), normal(features, width, seed=2, scale=width**-0.5)
    norm = Norm(normal(width, seed=3), 1e-2, offset)
    normed = (x.float() * (norm.weight.float() + offset)).to(HALF).double()
    exact = normed * (x.double().square().mean(1, keepdim=True) + norm.eps).rsqrt()
    return x, norm, weight, exact


SIZES = [(1, 64, 64), (16, 1024, 192), (7, 192, 128), (15, 320, 64)]


@pytest.mark.parametrize(("rows", "width", "features"), SIZES)
def test_norm_linear(rows: int, width: int, features: int) -> None:
    x, norm, weight, exact = make_operands(rows, width, features, 0.0)
    assert_near(norm_linear(x, norm, weight, backend="triton"), exact @ weight.double().t())
    x, norm, weight, exact = make_operands(rows, width, features, 1.0)
    assert_near(norm_linear(x, norm, weight, backend="triton"), exact @ weight.double().t())


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize(("rows", "width", "features"), SIZES)
def test_norm_gated_linear(rows: int, width: int, features: int, activation: str) -> None:
    x, norm, weight, exact = make_operands(rows, width, 2 * features, 0.0)
    gate, up = (exact @ weight.double().t()).chunk(2, -1)
    assert_near(norm_linear(x, norm, weight, activation=activation, backend="triton"), activate(gate, activation) * up)


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
@pytest.mark.parametrize(("rows", "width", "features"), [*SIZES, (13, 3072, 1024)])
def test_linear_add(rows: int, width: int, features: int, shared: bool) -> None:
    """A sum shared by several programs is the same in every run, and their counters are zero again afterwards."""
    x, _, weight, _ = make_operands(rows, width, features, 0.0)
    residual = normal(rows, features, seed=4)
    counters = torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE) if shared else None
    exact = residual.double() + x.double() @ weight.double().t()
    first, second = (linear_add(residual, x, weight, counters=counters, backend="triton") for _ in range(2))
    assert_near(first, exact)
    assert torch.equal(first, second)
    assert counters is None or not counters.any()


def adapters(rank: int, width: int, *sizes: int) -> LowRank:
    a = normal(len(sizes) * rank, width, seed=5, scale=width**-0.5)
    return LowRank(a, normal(sum(sizes), rank, seed=6, scale=rank**-0.5), sizes)


def adapter_product(low_rank: LowRank, exact: Tensor) -> Tensor:
    """Computes in float64, with A · x rounded as the product reads it."""
    parts = zip(low_rank.a.double().split(low_rank.rank), low_rank.b.double().split(low_rank.sizes), strict=True)
    return torch.cat([(exact @ a.t()).to(HALF).double() @ b.t() for a, b in parts], -1)


ADAPTED = [(1, 64, 16, (64,)), (16, 256, 32, (128, 64, 64)), (7, 192, 48, (64, 128)), (5, 128, 64, (64, 64, 64, 64))]


@pytest.mark.parametrize(("rows", "width", "rank", "sizes"), ADAPTED)
def test_norm_linear_with_adapters(rows: int, width: int, rank: int, sizes: tuple[int, ...]) -> None:
    x, norm, weight, exact = make_operands(rows, width, sum(sizes), 0.0)
    low_rank = adapters(rank, width, *sizes)
    expected = exact @ weight.double().t() + adapter_product(low_rank, exact)
    counters = torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE)
    assert_near(norm_linear(x, norm, weight, low_rank, counters, backend="triton"), expected)
    assert not counters.any()
    assert_near(norm_linear(x, norm, weight, low_rank, backend="triton"), expected)


@pytest.mark.parametrize(("rows", "width", "rank"), [(1, 64, 16), (16, 256, 32), (7, 192, 48)])
def test_norm_gated_linear_with_adapters(rows: int, width: int, rank: int) -> None:
    x, norm, weight, exact = make_operands(rows, width, 256, 0.0)
    low_rank = adapters(rank, width, 128, 128)
    gate, up = (exact @ weight.double().t() + adapter_product(low_rank, exact)).chunk(2, -1)
    actual = norm_linear(x, norm, weight, low_rank, activation="silu", backend="triton")
    assert_near(actual, activate(gate, "silu") * up)


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_linear_add_with_adapters(shared: bool) -> None:
    x, _, weight, _ = make_operands(13, 1024, 128, 0.0)
    residual, low_rank = normal(13, 128, seed=4), adapters(32, 1024, 128)
    counters = torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE) if shared else None
    exact = residual.double() + x.double() @ weight.double().t() + adapter_product(low_rank, x.double())
    first, second = (linear_add(residual, x, weight, low_rank, counters, backend="triton") for _ in range(2))
    assert_near(first, exact)
    assert torch.equal(first, second)
    assert counters is None or not counters.any()


@pytest.mark.parametrize("rows", [1, 17, 70, 300])
def test_adapters_with_many_rows(rows: int) -> None:
    """Added to a product in place, and followed by a gate."""
    x = normal(rows, 128, seed=1)
    for sizes, rank in (((256, 64, 64), 32), ((320,), 16), ((64, 64), 128)):
        low_rank, product = adapters(rank, 128, *sizes), normal(rows, sum(sizes), seed=2)
        expected = product.double() + adapter_product(low_rank, x.double())
        actual = add_low_rank(lambda product=product: product, x, low_rank, backend="triton")
        assert actual is product
        assert_near(actual, expected)
    low_rank, product = adapters(32, 128, 192, 192), normal(rows, 384, seed=2)
    gate, up = (product.double() + adapter_product(low_rank, x.double())).chunk(2, -1)
    assert_near(add_low_rank(lambda: product, x, low_rank, "silu", backend="triton"), activate(gate, "silu") * up)


@pytest.mark.skipif(DEVICE != "cuda", reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("rows", [16, 40])
def test_adapters_in_a_cuda_graph(rows: int) -> None:
    """The products with A run on another stream. Each replay equals the calls outside of a graph."""
    x, norm, weight, _ = make_operands(rows, 256, 512, 0.0)
    down, first, second = normal(256, 256, seed=7, scale=0.1), adapters(32, 256, 256, 256), adapters(32, 256, 256)
    counters = torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE)

    def layers(hidden: Tensor) -> Tensor:
        for _ in range(4):
            features = norm_linear(hidden, norm, weight, first, counters, activation="silu")
            hidden = linear_add(hidden.clone(), features, down, second, counters)
        return hidden

    expected = layers(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = layers(x)
    for _ in range(20):
        actual.zero_()
        graph.replay()
        assert torch.equal(actual, expected)


def test_unsupported_ranks_and_layer_sizes_are_refused() -> None:
    x, norm, weight, _ = make_operands(3, 128, 64, 0.0)
    with pytest.raises(RuntimeError, match="adapters of rank 8 are no multiple of 16 up to 64"):
        norm_linear(x, norm, weight, adapters(8, 128, 64), backend="triton")
    with pytest.raises(RuntimeError, match=r"layers of \[32, 32\] features are more than 4 or no multiples of 64"):
        norm_linear(x, norm, weight, adapters(16, 128, 32, 32), backend="triton")


def test_strided_rows() -> None:
    wide, weight = normal(5, 256, seed=1), normal(64, 128, seed=2)
    residual = normal(5, 128, seed=3)[:, :64]
    actual = linear_add(residual, wide[:, 128:], weight, backend="triton")
    assert_near(actual, residual.double() + wide[:, 128:].double() @ weight.double().t())


def test_nan_affects_only_its_row() -> None:
    x, norm, weight, _ = make_operands(3, 128, 64, 0.0)
    x[1, 5] = torch.nan
    assert norm_linear(x, norm, weight, backend="triton").isnan().all(1).tolist() == [False, True, False]


def test_row_is_independent_of_other_rows() -> None:
    """Bit for bit, as long as the tiles are the same."""
    x, norm, weight, _ = make_operands(16, 1024, 64, 0.0)
    every = norm_linear(x, norm, weight, backend="triton")
    assert torch.equal(norm_linear(x[3:4].clone(), norm, weight, backend="triton"), every[3:4])


def test_more_rows_than_a_tile_are_refused_or_use_torch() -> None:
    x, norm, weight, _ = make_operands(decode_linear.MAX_ROWS + 1, 64, 64, 0.0)
    with pytest.raises(RuntimeError, match=f"its tiles have room for {decode_linear.MAX_ROWS} rows, and these are"):
        norm_linear(x, norm, weight, backend="triton")
    exact = F.rms_norm(x.double(), (64,), norm.weight.double(), norm.eps)
    assert_near(norm_linear(x, norm, weight), exact @ weight.double().t())
