"""Rotary position embedding: the frequencies of each scaling rule, and the rotation itself."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from postlude.checks import Bounds, Positive, check_bounds
from postlude.ops.kernels.capabilities import EMPTY, Backend, use_kernel
from postlude.ops.linear import main_grad
from postlude.ops.norm import rms_norm

WIDEST = 1024  # features of a head that the Triton kernels take

RotaryTable = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """Frequencies `theta^(-2i/d)` and how they are scaled beyond the trained length.

    `linear` divides every frequency by `factor`. `llama3` divides the slow ones, keeps the fast ones and blends
    between. `yarn` blends by the number of turns within `original_length`, and scales the rotated vectors by
    `attention_factor`.
    """

    theta: Positive = 10_000.0
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: Positive = 1.0
    original_length: Annotated[int, Bounds(least=1)] | None = None
    low_frequency_factor: Positive = 1.0
    high_frequency_factor: Positive = 4.0
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    attention_factor: Positive = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.scaling not in ("none", "linear", "llama3", "yarn"):
            raise ValueError(f"rotary scaling {self.scaling!r} is unknown; use none, linear, llama3 or yarn.")
        if self.scaling in ("llama3", "yarn") and not self.original_length:
            raise ValueError(f"rotary scaling {self.scaling!r} needs original_length, the length before stretching.")
        if self.scaling == "llama3" and self.low_frequency_factor >= self.high_frequency_factor:
            raise ValueError(
                f"low_frequency_factor is {self.low_frequency_factor:g}, but it must be below high_frequency_factor, "
                f"which is {self.high_frequency_factor:g}."
            )
        if self.scaling == "yarn" and self.theta <= 1:
            raise ValueError(f"theta is {self.theta:g}, but rotary scaling 'yarn' needs a theta above 1.")

    def frequencies(self, width: int, device: torch.device | None = None) -> Tensor:
        """Returns the angle per position of each pair, fp32 [width / 2]."""
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


def rotary_table(config: RotaryConfig, positions: Tensor, width: int) -> RotaryTable:
    """Returns cosine and sine for `positions` [T], fp32 [T, 1, width], to broadcast over heads.

    Both halves have the same angles; in the second, the pair's other member, the sine has the opposite sign.
    """
    angles = positions.to(torch.float32)[:, None] * _frequencies(config, width, positions.device)
    angles = torch.cat((angles, -angles), dim=-1)[:, None, :]
    if config.attention_factor == 1.0:
        return angles.cos(), angles.sin()
    return angles.cos() * config.attention_factor, angles.sin() * config.attention_factor


@functools.cache
def _frequencies(config: RotaryConfig, width: int, device: torch.device) -> Tensor:
    """Computed once, since every decode step needs them. They are never freed: CUDA graphs read them."""
    return config.frequencies(width, device)


def rotate(vectors: Tensor, table: RotaryTable) -> Tensor:
    """Rotates `vectors` [T, heads, width] by their positions; pair i is (i, i + width / 2).

    Where the table is narrower, only that many first features are rotated.
    """
    rotated = table[0].shape[-1]
    if rotated < vectors.shape[-1]:
        return torch.cat((rotate(vectors[..., :rotated], table), vectors[..., rotated:]), dim=-1)
    cos, sin = table[0].to(vectors.dtype), table[1].to(vectors.dtype)
    return torch.addcmul(vectors * cos, vectors.roll(rotated // 2, -1), sin, value=-1)


def deinterleave_pairs(vectors: Tensor) -> Tensor:
    """Reorders `vectors` [..., width] from pairs (2i, 2i + 1) to the pairs of `rotate`."""
    return torch.cat((vectors[..., 0::2], vectors[..., 1::2]), dim=-1)


@dataclass(frozen=True, eq=False)
class HeadNorms:
    """RMSNorms of each query head and each key head: weights [width], as `rms_norm` takes them."""

    query: Tensor
    key: Tensor
    eps: float
    offset: float = 0.0


def rotate_heads(
    query: Tensor, key: Tensor, table: RotaryTable, norms: HeadNorms | None = None, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """Normalises queries [T, heads, width] and keys [T, kv_heads, width] if `norms` are given, and rotates them.

    The kernel rounds once; torch rounds after the norm, each factor of the table and each product.
    """
    if not _use_kernel(query, key, table, norms, backend):
        if norms is not None:
            query = rms_norm(query, norms.query, norms.eps, norms.offset)
            key = rms_norm(key, norms.key, norms.eps, norms.offset)
        return rotate(query, table), rotate(key, table)
    inputs = (query, key) if norms is None else (query, key, norms.query, norms.key)
    options = (0.0, 0.0) if norms is None else (norms.eps, norms.offset)
    rotated: tuple[Tensor, Tensor]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        rotated = (_Rotate if norms is None else _NormRotate).apply(*inputs, *table, *options)
    else:
        from postlude.ops.kernels import rotary as kernels  # needs triton

        weights = None if norms is None else (norms.query, norms.key)
        rotated = kernels.forward(query, key, table, weights, *options)
    return rotated


def _use_kernel(query: Tensor, key: Tensor, table: RotaryTable, norms: HeadNorms | None, backend: Backend) -> bool:
    if not query.is_cuda and backend == "auto":
        return False
    unsupported_reason = None
    if query.numel() == 0:
        unsupported_reason = EMPTY
    elif query.shape[-1] > WIDEST:
        unsupported_reason = f"its kernels take heads of {WIDEST} features, and these have {query.shape[-1]}"
    elif query.dtype != key.dtype or (norms is not None and norms.query.dtype != norms.key.dtype):
        unsupported_reason = "queries and keys are not of one dtype"
    elif not (table[0].is_contiguous() and table[1].is_contiguous() and table[0].dtype == torch.float32):
        unsupported_reason = "its table is not dense fp32"
    return use_kernel("rotate_heads", backend, query.device, query.dtype, unsupported_reason=unsupported_reason)


class _Rotate(Function):
    """The rotation without norms. Its backward needs the table only."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        from postlude.ops.kernels import rotary as kernels

        ctx.save_for_backward(cos, sin)
        return kernels.forward(query, key, (cos, sin), None, eps, offset)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from postlude.ops.kernels import rotary as kernels

        cos, sin = ctx.saved_tensors
        grad_query, grad_key = gradients
        grads = kernels.backward(None, None, (cos, sin), None, 0.0, 0.0, (grad_query, grad_key), (None, None))
        return grads[0], grads[1], None, None, None, None


class _NormRotate(Function):
    """Norms and rotation. The backward keeps queries and keys as they came and computes their norms again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        eps: float,
        offset: float,
    ) -> tuple[Tensor, Tensor]:
        from postlude.ops.kernels import rotary as kernels

        ctx.save_for_backward(query, key, query_weight, key_weight, cos, sin)
        ctx.options, ctx.main_grads = (eps, offset), (main_grad(query_weight), main_grad(key_weight))
        return kernels.forward(query, key, (cos, sin), (query_weight, key_weight), eps, offset)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from postlude.ops.kernels import rotary as kernels

        query, key, query_weight, key_weight, cos, sin = ctx.saved_tensors
        (eps, offset), (grad_query, grad_key) = ctx.options, gradients
        weights = query_weight, key_weight
        grads = kernels.backward(query, key, (cos, sin), weights, eps, offset, (grad_query, grad_key), ctx.main_grads)
        return *grads, None, None, None, None
