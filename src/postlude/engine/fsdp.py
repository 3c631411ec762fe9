"""shard_stage: shards a stage's parameters with FSDP2, or keeps them unsharded if no other rank shares them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard

from postlude.engine.unsharded import ParameterSharding, Unsharded
from postlude.model import LanguageModel
from postlude.model.parallel import FSDPUnit, local_shard
from postlude.training_options import TrainingOptions
from postlude.world.mesh import Mesh

DEFAULT = TrainingOptions()


def shard_stage(
    model: LanguageModel, mesh: Mesh, compute_dtype: torch.dtype, options: TrainingOptions = DEFAULT
) -> ParameterSharding:
    """Shards a stage over the data-parallel ranks: what blocks shard separately, each logical layer, then the rest.

    With one such rank, nothing is sharded. Gradients are summed, never divided: the loss is divided already. With
    `overlap`, `gather_once`, and in a pipeline, weights stay gathered between microbatches. With `gather_once`, and in
    a pipeline, gradients are reduced after the last backward. Otherwise each microbatch's are reduced at once, so that
    no rank holds the full gradient of more than a layer.
    """
    assert mesh.fsdp_mesh is not None
    assert mesh.expert_fsdp_mesh is not None
    units = model.sharded_separately()
    has_experts = any(unit.experts for unit in units)
    if mesh.fsdp_mesh.size() == 1 and (mesh.expert_fsdp_mesh.size() == 1 or not has_experts):
        return Unsharded(model, compute_dtype)
    if any(parameter.dtype == torch.bfloat16 for parameter in model.parameters() if parameter.requires_grad):
        raise ValueError(
            f"weights are stored narrower than fp32 where no other rank shares them, but {mesh.layout} shards them. "
            'Use weights="fp32", of which each rank stores a part, or a layout of tp and pp alone.'
        )
    planned, reduce_once = bool(options.overlap), options.gather_once or mesh.pp.size > 1
    reshard = not (reduce_once or planned)
    expert_placement = functools.partial(_even_placement, ranks=mesh.expert_fsdp_mesh.shape[-1])

    def precision(module: nn.Module, dtype: torch.dtype = compute_dtype) -> MixedPrecisionPolicy:
        return _precision(dtype, trained=any(parameter.requires_grad for parameter in module.parameters()))

    for unit in units:
        fully_shard(
            unit.module,
            mesh=mesh.expert_fsdp_mesh if unit.experts else mesh.fsdp_mesh,
            mp_policy=precision(unit.module, torch.float32 if unit.fp32 else compute_dtype),
            shard_placement_fn=expert_placement if unit.experts else None,
            reshard_after_forward=reshard,
        )
    for layer in model.logical_layers:
        fully_shard(layer, mesh=mesh.fsdp_mesh, mp_policy=precision(layer), reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh.fsdp_mesh, mp_policy=precision(model), reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            register_fsdp_forward_method(module, "trigger_grad_reduce")
    return (FSDPManual if planned else FSDPAutomatic)(model, reduce_once=reduce_once)


def _precision(param_dtype: torch.dtype, *, trained: bool) -> MixedPrecisionPolicy:
    # With a dtype to reduce in, FSDP reads the gathered weights after a backward. Frozen depths are never gathered.
    reduce_dtype = torch.float32 if trained else None
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)


def _even_placement(parameter: nn.Parameter, ranks: int) -> Shard:
    """Returns a shard over the first dimension that `ranks` divides; over dimension 0 if there is none.

    A few experts sharded over many ranks would leave some ranks empty, and all would gather the padding.
    """
    shape = local_shard(parameter).shape
    return Shard(next((dimension for dimension, size in enumerate(shape) if size % ranks == 0), 0))


class FSDPAutomatic(ParameterSharding):
    """FSDP's hooks gather weights and reduce gradients around the calls of layers."""

    def __init__(self, stage: LanguageModel, *, reduce_once: bool) -> None:
        self.stage, self.reduce_once = stage, reduce_once

    def begin_pass(self, *, train: bool) -> None:
        """Configures FSDP for all backwards but the last."""
        if train:
            self._set_backward(last=False)

    def before_last_backward(self) -> None:
        self._set_backward(last=True)

    def end_pass(self) -> None:
        """Frees gathered weights, so that the next forward gathers the current ones."""
        for module in self.stage.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _set_backward(self, *, last: bool) -> None:
        assert isinstance(self.stage, FSDPModule)
        self.stage.set_requires_gradient_sync(last or not self.reduce_once)
        self.stage.set_requires_all_reduce(last)
        self.stage.set_reshard_after_backward(last or not self.reduce_once)
        self.stage.set_is_last_backward(last)


class FSDPManual(FSDPAutomatic):
    """Weights are gathered before a step and stay gathered: schedule plans run layers' steps without calling layers.

    FSDP reduces gradients in the backward of a call. So when a layer's gradients are ready, an empty forward and
    backward triggers that.
    """

    last_backward = False

    def begin_pass(self, *, train: bool) -> None:
        self.last_backward = False
        if not train:
            return
        stage = self.stage
        assert isinstance(stage, FSDPModule)
        stage.set_requires_gradient_sync(False)
        stage.set_reshard_after_backward(False)
        stage.set_is_last_backward(False)
        stage.trigger_grad_reduce(_zero(stage))  # FSDP must see the root before its layers
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.unshard()

    def before_last_backward(self) -> None:
        """Makes `grads_ready` reduce the final gradients."""
        self.last_backward = True

    def grads_ready(self, module: FSDPUnit) -> None:
        stage = self.stage
        in_layers = {id(m) for layer in stage.logical_layers for m in layer.modules()} if module is stage else set()
        units = [m for m in module.modules() if isinstance(m, FSDPModule) and id(m) not in in_layers]
        self._trigger(units)  # adds to the fp32 sums what was not added yet
        if self.reduce_once and not self.last_backward:
            return
        for unit in units:
            unit.set_requires_gradient_sync(True, recurse=False)
            unit.set_requires_all_reduce(self.last_backward, recurse=False)
        if module is stage and self.last_backward:
            assert isinstance(stage, FSDPModule)
            stage.set_is_last_backward(True)
            stage.set_reshard_after_backward(True)
        self._trigger(units)
        for unit in units:
            unit.set_requires_gradient_sync(False, recurse=False)

    def _trigger(self, units: Sequence[FSDPModule]) -> None:
        """Runs one empty backward through all units: at its end FSDP visits every module of the stage."""
        value = _zero(self.stage).requires_grad_()
        for unit in units:
            value = cast(FSDPUnit, unit).trigger_grad_reduce(value)
        value.backward()


def _zero(stage: LanguageModel) -> Tensor:
    return torch.zeros((), device=next(stage.parameters()).device)
