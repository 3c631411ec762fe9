"""Measures what FP8 products change in a trained model: each product, the probabilities, and the gradients.

    PYTHONPATH=src python benchmarks/fp8_agreement.py smollm2 README.md docs/architecture.md

Reads the first tokens of each file, in fp32 on the CPU. The same model with FP8 products, and in bf16, is compared with
it: KL of the next token's distribution, whether the likeliest token is the same, the log-prob of the token that
follows, and the gradient of the mean loss.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from postlude import load_model, load_tokenizer, pack
from postlude.data import Microbatch
from postlude.model import LanguageModel
from postlude.model.fp8 import use_fp8
from postlude.ops import fp8, linear

KINDS = {3: "q, k, v", 2: "gate, up"}  # by the number of weights that share an input


class ProductErrors:
    """The relative error of each kind of product, forward and of the input's gradient, while it is entered."""

    def __init__(self) -> None:
        self.errors: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.patches = (
            mock.patch.object(linear, "fp8_products", self.products),
            mock.patch.object(linear, "fp8_input_gradient", self.input_gradient),
        )

    def __enter__(self) -> ProductErrors:
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self.patches:
            patch.stop()

    def add(self, weights: Sequence[Tensor], passed: str, actual: Tensor, exact: Tensor) -> None:
        kind = KINDS.get(len(weights)) or ("o" if weights[0].shape[0] == weights[0].shape[1] else "down")
        self.errors[kind, passed].append(float((actual - exact).norm() / exact.norm()))

    def products(self, rows: Tensor, weights: Sequence[Tensor], *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        products = fp8.fp8_products(rows, weights, *arguments, **options)
        self.add(weights, "forward", torch.cat(products, 1), rows @ torch.cat(list(weights)).T)
        return products

    def input_gradient(self, gradients: Sequence[Tensor], weights: Sequence[Tensor], *arguments: Any) -> Tensor:
        product = fp8.fp8_input_gradient(gradients, weights, *arguments)
        self.add(weights, "gradient", product, torch.cat(list(gradients), 1) @ torch.cat(list(weights)))
        return product


def differentiate(model: LanguageModel, microbatch: Microbatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns log-probs of all tokens at each position, fp32 [T, vocab], and gradients of the mean loss."""
    model.zero_grad()
    model(microbatch, targets=True).float().mean().backward()
    with torch.no_grad():
        logprobs = model(microbatch).float().log_softmax(-1)
    return logprobs, {
        name: parameter.grad.float().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def compare(exact: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]], tokens: Tensor) -> str:
    """Returns a line: KL, the same likeliest token, the log-prob of the next token, the gradient."""
    kl = (exact[0].exp() * (exact[0] - other[0])).sum(-1)
    same_argmax = (exact[0].argmax(-1) == other[0].argmax(-1)).float().mean()
    following = tokens[1:, None]
    change = (other[0][:-1].gather(-1, following) - exact[0][:-1].gather(-1, following)).abs()
    exact_gradients, other_gradients = (
        torch.cat([gradient.flatten() for gradient in result[1].values()]).double() for result in (exact, other)
    )
    cosine, off = (
        exact_gradients @ other_gradients / exact_gradients.norm() / other_gradients.norm(),
        (other_gradients - exact_gradients).norm() / exact_gradients.norm(),
    )
    return (
        f"KL mean {kl.mean():.2e}, 99th percentile {kl.quantile(0.99):.2e}, largest {kl.max():.2e}; same token "
        f"{same_argmax:.2%}; log-prob off by {change.mean():.2e}; gradient off by {off:.2%}, cosine {cosine:.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, default=256, help="of each file")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.model)
    texts = [tokenizer(path.read_text())["input_ids"][: arguments.tokens] for path in arguments.files]
    (microbatch,) = pack(texts, budget=sum(map(len, texts)))
    tokens = microbatch.tokens
    model = load_model(arguments.model, dtype=torch.float32)
    exact = differentiate(model, microbatch)
    print(f"{arguments.model}, {len(tokens)} tokens, loss {-exact[0][:-1].gather(-1, tokens[1:, None]).mean():.3f}")
    use_fp8(model, True, tp=1)
    with ProductErrors() as products:
        print("FP8 products, fp32 else:", compare(exact, differentiate(model, microbatch), tokens), flush=True)
    for (kind, passed), errors in products.errors.items():
        print(f"  {kind} {passed}: mean {sum(errors) / len(errors):.2%}, largest {max(errors):.2%}")
    model = load_model(arguments.model, dtype=torch.bfloat16)
    print("bf16, no FP8:", compare(exact, differentiate(model, microbatch), tokens), flush=True)


if __name__ == "__main__":
    main()
