"""Whole tensors out of a model that is spread over ranks: for inference engines, for export and for comparison.

Tensors go by their Hugging Face names and in transformers' order, or by ours where there is no family, in buckets of
bounded size. Each element of a bucket is written by the one rank that speaks for it and is zero elsewhere, so one
integer sum over all ranks assembles it bit for bit, whatever the layout. The plan depends on the model alone: nothing
is negotiated while weights stream.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from postlude.hf.family import Family, TensorMapping, copy_to_hf, map_to_hf
from postlude.hf.tensor_sources import names_in_order
from postlude.model import LanguageModel, ModelConfig
from postlude.model.blocks import BLOCKS, Block
from postlude.model.parallel import local_shard, region
from postlude.ops.adamw import joined
from postlude.world.mesh import Mesh


@dataclass(frozen=True)
class StreamedTensor:
    """One tensor as others know it, and which of ours stand in it, each at its place."""

    theirs: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, TensorMapping], ...]
    least: torch.dtype
    """The least precise dtype it is given in: fp32 for what the model keeps in fp32."""

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)

    def dtype(self, asked: torch.dtype) -> torch.dtype:
        """What it is given in where `asked` is asked for."""
        return torch.promote_types(asked, self.least)

    def bytes(self, asked: torch.dtype) -> int:
        """How much that is."""
        return self.size * self.dtype(asked).itemsize


def plan_tensors(
    config: ModelConfig, family: Family | None, blocks: Mapping[str, type[Block]] = BLOCKS
) -> list[StreamedTensor]:
    """Every tensor of the model, in transformers' order; under our names and in our order where it has no family."""
    with torch.device("meta"):
        whole = LanguageModel(config, dtype=torch.bfloat16, blocks=blocks).state_dict()  # what is wider, is kept so
    shapes = ((name, tensor.shape) for name, tensor in whole.items())
    found = {}
    for name, theirs in map_to_hf(family, config, shapes).items():
        widest = max((whole[ours].dtype for ours, _ in theirs.parts), key=lambda dtype: dtype.itemsize)
        found[name] = StreamedTensor(name, theirs.shape, theirs.parts, widest)
    order = [] if family is None else names_in_order(config, family, found)
    # What a family of your own names beyond what transformers' model has comes last.
    return [found[name] for name in dict.fromkeys([*order, *found]) if name in found]


def plan_buckets(pieces: Sequence[StreamedTensor], bucket_bytes: int, dtype: torch.dtype) -> list[list[StreamedTensor]]:
    """Consecutive pieces of at most `bucket_bytes` together; a larger piece has a bucket to itself."""
    buckets: list[list[StreamedTensor]] = []
    filled = 0
    for piece in pieces:
        needed = piece.bytes(dtype)
        if not buckets or filled + needed > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(piece)
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
    low: Mapping[str, Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors by their names, on every rank. `tensors` are those this rank holds parts of, by our names.

    `shared` are those that both ends of a pipeline hold, and `low` has the lower halves of split weights.

    They come in `dtype`, but for those that are kept in a wider one.
    Every rank takes every tensor, in step: a rank that stops early leaves the others waiting.
    """
    spoken = {name: tensor for name, tensor in tensors.items() if is_owner(name, tensor, mesh, shared)}
    device = next((tensor.device for tensor in tensors.values()), torch.device(mesh.device_type))
    for bucket in buckets:
        words = [-(-piece.bytes(dtype) // 8) for piece in bucket]  # each begins where any dtype may
        flat = torch.zeros(sum(words), dtype=torch.int64, device=device)
        views = []
        for piece, room in zip(bucket, flat.split(words), strict=True):
            view = room.view(piece.dtype(dtype))[: piece.size].view(piece.shape)
            views.append(view)
            for ours, place in piece.parts:
                if ours in spoken:
                    part = local_shard(spoken[ours])
                    if view.dtype != torch.bfloat16 and low is not None and ours in low:
                        part = joined(part, low[ours].to(part.device))
                    copy_to_hf(view, place, part, region(spoken[ours]))
        if dist.is_initialized():
            dist.all_reduce(flat)
        yield from zip((piece.theirs for piece in bucket), views, strict=True)


class InterruptibleStream:
    """`stream`, of which the first rank may take less than all. It calls `end` after that, and all ranks stop there."""

    def __init__(
        self,
        buckets: Sequence[Sequence[StreamedTensor]],
        tensors: Mapping[str, Tensor],
        mesh: Mesh,
        dtype: torch.dtype,
        *,
        shared: Collection[str],
        low: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.buckets, self.tensors, self.mesh, self.dtype, self.shared = buckets, tensors, mesh, dtype, shared
        self.low = low
        self.begun = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for bucket in self.buckets:
            self.begun += 1
            if not self._goes_on(True):
                return
            yield from stream([bucket], self.tensors, self.mesh, self.dtype, shared=self.shared, low=self.low)

    def end(self) -> None:
        """Say, on the first rank, that it takes no more. Nothing where there is no more."""
        if dist.get_rank() == 0 and self.begun < len(self.buckets):
            self._goes_on(False)

    def _goes_on(self, here: bool) -> bool:
        """What the first rank says."""
        device = next((tensor.device for tensor in self.tensors.values()), torch.device(self.mesh.device_type))
        flag = torch.tensor([here], dtype=torch.uint8, device=device)
        dist.broadcast(flag, 0)
        return bool(flag.item())


def is_owner(name: str, tensor: Tensor, mesh: Mesh, shared: Collection[str]) -> bool:
    """Whether this rank, of all that hold the same part, is the one to give it. `shared` ones the first end gives."""
    if name in shared and mesh.first_and_last_stage.rank == 1:
        return False
    if not isinstance(tensor, DTensor):
        return mesh.dp.rank == mesh.cp.rank == mesh.tp.rank == 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None  # this rank holds part of it
    return all(
        rank == 0 for placement, rank in zip(tensor.placements, coordinate, strict=True) if placement.is_replicate()
    )
