"""Attention: multi-head or grouped, full (`*`) or within a sliding window (`S`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from postlude.checks import Finite, Positive, check_bounds
from postlude.layout import Layout, nearest_degrees
from postlude.model.block_config import NOMINAL_LENGTH, BlockConfig, Size, default_heads
from postlude.model.blocks.block import Block
from postlude.model.config import ModelConfig
from postlude.model.context import ForwardContext
from postlude.model.parallel import (
    ColumnLinear,
    ColumnRMSNorm,
    RMSNorm,
    Role,
    RowLinear,
    apply_linears,
    fused_operand,
    local,
    sharded_parameter,
)
from postlude.ops.activation import gated_activation
from postlude.ops.attention import ScoreConfig, attend, attends_along_paths
from postlude.ops.collectives import gather_from_sequence
from postlude.ops.decode_linear import linear_add, norm_linear
from postlude.ops.norm import Norm
from postlude.ops.paged_attention import MAX_HEAD_DIM
from postlude.ops.rotary import HeadNorms, RotaryConfig, rotate_heads
from postlude.world.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(BlockConfig):
    """Sizes and options of one attention block.

    `qk_norm` normalises queries and keys: each `head` by itself, or the `full` projection before it is split into
    heads. `scale` multiplies the scores and defaults to head_dim^-½; `softcap` bounds them. `sinks` gives each head a
    learned score that is added only to the softmax's denominator. `rotary_dim` is how many of a head's first features
    are rotated; by default all. `output_gate` multiplies the heads' outputs by the sigmoid of one more projection.
    """

    kernel_share = 0.82
    heads: Size
    kv_heads: Size
    head_dim: Size
    rotary: RotaryConfig | None = field(default_factory=RotaryConfig)
    rotary_dim: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["head", "full"] | None = None
    scale: Finite | None = None
    softcap: Positive | None = None
    sinks: bool = False
    output_gate: bool = False

    @property
    def window(self) -> int | None:
        """The number of keys that a query sees, its own included; None for all."""
        return None

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.heads % self.kv_heads:
            raise ValueError(f"attention with heads={self.heads}, kv_heads={self.kv_heads}: kv_heads divides heads.")
        if self.rotary and self.rotary_dim is None and self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} is odd, but rotary embedding rotates pairs; use an even head_dim."
            )
        if self.rotary_dim is not None and not (0 < self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0):
            raise ValueError(
                f"rotary_dim={self.rotary_dim} of head_dim={self.head_dim}: rotary embedding rotates pairs of a head's "
                f"features; use an even number from 2 to {self.head_dim}."
            )

    @classmethod
    def default_for(cls, hidden_size: int, others: Sequence[BlockConfig]) -> Self:
        """Copies the fields of the model's other attention, full or sliding; else head_dim is 64."""
        for other in others:
            if isinstance(other, AttentionConfig):
                copied = {field.name: getattr(other, field.name) for field in fields(AttentionConfig)}
                return cls(**copied, **cls._extra_fields())
        heads, size = default_heads(hidden_size, 64)
        sizes: dict[str, Any] = {"heads": heads, "kv_heads": heads, "head_dim": max(2, size)}
        return cls(**sizes, **cls._extra_fields(), **cls.shared_fields(others))

    @classmethod
    def _extra_fields(cls) -> dict[str, Any]:
        """Returns defaults of fields that only this kind of attention has."""
        return {}

    def flops(self, hidden_size: int) -> float:
        """Counts projections, and causal scores over a sequence of NOMINAL_LENGTH."""
        gate = self.heads if self.output_gate else 0
        projections = 2 * hidden_size * self.head_dim * (2 * (self.heads + self.kv_heads) + gate)
        return projections + self.attention_flops(NOMINAL_LENGTH)

    def attention_flops(self, length: float) -> float:
        """Counts scores and weighted values over half of a sequence, or the window."""
        return 4 * min(length / 2, self.window or length) * self.heads * self.head_dim

    def cp_traffic(self, cp: int) -> float:
        """Counts keys and values of the other ranks."""
        return (cp - 1) * 2 * self.kv_heads * self.head_dim

    def saved_activations(self, hidden_size: int) -> float:
        """Counts three tensors of the norm, queries, keys and values before and after rotation, and the output.

        An output gate adds the gate, its sigmoid and the gated output.
        """
        heads = 6 * self.heads if self.output_gate else 3 * self.heads
        return 3 * hidden_size + self.head_dim * (heads + 4 * self.kv_heads)

    def wgrad_activations(self, hidden_size: int) -> float:
        """Counts the norm's output and the heads' output; gradients of queries, keys, values, a gate and the output."""
        return 2 * hidden_size + self.head_dim * ((3 if self.output_gate else 2) * self.heads + 2 * self.kv_heads)

    def check_layout(self, layout: Layout, name: str) -> None:
        """Raises unless each TP rank has its own query heads, and whole key heads or an equal slice of one."""
        if not self._divided_by(layout.tp):
            possible_degrees = nearest_degrees(layout.tp, filter(self._divided_by, range(1, self.heads + 1)))
            raise ValueError(
                f"{name} has {self.heads} heads and {self.kv_heads} key heads, which tp={layout.tp} ranks cannot "
                f"share: tp divides the heads, and either divides the key heads or is a multiple of them. "
                f"Use tp={possible_degrees}."
            )

    def _divided_by(self, tp: int) -> bool:
        shares_keys = tp % self.kv_heads == 0 and self.kv_heads * self.head_dim % tp == 0
        return self.heads % tp == 0 and (self.kv_heads % tp == 0 or shares_keys)


