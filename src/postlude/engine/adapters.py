"""The adapters of an engine: their whole tensors, what they add to weights, and the base that they belong to."""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from postlude.engine.failure_state import FailureState
from postlude.engine.stages import Stages
from postlude.engine.streaming import StreamedTensor, WeightDelta, is_owner, plan_buckets, stream
from postlude.hf.family import Family, TensorMapping
from postlude.hf.lora_targets import adapter_configs
from postlude.hf.peft import read_adapter, to_peft, write_adapter
from postlude.hf.read_peft import from_peft
from postlude.lora import NO_ADAPTERS, AdapterConfig, LoRA
from postlude.model import LanguageModel, ModelConfig
from postlude.model.adapters import is_adapter
from postlude.model.blocks import Block
from postlude.model.config import RATE
from postlude.model.parallel import Adapter, is_dtensor, local_shard, region
from postlude.options import WeightStorage
from postlude.world.agreement import on_rank0
from postlude.world.mesh import Mesh

FINGERPRINT_BITS = 63
BUCKET_BYTES = 1 << 30


class AdaptedModel(Protocol):
    """A distributed model with adapters: an engine."""

    mesh: Mesh
    config: ModelConfig
    block_types: Mapping[str, type[Block]]
    family: Family | None
    adapters: Adapters
    failure_state: FailureState

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """This rank's trained parameters by their global names."""
        ...


class Adapters:
    """The adapters of a whole model, by the global names of their layers. Without LoRA there are none."""

    def __init__(
        self,
        lora: LoRA | None,
        config: ModelConfig,
        family: Family | None,
        blocks: Mapping[str, type[Block]],
        weights: WeightStorage,
    ) -> None:
        self.configs: Mapping[str, AdapterConfig] = NO_ADAPTERS
        self._fingerprint: str | None = None
        if lora is not None:
            _check_options(config, weights)
            self.configs = adapter_configs(lora, config, family, blocks)

    def base_fingerprint(
        self, tensors: Mapping[str, Tensor], mesh: Mesh, shared_parameters: Collection[str]
    ) -> str | None:
        """Returns `base_fingerprint` of the frozen model, computed once; None without adapters."""
        if self.configs and self._fingerprint is None:
            self._fingerprint = base_fingerprint(tensors, mesh, shared_parameters)
        return self._fingerprint


def _check_options(config: ModelConfig, weights: WeightStorage) -> None:
    """Raises ValueError for options of an engine that adapters contradict."""
    if weights != "fp32":
        raise ValueError(
            f"weights={weights!r} stores trained weights below fp32, but with lora the model is stored in the compute "
            'dtype and the adapters, which are small, in fp32. Use weights="fp32".'
        )
    if rates := [rate for block in config.blocks.values() if (rate := getattr(block, RATE, 0.0))]:
        raise ValueError(f"{RATE}={rates[0]} changes biases of the model, which lora freezes. Use 0.")


def plan_adapter_tensors(
    config: ModelConfig, blocks: Mapping[str, type[Block]], adapters: Mapping[str, AdapterConfig]
) -> list[StreamedTensor]:
    """Returns every tensor of the adapters of the whole model, under our names."""
    with torch.device("meta"):
        whole = LanguageModel(config, blocks=blocks, adapters=adapters).state_dict()
    return [
        StreamedTensor(name, tuple(tensor.shape), ((name, _identity(name, tensor)),), torch.float32)
        for name, tensor in whole.items()
        if is_adapter(name)
    ]


def _identity(name: str, tensor: Tensor) -> TensorMapping:
    return TensorMapping(name, tuple(tensor.shape), region=tuple(slice(0, size) for size in tensor.shape))


@torch.no_grad()
def weight_deltas(stages: Stages) -> dict[str, WeightDelta]:
    """Returns what each adapter of this rank's stages adds to the weight of its layer. Every rank calls it."""
    return {
        name.removesuffix("adapter") + "weight": WeightDelta(_whole(each.a), _whole(each.b), each.config.scale)
        for name, each in _adapters(stages)
    }


