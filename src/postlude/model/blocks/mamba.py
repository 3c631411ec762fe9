"""Mamba-2 (`M`): a short convolution, a state-space scan and a gated norm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from postlude.checks import Positive, check_bounds
from postlude.data.microbatch import HeadExchange
from postlude.layout import Layout
from postlude.lora import LoRAGroup
from postlude.model.block_config import BlockConfig, Size, default_heads
from postlude.model.blocks.recurrent import Recurrence, Recurrent
from postlude.model.config import ModelConfig
from postlude.model.context import ForwardContext, Inputs, States
from postlude.model.parallel import (
    ColumnLinear,
    DepthwiseConvWeights,
    PerHeadVectors,
    Role,
    RowLinear,
    apply_linears,
    local,
    sharded_parameter,
)
from postlude.ops.collectives import gather_from_sequence, sum_over_group
from postlude.ops.convolution import convolve, convolve_step
from postlude.ops.kernels.capabilities import ScanBackend
from postlude.ops.packing import Packing
from postlude.ops.ssd import ssd, ssd_step
from postlude.world.mesh import SINGLE_RANK, Axis, Mesh


@dataclass(frozen=True, kw_only=True)
class MambaConfig(BlockConfig):
    """Sizes and options of one Mamba-2 block.

    Each of `heads` has a state [head_dim, state_size]; B and C of each of `groups` serve adjacent heads. Time steps are
    softplus(projection + bias), clamped to `time_step_limit`. The norm before the output projection normalises each of
    `norm_groups` separately, after the gate silu(z) or, with `norm_before_gate`, before it. `chunk` is the scan's chunk
    size and only changes speed. New biases give time steps within `time_step_start`.
    """

    heads: Size
    head_dim: Size
    state_size: Size
    groups: Size = 1
    conv_kernel: Size = 4
    conv_bias: bool = True
    bias: bool = False
    norm_groups: Size = 1
    norm_before_gate: bool = False
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    time_step_start: tuple[Positive, Positive] = (1e-3, 1e-1)
    chunk: Size = 128

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.heads % self.groups or self.inner % self.norm_groups:
            raise ValueError(
                f"Mamba-2 with heads={self.heads}, head_dim={self.head_dim}, groups={self.groups}, "
                f"norm_groups={self.norm_groups}: groups divide heads and norm_groups heads · head_dim."
            )
        low, high = self.time_step_limit
        if not 0 <= low < high:
            raise ValueError(f"time_step_limit={self.time_step_limit}: give a least and a greatest step, neither < 0.")

    @classmethod
    def default_for(cls, hidden_size: int, others: Sequence[BlockConfig]) -> Self:
        """Returns heads of 64 over twice the width, states of 128, and eight groups if possible, as in Nemotron-H."""
        heads, size = default_heads(2 * hidden_size, 64)
        groups = 8 if heads % 8 == 0 else 1
        common = cls.shared_fields(others)
        return cls(heads=heads, head_dim=size, state_size=128, groups=groups, norm_groups=groups, **common)

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.heads * self.head_dim

    @property
    def shared(self) -> int:
        """Features of all groups: of B, and of C."""
        return self.groups * self.state_size

    def flops(self, hidden_size: int) -> float:
        """Counts projections, convolution, and the scan's products within chunks and with states."""
        projections = 2 * hidden_size * (3 * self.inner + 2 * self.shared + self.heads)
        convolution = 2 * self.conv_kernel * (self.inner + 2 * self.shared)
        return (
            projections + convolution + 2 * self.chunk * (self.inner + self.shared) + 4 * self.inner * self.state_size
        )

    def cp_traffic(self, cp: int) -> float:
        """Counts the exchange of sequences for heads, and back."""
        return (cp - 1) / cp * (2 * self.inner + 2 * self.shared + self.heads)

    def saved_activations(self, hidden_size: int) -> float:
        """Counts three tensors of the norm, three of x, B and C, and five of z and the scan's output."""
        return 3 * hidden_size + 3 * (self.inner + 2 * self.shared) + 5 * self.inner

    def wgrad_activations(self, hidden_size: int) -> float:
        """Counts the norm's output and the gated heads; gradients of x, B, C, z, steps and the output."""
        return 2 * hidden_size + 3 * self.inner + 2 * self.shared + self.heads

    def check_layout(self, layout: Layout, name: str) -> None:
        """Raises unless each TP and CP rank has its own heads, and whole groups or an equal slice of one."""
        if not self._divided_by(layout.tp, layout.cp):
            fitting = [
                f"tp={tp}, cp={cp}"
                for tp in range(1, self.heads + 1)
                for cp in range(1, self.heads + 1)
                if tp * cp <= layout.tp * layout.cp and self._divided_by(tp, cp)
            ]
            raise ValueError(
                f"{name} has {self.heads} heads in {self.groups} groups, normed in {self.norm_groups}, which "
                f"tp={layout.tp}, cp={layout.cp} cannot share: tp · cp divides the heads, and along each axis ranks "
                f"divide the groups or are a multiple of them. Use {fitting[-1]}."
            )

    def _divided_by(self, tp: int, cp: int) -> bool:
        groups_divide = self.groups % tp == 0
        local_groups = self.groups // tp if groups_divide else 1
        shared = tp % self.groups == 0 and self.shared % tp == 0
        norms = self.norm_groups % tp == 0 or tp % self.norm_groups == 0
        return (
            self.heads % (tp * cp) == 0
            and (groups_divide or shared)
            and norms
            and (local_groups % cp == 0 or cp % local_groups == 0)
        )