@dataclass(frozen=True, kw_only=True)
class SlidingAttentionConfig(AttentionConfig):
    """Attention that sees the last `sliding_window` keys, the query's own included."""

    sliding_window: Size

    @classmethod
    def _extra_fields(cls) -> dict[str, Any]:
        return {"sliding_window": NOMINAL_LENGTH}

    @property
    def window(self) -> int | None:
        """The number of keys that a query sees, its own included."""
        return self.sliding_window


class Attention(Block):
    """Softmax attention over packed sequences. Each tensor-parallel rank has its own heads."""

    Config: ClassVar[type[AttentionConfig]] = AttentionConfig
    roles: ClassVar[Mapping[str, Role]] = {"sinks": "vector"}
    supports_decoding = shares_prefixes = batch_invariant = True

    def __init__(self, config: AttentionConfig, model: ModelConfig, name: str, mesh: Mesh) -> None:
        super().__init__(config, model, name, mesh)
        self.config = config
        query_size, key_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = ColumnLinear(model.hidden_size, query_size, bias=config.qkv_bias, tp=mesh.tp)
        self.k_proj = ColumnLinear(model.hidden_size, key_size, bias=config.qkv_bias, tp=mesh.tp)
        self.v_proj = ColumnLinear(model.hidden_size, key_size, bias=config.qkv_bias, tp=mesh.tp)
        self.o_proj = RowLinear(query_size, model.hidden_size, bias=config.output_bias, tp=mesh.tp)
        if config.output_gate:
            self.gate_proj = ColumnLinear(model.hidden_size, query_size, bias=config.qkv_bias, tp=mesh.tp)
        self.sinks = sharded_parameter(config.heads, axis=mesh.tp, dim=0) if config.sinks else None
        if config.qk_norm:
            norm, full = (ColumnRMSNorm, True) if config.qk_norm == "full" else (RMSNorm, False)
            eps, offset = model.norm_eps, model.norm_offset
            self.q_norm = norm(query_size if full else config.head_dim, eps, tp=mesh.tp, offset=offset)
            self.k_norm = norm(key_size if full else config.head_dim, eps, tp=mesh.tp, offset=offset)

    def fused_projections(self) -> tuple[tuple[ColumnLinear, ...], ...]:
        """Returns the projections of queries, keys, values and a gate."""
        gate = (self.gate_proj,) if self.config.output_gate else ()
        return ((self.q_proj, self.k_proj, self.v_proj, *gate),)

    @property
    def cuda_graphable(self) -> bool:
        """True where the decoding kernel takes heads of this size."""
        return self.config.head_dim <= MAX_HEAD_DIM

    def fused_decode(self, hidden: Tensor, norm: Norm, context: ForwardContext) -> Tensor | None:
        """Supports projections with a fused weight, none of them with a bias: see `Block`."""
        layers = self.fused_projections()[0]
        operand, output = fused_operand(layers), fused_operand((self.o_proj,))
        if operand is None or output is None:
            return None
        projected = norm_linear(hidden, norm, *operand, context.counters)
        heads = projected.split([len(local(layer.weight)) for layer in layers], -1)
        return linear_add(hidden, self._attention_output(heads, context), *output, context.counters)

    def sublayer(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Computes attention, [T / tp, H] -> [T / tp, H]."""
        hidden = gather_from_sequence(hidden, self.mesh.tp.group)
        # A norm saves projected queries and keys for its backward, so they may be slices of one GEMM's output. Without
        # a norm, separate tensors let them be freed.
        projected = apply_linears(hidden, *self.fused_projections()[0], single_gemm=self.config.qk_norm is not None)
        output: Tensor = self.o_proj(self._attention_output(projected, context))
        return output

    def _attention_output(self, projected: Sequence[Tensor], context: ForwardContext) -> Tensor:
        """Returns the output of this rank's heads, [T, heads · d], from queries, keys, values and perhaps a gate."""
        config = self.config
        query, key, value, *gates = projected
        if config.qk_norm == "full":
            query, key = self.q_norm(query), self.k_norm(key)
        key, value = self._local_kv(key), self._local_kv(value)
        query, key, value = (self._split_heads(features) for features in (query, key, value))
        query, key = self._normalize_and_rotate(query, key, context)
        heads = self._attend(query, key, value, context).flatten(-2)
        for gate in gates:
            heads = gated_activation(gate, heads, "sigmoid")
        return heads

    def _normalize_and_rotate(self, query: Tensor, key: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """Returns queries and keys [T, heads, d], with head norms and rotation where configured."""
        config, normed = self.config, self.config.qk_norm == "head"
        if not config.rotary:
            return (self.q_norm(query), self.k_norm(key)) if normed else (query, key)
        table = context.rotary(config.rotary, config.rotary_dim or config.head_dim)
        return rotate_heads(query, key, table, self._head_norms())

    def _head_norms(self) -> HeadNorms | None:
        if self.config.qk_norm != "head":
            return None
        weights = local(self.q_norm.weight), local(self.k_norm.weight)
        return HeadNorms(*weights, self.q_norm.eps, self.q_norm.offset)

    def _split_heads(self, features: Tensor) -> Tensor:
        """Splits features into heads, [T, heads · d] -> [T, heads, d]."""
        tokens, width = features.shape
        return features.view(tokens, width // self.config.head_dim, self.config.head_dim)

    def _local_kv(self, features: Tensor) -> Tensor:
        """Returns key or value features of the heads that this rank's queries use.

        With more ranks than key heads a rank projects part of a head; the parts are then gathered.
        """
        tp, kv_heads = self.mesh.tp, self.config.kv_heads
        if kv_heads % tp.size == 0:
            return features
        # The collective gathers dim 0, which is features here.
        gathered = gather_from_sequence(features.T.contiguous(), tp.group)
        head: Tensor = gathered.unflatten(0, (kv_heads, -1))[tp.rank * kv_heads // tp.size].T
        return head

    def _score_config(self) -> ScoreConfig:
        config = self.config
        scale = config.head_dim**-0.5 if config.scale is None else config.scale
        sinks = None if self.sinks is None else local(self.sinks)
        return ScoreConfig(scale=scale, window=config.window, softcap=config.softcap, sinks=sinks)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, context: ForwardContext) -> Tensor:
        """Attends over whole sequences: packed, over several ranks or with shared tokens, or with a KV cache."""
        score_config = self._score_config()
        if context.decode_state is not None:
            return context.decode_state.attend(self.name, query, key, value, score_config)
        sequence_rows, widths = context.microbatch.sequence_rows, (key.shape[-1], value.shape[-1])
        if sequence_rows is None or attends_along_paths(query, widths, context.packing, score_config):
            return attend(query, key, value, context.packing, context.packing, score_config)
        gathered = gather_from_sequence(torch.cat((key, value), dim=-1), sequence_rows.axis.group)
        key, value = sequence_rows.key_rows(gathered).split(widths, dim=-1)
        return attend(query, key, value, sequence_rows.queries, sequence_rows.keys, score_config)


class SlidingAttention(Attention):
    """Softmax attention within a window."""

    Config = SlidingAttentionConfig
