"""Data parallelism: who shards which parameters by FSDP2, or holds them whole, and when gradients are summed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard

from postlude.engine.unsharded import Unsharded
from postlude.model import LanguageModel
from postlude.model.parallel import FSDPUnit, local_shard
from postlude.world.mesh import Mesh


class ParameterSharding(Protocol):
    """How the weights of one stage are made ready for passes, and what becomes of its gradients."""

    def begin(self, *, train: bool) -> None:
        """Before the first forward of a pass over microbatches; with `train`, backwards come too."""
        ...

    def before_last_backward(self) -> None:
        """When all but one of the backwards are done."""
        ...

    def complete(self, module: FSDPUnit) -> None:
        """When a planned backward has added all that it adds to a layer's gradients, or to those of the stage."""
        ...

    def settle(self) -> None:
        """After the last backward: make gradients those of all ranks."""
        ...

    def end(self) -> None:
        """After the pass, also one that failed: the stage has its stored parameters again."""
        ...


def shard_stage(
    model: LanguageModel, mesh: Mesh, compute_dtype: torch.dtype, *, planned: bool = False, once: bool = False
) -> ParameterSharding:
    """Shard a stage over the data-parallel ranks: what blocks keep apart, each logical layer, then the rest.

    Where there is one such rank, nothing is sharded. Gradients are summed, never divided: the one scale has divided
    already. Where passes are `planned`, with `once`, and in a pipeline, weights stay whole between microbatches. With
    `once`, and in a pipeline, gradients wait for the last backward; otherwise each microbatch's are summed at once, so
    that no rank ever holds the gradient of more than a layer.
    """
    assert mesh.fsdp_mesh is not None
    assert mesh.expert_fsdp_mesh is not None
    apart = model.sharded_separately()
    if is_whole(mesh, experts=any(part.experts for part in apart)):
        return Unsharded(model, compute_dtype)
    if any(parameter.dtype == torch.bfloat16 for parameter in model.parameters()):
        raise ValueError(
            f"weights are stored narrower than fp32 where no other rank shares them, but {mesh.layout} shards them. "
            'Use weights="fp32", of which each rank stores a part, or a layout of tp and pp alone.'
        )
    once = once or mesh.pp.size > 1
    whole_between = once or planned
    even = functools.partial(_evenly, ranks=mesh.expert_fsdp_mesh.shape[-1])
    for part in apart:
        fully_shard(
            part.module,
            mesh=mesh.expert_fsdp_mesh if part.experts else mesh.fsdp_mesh,
            mp_policy=_precision(torch.float32 if part.fp32 else compute_dtype),
            shard_placement_fn=even if part.experts else None,
            reshard_after_forward=not whole_between,
        )
    for layer in model.logical_layers:
        fully_shard(
            layer, mesh=mesh.fsdp_mesh, mp_policy=_precision(compute_dtype), reshard_after_forward=not whole_between
        )
    fully_shard(model, mesh=mesh.fsdp_mesh, mp_policy=_precision(compute_dtype), reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            register_fsdp_forward_method(module, "trigger_grad_reduce")
    return FSDPManual(model, once=once) if planned else FSDPAutomatic(model, once=once)


def is_whole(mesh: Mesh, *, experts: bool) -> bool:
    """Whether no other rank shares this one's part of a stage, or of its experts where it has some."""
    assert mesh.fsdp_mesh is not None
    assert mesh.expert_fsdp_mesh is not None
    return mesh.fsdp_mesh.size() == 1 and (mesh.expert_fsdp_mesh.size() == 1 or not experts)


def _precision(gathered: torch.dtype) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32, cast_forward_inputs=False)


def _evenly(parameter: nn.Parameter, ranks: int) -> Shard:
    """The first dimension of what this rank holds that divides over `ranks`; the very first where none does.

    A few experts over many ranks would leave some without any, and all would gather the room kept for them.
    """
    shape = local_shard(parameter).shape
    return Shard(next((dimension for dimension, size in enumerate(shape) if size % ranks == 0), 0))


class FSDPAutomatic:
    """Weights are gathered, and gradients summed, where FSDP does so: around the calls of layers."""

    def __init__(self, stage: LanguageModel, *, once: bool) -> None:
        self.stage, self.once = stage, once

    def begin(self, *, train: bool) -> None:
        """What FSDP is to do in the backwards but the last."""
        if train:
            self._expect(last=False)

    def before_last_backward(self) -> None:
        """What it is to do in the last."""
        self._expect(last=True)

    def complete(self, module: FSDPUnit) -> None:
        """FSDP knows by itself."""

    def settle(self) -> None:
        """FSDP has summed them."""

    def end(self) -> None:
        """Let go of whole weights, so that the next forward gathers them as they are then."""
        for module in self.stage.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _expect(self, *, last: bool) -> None:
        assert isinstance(self.stage, FSDPModule)
        self.stage.set_requires_gradient_sync(last or not self.once)
        self.stage.set_requires_all_reduce(last)
        self.stage.set_reshard_after_backward(last or not self.once)
        self.stage.set_is_last_backward(last)


class FSDPManual(FSDPAutomatic):
    """Weights are made whole before a step and stay so, for plans, which run the steps of layers without calling them.

    FSDP sums gradients in the backward of a call, so when those of a layer are all there, it gets an empty one.
    """

    ending = False

    def begin(self, *, train: bool) -> None:
        """Gather all weights."""
        self.ending = False
        if not train:
            return
        stage = self.stage
        assert isinstance(stage, FSDPModule)
        stage.set_requires_gradient_sync(False)
        stage.set_reshard_after_backward(False)
        stage.set_is_last_backward(False)
        stage.trigger_grad_reduce(_nothing(stage))  # FSDP wants to meet a stage before its layers
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.unshard()

    def before_last_backward(self) -> None:
        """The gradients that it completes are the step's."""
        self.ending = True

    def complete(self, module: FSDPUnit) -> None:
        """Sum the gradients: of every backward, or once, of the last."""
        stage = self.stage
        layers = {id(each) for layer in stage.logical_layers for each in layer.modules()} if module is stage else set()
        own = [each for each in module.modules() if isinstance(each, FSDPModule) and id(each) not in layers]
        self._hand_over(own)  # some may have been added to the sums in fp32 already: so that all are
        if self.once and not self.ending:
            return
        for each in own:
            each.set_requires_gradient_sync(True, recurse=False)
            each.set_requires_all_reduce(self.ending, recurse=False)
        if module is stage and self.ending:
            assert isinstance(stage, FSDPModule)
            stage.set_is_last_backward(True)
            stage.set_reshard_after_backward(True)
        self._hand_over(own)
        for each in own:
            each.set_requires_gradient_sync(False, recurse=False)

    def _hand_over(self, modules: Sequence[FSDPModule]) -> None:
        """One empty backward through all: at its end FSDP looks at every module of the stage, so each costs."""
        passed = _nothing(self.stage).requires_grad_()
        for each in modules:
            passed = cast(FSDPUnit, each).trigger_grad_reduce(passed)
        passed.backward()


def _nothing(stage: LanguageModel) -> Tensor:
    return torch.zeros((), device=next(stage.parameters()).device)


def all_reduce_shared(gradient: Tensor, mesh: Mesh) -> None:
    """Sum the gradient of a shared parameter over the two ends of the pipeline, which both hold it."""
    if mesh.first_and_last_stage.group is not None:
        dist.all_reduce(local_shard(gradient), group=mesh.first_and_last_stage.group)
