"""Gated delta net (`G`): short convolutions, the gated delta rule and a gated norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.checks import check_bounds
from postlude.data.microbatch import HeadExchange
from postlude.layout import Layout
from postlude.model.block_config import BlockConfig, Size, default_heads
from postlude.model.blocks.recurrent import Recurrence, Recurrent
from postlude.model.config import ModelConfig
from postlude.model.context import ForwardContext, Inputs, States
from postlude.model.parallel import (
    ColumnLinear,
    DepthwiseConvWeights,
    PerHeadVectors,
    RMSNorm,
    RowLinear,
    apply_linears,
    local,
)
from postlude.ops.collectives import gather_from_sequence
from postlude.ops.convolution import convolve, convolve_step
from postlude.ops.gated_delta import CHUNK, gated_delta, gated_delta_step
from postlude.ops.kernels.capabilities import ScanBackend
from postlude.ops.packing import Packing
from postlude.world.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig(BlockConfig):
    """Sizes and options of one gated delta net.

    Each of `value_heads` has a state [key_dim, value_dim]; queries and keys of each of `key_heads` serve adjacent ones.
    The state decays by e^(−A · softplus(projection + bias)) before a token writes. `chunk` is the scan's chunk size and
    only changes speed.
    """

    key_heads: Size
    value_heads: Size
    key_dim: Size
    value_dim: Size
    conv_kernel: Size = 4
    chunk: Size = CHUNK

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"gated delta net with key_heads={self.key_heads}, value_heads={self.value_heads}: key_heads divide "
                "value_heads."
            )

    @classmethod
    def default_for(cls, hidden_size: int, others: Sequence[BlockConfig]) -> Self:
        """Returns key heads of 128, and two value heads of that size for each, as in Qwen3-Next."""
        heads, size = default_heads(hidden_size, 128)
        return cls(key_heads=heads, value_heads=2 * heads, key_dim=size, value_dim=size, **cls.shared_fields(others))

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def keys(self) -> int:
        """Features of all key heads: of queries, and of keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Features of all value heads: of values, the gate and the outputs."""
        return self.value_heads * self.value_dim

    def flops(self, hidden_size: int) -> float:
        """Counts projections, convolutions, and the scan's products within chunks and with states."""
        projections = 2 * hidden_size * (2 * self.keys + 3 * self.values + 2 * self.value_heads)
        convolutions = 2 * self.conv_kernel * (2 * self.keys + self.values)
        inside = 4 * self.chunk * self.value_heads * (self.key_dim + self.value_dim)
        return projections + convolutions + inside + 6 * self.value_heads * self.key_dim * self.value_dim

    def cp_traffic(self, cp: int) -> float:
        """Counts the exchange of sequences for heads, and back."""
        return (cp - 1) / cp * (2 * self.keys + 2 * self.values + 2 * self.value_heads)

    def saved_activations(self, hidden_size: int) -> float:
        """Counts three tensors of the norm; queries, keys and values projected, joined, convolved; heads and gate.

        The heads count before and after their norm, the gate before and after its activation, and their product once.
        """
        return 3 * hidden_size + 3 * (2 * self.keys + self.values) + 6 * self.values

    def wgrad_activations(self, hidden_size: int) -> float:
        """Counts the norm's output and the gated heads; gradients of queries, keys, values, gates, and the output."""
        return 2 * hidden_size + 2 * self.keys + 3 * self.values + 2 * self.value_heads

    def check_layout(self, layout: Layout, name: str) -> None:
        """Raises unless each TP and CP rank has its own key heads with their value heads."""
        ranks = layout.tp * layout.cp
        if self.key_heads % ranks:
            best = max(divisor for divisor in range(1, min(ranks, self.key_heads) + 1) if self.key_heads % divisor == 0)
            raise ValueError(
                f"{name} has {self.key_heads} key heads, which tp={layout.tp}, cp={layout.cp} cannot share: both give "
                f"each rank heads of its own, so tp · cp divides the key heads. Use tp · cp = {best}."
            )


