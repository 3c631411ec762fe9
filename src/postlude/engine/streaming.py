"""Streams full tensors of a model that is distributed over ranks, for inference engines, export and comparison.

Tensors have their Hugging Face names and transformers' order, or ours if there is no family, and come in buckets of
bounded size. Each element of a bucket is written by the one rank that owns it and is zero elsewhere, so one integer
all-reduce assembles the bucket bit for bit in every layout. The plan depends on the model only: ranks negotiate nothing
while weights stream.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from postlude.hf.family import Family, HFTensor, copy_from_hf, copy_to_hf, map_to_hf
from postlude.hf.tensor_sources import names_in_order
from postlude.model import LanguageModel, ModelConfig
from postlude.model.blocks import BLOCKS, BlockTable
from postlude.model.parallel import local_shard, region
from postlude.ops.adamw_storage import join_halves
from postlude.world.mesh import Mesh

BUCKET_BYTES = 1 << 30


class DistributedModel(Protocol):
    """A model of which each rank holds a part: an engine."""

    mesh: Mesh

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...

    @property
    def shared_parameters(self) -> Collection[str]: ...

    @property
    def low_bits(self) -> Mapping[str, Tensor]: ...

    def weight_deltas(self) -> Mapping[str, WeightDelta]: ...


@dataclass(frozen=True)
class WeightDelta:
    """The matrix that an adapter adds to a weight: scale · B · A, in fp32."""

    a: Tensor
    b: Tensor
    scale: float

    def at(self, slices: Sequence[slice]) -> Tensor:
        *experts, rows, columns = slices
        a, b = (matrix[tuple(experts)] if matrix.dim() == 3 else matrix for matrix in (self.a, self.b))
        return self.scale * (b[..., rows, :] @ a[..., :, columns])


@dataclass(frozen=True)
class StreamedTensor(HFTensor):
    """A tensor as Hugging Face names it, with the dtype that it is streamed in."""

    min_dtype: torch.dtype
    """The narrowest dtype that it is streamed in: fp32 if the model keeps it in fp32."""

    @property
    def size(self) -> int:
        return prod(self.shape)

    def dtype(self, requested: torch.dtype) -> torch.dtype:
        return torch.promote_types(requested, self.min_dtype)

    def bytes(self, requested: torch.dtype) -> int:
        return self.size * self.dtype(requested).itemsize


def plan_tensors(config: ModelConfig, family: Family | None, blocks: BlockTable = BLOCKS) -> list[StreamedTensor]:
    """Returns every tensor of the model, in transformers' order; with our names and order if it has no family."""
    with torch.device("meta"):
        # Parameters that a block keeps in a wider dtype stay wider.
        state_dict = LanguageModel(config, dtype=torch.bfloat16, blocks=blocks).state_dict()
    shapes = ((name, tensor.shape) for name, tensor in state_dict.items())
    tensors = {}
    for name, mapped in map_to_hf(family, config, shapes).items():
        widest = max((state_dict[part].dtype for part, _ in mapped.parts), key=lambda dtype: dtype.itemsize)
        tensors[name] = StreamedTensor(name, mapped.shape, mapped.parts, widest)
    order = [] if family is None else names_in_order(config, family, tensors)
    # Tensors that a family of yours names beyond those of transformers' model come last.
    return [tensors[name] for name in dict.fromkeys([*order, *tensors]) if name in tensors]


def plan_buckets(
    tensors: Sequence[StreamedTensor], dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES
) -> list[list[StreamedTensor]]:
    """Returns consecutive tensors of at most `bucket_bytes` together; a larger tensor has its own bucket."""
    buckets: list[list[StreamedTensor]] = []
    filled = 0
    for tensor in tensors:
        needed = tensor.bytes(dtype)
        if not buckets or filled + needed > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(tensor)
        filled += needed
    return buckets