def _adapters(stages: Stages) -> Iterator[tuple[str, Adapter]]:
    for stage in stages.models.values():
        yield from ((name, module) for name, module in stage.named_modules() if isinstance(module, Adapter))


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if is_dtensor(parameter) else parameter.detach()


def stream_adapters(engine: AdaptedModel, *, gradients: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yields all tensors of an engine's adapters, or their gradients, whole, in fp32, by our names, on every rank."""
    engine.failure_state.check(gradients=gradients)
    tensors = {name: each.grad if gradients else each for name, each in engine.parameters.items() if is_adapter(name)}
    local = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    planned = plan_adapter_tensors(engine.config, engine.block_types, engine.adapters.configs)
    buckets = plan_buckets(planned, BUCKET_BYTES, torch.float32)
    return stream(buckets, local, engine.mesh, torch.float32, shared=())


def export_adapter(engine: AdaptedModel, directory: str | os.PathLike[str]) -> Path:
    """Writes the adapters as peft and vLLM read them. Every rank calls it; rank 0 writes."""
    _check_has_adapters(engine)
    tensors = {name: tensor.cpu() for name, tensor in stream_adapters(engine)}
    pairs = {name: (tensors[f"{name}.adapter.a"], tensors[f"{name}.adapter.b"]) for name in engine.adapters.configs}

    def write() -> None:
        files = to_peft(pairs, engine.adapters.configs, engine.config, engine.family, blocks=engine.block_types)
        write_adapter(directory, *files)

    on_rank0(write)
    return Path(directory)


@torch.no_grad()
def load_adapter(engine: AdaptedModel, directory: str | os.PathLike[str]) -> None:
    """Copies adapters that `export_adapter` or peft wrote into an engine whose adapters have the same shapes."""
    engine.failure_state.check()
    _check_has_adapters(engine)
    configs, pairs = on_rank0(
        lambda: from_peft(*read_adapter(directory), engine.config, engine.family, engine.block_types)
    )
    for name in sorted(configs.keys() | engine.adapters.configs.keys()):
        there, here = configs.get(name), engine.adapters.configs.get(name)
        if there != here:
            raise ValueError(
                f"{directory} has another adapter of {name}: {there or 'none'} there, {here or 'none'} here. Give the "
                "engine the lora that it was made with."
            )
    with engine.failure_state.guard_write("load_adapter"):
        for name, parameter in engine.parameters.items():
            if is_adapter(name):
                layer, leaf = name.rsplit(".adapter.", 1)
                whole = pairs[layer]["ab".index(leaf)]
                local_shard(parameter).copy_(whole[region(parameter)])


def _check_has_adapters(engine: AdaptedModel) -> None:
    if not engine.adapters.configs:
        raise ValueError("this engine has no adapters: make it with Engine(..., lora=LoRA()).")


@torch.no_grad()
def base_fingerprint(tensors: Mapping[str, Tensor], mesh: Mesh, shared_parameters: Collection[str]) -> str:
    """Returns a sum over all weights of the base, rounded to bf16: the same in every layout. Every rank calls it."""
    device = next((tensor.device for tensor in tensors.values()), torch.device(mesh.device_type))
    total = torch.zeros((), dtype=torch.int64, device=device)
    for name, tensor in tensors.items():
        if not is_adapter(name) and tensor.is_floating_point() and is_owner(name, tensor, mesh, shared_parameters):
            bits = local_shard(tensor).to(torch.bfloat16).contiguous().view(torch.int16)
            total += bits.sum(dtype=torch.int64) * zlib.crc32(name.encode())
    if dist.is_initialized():
        dist.all_reduce(total)
    return f"{int(total) % (1 << FINGERPRINT_BITS):016x}"
