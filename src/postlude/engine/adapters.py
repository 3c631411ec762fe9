"""Adapters of an engine: adding and removing, full tensors, what they add to weights, and the base they belong to."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.engine.checkpoint_checks import check_adapter
from postlude.engine.failure_state import FailureState
from postlude.engine.options import EngineOptions
from postlude.engine.stages import StageBuilder, Stages
from postlude.engine.streaming import (
    DistributedModel,
    StreamedTensor,
    WeightDelta,
    device_of,
    is_owner,
    plan_buckets,
    stream,
)
from postlude.engine.training_state import TrainingState
from postlude.hf.family import VALUE_HEAD, Family, map_to_hf
from postlude.hf.linear_layers import adapter_configs
from postlude.hf.peft import base_entries, read_adapter, to_peft, write_adapter
from postlude.hf.read_peft import from_peft
from postlude.hf.tensor_sources import name_weight, position_sum
from postlude.lora import NO_ADAPTERS, AdapterConfigs, LoRA
from postlude.model import LanguageModel, ModelConfig
from postlude.model.adapters import is_adapter
from postlude.model.blocks import BlockTable
from postlude.model.config import RATE
from postlude.model.parallel import Adapter, is_dtensor, local_shard, region
from postlude.training_options import TrainingOptions
from postlude.world.agreement import on_rank0
from postlude.world.mesh import Mesh

DEFAULT = "default"
"""The name of the adapter of `Engine(lora=LoRA(...))`."""


class AdaptedModel(DistributedModel, Protocol):
    config: ModelConfig
    block_types: BlockTable
    family: Family | None
    builder: StageBuilder
    options: EngineOptions
    adapters: Adapters
    training_states: dict[str | None, TrainingState]
    failure_state: FailureState

    def set_adapter(self, adapter: str | None) -> None: ...

    def base_fingerprint(self) -> str | None:
        """Returns a digest of the frozen tensors; None if all are trained. Every rank calls it."""
        ...


class Adapters:
    """The names and layers of an engine's adapters, and which one is active. Without LoRA there are none."""

    def __init__(
        self,
        options: TrainingOptions,
        config: ModelConfig,
        family: Family | None,
        blocks: BlockTable,
    ) -> None:
        lora = options.lora
        self.enabled = lora is not None
        """Whether the model is frozen and adapters are trained."""
        self.by_name: dict[str, AdapterConfigs] = {}
        """The adapter of each layer of the whole model, by the adapter's name and the layer's global name."""
        self._fingerprint: str | None = None
        if lora is not None:
            _check_frozen(config)
            for name, settings in ({DEFAULT: lora} if isinstance(lora, LoRA) else lora).items():
                self.check_new(name)
                self.by_name[name] = adapter_configs(settings, config, family, blocks)
        self.active: str | None = next(iter(self.by_name), None)

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters, in the order in which they were added."""
        return tuple(self.by_name)

    @property
    def configs(self) -> AdapterConfigs:
        """The active adapter of each layer, by the layer's global name; empty if there is none."""
        return NO_ADAPTERS if self.active is None else self.by_name[self.active]

    def check_name(self, name: str | None) -> None:
        """Raises ValueError unless there is an adapter of this name. None, the model alone, always exists."""
        if name is not None and name not in self.by_name:
            if not self.enabled:
                raise ValueError(f'this engine has no adapter "{name}": make it with Engine(..., lora=LoRA()).')
            raise ValueError(f'this engine has no adapter "{name}". {self._existing}')

    def check_new(self, name: str) -> None:
        if not self.enabled:
            raise ValueError(
                f'this engine trains all weights, so it takes no adapter "{name}": make it with Engine(..., lora={{}}).'
            )
        if not name or "/" in name:
            raise ValueError(f'the name of an adapter is text without "/", but this one is {name!r}.')
        if name in self.by_name:
            raise ValueError(f'this engine has an adapter "{name}" already: choose another name, or remove it.')

    def check_trainable(self) -> None:
        """Raises ValueError if no adapter is active: the model itself is frozen."""
        if self.enabled and self.active is None:
            raise ValueError(
                f"no adapter is active, and the model is frozen: call engine.set_adapter(name). {self._existing}"
            )

    def resolve(self, name: str | None) -> str:
        """Returns the name, or for None that of the active adapter. Raises ValueError if there is none."""
        name = self.active if name is None else name
        self.check_name(name)
        if name is None:
            fix = "call engine.set_adapter(name)" if self.enabled else "make it with Engine(..., lora=LoRA())"
            raise ValueError(f"this engine has no active adapter: {fix}. {self._existing}")
        return name

    def resolve_or_new(self, name: str | None) -> str:
        """Returns what `resolve` returns, or the name of an adapter that can be added."""
        if name is None or name in self.by_name:
            return self.resolve(name)
        self.check_new(name)
        return name

    @property
    def _existing(self) -> str:
        return f"There are {', '.join(self.names)}." if self.by_name else "There are none; add_adapter makes one."

    def base_fingerprint(
        self, tensors: Mapping[str, Tensor], mesh: Mesh, shared_parameters: Collection[str]
    ) -> str | None:
        """Returns `base_fingerprint` of the frozen model, computed once; None without LoRA."""
        if self.enabled and self._fingerprint is None:
            self._fingerprint = base_fingerprint(tensors, mesh, shared_parameters)
        return self._fingerprint


