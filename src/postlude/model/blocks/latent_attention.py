"""Latent attention (MLA, `+`): keys and values of all heads come from one small cached vector per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from postlude.checks import Finite, Positive, check_bounds
from postlude.data.microbatch import SequenceRows
from postlude.layout import Layout, nearest_degrees
from postlude.model.block_config import NOMINAL_LENGTH, BlockConfig, Size, default_heads
from postlude.model.blocks.attention import AttentionConfig
from postlude.model.blocks.block import Block
from postlude.model.config import ModelConfig
from postlude.model.context import AttendCache, DecodeState, ForwardContext, Inputs, Stores
from postlude.model.parallel import ColumnLinear, Linear, RMSNorm, RowLinear, fused_operand, local
from postlude.ops.attention import ScoreConfig, attend, attends_along_paths
from postlude.ops.collectives import gather_from_sequence
from postlude.ops.decode_linear import linear_add, norm_linear
from postlude.ops.latent_attention import rotate_latents
from postlude.ops.norm import Norm
from postlude.ops.packing import Packing
from postlude.ops.rotary import RotaryConfig, deinterleave_pairs, rotate_heads
from postlude.world.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig(BlockConfig):
    """Sizes and options of one latent attention block.

    A token's `latent_size` features give the keys and values of every head: `nope_dim` features of a key, joined by
    `rope_dim` rotary features that all heads share, and `value_dim` of a value. Queries come from their own latent of
    `query_latent_size`, or from the token itself. Both latents are normalised with `latent_norm_eps`. `interleaved`
    weights have the two features of a rotary pair next to each other. `bias` is that of the latent and output
    projections. `scale` multiplies the scores and defaults to (nope_dim + rope_dim)^-½.
    """

    caches_latents = True
    heads: Size
    nope_dim: Size
    rope_dim: Size
    value_dim: Size
    latent_size: Size
    query_latent_size: Size | None = None
    rotary: RotaryConfig = field(default_factory=RotaryConfig)
    interleaved: bool = False
    bias: bool = False
    latent_norm_eps: Positive = 1e-6
    scale: Finite | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.rope_dim % 2:
            raise ValueError(
                f"rope_dim={self.rope_dim} is odd, but rotary embedding rotates pairs; use an even rope_dim."
            )

    @classmethod
    def default_for(cls, hidden_size: int, others: Sequence[BlockConfig]) -> Self:
        """Returns heads of the model's attention, else of 128, and a latent of four head sizes.

        Rotary features are half a head size, as in DeepSeek-V3.
        """
        attention = next((other for other in others if isinstance(other, AttentionConfig)), None)
        heads, size = default_heads(hidden_size, 128) if attention is None else (attention.heads, attention.head_dim)
        rotary = RotaryConfig() if attention is None or attention.rotary is None else attention.rotary
        return cls(
            heads=heads,
            nope_dim=size,
            rope_dim=max(2, size // 4 * 2),
            value_dim=size,
            latent_size=4 * size,
            rotary=rotary,
            **cls.shared_fields(others),
        )

    @property
    def query_dim(self) -> int:
        """The width of a query, and of a key."""
        return self.nope_dim + self.rope_dim

    @property
    def score_config(self) -> ScoreConfig:
        """The scoring of keys."""
        return ScoreConfig(scale=self.query_dim**-0.5 if self.scale is None else self.scale)

    def flops(self, hidden_size: int) -> float:
        """Counts projections, and scores over half of a nominal sequence."""
        query, heads = self.query_latent_size, self.heads
        queries = (
            hidden_size * heads * self.query_dim if query is None else query * (hidden_size + heads * self.query_dim)
        )
        latent = hidden_size * (self.latent_size + self.rope_dim)
        expanded = self.latent_size * heads * (self.nope_dim + self.value_dim)
        projections = 2 * (queries + latent + expanded + heads * self.value_dim * hidden_size)
        return projections + self.attention_flops(NOMINAL_LENGTH)

    def attention_flops(self, length: float) -> float:
        """Counts scores and weighted values over half of a sequence."""
        return length * self.heads * (self.query_dim + self.value_dim)

    def tp_traffic(self, hidden_size: int) -> float:
        """Counts gathered latents, or tokens where queries have no latent, and the scattered output."""
        gathered = hidden_size if self.query_latent_size is None else self.query_latent_size
        return gathered + self.latent_size + self.rope_dim + hidden_size

    def cp_traffic(self, cp: int) -> float:
        """Counts latents of the other ranks."""
        return (cp - 1) * (self.latent_size + self.rope_dim)

    def saved_activations(self, hidden_size: int) -> float:
        """Counts three tensors of the norm, the latents, and queries, keys and values before and after joining."""
        latents = 2 * (self.latent_size + (self.query_latent_size or 0)) + self.rope_dim
        return 3 * hidden_size + latents + self.heads * (4 * self.query_dim + 3 * self.value_dim)

    def wgrad_activations(self, hidden_size: int) -> float:
        """Counts the norm's output, latents and heads; gradients of latents, queries, keys, values and the output."""
        latents = 2 * (self.latent_size + (self.query_latent_size or 0)) + self.rope_dim
        return 2 * hidden_size + latents + self.heads * (self.query_dim + self.nope_dim + 2 * self.value_dim)

    def check_layout(self, layout: Layout, name: str) -> None:
        """Raises unless tp divides the heads."""
        if self.heads % layout.tp:
            degrees = nearest_degrees(layout.tp, (tp for tp in range(1, self.heads + 1) if self.heads % tp == 0))
            raise ValueError(
                f"{name} has {self.heads} heads, which tp={layout.tp} ranks cannot share evenly. Use tp={degrees}."
            )


