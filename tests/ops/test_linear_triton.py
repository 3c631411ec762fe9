"""The Triton backend: its checks through the interpreter where there is no GPU, and bf16 accuracy where there is."""

from __future__ import annotations

import pytest
import torch

from postlude.ops.linear_logprobs import linear_logprobs
from postlude.ops.linear_objective import linear_objective
from tests.ops.dense_head import Operands, dense
from tests.ops.kernel_checks import interpret_checks, run_checks

CHECKS = "triton_checks.py"


@pytest.mark.slow
def test_kernels_in_the_interpreter() -> None:
    interpret_checks(CHECKS)


@pytest.mark.gpu
class TestOnTheGpu:
    """bf16 operands against float64 on the same values."""

    TOKENS, FEATURES, VOCABULARY = 384, 512, 9000

    def test_kernels(self) -> None:
        run_checks(CHECKS)

    def operands(self) -> Operands:
        made = Operands.random(self.TOKENS, self.FEATURES, self.VOCABULARY, device="cuda")
        made.hidden = made.hidden.detach().bfloat16().requires_grad_()
        made.weight = made.weight.detach().bfloat16().requires_grad_()
        made.targets[::5] = -100
        return made

    @pytest.mark.parametrize("backend", ["triton", "torch"])
    @pytest.mark.parametrize("softcap", [None, 20.0])
    @pytest.mark.parametrize("memory_budget", [None, 6_000_000, 40_000_000])
    def test_bf16_accuracy(self, backend: str, softcap: float | None, memory_budget: int | None) -> None:
        operands = self.operands()
        options = {"temperature": 0.9, "softcap": softcap}
        stats = linear_logprobs(
            operands.hidden,
            operands.weight,
            operands.targets,
            entropy=True,
            lse=True,
            backend=backend,
            memory_budget=memory_budget,
            **options,
        )
        results = (stats.logprob, stats.entropy, stats.lse)
        exact = dense(operands.hidden, operands.weight, operands.targets, **options)
        for name, got, want in zip(("logprob", "entropy", "lse"), results, exact, strict=True):
            off = float((got.double() - want).norm() / want.norm())
            assert off <= 1e-6, f"{name} is off by {off:.1e}"
        gradients = operands.gradients(results)
        for name, got, want in zip(("hidden", "weight"), gradients, operands.gradients(exact), strict=True):
            off = float((got.double() - want.double()).norm() / want.double().norm())
            assert off <= 3e-3, f"gradient of {name} is off by {off:.1e}"

    def test_objective_accuracy(self) -> None:
        operands = self.operands()
        kept = (operands.targets != -100).double()

        def loss(logprob: torch.Tensor, entropy: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
            return logprob * columns + entropy

        for memory_budget in (None, 40_000_000):
            arguments = (operands.hidden, operands.weight, operands.targets, loss, operands.upstream[0])
            result = linear_objective(*arguments, entropy=True, memory_budget=memory_budget)
            logprob, entropy, _ = dense(operands.hidden, operands.weight, operands.targets)
            exact = (loss(logprob, entropy, operands.upstream[0].double()) * kept).sum()
            assert abs(float(result.loss) - float(exact)) <= 1e-5 * abs(float(exact))
            got, want = (torch.autograd.grad(total, operands.leaves()) for total in (result.loss, exact))
            for ours, theirs in zip(got, want, strict=True):
                assert float((ours.double() - theirs.double()).norm() / theirs.double().norm()) <= 3e-3

    def test_one_wait_for_the_device(self) -> None:
        """Everything else is queued: the host never asks the device again."""
        operands = self.operands()

        def step() -> None:
            linear_logprobs(operands.hidden, operands.weight, operands.targets, entropy=True).logprob.sum().backward()

        step()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with pytest.warns(UserWarning, match="synchronizing") as seen:
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len([one for one in seen if "synchronizing" in str(one.message)]) == 1

    def test_ignored_positions_halve_the_memory_of_a_slab(self) -> None:
        operands = self.operands()
        operands.targets[::2] = -100
        linear_logprobs(operands.hidden, operands.weight, operands.targets, memory_budget=2**30)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            linear_logprobs(operands.hidden, operands.weight, operands.targets, memory_budget=2**30)
        peak = torch.cuda.max_memory_allocated() - before
        assert peak <= 0.6 * 4 * self.TOKENS * self.VOCABULARY