def _check_frozen(config: ModelConfig) -> None:
    """Raises ValueError for a model that changes without gradients."""
    if rates := [rate for block in config.blocks.values() if (rate := getattr(block, RATE, 0.0))]:
        raise ValueError(f"{RATE}={rates[0]} changes biases of the model, which lora freezes. Use 0.")


def plan_adapter_tensors(config: ModelConfig, blocks: BlockTable, adapters: AdapterConfigs) -> list[StreamedTensor]:
    """Returns every tensor of the adapters of the whole model, under our names."""
    with torch.device("meta"):
        tensors = LanguageModel(config, blocks=blocks, adapters=adapters).state_dict()
    shapes = ((name, tensor.shape) for name, tensor in tensors.items() if is_adapter(name))
    mapped = map_to_hf(None, config, shapes).values()
    return [StreamedTensor(tensor.name, tensor.shape, tensor.parts, torch.float32) for tensor in mapped]


@torch.no_grad()
def weight_deltas(stages: Stages) -> dict[str, WeightDelta]:
    """Returns what each adapter of this rank's stages adds to the weight of its layer. Every rank calls it."""
    return {
        name.removesuffix("adapter") + "weight": WeightDelta(
            _full_tensor(module.a), _full_tensor(module.b), module.config.scale
        )
        for stage in stages.models.values()
        for name, module in stage.named_modules()
        if isinstance(module, Adapter)
    }


