"""Blocks fused into one autograd function: checks in the interpreter and on a GPU, and that models use them there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from postlude import LanguageModel, pack
from postlude.model.blocks import MLP, Attention, AttentionConfig, MLPConfig, SlidingAttentionConfig
from tests.equality import assert_equal
from tests.model.small import small_config
from tests.ops.kernel_checks import interpret_checks, run_checks

CHECKS = "fused_block_checks.py"
SEQUENCES = [list(range(3, 40)), [7], list(range(100, 230))]


@pytest.mark.thorough  # on a GPU the same is held to float64
def test_kernels_in_the_interpreter() -> None:
    interpret_checks(CHECKS)


@pytest.mark.gpu
def test_kernels_on_the_gpu() -> None:
    run_checks(CHECKS)


def losses_and_gradients() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    heads = {"heads": 4, "kv_heads": 2, "head_dim": 16}
    blocks = {
        "*": AttentionConfig(**heads, qk_norm="head"),
        "S": SlidingAttentionConfig(**heads, sliding_window=30),
        "-": MLPConfig(intermediate_size=48),
    }
    config = small_config("[*-][S-]", hidden_size=32, vocab_size=256, blocks=blocks)
    model = LanguageModel(config).to("cuda", torch.bfloat16)
    (microbatch,) = pack(SEQUENCES, budget=256)
    losses = model(microbatch.to("cuda"), targets=True)
    (losses.sum() / microbatch.batch_targets).backward()
    return losses, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.gpu
def test_fused_model_equals_unfused_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to bf16 rounding: fused and separate products add up in different orders."""
    outputs = []
    for block in (Attention, MLP):
        monkeypatch.setattr(block, "fused_forward", counting_calls(block.fused_forward, outputs))
    losses, gradients = losses_and_gradients()
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert len(outputs) == (4 if hopper else 2)
    for block in (Attention, MLP):
        monkeypatch.setattr(block, "fused_forward", lambda *_: None)
    expected, expected_gradients = losses_and_gradients()
    assert_equal(losses, expected, "losses", 1e-2)
    for name, gradient in gradients.items():
        assert_equal(gradient, expected_gradients[name], f"gradient of {name}", 3e-2)


def counting_calls(fused_forward: Any, outputs: list[Any]) -> Any:
    """Returns the same function, which also appends to a list at each call."""

    def call(*arguments: Any) -> Any:
        done = fused_forward(*arguments)
        if done is not None:
            outputs.append(done.shape)
        return done

    return call
