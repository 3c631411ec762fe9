"""Attention: multi-head or grouped, full (`*`) or within a sliding window (`S`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor, nn

from postlude.model.blocks.block import NOMINAL_LENGTH, Block, BlockConfig, RMSNorm
from postlude.model.context import ForwardContext
from postlude.ops.attention import Scores, attend
from postlude.ops.rotary import RotaryConfig, rotate

if TYPE_CHECKING:
    from postlude.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(BlockConfig):
    """Sizes and options of one attention block.

    `qk_norm` normalises queries and keys: each `head` by itself, or the `full` projection before it is cut into heads.
    `scale` multiplies the scores and defaults to head_dim^-½; `softcap` bounds them.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotary: RotaryConfig | None = field(default_factory=RotaryConfig)
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["head", "full"] | None = None
    scale: float | None = None
    softcap: float | None = None

    @property
    def window(self) -> int | None:
        """How many keys a query sees, its own included; None for all."""
        return None

    def __post_init__(self) -> None:
        if min(self.heads, self.kv_heads, self.head_dim) < 1 or self.heads % self.kv_heads:
            raise ValueError(
                f"attention with heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}: every size is "
                "at least 1 and kv_heads divides heads."
            )
        if self.rotary and self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} is odd, but rotary embedding turns pairs; use an even head_dim."
            )

    def flops(self, hidden_size: int) -> float:
        """Projections, and scores over half of a nominal sequence."""
        seen = min(NOMINAL_LENGTH / 2, self.window or NOMINAL_LENGTH)
        projections = 2 * hidden_size * self.head_dim * 2 * (self.heads + self.kv_heads)
        return projections + 4 * seen * self.heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class SlidingAttentionConfig(AttentionConfig):
    """Attention that sees the last `sliding_window` keys, the query's own included."""

    sliding_window: int

    @property
    def window(self) -> int | None:
        """How many keys a query sees, its own included."""
        return self.sliding_window

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window < 1:
            raise ValueError(f"sliding_window={self.sliding_window}: a query sees at least its own key, so at least 1.")


class Attention(Block):
    """Softmax attention over the packed sequences."""

    Config: ClassVar[type[AttentionConfig]] = AttentionConfig

    def __init__(self, config: AttentionConfig, model: ModelConfig, name: str) -> None:
        super().__init__(config, model, name)
        self.config = config
        query_size, key_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(model.hidden_size, query_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(model.hidden_size, key_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(model.hidden_size, key_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(query_size, model.hidden_size, bias=config.output_bias)
        if config.qk_norm:
            full = config.qk_norm == "full"
            self.q_norm = RMSNorm(query_size if full else config.head_dim, model.norm_eps)
            self.k_norm = RMSNorm(key_size if full else config.head_dim, model.norm_eps)

    def work(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """[T, H] -> [T, H]."""
        config = self.config
        query, key, value = self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)
        if config.qk_norm == "full":
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (part.unflatten(-1, (-1, config.head_dim)) for part in (query, key, value))  # [T, heads, d]
        if config.qk_norm == "head":
            query, key = self.q_norm(query), self.k_norm(key)
        if config.rotary:
            table = context.rotary(config.rotary, config.head_dim)
            query, key = rotate(query, table), rotate(key, table)
        scale = config.head_dim**-0.5 if config.scale is None else config.scale
        scores = Scores(scale=scale, window=config.window, softcap=config.softcap)
        heads = attend(query, key, value, context.packing, scores)
        output: Tensor = self.o_proj(heads.flatten(-2))
        return output


class SlidingAttention(Attention):
    """Softmax attention within a window."""

    Config = SlidingAttentionConfig
