"""Rotary position embedding: the frequencies of each scaling rule, and the rotation itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """Frequencies `theta^(-2i/d)` and the rule that stretches them beyond the trained length.

    `linear` divides every frequency by `factor`. `llama3` divides the slow ones, keeps the fast ones and blends
    between. `yarn` blends by the number of turns within `original_length`, and scales the rotated vectors by
    `attention_factor`.
    """

    theta: float = 10_000.0
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_length: int | None = None
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.scaling not in ("none", "linear", "llama3", "yarn"):
            raise ValueError(f"rotary scaling {self.scaling!r} is unknown; use none, linear, llama3 or yarn.")
        if self.scaling in ("llama3", "yarn") and not self.original_length:
            raise ValueError(f"rotary scaling {self.scaling!r} needs original_length, the length before stretching.")

    def frequencies(self, width: int, device: torch.device | None = None) -> Tensor:
        """Angle per position of each pair, fp32 [width / 2]."""
        exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
        plain = 1.0 / (self.theta**exponents)
        match self.scaling:
            case "none":
                return plain
            case "linear":
                return plain / self.factor
            case "llama3":
                return self._llama3(plain)
            case "yarn":
                return self._yarn(plain, width)

    def _llama3(self, plain: Tensor) -> Tensor:
        assert self.original_length is not None
        turns = self.original_length * plain / (2 * math.pi)  # full turns within the original length
        keep = (turns - self.low_frequency_factor) / (self.high_frequency_factor - self.low_frequency_factor)
        keep = keep.clamp(0.0, 1.0)
        return keep * plain + (1 - keep) * plain / self.factor

    def _yarn(self, plain: Tensor, width: int) -> Tensor:
        assert self.original_length is not None

        def pair_that_turns(turns: float) -> float:
            assert self.original_length is not None
            return width * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        pairs = torch.arange(width // 2, dtype=torch.float32, device=plain.device)
        stretch = ((pairs - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
        return stretch * plain / self.factor + (1 - stretch) * plain


def rotary_table(config: RotaryConfig, positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine for `positions` [T], fp32 [T, 1, width], the halves repeated, ready to broadcast over heads."""
    angles = positions.to(torch.float32)[:, None] * config.frequencies(width, positions.device)
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    return angles.cos() * config.attention_factor, angles.sin() * config.attention_factor


def rotate(vectors: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn `vectors` [T, heads, width] by their positions; pair i is (i, i + width / 2).

    Where the table is narrower, as many of the first features are turned, and the rest are left as they are.
    """
    turned = table[0].shape[-1]
    if turned < vectors.shape[-1]:
        return torch.cat((rotate(vectors[..., :turned], table), vectors[..., turned:]), dim=-1)
    cos, sin = (part.to(vectors.dtype) for part in table)
    first, second = vectors.chunk(2, dim=-1)
    return vectors * cos + torch.cat((-second, first), dim=-1) * sin


def paired(vectors: Tensor) -> Tensor:
    """`vectors` [..., width] whose pair i is (2i, 2i + 1) -> the same with pairs as `rotate` has them."""
    return torch.cat((vectors[..., 0::2], vectors[..., 1::2]), dim=-1)
