"""Data parallelism by FSDP2: who shards which parameters, and when gradients are summed."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from postlude.model import LanguageModel
from postlude.model.parallel import held
from postlude.world.mesh import Mesh


def shard(model: LanguageModel, mesh: Mesh, compute_dtype: torch.dtype) -> None:
    """Shard a stage over the data-parallel ranks: what blocks keep apart, each logical layer, then the rest.

    Gradients are summed, never divided: the one scale has divided already. Between the microbatches of a pipeline the
    weights stay whole and gradients wait for the last backward; without one, each microbatch's are summed at once, so
    that no rank ever holds the gradient of more than a layer.
    """
    assert mesh.shards is not None
    assert mesh.expert_shards is not None
    whole_between = mesh.pp.size > 1
    even = functools.partial(_evenly, ranks=mesh.expert_shards.shape[-1])
    for part in model.apart():
        fully_shard(
            part.module,
            mesh=mesh.expert_shards if part.experts else mesh.shards,
            mp_policy=_precision(torch.float32 if part.fp32 else compute_dtype),
            shard_placement_fn=even if part.experts else None,
            reshard_after_forward=not whole_between,
        )
    for layer in model.logical_layers:
        fully_shard(
            layer, mesh=mesh.shards, mp_policy=_precision(compute_dtype), reshard_after_forward=not whole_between
        )
    fully_shard(model, mesh=mesh.shards, mp_policy=_precision(compute_dtype), reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _precision(gathered: torch.dtype) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32, cast_forward_inputs=False)


def _evenly(parameter: nn.Parameter, ranks: int) -> Shard:
    """The first dimension of what this rank holds that divides over `ranks`; the very first where none does.

    A few experts over many ranks would leave some without any, and all would gather the room kept for them.
    """
    shape = held(parameter).shape
    return Shard(next((dimension for dimension, size in enumerate(shape) if size % ranks == 0), 0))


def before_backwards(model: LanguageModel, mesh: Mesh, *, last: bool) -> None:
    """Say whether the backwards to come are all but the last of a step, or the last one."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(last or mesh.pp.size == 1)
    model.set_requires_all_reduce(last)
    model.set_reshard_after_backward(last or mesh.pp.size == 1)
    model.set_is_last_backward(last)


def reshard(model: LanguageModel) -> None:
    """Let go of whole weights, so that the next forward gathers them as they are then."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def renewed(old: LanguageModel, new: LanguageModel) -> LanguageModel:
    """Move the parameters, with their gradients, and the buffers of a stage into a new one built alike.

    The new one has never run. Of the old one nothing is asked but its state, which FSDP gives out sharded whatever it
    was in the middle of.
    """
    new.load_state_dict(old.state_dict(keep_vars=True), assign=True)
    for before, after in zip(old.modules(), new.modules(), strict=True):
        for name, buffer in before.named_buffers(recurse=False):
            setattr(after, name, buffer)  # also those that no state holds
    return new


def sum_shared(gradient: Tensor, mesh: Mesh) -> None:
    """Sum the gradient of a shared parameter over the two ends of the pipeline, which both hold it."""
    if mesh.ends.group is not None:
        dist.all_reduce(held(gradient), group=mesh.ends.group)


def copies(parameter: Tensor) -> int:
    """How many ranks hold the same part of a parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    count = 1
    for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
        count *= size if placement.is_replicate() else 1
    return count
