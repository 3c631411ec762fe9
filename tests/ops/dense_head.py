"""The LM head written plainly in float64, as the reference of every fused form."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TOLERANCE = 1e-5


def dense(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """logprob, entropy and lse of every position, float64; zero where the target is ignored."""
    logits = hidden.double() @ weight.double().t()
    if bias is not None:
        logits = logits + bias.double()
    logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    scale = temperature.double()[..., None] if isinstance(temperature, Tensor) else temperature
    logits = (logits / scale)[..., :vocab_size]
    logprobs = logits.log_softmax(-1)
    probabilities = logprobs.exp()
    entropy = -torch.where(probabilities > 0, probabilities * logprobs, 0.0).sum(-1)
    has_target = targets != ignore_index
    logprob = logprobs.gather(-1, torch.where(has_target, targets, 0)[..., None])[..., 0]
    return tuple(torch.where(has_target, row, 0.0) for row in (logprob, entropy, logits.logsumexp(-1)))


@dataclass
class Operands:
    """Tensors that require gradients, and the upstream gradients of logprob, entropy and lse."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    upstream: tuple[Tensor, Tensor, Tensor]

    @staticmethod
    def random(
        tokens: int, features: int, vocabulary: int, *, bias: bool = False, seed: int = 0, device: str = "cpu"
    ) -> "Operands":
        generator = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(device)

        return Operands(
            normal(tokens, features).requires_grad_(),
            (2 * normal(vocabulary, features) / features**0.5).requires_grad_(),
            normal(vocabulary).requires_grad_() if bias else None,
            torch.randint(vocabulary, (tokens,), generator=generator).to(device),
            (normal(tokens), normal(tokens), normal(tokens)),
        )

    @property
    def head(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns a head's first arguments."""
        return self.hidden, self.weight, self.targets

    def leaves(self) -> list[Tensor]:
        return [tensor for tensor in (self.hidden, self.weight, self.bias) if tensor is not None]

    def gradients(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Gradients of hidden, weight and bias under the upstream gradients."""
        total = sum((row * up.to(row.dtype)).sum() for row, up in zip(results, self.upstream, strict=True))
        return torch.autograd.grad(total, self.leaves())


def assert_close(actual: Tensor, expected: Tensor, name: str, *, scale: float = 0.0, within: float = TOLERANCE) -> None:
    """Compares to `within` of the largest expected magnitude, or of `scale`, the magnitude of terms that cancel."""
    assert actual.shape == expected.shape, f"{name}: {tuple(actual.shape)} is not {tuple(expected.shape)}"
    assert torch.isfinite(actual).all(), f"{name} is not finite"
    if expected.numel() == 0:
        return
    expected = expected.detach().double()
    size = max(float(expected.abs().max()), scale)
    off = float((actual.detach().double() - expected).abs().max())
    assert off <= within * size, f"{name} is off by {off:.2e} where values are about {size:.2e}"


def assert_same_head(fused: Any, operands: Operands, *, within: float = TOLERANCE, **options: Any) -> None:
    """Asserts that `fused(hidden, weight, targets, bias=..., **options)`, a full TokenStats, equals the dense head."""
    leaves = operands.leaves()
    stats = fused(*operands.head, bias=operands.bias, entropy=True, lse=True)
    results = (stats.logprob, stats.entropy, stats.lse)
    gradients = operands.gradients(results)
    exact = dense(*operands.head, bias=operands.bias, **options)
    expected = operands.gradients(exact)
    for name, actual_part, want in zip(("logprob", "entropy", "lse"), results, exact, strict=True):
        # A log-prob is a difference of numbers as large as the logits, and 1 nat is what it is measured in.
        assert_close(actual_part, want, name, scale=1.0, within=within)
    slope = options.get("logit_scale", 1.0) / float(torch.as_tensor(options.get("temperature", 1.0)).min())
    largest = max((float(up.abs().max()) for up in operands.upstream if up.numel()), default=0.0) * slope
    widest = max(float(leaf.detach().abs().max()) if leaf.numel() else 0.0 for leaf in leaves)
    for name, actual_part, want, leaf in zip(("hidden", "weight", "bias"), gradients, expected, leaves, strict=False):
        assert actual_part.dtype == leaf.dtype
        assert_close(actual_part, want, f"gradient of {name}", scale=largest * max(widest, 1.0), within=within)