class Mamba(Recurrent):
    """Each tensor-parallel rank has its own heads. Under context parallelism each rank has whole sequences of some."""

    Config = MambaConfig
    shares_prefixes = True
    never_fp8 = ("dt_proj",)  # it sets how fast states decay
    # transformers' fused kernel ignores an adapter of out_proj, so peft refuses it.
    lora_groups: ClassVar[Mapping[str, LoRAGroup]] = {"": "attention", "out_proj": "named"}
    decays = (1.0, 16.0)
    ones = ("vectors.D", "gated_norm.weight")

    def __init__(self, config: MambaConfig, model: ModelConfig, name: str, mesh: Mesh) -> None:
        super().__init__(config, model, name, mesh)
        self.config = config
        self.time_steps = config.time_step_start
        size, inner, shared, tp = model.hidden_size, config.inner, config.shared, mesh.tp
        self.z_proj = ColumnLinear(size, inner, bias=config.bias, tp=tp)
        self.x_proj = ColumnLinear(size, inner, bias=config.bias, tp=tp)
        self.b_proj = ColumnLinear(size, shared, bias=config.bias, tp=tp)
        self.c_proj = ColumnLinear(size, shared, bias=config.bias, tp=tp)
        self.dt_proj = ColumnLinear(size, config.heads, bias=config.bias, tp=tp)
        self.x_conv = DepthwiseConvWeights(inner, config.conv_kernel, bias=config.conv_bias, tp=tp)
        self.b_conv = DepthwiseConvWeights(shared, config.conv_kernel, bias=config.conv_bias, tp=tp)
        self.c_conv = DepthwiseConvWeights(shared, config.conv_kernel, bias=config.conv_bias, tp=tp)
        self.vectors = PerHeadVectors(("A_log", "dt_bias", "D"), config.heads, tp=tp)
        self.gated_norm = GatedRMSNorm(inner, config.norm_groups, model.norm_eps, config.norm_before_gate, tp=tp)
        self.out_proj = RowLinear(inner, size, bias=config.bias, tp=tp)

    def mix(self, hidden: Tensor, vectors: Mapping[str, Tensor], context: ForwardContext) -> Tensor:
        """Mixes tokens after the pre-norm, [T / tp, H] -> [T / tp, H]."""
        config, head_exchange = self.config, context.microbatch.head_exchange
        hidden = gather_from_sequence(hidden, self.mesh.tp.group)
        x, dt, gate, *shared = apply_linears(hidden, self.x_proj, self.dt_proj, self.z_proj, self.b_proj, self.c_proj)
        x = x.unflatten(-1, (-1, config.head_dim))  # [T, heads, p]
        shared = [self._local_groups(features.T).permute(2, 0, 1) for features in shared]
        # Two exchanges under context parallelism: per head, and per group.
        x, dt = head_exchange.to_heads(torch.cat((x, dt[..., None]), -1)).split((config.head_dim, 1), -1)
        groups = head_exchange.to_heads(_repeat_for_cp_ranks(head_exchange, torch.cat(shared, -1), 1))
        b, c = groups.chunk(2, -1)  # [total, groups, n] each
        inputs = torch.cat([features.flatten(1) for features in (x, b, c)], 1), dt.squeeze(-1)
        y = self.recur(inputs, self._recurrence(vectors, head_exchange, context.scan_backend), head_exchange, context)
        output: Tensor = self.out_proj(self.gated_norm(y.flatten(1), gate))
        return output

    def _recurrence(
        self, vectors: Mapping[str, Tensor], head_exchange: HeadExchange, backend: ScanBackend
    ) -> StateSpace:
        kernels = (self.x_conv, self.b_conv, self.c_conv)
        biases = [kernel.bias for kernel in kernels if kernel.bias is not None]
        return StateSpace(
            self.config,
            kernel=self._channels([kernel.weight for kernel in kernels], head_exchange),
            bias=self._channels(biases, head_exchange) if biases else None,
            A=-head_exchange.local_heads(vectors["A_log"]).exp(),
            dt_bias=head_exchange.local_heads(vectors["dt_bias"]),
            D=head_exchange.local_heads(vectors["D"]),
            backend=backend,
        )

    def _channels(self, parameters: Sequence[Tensor], head_exchange: HeadExchange) -> Tensor:
        """Returns the parameters of this rank's heads, [channels, ...], from those of x's, B's and C's channels."""
        x, *shared = (local(parameter) for parameter in parameters)
        parts = x.unflatten(0, (-1, self.config.head_dim)), *map(self._local_groups, shared)
        repeated = [_repeat_for_cp_ranks(head_exchange, part, 0) for part in parts]
        return torch.cat([head_exchange.local_heads(part).flatten(0, 1) for part in repeated])

    def _local_groups(self, features: Tensor) -> Tensor:
        """Returns the groups of this rank's heads, [groups, n, ...], from its features [shared / tp, ...].

        With more ranks than groups a rank holds part of one; the parts are then gathered.
        """
        tp, groups, size = self.mesh.tp, self.config.groups, self.config.state_size
        first, count = 0, groups // tp.size
        if groups % tp.size:
            features = gather_from_sequence(features.contiguous(), tp.group)
            first, count = tp.rank * groups // tp.size, 1
        groups_of_heads: Tensor = features[first * size : (first + count) * size].unflatten(0, (count, size))
        return groups_of_heads


