"""Block: the base class of blocks. Open this before writing a new block, and `block_config.py` for its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from postlude.lora import LoRAGroup
from postlude.model.block_config import BlockConfig
from postlude.model.config import ModelConfig
from postlude.model.context import ForwardContext
from postlude.model.parallel import ColumnLinear, FSDPUnit, Linear, NoNorm, RMSNorm, Role, local, role_of
from postlude.model.steps import LayerStep, compute
from postlude.ops.norm import Norm
from postlude.world.mesh import Mesh


class MetricSums:
    """Sums over this rank's tokens, by name, in one float64 tensor on their device. Nothing here synchronises."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        self.total: Tensor | None = None  # None until something is added

    @torch.no_grad()
    def add(self, sums: Mapping[str, Tensor]) -> None:
        """Adds the sums of one microbatch. Those left out are zero.

        Call it in training, and once per microbatch: see `ForwardContext.is_first_call`.
        """
        device = next(iter(sums.values())).device
        zeros = torch.zeros(max(self.sizes.values()), dtype=torch.float32, device=device)  # one kernel for all
        added = torch.cat([sums.get(name, zeros[:size]).reshape(size).float() for name, size in self.sizes.items()])
        self.total = added.double() if self.total is None else self.total.add_(added)

    def take(self) -> Tensor | None:
        """Returns the sums since the last call, in the order of `sizes`; None if nothing was added."""
        total, self.total = self.total, None
        return total


@dataclass(frozen=True)
class SeparateUnit:
    """A module that FSDP shards separately from its layer, and gathers when it is called."""

    module: FSDPUnit
    experts: bool = False
    """Its parameters are divided over `mesh.ep` and sharded over all ranks of a stage that hold the same ones, tensor-
    and context-parallel ranks included. Otherwise they are divided over `mesh.tp` and sharded like the layer."""
    fp32: bool = False
    """It is gathered in fp32, whatever the compute dtype. Create its parameters with dtype=torch.float32."""


