"""Data parallelism by FSDP2: who shards which parameters, and when gradients are summed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from postlude.model import LanguageModel
from postlude.model.parallel import Gathered, held
from postlude.world.mesh import Mesh


def shard(model: LanguageModel, mesh: Mesh, compute_dtype: torch.dtype, *, whole: bool = False) -> None:
    """Shard a stage over the data-parallel ranks: what blocks keep apart, each logical layer, then the rest.

    Gradients are summed, never divided: the one scale has divided already. With `whole`, and in a
    pipeline, weights stay whole between microbatches. In a pipeline gradients wait for the last backward; without one,
    each microbatch's are summed at once, so that no rank ever holds the gradient of more than a layer.
    """
    assert mesh.shards is not None
    assert mesh.expert_shards is not None
    whole_between = whole or mesh.pp.size > 1
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
            register_fsdp_forward_method(module, "hand_over")


def _precision(gathered: torch.dtype) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32, cast_forward_inputs=False)


def _evenly(parameter: nn.Parameter, ranks: int) -> Shard:
    """The first dimension of what this rank holds that divides over `ranks`; the very first where none does.

    A few experts over many ranks would leave some without any, and all would gather the room kept for them.
    """
    shape = held(parameter).shape
    return Shard(next((dimension for dimension, size in enumerate(shape) if size % ranks == 0), 0))


class ByCalls:
    """Weights are gathered, and gradients summed, where FSDP does so: around the calls of layers."""

    whole = False
    """Whether weights stay whole between microbatches, though there be no pipeline."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def begin(self, stage: LanguageModel) -> None:
        """Before the first forward of a step."""
        self._expect(stage, last=False)

    def before_last_backward(self, stage: LanguageModel) -> None:
        """When all but one of the stage's backwards are done."""
        self._expect(stage, last=True)

    def complete(self, stage: LanguageModel, module: Gathered) -> None:
        """When a backward has added all that it adds to a layer's gradients, or to those of the stage beside them."""

    def _expect(self, stage: LanguageModel, *, last: bool) -> None:
        assert isinstance(stage, FSDPModule)
        alone = self.mesh.pp.size == 1
        stage.set_requires_gradient_sync(last or alone)
        stage.set_requires_all_reduce(last)
        stage.set_reshard_after_backward(last or alone)
        stage.set_is_last_backward(last)


class ByHand(ByCalls):
    """Weights are made whole before a step and stay so, for plans, which run the steps of layers without calling them.

    FSDP sums gradients in the backward of a call, so when those of a layer are all there, it gets an empty one.
    """

    whole = True

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.ending: set[LanguageModel] = set()

    def begin(self, stage: LanguageModel) -> None:
        """Gather all weights."""
        assert isinstance(stage, FSDPModule)
        self.ending.clear()  # of the step before, or of stages that a failure has renewed
        stage.set_requires_gradient_sync(False)
        stage.set_reshard_after_backward(False)
        stage.set_is_last_backward(False)
        stage.hand_over(_nothing(stage))  # FSDP wants to meet a stage before its layers
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.unshard()

    def before_last_backward(self, stage: LanguageModel) -> None:
        """The gradients that it completes are the step's."""
        self.ending.add(stage)

    def complete(self, stage: LanguageModel, module: Gathered) -> None:
        """Sum the gradients: of every backward, or in a pipeline of the last."""
        last = stage in self.ending
        layers = {id(each) for layer in stage.logical_layers for each in layer.modules()} if module is stage else set()
        own = [each for each in module.modules() if isinstance(each, FSDPModule) and id(each) not in layers]
        self._hand_over(own, stage)  # some may have been added to the sums in fp32 already: so that all are
        if not (last or self.mesh.pp.size == 1):
            return
        for each in own:
            each.set_requires_gradient_sync(True, recurse=False)
            each.set_requires_all_reduce(last, recurse=False)
        if module is stage and last:
            assert isinstance(stage, FSDPModule)
            stage.set_is_last_backward(True)
            stage.set_reshard_after_backward(True)
        self._hand_over(own, stage)
        for each in own:
            each.set_requires_gradient_sync(False, recurse=False)

    def _hand_over(self, modules: Sequence[FSDPModule], stage: LanguageModel) -> None:
        """One empty backward through all: at its end FSDP looks at every module of the stage, so each costs."""
        passed = _nothing(stage).requires_grad_()
        for each in modules:
            passed = cast(Gathered, each).hand_over(passed)
        passed.backward()


def _nothing(stage: LanguageModel) -> Tensor:
    return torch.zeros((), device=next(stage.parameters()).device)


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
