"""A stage whose parameters no other rank shares: used as they are stored, or as copies made once per pass. No FSDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from postlude.engine.gradients import all_reduce_together, replica_count, zero_gradient
from postlude.model import LanguageModel
from postlude.model.parallel import FSDPUnit, local_shard
from postlude.ops.foreach import foreach_copy
from postlude.ops.linear import set_main_grad

BUCKET_BYTES = 1 << 28
"""Memory of many tensors that is allocated at once: small enough for the allocator to reuse."""
ALIGNED = 128  # elements


@dataclass(frozen=True)
class ComputeParameter:
    """A leaf that replaces a parameter in its module during a pass, and this rank's shard of the parameter."""

    module: nn.Module
    name: str
    parameter: nn.Parameter
    shard: Tensor
    leaf: nn.Parameter

    @property
    def is_copy(self) -> bool:
        """Whether the leaf has another dtype, and so its own memory."""
        return self.leaf.dtype != self.shard.dtype


class Unsharded:
    """The parameter sharding of such a stage. FSDP would copy every weight and gradient that it handles.

    During a pass, a plain tensor in the compute dtype replaces each parameter: a copy made once, or the same memory if
    the dtypes are equal. Autograd adds gradients directly to the stored parameter's gradient, in its dtype.
    """

    def __init__(self, stage: LanguageModel, compute_dtype: torch.dtype) -> None:
        self.stage, self.compute_dtype = stage, compute_dtype
        fp32_units = (unit.module for unit in stage.sharded_separately() if unit.fp32)
        self.fp32_modules = {module for unit in fp32_units for module in unit.modules()}
        self.compute_parameters: list[ComputeParameter] = []  # from the first pass on, when parameters have memory
        self.copied: list[ComputeParameter] = []
        self.memory: list[tuple[UntypedStorage, int]] = []  # of the copies, and its size; empty between passes
        self.in_pass = False

    def begin_pass(self, *, train: bool) -> None:
        """Replaces every parameter by its leaf, with a gradient to add to."""
        self.end_pass()
        self.in_pass = True
        self._make_copies()
        if train:
            self._attach_gradients([each for each in self.compute_parameters if each.parameter.requires_grad])
        for each in self.compute_parameters:
            each.module.register_parameter(each.name, each.leaf)

    def before_last_backward(self) -> None:
        """Nothing to do: gradients are complete after every backward."""

    def grads_ready(self, module: FSDPUnit) -> None:
        """Nothing to do: gradients are where they belong."""

    def finish_grads(self) -> None:
        """Sums the gradients of parameters that tensor-parallel ranks replicate: each has its own addend."""
        all_reduce_replicated([each.parameter for each in self.compute_parameters])

    def end_pass(self) -> None:
        """Restores the parameters, and frees the copies."""
        if not self.in_pass:
            return
        for each in self.compute_parameters:
            each.module.register_parameter(each.name, each.parameter)
            each.leaf.grad = None
            set_main_grad(each.leaf, None)
        for memory, _ in self.memory:
            memory.resize_(0)
        self.in_pass = False

    @torch.no_grad()
    def _make_copies(self) -> None:
        """Allocates the leaves of another dtype, and copies the stored values."""
        for memory, size in self.memory:
            memory.resize_(size)
        if not self.compute_parameters:
            self.compute_parameters = list(self._leaves())
            self.copied = [each for each in self.compute_parameters if each.is_copy]
            for dtype in {each.leaf.dtype for each in self.copied}:
                some = [each for each in self.copied if each.leaf.dtype == dtype]
                buffers = allocate_like([each.shard for each in some], dtype, torch.empty)
                for each, buffer in zip(some, buffers, strict=True):
                    each.leaf.data = buffer
            storages = (each.leaf.untyped_storage() for each in self.copied)
            by_address = {storage.data_ptr(): storage for storage in storages}
            self.memory = [(storage, storage.nbytes()) for storage in by_address.values()]
        if self.copied:
            foreach_copy([each.leaf for each in self.copied], [each.shard for each in self.copied])

    def _leaves(self) -> Iterable[ComputeParameter]:
        for module in self.stage.modules():
            dtype = torch.float32 if module in self.fp32_modules else self.compute_dtype
            for name, parameter in module.named_parameters(recurse=False):
                shard = local_shard(parameter)
                data = shard if shard.dtype == dtype else shard.new_empty(0, dtype=dtype)
                leaf = nn.Parameter(data, requires_grad=parameter.requires_grad)
                leaf.grad_dtype = parameter.grad_dtype = None  # any
                yield ComputeParameter(module, name, parameter, shard, leaf)

    def _attach_gradients(self, compute_parameters: Sequence[ComputeParameter]) -> None:
        """Makes autograd add the leaves' gradients to those of the stored parameters."""
        fresh = [each.parameter for each in compute_parameters if each.parameter.grad is None]
        plain = [parameter for parameter in fresh if not isinstance(parameter, DTensor)]
        for parameter, buffer in zip(plain, allocate_like(plain, torch.float32, torch.zeros), strict=True):
            parameter.grad = buffer
        for each in compute_parameters:
            parameter, total = each.parameter, each.parameter.grad
            if isinstance(parameter, DTensor):
                if total is None:
                    total = parameter.grad = zero_gradient(parameter)
                total = local_shard(total)
                if parameter.device_mesh.get_local_rank() and replica_count(parameter) > 1:
                    total.zero_()  # the sum so far is replicated, and the first rank brings it into the next sum
            each.leaf.grad = total
            set_main_grad(each.leaf, total)


def allocate_like(tensors: Sequence[Tensor], dtype: torch.dtype, make: Callable[..., Tensor]) -> list[Tensor]:
    """Returns memory of the tensors' shapes in a `dtype`, allocated in buckets: a launch for each would take time."""
    allocated: list[Tensor] = []
    waiting: list[Tensor] = []
    size = 0
    for tensor in [*tensors, None]:
        if waiting and (tensor is None or size + _aligned(tensor) > BUCKET_BYTES // dtype.itemsize):
            buffers = make(size, dtype=dtype, device=waiting[0].device).split([_aligned(each) for each in waiting])
            allocated += [
                (buffer if buffer.numel() == each.numel() else buffer[: each.numel()]).view(each.shape)
                for buffer, each in zip(buffers, waiting, strict=True)
            ]
            waiting, size = [], 0
        if tensor is not None:
            waiting.append(tensor)
            size += _aligned(tensor)
    return allocated


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.numel() // ALIGNED) * ALIGNED


def all_reduce_replicated(parameters: Iterable[nn.Parameter]) -> None:
    """Sums the gradients of parameters that several ranks replicate over those ranks, in one all-reduce per mesh."""
    by_mesh: dict[DeviceMesh, list[Tensor]] = {}
    for each in parameters:
        if isinstance(each, DTensor) and replica_count(each) > 1 and each.grad is not None:
            by_mesh.setdefault(each.device_mesh, []).append(local_shard(each.grad))
    for mesh, gradients in by_mesh.items():
        all_reduce_together(gradients, [mesh.get_group()])
