"""Block: the base of every block. Open this before writing a new block, and `block_config.py` for its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from postlude.model.block_config import BlockConfig
from postlude.model.config import ModelConfig
from postlude.model.context import ForwardContext
from postlude.model.parallel import ColumnLinear, FSDPUnit, Linear, NoNorm, RMSNorm, Role, local, role_of
from postlude.model.steps import Step, compute
from postlude.ops.norm import Norm, uses_kernel
from postlude.world.mesh import Mesh


@dataclass(frozen=True)
class SeparateUnit:
    """A module whose weights are sharded by themselves, and gathered when it is called, not with its layer's."""

    module: FSDPUnit
    experts: bool = False
    """Its parameters are stored along `mesh.ep`: sharded over all ranks of a stage that hold the same of them, tensor-
    and context-parallel ones included. Otherwise they are stored along `mesh.tp` and sharded as the layer is."""
    fp32: bool = False
    """It is gathered in fp32, whatever the model computes in. Store its parameters with dtype=torch.float32."""


class Block(nn.Module):
    """hidden + scale · post_norm(work(norm(hidden))): a block writes `work`, or its own `steps`, the last with `join`.

    `hidden` is this rank's shard of the tokens, [T / tp, H]; the layers of `model.parallel` gather and spread them.
    """

    Config: ClassVar[type[BlockConfig]]
    roles: ClassVar[Mapping[str, Role]] = {}
    """The roles of parameters that are its own, rather than a layer's, and of those of layers that declare none."""
    supports_decoding: ClassVar[bool] = False
    """Whether it can continue from an earlier forward's tokens, one by one or through `context.decode_state`."""

    def __init__(self, config: BlockConfig, model: ModelConfig, name: str, mesh: Mesh) -> None:
        super().__init__()
        config.check_layout(mesh.layout, name)
        self.name = name  # global, such as "layers.17.moe"
        self.mesh = mesh
        pre, post = config.norm in ("pre", "both"), config.norm in ("post", "both")
        self.residual_scale = config.residual_scale
        self.norm_start = 1.0 - model.norm_offset
        self.norm = self._block_norm(model) if pre else NoNorm()
        self.post_norm = self._block_norm(model) if post else NoNorm()
        self.plain = pre and not post and config.residual_scale == 1.0 and mesh.tp.group is None

    def _block_norm(self, model: ModelConfig) -> RMSNorm:
        return RMSNorm(model.hidden_size, model.norm_eps, tp=self.mesh.tp, offset=model.norm_offset)

    @property
    def cuda_graphable(self) -> bool:
        """Whether its work on one next token of each running sequence is the same kernels at every step.

        Then a GPU can be handed a whole recorded step: the block asks nothing of the host that depends on values, and
        of `context.decode_state` nothing but `attend` and `recur`.
        """
        return False

    def steps(self) -> tuple[Step, ...]:
        """The block's work in order. Most blocks are one compute step."""
        return (compute("work", self._residual),)

    def work(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """[T / tp, H] -> [T / tp, H], after the pre-norm and before the post-norm and the residual."""
        raise NotImplementedError(f"{type(self).__name__} must define work() or steps().")

    def fused_projections(self) -> tuple[tuple[Linear | ColumnLinear, ...], ...]:
        """Layers that are given the same tokens, group by group: `fuse_weights` makes one product of each."""
        return ()

    def sharded_separately(self) -> tuple[SeparateUnit, ...]:
        """The modules of this block that are sharded by themselves: experts, and what stays in fp32."""
        return ()

    def count_buffers(self) -> tuple[Tensor, ...]:
        """Buffers, fp32, that training forwards add to: this rank's part of a count over the step's tokens.

        Zero again when gradients are forgotten; summed over all ranks before `after_optimizer_step`.
        """
        return ()

    def metrics(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """What it counted of this rank's tokens in training since it was last asked, by the name of a metric.

        A number and what it is a share of, float64 scalars; the metric is their quotient over all blocks and ranks.
        """
        return {}

    def after_optimizer_step(self) -> None:
        """What there is to do after an optimizer step, from what was counted since the last one."""

    def reset(self, name: str, parameter: Tensor, std: float, generator: torch.Generator) -> None:
        """Give one parameter of this block (`name` is local) its first value."""
        reset_parameter(role_of(self, name), parameter, std, generator, norm=self.norm_start)

    def join(self, hidden: Tensor, output: Tensor) -> dict[str, Tensor]:
        """The residual stream, and what the block's work came to -> the residual stream after it, by its name."""
        added: Tensor = self.post_norm(output)
        return {"hidden": hidden + (added if self.residual_scale == 1.0 else added * self.residual_scale)}

    def fused_forward(self, hidden: Tensor, norm: Norm, context: ForwardContext) -> Tensor | None:
        """All of the block as one step of autograd, [T, H] -> [T, H], or None where it cannot be: see `ops.block_step`.

        Asked for where `work` is of one rank, on a GPU that has Triton's kernels, between this norm and a plain sum.
        """
        return None

    def fused_decode(self, hidden: Tensor, norm: Norm, context: ForwardContext) -> Tensor | None:
        """Likewise while tokens are generated, by kernels that do more at once and know no gradients.

        `hidden` may be overwritten.
        """
        return None

    def _residual(self, hidden: Tensor, context: ForwardContext) -> Mapping[str, Tensor]:
        done = self._in_kernels(hidden, context) if hidden.is_cuda and self.plain else None
        if done is not None:
            return {"hidden": done}
        hidden, normed = self.norm.with_residual(hidden)
        return self.join(hidden, self.work(normed, context))

    def _in_kernels(self, hidden: Tensor, context: ForwardContext) -> Tensor | None:
        """What `fused_forward` or `fused_decode` makes of it; None where neither is asked, or can."""
        norm = self.norm
        assert isinstance(norm, RMSNorm)
        weight = local(norm.weight)
        given = Norm(weight, norm.eps, norm.offset)
        if not torch.is_grad_enabled():
            decodes = context.decode_state is not None and hidden.dtype == torch.bfloat16
            return self.fused_decode(hidden, given, context) if decodes else None
        trains = hidden.requires_grad and uses_kernel(hidden, weight)
        return self.fused_forward(hidden, given, context) if trains else None


def reset_parameter(
    role: Role, parameter: Tensor, std: float, generator: torch.Generator, *, norm: float = 1.0
) -> None:
    """The usual start: matrices normal, scales of norms `norm`, every other vector zero."""
    if role == "matrix":
        # Drawn in fp32 and rounded, so that a model is the same in every dtype.
        drawn = torch.empty_like(parameter, dtype=torch.float32).normal_(0.0, std, generator=generator)
        parameter.copy_(drawn)
    elif role == "norm":
        parameter.fill_(norm)
    else:
        parameter.zero_()