class Block(nn.Module):
    """hidden + scale · post_norm(sublayer(norm(hidden))).

    A block defines `sublayer`, or its own `steps`, the last of which calls `add_residual`.
    `hidden` is this rank's shard of the tokens, [T / tp, H]; the layers of `model.parallel` gather and scatter them.
    `fused_decode` is a faster implementation of the same block, for the few rows of a decode step on a GPU.
    """

    Config: ClassVar[type[BlockConfig]]
    roles: ClassVar[Mapping[str, Role]] = {}
    """The roles of the block's own parameters, and of those of submodules without roles."""
    lora_groups: ClassVar[Mapping[str, LoRAGroup]] = {"": "attention"}
    """The LoRA groups of its linear layers by name, "" for others. Any module may have it; the innermost applies."""
    supports_decoding: ClassVar[bool] = False
    """Whether it can decode with a cache (`context.decode_state`)."""
    shares_prefixes: ClassVar[bool] = False
    """Whether it takes tokens that sequences share (`ForwardContext.segments`). A subclass with methods repeats it."""
    batch_invariant: ClassVar[bool] = False  # whether decoding gives the bits of its forward: `ops/batch_invariant.py`

    def __init__(self, config: BlockConfig, model: ModelConfig, name: str, mesh: Mesh) -> None:
        super().__init__()
        config.check_layout(mesh.layout, name)
        self.name = name  # global, such as "layers.17.moe"
        self.metric_sums = MetricSums(config.metric_sums)
        self.mesh = mesh
        pre, post = config.norm in ("pre", "both"), config.norm in ("post", "both")
        self.residual_scale = config.residual_scale
        self.norm_init = 1.0 - model.norm_offset
        self.norm = self._block_norm(model) if pre else NoNorm()
        self.post_norm = self._block_norm(model) if post else NoNorm()
        self.can_fuse_decode = pre and not post and config.residual_scale == 1.0 and mesh.tp.group is None

    def _block_norm(self, model: ModelConfig) -> RMSNorm:
        return RMSNorm(model.hidden_size, model.norm_eps, tp=self.mesh.tp, offset=model.norm_offset)

    @property
    def cuda_graphable(self) -> bool:
        """Whether decoding one token of each sequence launches the same kernels at every step.

        A step can then be captured as a CUDA graph: the block does not synchronise with the host, and calls
        only `attend`, `recur` and `record_routing` of `context.decode_state`.
        """
        return False

    def steps(self) -> tuple[LayerStep, ...]:
        """Returns the block's steps in order. Most blocks are one compute step."""
        return (compute("sublayer", self._sublayer_and_residual),)

    def sublayer(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Computes what is between the pre-norm and the post-norm, [T / tp, H] -> [T / tp, H]."""
        raise NotImplementedError(f"{type(self).__name__} must define sublayer() or steps().")

    def fused_projections(self) -> tuple[tuple[Linear | ColumnLinear, ...], ...]:
        """Returns groups of layers with the same input: `fuse_weights` makes one GEMM of each group."""
        return ()

    def sharded_separately(self) -> tuple[SeparateUnit, ...]:
        """Returns the modules that FSDP shards separately: experts, and what stays in fp32."""
        return ()

    def token_counters(self) -> tuple[Tensor, ...]:
        """Returns fp32 counters that training forwards accumulate over this rank's tokens.

        They are zeroed with the gradients, and summed over all ranks before `after_optimizer_step`.
        """
        return ()

    def batch_counters(self) -> tuple[Tensor, ...]:
        """Returns fp32 counters that forwards in evaluation mode accumulate over this rank's tokens.

        If the config `counts_batch`, they are zeroed, counted and summed over all ranks before each training pass.
        """
        return ()

    def take_metric_sums(self) -> Tensor | None:
        """Returns what training forwards added to `metric_sums` since the last call, [n] float64; None if nothing."""
        return self.metric_sums.take()

    def after_optimizer_step(self) -> None:
        """Runs after an optimizer step, with what was counted since the last one."""

    def reset(self, name: str, parameter: Tensor, std: float, generator: torch.Generator) -> None:
        """Initialises one parameter of this block; `name` is relative to the block."""
        reset_parameter(role_of(self, name), parameter, std, generator, norm=self.norm_init)

    def add_residual(self, hidden: Tensor, output: Tensor) -> dict[str, Tensor]:
        """Adds the block's output to the residual stream. Returns {"hidden": sum}."""
        added: Tensor = self.post_norm(output)
        return {"hidden": hidden + (added if self.residual_scale == 1.0 else added * self.residual_scale)}

    def fused_decode(self, hidden: Tensor, norm: Norm, context: ForwardContext) -> Tensor | None:
        """Computes the whole block while decoding, without gradients: see `ops.decode_linear`. None if not supported.

        It is called without tensor parallelism, for a block with a pre-norm and a plain residual sum, in bf16 on a GPU.
        It may overwrite `hidden`.
        """
        return None

    def _sublayer_and_residual(self, hidden: Tensor, context: ForwardContext) -> Mapping[str, Tensor]:
        hidden, normed = self.norm.with_residual(hidden)
        return self.add_residual(hidden, self.sublayer(normed, context))

    def fused_decode_or_none(self, hidden: Tensor, context: ForwardContext) -> Tensor | None:
        """Returns the result of `fused_decode`, and None where it does not apply."""
        if context.decode_state is None or not self.can_fuse_decode or torch.is_grad_enabled():
            return None
        if not hidden.is_cuda or hidden.dtype != torch.bfloat16:
            return None
        norm = self.norm
        assert isinstance(norm, RMSNorm)
        return self.fused_decode(hidden, Norm(local(norm.weight), norm.eps, norm.offset), context)


def reset_parameter(
    role: Role, parameter: Tensor, std: float, generator: torch.Generator, *, norm: float = 1.0
) -> None:
    """Initialises a parameter by its role: matrices normal, norm scales to `norm`, other vectors zero."""
    if role == "matrix":
        # Sampled in fp32 and rounded, so that a model is the same in every dtype.
        sampled = torch.empty_like(parameter, dtype=torch.float32).normal_(0.0, std, generator=generator)
        parameter.copy_(sampled)
    elif role == "norm":
        parameter.fill_(norm)
    else:
        parameter.zero_()