class GatedDelta(Recurrent):
    """Each tensor-parallel rank has its own heads. Under context parallelism each rank has whole sequences of some."""

    Config = GatedDeltaConfig
    shares_prefixes = True
    never_fp8 = ("a_proj", "b_proj")  # they set how fast states decay
    decays = (0.01, 16.0)
    ones = ("head_norm.weight",)  # it has no offset

    def __init__(self, config: GatedDeltaConfig, model: ModelConfig, name: str, mesh: Mesh) -> None:
        super().__init__(config, model, name, mesh)
        self.config = config
        size, tp = model.hidden_size, mesh.tp
        self.q_proj = ColumnLinear(size, config.keys, tp=tp)
        self.k_proj = ColumnLinear(size, config.keys, tp=tp)
        self.v_proj = ColumnLinear(size, config.values, tp=tp)
        self.z_proj = ColumnLinear(size, config.values, tp=tp)
        self.b_proj = ColumnLinear(size, config.value_heads, tp=tp)
        self.a_proj = ColumnLinear(size, config.value_heads, tp=tp)
        self.q_conv = DepthwiseConvWeights(config.keys, config.conv_kernel, tp=tp)
        self.k_conv = DepthwiseConvWeights(config.keys, config.conv_kernel, tp=tp)
        self.v_conv = DepthwiseConvWeights(config.values, config.conv_kernel, tp=tp)
        self.vectors = PerHeadVectors(("A_log", "dt_bias"), config.value_heads, tp=tp)
        self.head_norm = RMSNorm(config.value_dim, model.norm_eps, tp=tp)  # of each value head separately
        self.out_proj = RowLinear(config.values, size, tp=tp)

    def mix(self, hidden: Tensor, vectors: Mapping[str, Tensor], context: ForwardContext) -> Tensor:
        """Mixes tokens after the pre-norm, [T / tp, H] -> [T / tp, H]."""
        head_exchange = context.microbatch.head_exchange
        hidden = gather_from_sequence(hidden, self.mesh.tp.group)
        layers = (self.z_proj, self.q_proj, self.k_proj, self.v_proj, self.b_proj, self.a_proj)
        gate, *of_keys = apply_linears(hidden, *layers)
        # Everything of a key head in one tensor: one exchange under context parallelism.
        by_key_head = torch.cat([projected.unflatten(-1, (self.key_heads, -1)) for projected in of_keys], -1)
        inputs = (head_exchange.to_heads(by_key_head),)
        heads = self.recur(
            inputs, self._recurrence(vectors, head_exchange, context.scan_backend), head_exchange, context
        )
        heads = (self.head_norm(heads) * F.silu(gate.view(heads.shape).float())).to(hidden.dtype)
        output: Tensor = self.out_proj(heads.flatten(-2))
        return output

    @property
    def key_heads(self) -> int:
        """Key heads of this tensor-parallel rank."""
        return self.config.key_heads // self.mesh.tp.size

    def _recurrence(
        self, vectors: Mapping[str, Tensor], head_exchange: HeadExchange, backend: ScanBackend
    ) -> DeltaRule:
        kernels = [local(kernel.weight) for kernel in (self.q_conv, self.k_conv, self.v_conv)]
        by_key_head = torch.cat([kernel.unflatten(0, (self.key_heads, -1)) for kernel in kernels], 1)
        return DeltaRule(
            self.config,
            kernel=head_exchange.local_heads(by_key_head).flatten(0, 1),
            decay=-head_exchange.local_heads(vectors["A_log"]).exp(),
            dt_bias=head_exchange.local_heads(vectors["dt_bias"]),
            backend=backend,
        )


@dataclass(frozen=True)
class DeltaRule(Recurrence):
    """The recurrence of some value heads, whose states are [key_dim, value_dim].

    Its input is everything of each key head, [T, key_heads, 2 · key_dim + group · (value_dim + 2)]: query, key, its
    values, and `b` and `a` for each.
    """

    config: GatedDeltaConfig
    kernel: Tensor
    decay: Tensor
    dt_bias: Tensor
    backend: ScanBackend

    def run(self, inputs: Inputs, packing: Packing, *, last_states: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns [T, value_heads, value_dim], the scan's states on request, and the convolution's inputs."""
        channels, writing = self._split(inputs[0])
        heads = self._heads(convolve(channels, self.kernel, None, packing, silu=True))
        chunk = self.config.chunk
        outputs, states = gated_delta(
            *heads, *writing, packing, normalise=True, chunk=chunk, last_states=last_states, backend=self.backend
        )
        return outputs, states, channels

    def step(self, inputs: Inputs, states: States, running: Tensor | None) -> Tensor:
        """Runs one token of each sequence. Returns [sequences, value_heads, value_dim]."""
        channels, writing = self._split(inputs[0])
        convolved = convolve_step(channels, states[0], self.kernel, None, running, silu=True)
        return gated_delta_step(*self._heads(convolved), *writing, states[1], running, normalise=True)

    def _split(self, projected: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Returns the convolution's input [T, channels]; log decay and beta [T, value_heads], fp32."""
        group = self.config.group
        channels, b, a = projected.split((projected.shape[-1] - 2 * group, group, group), -1)
        log_decay = self.decay * F.softplus(a.flatten(1).float() + self.dt_bias)
        return channels.flatten(1), (log_decay, b.flatten(1).float().sigmoid())

    def _heads(self, channels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns query and key [T, key_heads, key_dim], value [T, value_heads, value_dim]."""
        config = self.config
        sizes = (config.key_dim, config.key_dim, config.group * config.value_dim)
        query, key, value = channels.unflatten(1, (-1, sum(sizes))).split(sizes, -1)
        return query, key, value.reshape(len(value), len(self.decay), config.value_dim)