class LatentAttention(Block):
    """Softmax attention whose keys and values come from a latent. Each tensor-parallel rank has its own heads.

    Latents are small, so every rank computes those of its own tokens and gathers the others'; under context parallelism
    they are exchanged instead of keys and values. A running sequence caches only its latents: its next query attends to
    them directly, with the key projection applied to the query and the value projection to the result.
    """

    Config: ClassVar[type[LatentAttentionConfig]] = LatentAttentionConfig
    supports_decoding = shares_prefixes = True

    def __init__(self, config: LatentAttentionConfig, model: ModelConfig, name: str, mesh: Mesh) -> None:
        super().__init__(config, model, name, mesh)
        self.config = config
        outer, tp, eps, offset = model.hidden_size, mesh.tp, config.latent_norm_eps, model.norm_offset
        query_size = config.heads * config.query_dim
        if config.query_latent_size is None:
            self.q_proj = ColumnLinear(outer, query_size, tp=tp)
        else:
            self.q_a_proj = Linear(outer, config.query_latent_size, bias=config.bias, tp=tp)
            self.q_a_norm = RMSNorm(config.query_latent_size, eps, tp=tp, offset=offset)
            self.q_b_proj = ColumnLinear(config.query_latent_size, query_size, tp=tp)
        self.kv_a_proj = Linear(outer, config.latent_size + config.rope_dim, bias=config.bias, tp=tp)
        self.kv_a_norm = RMSNorm(config.latent_size, eps, tp=tp, offset=offset)
        self.kv_b_proj = ColumnLinear(config.latent_size, config.heads * (config.nope_dim + config.value_dim), tp=tp)
        self.o_proj = RowLinear(config.heads * config.value_dim, outer, bias=config.bias, tp=tp)

    def fused_projections(self) -> tuple[tuple[Linear, ...], ...]:
        """Returns the projections of queries, or of their latents, and of the latents of keys and values."""
        return ((self.q_proj if self.config.query_latent_size is None else self.q_a_proj, self.kv_a_proj),)

    def fused_decode(self, hidden: Tensor, norm: Norm, context: ForwardContext) -> Tensor | None:
        """Supports projections with a fused weight, none of them with a bias: see `Block`."""
        layers, config = self.fused_projections()[0], self.config
        operand, output = fused_operand(layers), fused_operand((self.o_proj,))
        if context.decode_state is None or operand is None or output is None:
            return None
        projected = norm_linear(hidden, norm, *operand, context.counters)
        query, latent = projected.split([len(local(layer.weight)) for layer in layers], -1)
        if config.query_latent_size is not None:
            query = self.q_b_proj(self.q_a_norm(query))
        query_part, query_rotated = query.unflatten(-1, (-1, config.query_dim)).split(
            (config.nope_dim, config.rope_dim), dim=-1
        )
        latent_norm = Norm(local(self.kv_a_norm.weight), self.kv_a_norm.eps, self.kv_a_norm.offset)
        table = context.rotary(config.rotary, config.rope_dim)
        query_rotated, latent = rotate_latents(
            query_rotated, latent, latent_norm, table, interleaved=config.interleaved
        )
        heads = self._attend_cache((query_part, query_rotated), latent, context.decode_state)
        return linear_add(hidden, heads.flatten(-2), *output, context.counters)

    def sublayer(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Computes attention, [T / tp, H] -> [T / tp, H]."""
        config = self.config
        query, latent = self._projected(hidden)
        query_part, query_rotated = query.split((config.nope_dim, config.rope_dim), dim=-1)
        latent, key_rotated = latent.split((config.latent_size, config.rope_dim), dim=-1)
        table = context.rotary(config.rotary, config.rope_dim)
        if config.interleaved:
            query_rotated, key_rotated = deinterleave_pairs(query_rotated), deinterleave_pairs(key_rotated)
        query_rotated, key_rotated = rotate_heads(query_rotated, key_rotated[:, None], table)
        latent = torch.cat((latent, key_rotated[:, 0]), dim=-1)  # [T, latent + rope]
        sequence_rows, widths = context.microbatch.sequence_rows, (config.query_dim, config.value_dim)
        if context.decode_state is not None:
            heads = self._attend_cache((query_part, query_rotated), latent, context.decode_state)
        elif sequence_rows is not None and not attends_along_paths(query, widths, context.packing, config.score_config):
            heads = self._attend_rows((query_part, query_rotated, latent), sequence_rows)
        else:
            heads = self._prefill((query_part, query_rotated), (latent[:, None],), context.packing, context.packing)
        output: Tensor = self.o_proj(heads.flatten(-2))
        return output

    def _attend_cache(self, inputs: Inputs, latent: Tensor, decode_state: DecodeState) -> Tensor:
        return decode_state.attend_latents(self.name, inputs, (latent[:, None],), self._decode, self._prefill)

    def _projected(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Projects to this rank's queries [T, heads / tp, nope + rope] and the latents [T, latent + rope]."""
        config, group = self.config, self.mesh.tp.group
        latent, rotated = self.kv_a_proj(hidden).split((config.latent_size, config.rope_dim), dim=-1)
        small = [self.kv_a_norm(latent), rotated]
        if config.query_latent_size is not None:
            small.append(self.q_a_norm(self.q_a_proj(hidden)))
        gathered = gather_from_sequence(torch.cat(small, dim=-1), group)
        if config.query_latent_size is None:
            query = self.q_proj(gather_from_sequence(hidden, group))
        else:
            gathered, query_latent = gathered.split(
                (config.latent_size + config.rope_dim, config.query_latent_size), -1
            )
            query = self.q_b_proj(query_latent)
        return query.unflatten(-1, (-1, config.query_dim)), gathered

    def _prefill(self, inputs: Inputs, stored: Inputs, queries: Packing, keys: Packing) -> Tensor:
        """Attends to sequences: query parts [Tq, heads, ...], latents [Tk, 1, latent + rope] -> [Tq, heads, value]."""
        (latent,) = stored
        key, value = self._expand(latent[:, 0])
        return attend(torch.cat(inputs, dim=-1), key, value, queries, keys, self.config.score_config)

    def _attend_rows(self, inputs: Inputs, sequence_rows: SequenceRows) -> Tensor:
        """Attends to keys on other ranks, or that sequences share."""
        query_part, query_rotated, latent = inputs
        key, value = self._expand(gather_from_sequence(latent, sequence_rows.axis.group))
        key_value = sequence_rows.key_rows(torch.cat((key, value), dim=-1))
        key, value = key_value.split((key.shape[-1], value.shape[-1]), dim=-1)
        query = torch.cat((query_part, query_rotated), dim=-1)
        return attend(query, key, value, sequence_rows.queries, sequence_rows.keys, self.config.score_config)

    def _expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys [T, heads, nope + rope] and values [T, heads, value] of latents [T, latent + rope]."""
        config = self.config
        latent, key_rotated = latent.split((config.latent_size, config.rope_dim), dim=-1)
        key_value = self.kv_b_proj(latent).unflatten(-1, (-1, config.nope_dim + config.value_dim))
        key_part, value = key_value.split((config.nope_dim, config.value_dim), dim=-1)
        key = torch.cat((key_part, key_rotated[:, None].expand(-1, key_part.shape[1], -1)), dim=-1)
        return key, value

    def _decode(self, inputs: Inputs, stores: Stores, attend_stores: AttendCache) -> Tensor:
        """Decodes one token of each sequence. Its query attends to the latents, one key head that all heads share."""
        config = self.config
        query_part, query_rotated = inputs
        to_key, to_value = self._expansions(local(self.kv_b_proj.weight))  # [heads, …, latent] each
        query_latent = query_part.new_empty(*query_part.shape[:2], config.latent_size)
        torch.bmm(query_part.transpose(0, 1), to_key, out=query_latent.transpose(0, 1))
        adapter = self.kv_b_proj.adapter
        if adapter is not None:  # W + scale · B · A, without computing it
            a, scale = local(adapter.a), adapter.config.scale
            b_key, b_value = self._expansions(local(adapter.b))  # [heads, …, rank] each
            query_latent += torch.einsum("thn,hnr->thr", query_part * scale, b_key) @ a
        (latents,) = stores
        attended = attend_stores(
            (query_latent, query_rotated), latents, latents[..., : config.latent_size], config.score_config
        )
        values = attended.new_empty(*attended.shape[:2], config.value_dim)
        torch.bmm(attended.transpose(0, 1), to_value.transpose(1, 2), out=values.transpose(0, 1))
        if adapter is not None:
            values = values + torch.einsum("thr,hvr->thv", attended @ a.T * scale, b_value)
        return values

    def _expansions(self, matrix: Tensor) -> tuple[Tensor, ...]:
        """Returns the rows of keys and of values of the matrix of `kv_b_proj`, [heads, …, columns] each."""
        config = self.config
        by_head = matrix.unflatten(0, (-1, config.nope_dim + config.value_dim))
        parts: tuple[Tensor, ...] = by_head.split((config.nope_dim, config.value_dim), dim=1)
        return parts
