"""LowRank: the LoRA adapters of layers with the same input, as operations of decoding take them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

MAX_LAYERS = 4
STEP = 64  # layers have multiples of this many features
MAX_RANK = 256


@dataclass(frozen=True)
class LowRank:
    """The adapters of adjacent layers with the same input: each layer's product gets its B · A · input.

    `a` [layers · rank, in] has every A, `b` [sum of sizes, rank] every B times its scale, and `sizes` are the layers'
    output features.
    """

    a: Tensor
    b: Tensor
    sizes: tuple[int, ...]

    @property
    def rank(self) -> int:
        return self.b.shape[1]

    def unsupported_reason(self, rows: Tensor, max_rank: int = MAX_RANK) -> str | None:
        """Returns why kernels cannot take it, or None."""
        if self.rank % 16 or self.rank > max_rank:
            return f"adapters of rank {self.rank} are no multiple of 16 up to {max_rank}"
        if len(self.sizes) > MAX_LAYERS or any(size % STEP for size in self.sizes):
            return f"layers of {list(self.sizes)} features are more than {MAX_LAYERS} or no multiples of {STEP}"
        if not (self.a.dtype == self.b.dtype == rows.dtype and self.a.is_contiguous() and self.b.is_contiguous()):
            return "rows and adapters are not dense and of one dtype"
        return None
