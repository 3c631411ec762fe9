"""Triton's convolution and scan: their checks through the interpreter where there is no GPU, and half precision, at the
sizes that models have, where there is."""

import functools

import pytest
import torch
from torch import Tensor

from postlude.ops.convolution import convolve
from postlude.ops.packing import Packing
from postlude.ops.ssd import _unsupported_reason, ssd


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auto_uses_torch_without_a_gpu(dtype: torch.dtype) -> None:
    tokens, packing = torch.randn(5, 2, 4, dtype=dtype), Packing.from_lengths((3, 2))
    arguments = tokens, torch.rand(5, 2), -torch.rand(2), tokens, tokens, None, packing
    assert torch.equal(ssd(*arguments)[0], ssd(*arguments, backend="torch")[0])
    with pytest.raises(RuntimeError, match="the tensors are on cpu"):
        ssd(*arguments, backend="triton")
    with pytest.raises(RuntimeError, match="the tensors are on cpu"):
        convolve(tokens[:, 0], tokens[:4, 0], None, packing, backend="triton")


def test_sizes_beyond_shared_memory_use_torch() -> None:
    """With `backend="triton"` they are refused."""
    x, B = torch.zeros(3, 2, 64), torch.zeros(3, 1, 128)
    assert _unsupported_reason(x, B, B, last_states=False) == (None, 110_000)
    assert _unsupported_reason(x, B, B, last_states=True)[0] == "its kernels give no last states"
    assert "these are 129 and 128" in _unsupported_reason(torch.zeros(3, 2, 129), B, B, last_states=False)[0]
    assert "of one dtype" in _unsupported_reason(x, B, B.half(), last_states=False)[0]


@pytest.mark.gpu
class TestOnTheGpu:
    """Against torch in float64 on the same values.

    Half-precision operands are rounded a few times on their way: pairs of tokens, states, the result. Each is off by
    2^-9 of its size at most in bf16, by half of that on average, and errors of different numbers are independent.
    """

    LENGTHS = (700, 1, 130, 2, 900, 267)  # of 2000, so that the last chunk is not full

    def operands(self, dtype: torch.dtype, heads: int, width: int, groups: int, states: int) -> list[Tensor]:
        generator = torch.Generator("cuda").manual_seed(0)
        normal = functools.partial(torch.randn, generator=generator, device="cuda")
        tokens = sum(self.LENGTHS)
        drawn = [
            normal(tokens, heads, width).to(dtype),
            (normal(tokens, heads) - 3).exp(),
            -(normal(heads)).exp(),
            normal(tokens, groups, states).to(dtype),
            normal(tokens, groups, states).to(dtype),
            normal(heads),
        ]
        return [tensor.requires_grad_() for tensor in drawn]

    @pytest.mark.parametrize(
        ("shape", "chunk", "dtype"),
        [
            ((16, 64, 2, 128), 128, torch.bfloat16),
            ((16, 64, 2, 128), 64, torch.float16),
            ((4, 64, 1, 256), 256, torch.bfloat16),
            ((2, 128, 2, 128), 128, torch.bfloat16),
            ((5, 24, 1, 40), 32, torch.bfloat16),
        ],
        ids=str,
    )
    def test_scan(self, shape, chunk: int, dtype: torch.dtype) -> None:
        operands = self.operands(dtype, *shape)
        exact = [tensor.detach().double().requires_grad_() for tensor in operands]
        packing = Packing.from_lengths(self.LENGTHS, "cuda")
        actual = ssd(*operands, packing, chunk=chunk, backend="triton")[0]
        expected = ssd(*exact, packing, backend="torch")[0]
        upstream = torch.randn(actual.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda").to(dtype)
        results = [actual, *torch.autograd.grad(actual, operands, upstream)]
        expected_results = [expected, *torch.autograd.grad(expected, exact, upstream.double())]
        tolerance = 2**-8 if dtype == torch.bfloat16 else 2**-11
        # A's is a sum over all tokens that may cancel: its scale is that of what is summed, which dt's gradient, and
        # x's, tell of.
        with torch.no_grad():
            x, dt, A, _, _, D = exact
            summed = (dt * expected_results[2] - (x * (expected_results[1] - D[:, None] * upstream)).sum(-1)) / A
            torch.testing.assert_close(summed.sum(0), expected_results[3])
            off = float(((results.pop(3) - expected_results.pop(3)).abs() / summed.abs().sum(0)).max())
            assert off <= tolerance, f"gradient of A is off by {off:.1e}"
        self.compare(("y", "x", "dt", "B", "C", "D"), results, expected_results, tolerance)

    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-9), (torch.float32, 1e-6)])
    @pytest.mark.parametrize(("channels", "width"), [(1536, 4), (1537, 2)])
    @pytest.mark.parametrize("silu", [False, True])
    def test_convolution(self, silu: bool, channels: int, width: int, dtype: torch.dtype, tolerance: float) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        shapes = (sum(self.LENGTHS), channels), (channels, width), (channels,)
        operands = [
            torch.randn(shape, generator=generator, device="cuda").to(dtype).requires_grad_() for shape in shapes
        ]
        exact = [tensor.detach().double().requires_grad_() for tensor in operands]
        packing = Packing.from_lengths(self.LENGTHS, "cuda")
        actual = convolve(*operands, packing, silu=silu, backend="triton")
        expected = convolve(*exact, packing, silu=silu, backend="torch")
        upstream = torch.randn(actual.shape, generator=generator, device="cuda").to(dtype)
        results = [actual, *torch.autograd.grad(actual, operands, upstream)]
        expected_results = [expected, *torch.autograd.grad(expected, exact, upstream.double())]
        self.compare(("output", "inputs", "kernel", "bias"), results, expected_results, tolerance)

    def compare(self, names: tuple[str, ...], actual: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
        """Compares the norm of the error with the norm of the reference."""
        off = {
            name: float((tensor.detach().double() - expected_tensor.detach()).norm() / expected_tensor.detach().norm())
            for name, tensor, expected_tensor in zip(names, actual, expected, strict=True)
        }
        print({name: f"{error:.1e}" for name, error in off.items()})
        assert max(off.values()) <= tolerance, off

    def test_auto_uses_triton_for_half_precision_deterministically(self) -> None:
        operands, packing = self.operands(torch.bfloat16, 8, 64, 2, 128), Packing.from_lengths(self.LENGTHS, "cuda")

        def once(backend: str) -> list[Tensor]:
            inputs = convolve(operands[0].flatten(1), kernel, None, packing, silu=True, backend=backend)
            y, _ = ssd(inputs.view_as(operands[0]), *operands[1:], packing, backend=backend)
            return [y, *torch.autograd.grad(y.float().square().sum(), [*operands, kernel])]

        kernel = torch.randn(8 * 64, 4, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for first, second, torchs in zip(once("auto"), once("triton"), once("torch"), strict=True):
            assert torch.equal(first, second)
            assert not torch.equal(first, torchs)

    def test_kernels_do_not_synchronise(self) -> None:
        operands, packing = self.operands(torch.bfloat16, 8, 64, 2, 128), Packing.from_lengths(self.LENGTHS, "cuda")
        kernel = torch.randn(8 * 64, 4, device="cuda", dtype=torch.bfloat16).requires_grad_()

        def step() -> None:
            inputs = convolve(operands[0].flatten(1), kernel, None, packing, silu=True)
            ssd(inputs.view_as(operands[0]), *operands[1:], packing)[0].sum().backward()

        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
