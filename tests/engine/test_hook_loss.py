"""Ten steps on real text: the default loss and a loss from logits through the output processor equal float64."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from postlude import AdamW, Batch, Engine, Loss, ModelConfig, OutputInputs, Pattern, ranks
from postlude.data import IGNORE
from postlude.hf.load import load_tokenizer
from postlude.hf.read_model import read_model
from postlude.objectives import SFT, Objective

TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\nGravity is a force",
)


def through_logits(inputs: OutputInputs) -> Loss:
    """Next-token loss by a custom processor, from full logits."""
    logits = inputs.head.logits(inputs.hidden).float()
    return Loss(F.cross_entropy(logits, inputs.microbatch.targets, ignore_index=IGNORE, reduction="none"))


def in_float64(inputs: OutputInputs) -> Loss:
    """The same from logits in float64."""
    logits = inputs.head.gather(inputs.hidden).double() @ inputs.head.weight.double().t()
    return Loss(F.cross_entropy(logits, inputs.microbatch.targets, ignore_index=IGNORE, reduction="none"))


def losses_of_ten_steps(
    model: Path | str | ModelConfig, rows: list[list[int]], objective: Objective, lr: float
) -> list[float]:
    with ranks():
        torch.manual_seed(0)
        optimizer = AdamW(lr=lr, max_grad_norm=None)
        engine = Engine(model, budget=128, optimizer=optimizer, compute_dtype=torch.float32)
        losses = []
        for _ in range(10):
            losses.append(engine.forward_backward(Batch(rows), objective).loss)
            engine.optimizer_step()
        return losses


def assert_losses_equal_float64(model: Path | str | ModelConfig, rows: list[list[int]], lr: float) -> list[float]:
    """Asserts that ten steps with the fused head, and with fp32 logits, have the losses of a head in float64: these."""
    exact = losses_of_ten_steps(model, rows, in_float64, lr)
    # A mean of fp32 cross entropies over a large vocabulary is off by 1.3e-5, and the fused head's by 1e-6.
    for objective, within in ((SFT(over="tokens"), 3e-6), (through_logits, 3e-5)):
        losses = losses_of_ten_steps(model, rows, objective, lr)
        assert losses[0] == pytest.approx(exact[0], rel=within)
        assert losses == pytest.approx(exact, rel=1e-3)  # AdamW divides gradients by their size, and so their rounding
    return exact


def test_ten_steps_on_real_text_equal_float64() -> None:
    """Of two layers. tests/test_smollm2.py has the same for a published model."""
    tokenizer = load_tokenizer("tiny-dense")
    config = replace(read_model("tiny-dense")[1], pattern=Pattern.parse("[*-]{2}"))
    losses = assert_losses_equal_float64(config, [tokenizer(text)["input_ids"] for text in TEXTS], lr=2e-3)
    assert losses[-1] < 0.8 * losses[0]