def _full_tensor(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if is_dtensor(parameter) else parameter.detach()


def add_adapter(engine: AdaptedModel, name: str, lora: LoRA, *, seed: int = 0) -> None:
    """Adds an adapter that changes nothing yet. Every rank calls it. `Engine.set_adapter` selects it.

    Its A starts from `seed`, the same in every layout. On a failure the engine is as before.
    """
    engine.failure_state.check()
    engine.adapters.check_new(name)
    configs = adapter_configs(lora, engine.config, engine.family, engine.block_types)
    add_adapter_configs(engine, name, configs, seed=seed)


def add_adapter_configs(engine: AdaptedModel, name: str, configs: AdapterConfigs, *, seed: int = 0) -> None:
    """Adds an adapter of these layers, whose stages share the frozen model."""
    builder = replace(engine.builder, adapters=configs)
    stages = builder.build_on(engine.training_states[None].stages, seed)
    engine.training_states[name] = TrainingState(builder, stages, engine.options.optimizer)
    engine.adapters.by_name[name] = configs


def remove_adapter(engine: AdaptedModel, name: str) -> None:
    """Removes an adapter and frees its memory. Every rank calls it. If it was active, no adapter is afterwards."""
    engine.failure_state.check()
    engine.adapters.check_name(name)
    discard_adapter(engine, name)


def discard_adapter(engine: AdaptedModel, name: str) -> None:
    if engine.adapters.active == name:
        engine.set_adapter(None)
    del engine.adapters.by_name[name]
    engine.failure_state.lost_gradients.pop(name, None)
    engine.training_states.pop(name).free()


def stream_adapters(
    engine: AdaptedModel, *, name: str | None = None, gradients: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yields all tensors of an adapter, or their gradients, whole, in fp32, by our names, on every rank.

    `name` is by default that of the active adapter. One pass of the iterator is collective: every rank exhausts it.
    """
    name = engine.adapters.resolve(name)
    engine.failure_state.check(gradients=gradients, adapter=name)
    parameters = engine.training_states[name].parameters
    tensors = {
        key: parameter.grad if gradients else parameter for key, parameter in parameters.items() if is_adapter(key)
    }
    local = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    planned = plan_adapter_tensors(engine.config, engine.block_types, engine.adapters.by_name[name])
    buckets = plan_buckets(planned, torch.float32)
    return stream(buckets, local, engine.mesh, torch.float32, shared=())


def export_adapter(
    engine: AdaptedModel, directory: str | os.PathLike[str], *, name: str | None = None, base: str | None = None
) -> Path:
    """Writes an adapter, by default the active one, as peft and vLLM read it. Every rank calls it; rank 0 writes.

    `base` is the directory of the adapted model, or its name on the Hugging Face Hub: peft loads it by that.
    """
    configs = engine.adapters.by_name[engine.adapters.resolve(name)]
    tensors = {key: tensor.cpu() for key, tensor in stream_adapters(engine, name=name)}
    pairs = {layer: (tensors[f"{layer}.adapter.a"], tensors[f"{layer}.adapter.b"]) for layer in configs}

    def write() -> None:
        adapter_config, files = to_peft(pairs, configs, engine.config, engine.family, blocks=engine.block_types)
        write_adapter(directory, {**adapter_config, **base_entries(base)}, files)

    on_rank0(write)
    return Path(directory)


@torch.no_grad()
def load_adapter(engine: AdaptedModel, directory: str | os.PathLike[str], *, name: str | None = None) -> None:
    """Reads what `export_adapter` or peft wrote into an adapter, by default the active one. Every rank calls it.

    If there is none of this name, it is made as the file has it; else ranks, scales and layers must be the same.
    Gradients and the optimizer's state stay as they are.
    """
    engine.failure_state.check()
    name = engine.adapters.resolve_or_new(name)
    configs, pairs = on_rank0(
        lambda: from_peft(*read_adapter(directory), engine.config, engine.family, engine.block_types)
    )
    if name not in engine.adapters.by_name:
        add_adapter_configs(engine, name, configs)
    check_adapter(Path(directory), name, configs, engine.adapters.by_name[name])
    with engine.failure_state.guard_write("load_adapter"):
        for key, parameter in engine.training_states[name].parameters.items():
            if is_adapter(key):
                layer, leaf = key.rsplit(".adapter.", 1)
                matrix = pairs[layer]["ab".index(leaf)]
                local_shard(parameter).copy_(matrix[region(parameter)])


@torch.no_grad()
def base_fingerprint(tensors: Mapping[str, Tensor], mesh: Mesh, shared_parameters: Collection[str]) -> str:
    """Returns a digest of the base's weights, rounded to bf16: the same in every layout. Every rank calls it."""
    total = torch.zeros((), dtype=torch.int64, device=device_of(tensors, mesh))
    for name, tensor in tensors.items():
        in_base = tensor.is_floating_point() and not is_adapter(name) and name != VALUE_HEAD
        if in_base and is_owner(name, tensor, mesh, shared_parameters):
            bits = local_shard(tensor).to(torch.bfloat16).contiguous().view(torch.int16)
            start = tuple(part.start for part in region(tensor))
            total += position_sum(bits, tensor.shape, start) * name_weight(name)
    if dist.is_initialized():
        dist.all_reduce(total)
    return f"{int(total) % (1 << 64):016x}"