def _repeat_for_cp_ranks(head_exchange: HeadExchange, groups: Tensor, dimension: int) -> Tensor:
    """Repeats groups so that every context-parallel rank gets those of its heads."""
    ranks, count = head_exchange.axis.size, groups.shape[dimension]
    return groups if count % ranks == 0 else groups.repeat_interleave(ranks // count, dimension)


@dataclass(frozen=True)
class StateSpace(Recurrence):
    """The recurrence of some heads, whose states are [p, n].

    Its inputs are the channels [T, heads · p + 2 · groups · n] of x, B and C, and the projected time steps [T, heads].
    """

    config: MambaConfig
    kernel: Tensor
    bias: Tensor | None
    A: Tensor
    dt_bias: Tensor
    D: Tensor
    backend: ScanBackend

    def run(self, inputs: Inputs, packing: Packing, *, last_states: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns [T, heads, p], the scan's states on request, and the convolution's inputs."""
        x, b, c = self._parts(convolve(inputs[0], self.kernel, self.bias, packing, silu=True))
        dt, chunk = self._time_steps(inputs[1]), self.config.chunk
        y, states = ssd(
            x, dt, self.A, b, c, self.D, packing, chunk=chunk, last_states=last_states, backend=self.backend
        )
        return y, states, inputs[0]

    def step(self, inputs: Inputs, states: States, running: Tensor | None) -> Tensor:
        """Runs one token of each sequence. Returns [sequences, heads, p]."""
        channels = convolve_step(inputs[0], states[0], self.kernel, self.bias, running, silu=True)
        x, b, c = self._parts(channels)
        return ssd_step(x, self._time_steps(inputs[1]), self.A, b, c, self.D, states[1], running)

    def _parts(self, channels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads, width = len(self.A), self.config.head_dim
        shared = (channels.shape[1] - heads * width) // 2
        x, b, c = channels.split((heads * width, shared, shared), 1)
        size = self.config.state_size
        return x.unflatten(1, (heads, width)), b.unflatten(1, (-1, size)), c.unflatten(1, (-1, size))

    def _time_steps(self, projected: Tensor) -> Tensor:
        return F.softplus(projected.float() + self.dt_bias).clamp(*self.config.time_step_limit)


class GatedRMSNorm(nn.Module):
    """RMSNorm of each of `groups` parts of the features, with a silu gate before or after it, in fp32."""

    roles: ClassVar[Mapping[str, Role]] = {"weight": "norm"}

    def __init__(self, size: int, groups: int, eps: float, before_gate: bool, *, tp: Axis = SINGLE_RANK) -> None:
        super().__init__()
        self.groups, self.width, self.eps, self.before_gate, self.tp = groups, size // groups, eps, before_gate, tp
        self.weight = sharded_parameter(size, axis=tp, dim=0)

    def forward(self, features: Tensor, gate: Tensor) -> Tensor:
        """Normalises and gates features, both [T, size / tp] -> [T, size / tp]."""
        wide, opened = features.float(), F.silu(gate.float())
        if not self.before_gate:
            wide = wide * opened
        grouped: Tensor = wide.unflatten(-1, (max(1, self.groups // self.tp.size), -1))
        normed: Tensor = (grouped * torch.rsqrt(self._squares(grouped) / self.width + self.eps)).flatten(-2)
        normed = normed * local(self.weight).float()
        return (normed * opened if self.before_gate else normed).to(features.dtype)

    def _squares(self, grouped: Tensor) -> Tensor:
        """Returns the sum of squares of each group, [T, groups, 1], over ranks where they share one."""
        squares: Tensor = grouped.square().sum(-1, keepdim=True)
        if self.groups % self.tp.size == 0:
            return squares
        group = self.tp.rank * self.groups // self.tp.size
        of_all = F.pad(squares, (0, 0, group, self.groups - group - 1))  # [T, groups, 1], zero except for its own group
        return sum_over_group(of_all, self.tp.group).narrow(1, group, 1)
