"""The gated delta rule's Triton kernels: their checks through the interpreter where there is no GPU, and bf16, at the
sizes that models have, where there is."""

import pytest
import torch
from torch import Tensor

from postlude.ops.gated_delta import CHUNK, _why_slower, gated_delta
from postlude.ops.packing import Packing
from tests.ops.test_gated_delta import NAMES, inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auto_uses_torch_without_a_gpu(dtype: torch.dtype) -> None:
    operands = [tensor.detach().to(dtype) for tensor in inputs(5, 2, 1, 4, 4, seed=0)]
    packing = Packing.from_lengths([3, 2])
    assert torch.equal(gated_delta(*operands, packing)[0], gated_delta(*operands, packing, backend="torch")[0])
    with pytest.raises(RuntimeError, match="the tensors are on cpu"):
        gated_delta(*operands, packing, backend="triton")


@pytest.mark.gpu
class TestOnTheGpu:
    """bf16 against torch in float64 on the same values: [outputs, last states, gradients].

    Weights of pairs, what tokens write, states and results are rounded on their way, each by 2^-9 of its size at most
    and by a third of 2^-8 in the mean square. Five or so such errors that know nothing of each other are 2^-8 together
    in the norm (3.5e-3 is seen); the limit is twice 2^-8.
    """

    LIMIT = 2**-7

    def made(
        self, lengths: list[int], heads: int = 8, key_heads: int = 4, dk: int = 128, dv: int = 128
    ) -> list[Tensor]:
        operands = [
            tensor.detach()
            for tensor in inputs(sum(lengths), heads, key_heads, dk, dv, seed=0, decay=0.1, device="cuda")
        ]
        return [tensor.bfloat16() if index < 3 else tensor for index, tensor in enumerate(operands)]

    def results(self, operands: list[Tensor], lengths: list[int], backend: str, normalise: bool = True) -> list[Tensor]:
        operands = [tensor.clone().requires_grad_() for tensor in operands]
        packing = Packing.from_lengths(lengths, "cuda")
        outputs = gated_delta(*operands, packing, normalise=normalise, last_states=True, backend=backend)
        generator = torch.Generator().manual_seed(1)
        upstream = [torch.randn(tensor.shape, generator=generator).to(tensor) for tensor in outputs]
        return [tensor.detach() for tensor in (*outputs, *torch.autograd.grad(outputs, operands, upstream))]

    def compare(
        self, operands: list[Tensor], lengths: list[int], names: tuple[str, ...], normalise: bool = True
    ) -> None:
        results = self.results(operands, lengths, "triton", normalise)
        exact = self.results([tensor.double() for tensor in operands], lengths, "torch", normalise)
        for name, actual, want in zip(("outputs", "states", *NAMES), results, exact, strict=True):
            off = float((actual.double() - want).norm() / want.norm())
            assert name not in names or off <= self.LIMIT, f"{name}: off by {off:.1e}"

    @pytest.mark.parametrize(("heads", "widths"), [((8, 4), (128, 128)), ((6, 2), (72, 96)), ((3, 3), (64, 256))])
    def test_accuracy(self, heads: tuple[int, int], widths: tuple[int, int]) -> None:
        lengths = [700, 65, 1, 64, 130, 2]
        self.compare(self.made(lengths, *heads, *widths), lengths, ("outputs", "states", *NAMES))

    def test_unnormalised_vectors(self) -> None:
        operands = self.made([300, 20])
        operands[1] /= 16
        self.compare(operands, [300, 20], ("outputs", "states", *NAMES), normalise=False)

    def test_sequences_of_one_token(self) -> None:
        """There is no earlier state to decay, so the gradient of the decay is zero."""
        operands = self.made([1, 1, 1])
        self.compare(operands, [1, 1, 1], tuple(name for name in ("outputs", "states", *NAMES) if name != "log_decay"))
        assert not self.results(operands, [1, 1, 1], "triton")[5].any()

    def test_strong_decay(self) -> None:
        operands = self.made([300, 65])
        operands[3][20::40] = -500.0
        self.compare(operands, [300, 65], ("outputs", "states", *NAMES))

    def test_auto_uses_kernels_where_they_were_measured(self) -> None:
        operands = self.made([70])
        uses_kernels = all(
            map(torch.equal, self.results(operands, [70], "auto"), self.results(operands, [70], "triton"))
        )
        assert uses_kernels == (_why_slower(operands[0].device, torch.bfloat16, CHUNK, (128, 128)) is None)

    def test_kernels_are_deterministic_and_do_not_synchronise(self) -> None:
        lengths = [2000, 1, 129, 5000]
        operands = self.made(lengths)
        first = self.results(operands, lengths, "triton")
        for _ in range(5):
            assert all(map(torch.equal, self.results(operands, lengths, "triton"), first))
        operands = [tensor.requires_grad_() for tensor in operands]
        packing = Packing.from_lengths(lengths, "cuda")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            output, _ = gated_delta(*operands, packing, normalise=True, backend="triton")
            torch.autograd.grad(output, operands, torch.ones_like(output))
        finally:
            torch.cuda.set_sync_debug_mode("default")
