"""A stage whose parameters no other rank shares: used as they are stored, or as copies made once a pass. No FSDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn
from torch.distributed.tensor import DTensor

from postlude.engine.gradients import replica_count, zero_gradient
from postlude.model import LanguageModel
from postlude.model.parallel import FSDPUnit, local_shard
from postlude.ops.foreach import foreach_copy
from postlude.ops.linear import set_main_grad

BUCKET_BYTES = 1 << 28
"""Of the memory that many tensors are made in at once: little enough to find a place again."""
ALIGNED = 128  # elements


@dataclass(frozen=True)
class Substitute:
    """A leaf that takes a parameter's place in its module during a pass, and what this rank stores of the parameter."""

    module: nn.Module
    name: str
    parameter: nn.Parameter
    part: Tensor
    leaf: nn.Parameter

    @property
    def is_copied(self) -> bool:
        """Whether the leaf is in another dtype, and so in memory of its own."""
        return self.leaf.dtype != self.part.dtype


class Unsharded:
    """The gathering of such a stage. FSDP would copy every weight and gradient that it handles.

    During a pass each parameter's place is taken by a leaf in the dtype of computation, a plain tensor: a copy made
    once, or the very memory where the dtypes are one. Autograd adds what it finds to the stored parameter's gradient
    itself, in its dtype, also to that of a copy which is narrower.
    """

    def __init__(self, stage: LanguageModel, compute_dtype: torch.dtype) -> None:
        self.stage, self.compute_dtype = stage, compute_dtype
        self.wide = {part.module for part in stage.sharded_separately() if part.fp32}
        self.substitutes: list[Substitute] = []  # known from the first pass on, when parameters have memory
        self.copied: list[Substitute] = []
        self.memory: list[tuple[UntypedStorage, int]] = []  # of the copies, and its size, which it has in a pass alone
        self.passing = False

    def begin(self, *, train: bool) -> None:
        """Put a leaf in every parameter's place, with a gradient to add to."""
        self.end()
        self.passing = True
        self._make_copies()
        if train:
            self._expect_gradients([each for each in self.substitutes if each.parameter.requires_grad])
        for each in self.substitutes:
            each.module.register_parameter(each.name, each.leaf)

    def before_last_backward(self) -> None:
        """Gradients are where they belong after every one."""

    def complete(self, module: FSDPUnit) -> None:
        """Its gradients are where they belong."""

    def settle(self) -> None:
        """Sum the gradients of what tensor-parallel ranks hold alike, each of which has its own addend."""
        all_reduce_replicated([each.parameter for each in self.substitutes])

    def end(self) -> None:
        """Put the parameters back, and let go of copies."""
        if not self.passing:
            return
        for each in self.substitutes:
            each.module.register_parameter(each.name, each.parameter)
            each.leaf.grad = None
            set_main_grad(each.leaf, None)
        for memory, _ in self.memory:
            memory.resize_(0)
        self.passing = False

    @torch.no_grad()
    def _make_copies(self) -> None:
        """Give leaves of another dtype their memory, at first or again, and what is stored now."""
        for memory, size in self.memory:
            memory.resize_(size)
        if not self.substitutes:
            self.substitutes = list(self._find())
            self.copied = [each for each in self.substitutes if each.is_copied]
            for dtype in {each.leaf.dtype for each in self.copied}:
                some = [each for each in self.copied if each.leaf.dtype == dtype]
                for each, room in zip(some, rooms([one.part for one in some], dtype, torch.empty), strict=True):
                    each.leaf.data = room
            storages = (each.leaf.untyped_storage() for each in self.copied)
            found = {storage.data_ptr(): storage for storage in storages}
            self.memory = [(storage, storage.nbytes()) for storage in found.values()]
        if self.copied:
            foreach_copy([each.leaf for each in self.copied], [each.part for each in self.copied])

    def _find(self) -> Iterable[Substitute]:
        for module in self.stage.modules():
            dtype = torch.float32 if module in self.wide else self.compute_dtype
            for name, parameter in module.named_parameters(recurse=False):
                part = local_shard(parameter)
                data = part if part.dtype == dtype else part.new_empty(0, dtype=dtype)
                leaf = nn.Parameter(data, requires_grad=parameter.requires_grad)
                leaf.grad_dtype = parameter.grad_dtype = None  # any
                yield Substitute(module, name, parameter, part, leaf)

    def _expect_gradients(self, substitutes: Sequence[Substitute]) -> None:
        """Have autograd add the gradients of leaves to those of stored parameters."""
        fresh = [each.parameter for each in substitutes if each.parameter.grad is None]
        plain = [parameter for parameter in fresh if not isinstance(parameter, DTensor)]
        for parameter, room in zip(plain, rooms(plain, torch.float32, torch.zeros), strict=True):
            parameter.grad = room
        for each in substitutes:
            parameter, total = each.parameter, each.parameter.grad
            if isinstance(parameter, DTensor):
                if total is None:
                    total = parameter.grad = zero_gradient(parameter)
                total = local_shard(total)
                if parameter.device_mesh.get_local_rank() and replica_count(parameter) > 1:
                    total.zero_()  # what ranks that hold it alike have summed before, the first brings into the next
            each.leaf.grad = total
            set_main_grad(each.leaf, total)


def rooms(tensors: Sequence[Tensor], dtype: torch.dtype, make: Callable[..., Tensor]) -> list[Tensor]:
    """Memory for tensors of the same shapes in a `dtype`, made together in buckets, as a launch for each takes time."""
    found: list[Tensor] = []
    waiting: list[Tensor] = []
    size = 0
    for tensor in [*tensors, None]:
        if waiting and (tensor is None or size + _room(tensor) > BUCKET_BYTES // dtype.itemsize):
            bucket = make(size, dtype=dtype, device=waiting[0].device).split([_room(each) for each in waiting])
            found += [
                (room if room.numel() == each.numel() else room[: each.numel()]).view(each.shape)
                for room, each in zip(bucket, waiting, strict=True)
            ]
            waiting, size = [], 0
        if tensor is not None:
            waiting.append(tensor)
            size += _room(tensor)
    return found


def _room(tensor: Tensor) -> int:
    return -(-tensor.numel() // ALIGNED) * ALIGNED


def all_reduce_replicated(parameters: Iterable[nn.Parameter]) -> None:
    """Sum the gradients of what several ranks hold alike over those ranks, all in one go."""
    alike = [each for each in parameters if isinstance(each, DTensor) and replica_count(each) > 1]
    gradients = [local_shard(each.grad) for each in alike if each.grad is not None]
    if not gradients:
        return
    together = torch.cat([each.flatten() for each in gradients])
    dist.all_reduce(together, group=alike[0].device_mesh.get_group())
    for each, total in zip(gradients, together.split([each.numel() for each in gradients]), strict=True):
        each.copy_(total.view_as(each))