@torch.no_grad()
def stream(
    buckets: Sequence[Sequence[StreamedTensor]],
    tensors: Mapping[str, Tensor],
    mesh: Mesh,
    dtype: torch.dtype,
    *,
    shared: Collection[str],
    low_bits: Mapping[str, Tensor] | None = None,
    deltas: Mapping[str, WeightDelta] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yields full tensors by name, on every rank, in `dtype` or a wider one that the model keeps.

    `tensors` are this rank's, by our names. `shared` names those that the first and the last stage both hold.
    `low_bits` are the lower halves of split weights, `deltas` what adapters add to weights. Every rank must exhaust the
    iterator: the others wait for a rank that stops early.
    """
    owned = {name: tensor for name, tensor in tensors.items() if is_owner(name, tensor, mesh, shared)}
    device = device_of(tensors, mesh)
    for bucket in buckets:
        # Each starts at a multiple of 8 bytes, aligned for any dtype.
        words = [-(-tensor.bytes(dtype) // 8) for tensor in bucket]
        flat = torch.zeros(sum(words), dtype=torch.int64, device=device)
        views = []
        for tensor, buffer in zip(bucket, flat.split(words), strict=True):
            view = buffer.view(tensor.dtype(dtype))[: tensor.size].view(tensor.shape)
            views.append(view)
            for parameter_name, mapping in tensor.parts:
                if parameter_name in owned:
                    shard = local_shard(owned[parameter_name])
                    if view.dtype != torch.bfloat16 and low_bits is not None and parameter_name in low_bits:
                        shard = join_halves(shard, low_bits[parameter_name].to(shard.device))
                    if deltas and parameter_name in deltas:
                        shard = shard.float() + deltas[parameter_name].at(region(owned[parameter_name]))
                    copy_to_hf(view, mapping, shard, region(owned[parameter_name]))
        if dist.is_initialized():
            dist.all_reduce(flat)
        yield from zip((tensor.name for tensor in bucket), views, strict=True)


def stream_buckets(
    buckets: Sequence[Sequence[StreamedTensor]], model: DistributedModel, dtype: torch.dtype, *, all_bits: bool
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yields a model's tensors bucket by bucket; without `all_bits` split weights as a forward uses them."""
    low_bits, deltas = model.low_bits if all_bits else None, model.weight_deltas()
    shared = model.shared_parameters
    return (  # `model.tensors` is read for each bucket: it refuses once the engine is offloaded
        list(stream([bucket], model.tensors, model.mesh, dtype, shared=shared, low_bits=low_bits, deltas=deltas))
        for bucket in buckets
    )


@torch.no_grad()
def copy_into(model: LanguageModel, planned: Sequence[StreamedTensor], streamed: Iterator[tuple[str, Tensor]]) -> None:
    targets = model.state_dict()
    for tensor, (_, values) in zip(planned, streamed, strict=True):
        for name, mapping in tensor.parts:
            copy_from_hf(values, mapping, targets[name], region(targets[name]))


class InterruptibleStream:
    """A `stream` that rank 0 may stop early. It calls `end` then, and all ranks stop there."""

    def __init__(
        self, buckets: Sequence[Sequence[StreamedTensor]], model: DistributedModel, dtype: torch.dtype
    ) -> None:
        self.buckets = stream_buckets(buckets, model, dtype, all_bits=True)
        self.remaining = len(buckets)
        self.device = device_of(model.tensors, model.mesh)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        while self.remaining:
            self.remaining -= 1
            if not self._continues(True):
                return
            yield from next(self.buckets)

    def end(self) -> None:
        """Makes all ranks stop, on rank 0. Does nothing on other ranks, and after the last bucket."""
        if dist.get_rank() == 0 and self.remaining:
            self._continues(False)

    def _continues(self, proceed: bool) -> bool:
        """Broadcasts rank 0's `proceed`, and returns it on every rank."""
        flag = torch.tensor([proceed], dtype=torch.uint8, device=self.device)
        dist.broadcast(flag, 0)
        return bool(flag.item())


def device_of(tensors: Mapping[str, Tensor], mesh: Mesh) -> torch.device:
    return next((tensor.device for tensor in tensors.values()), torch.device(mesh.device_type))


def is_owner(name: str, tensor: Tensor, mesh: Mesh, shared: Collection[str]) -> bool:
    """Returns whether this rank, of all that hold the same shard, writes it. The first stage writes `shared` ones."""
    if name in shared and mesh.first_and_last_stage.rank == 1:
        return False
    if not isinstance(tensor, DTensor):
        return mesh.dp.rank == mesh.cp.rank == mesh.tp.rank == 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None  # this rank holds a shard
    return all(
        rank == 0 for placement, rank in zip(tensor.placements, coordinate, strict=True) if placement.is_replicate()
    )
