"""The Triton backend of the head: checks in the interpreter without a GPU, and bf16 accuracy on a GPU."""

import warnings

import pytest
import torch

from postlude.ops.linear_logprobs import linear_logprobs
from postlude.ops.linear_objective import linear_objective
from tests.ops.dense_head import Operands, dense


@pytest.mark.gpu
class TestOnTheGpu:
    """bf16 operands against float64 on the same values."""

    TOKENS, FEATURES, VOCABULARY = 384, 512, 9000

    def operands(self) -> Operands:
        drawn = Operands.random(self.TOKENS, self.FEATURES, self.VOCABULARY, device="cuda")
        drawn.hidden = drawn.hidden.detach().bfloat16().requires_grad_()
        drawn.weight = drawn.weight.detach().bfloat16().requires_grad_()
        drawn.targets[::5] = -100
        return drawn

    @pytest.mark.parametrize("backend", ["triton", "torch"])
    @pytest.mark.parametrize("softcap", [None, 20.0])
    @pytest.mark.parametrize("memory_budget", [None, 6_000_000, 40_000_000])
    def test_bf16_accuracy(self, backend: str, softcap: float | None, memory_budget: int | None) -> None:
        operands = self.operands()
        options = {"temperature": 0.9, "softcap": softcap}
        stats = linear_logprobs(
            *operands.head, entropy=True, lse=True, backend=backend, memory_budget=memory_budget, **options
        )
        results = (stats.logprob, stats.entropy, stats.lse)
        exact = dense(*operands.head, **options)
        for name, result, want in zip(("logprob", "entropy", "lse"), results, exact, strict=True):
            off = float((result.double() - want).norm() / want.norm())
            assert off <= 1e-6, f"{name} is off by {off:.1e}"
        gradients = operands.gradients(results)
        for name, result, want in zip(("hidden", "weight"), gradients, operands.gradients(exact), strict=True):
            off = float((result.double() - want.double()).norm() / want.double().norm())
            assert off <= 3e-3, f"gradient of {name} is off by {off:.1e}"

    def test_objective_accuracy(self) -> None:
        operands = self.operands()
        has_target = (operands.targets != -100).double()

        def loss(logprob: torch.Tensor, entropy: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
            return logprob * columns + entropy

        # The least holds 52 tokens of codes and no fp32 sum: each of six slabs rounds the weight's gradient.
        for memory_budget, within in ((None, 3e-3), (40_000_000, 3e-3), (1_000_000, 5e-3)):
            arguments = (*operands.head, loss, operands.upstream[0])
            result = linear_objective(*arguments, entropy=True, memory_budget=memory_budget)
            logprob, entropy, _ = dense(*operands.head)
            exact = (loss(logprob, entropy, operands.upstream[0].double()) * has_target).sum()
            assert abs(float(result.loss) - float(exact)) <= 1e-5 * abs(float(exact))
            gradients, want = (torch.autograd.grad(total, operands.leaves()) for total in (result.loss, exact))
            for name, gradient, expected_gradient in zip(("hidden", "weight"), gradients, want, strict=True):
                off = float((gradient.double() - expected_gradient.double()).norm() / expected_gradient.double().norm())
                print(f"budget {memory_budget}: gradient of {name} off by {off:.2e}")
                assert off <= within, f"gradient of {name} is off by {off:.1e} with a budget of {memory_budget}"

    def test_given_target_count_changes_no_bit(self) -> None:
        for ignored in (False, True):
            operands = self.operands()
            if not ignored:
                operands.targets.fill_(7)
            outputs = []
            for count in (None, int((operands.targets != -100).sum())):
                arguments = operands.head
                stats = linear_logprobs(*arguments, entropy=True, lse=True, target_count=count)
                results = (stats.logprob, stats.entropy, stats.lse)
                # Slabs of 52 tokens.
                swept = linear_objective(
                    *arguments, lambda logprob, _, __: logprob, lse=True, target_count=count, memory_budget=1_000_000
                )
                gradients = torch.autograd.grad(swept.loss, operands.leaves())
                swept_stats = (swept.token_loss, swept.stats.lse, swept.loss)
                outputs.append((*results, *operands.gradients(results), *swept_stats, *gradients))
            for counted, known in zip(*outputs, strict=True):
                assert torch.equal(counted, known)

    def test_head_synchronises_once_without_target_count_and_never_with_it(self) -> None:
        operands = self.operands()
        count = int((operands.targets != -100).sum())

        def waits(**options: int) -> int:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    stats = linear_logprobs(*operands.head, entropy=True, **options)
                    stats.logprob.sum().backward()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            return sum("synchroniz" in str(warning.message) for warning in caught)

        waits()  # compiles
        assert waits() == 1
        assert waits(target_count=count) == 0

    def test_ignored_positions_halve_the_memory_of_a_slab(self) -> None:
        operands = self.operands()
        operands.targets[::2] = -100
        linear_logprobs(*operands.head, memory_budget=2**30)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            linear_logprobs(*operands.head, memory_budget=2**30)
        peak = torch.cuda.max_memory_allocated() - before
        assert peak <= 0.6 * 4 * self.TOKENS * self.VOCABULARY
