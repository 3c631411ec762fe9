"""Unsharded: parameters of a stage that no other rank shares, used as stored or copied once per pass. No FSDP."""

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
from postlude.ops.experts import alternating
from postlude.ops.foreach import foreach_copy
from postlude.ops.linear import main_grad, set_main_grad, zero_before_autograd

BUCKET_BYTES = 1 << 28
"""Memory of many tensors that is allocated at once: small enough for the allocator to reuse."""
ALIGNED = 128  # elements


class ParameterSharding:
    """Makes the weights of one stage ready for passes, and reduces its gradients. `fsdp.py` has the other kinds."""

    def begin_pass(self, *, train: bool) -> None:
        """Prepares for a pass over microbatches, before its first forward. With `train`, backwards follow."""

    def before_last_backward(self) -> None:
        """Prepares for the last backward."""

    def grads_ready(self, module: FSDPUnit) -> None:
        """Handles the gradients of a layer or the stage, to which a planned backward has added all that it adds."""

    def finish_grads(self) -> None:
        """Finishes the reduction of gradients over ranks, after the last backward."""

    def end_pass(self) -> None:
        """Restores the stored parameters, after a pass or a failed pass."""


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


class Unsharded(ParameterSharding):
    """A stage whose parameters no other rank shares. FSDP would copy weights and gradients.

    During a pass, a plain tensor in the compute dtype replaces each parameter: a copy made once, or the same memory if
    the dtypes are equal. Autograd adds gradients directly to the stored parameter's gradient, in its dtype.
    """

    def __init__(self, stage: LanguageModel, compute_dtype: torch.dtype) -> None:
        self.stage, self.compute_dtype = stage, compute_dtype
        fp32_units = (unit.module for unit in stage.sharded_separately() if unit.fp32)
        self.fp32_modules = {module for unit in fp32_units for module in unit.modules()}
        self.compute_parameters: list[ComputeParameter] = []  # from the first pass on, when parameters have memory
        self.copied: list[ComputeParameter] = []
        self.copies: tuple[list[Tensor], list[Tensor]] = ([], [])  # dense parts of the copies, and of the shards
        self.memory: list[tuple[UntypedStorage, int]] = []  # of the copies, and its size; empty between passes
        self.in_pass = False

    def begin_pass(self, *, train: bool) -> None:
        """Replaces every parameter by its leaf, with a gradient to add to."""
        self.end_pass()
        self.in_pass = True
        self._make_copies()
        if train:
            self._attach_gradients([entry for entry in self.compute_parameters if entry.parameter.requires_grad])
        for entry in self.compute_parameters:
            entry.module.register_parameter(entry.name, entry.leaf)

    def finish_grads(self) -> None:
        """Sums the gradients of parameters that tensor-parallel ranks replicate: each has its own addend."""
        all_reduce_replicated([entry.parameter for entry in self.compute_parameters])

    def end_pass(self) -> None:
        if not self.in_pass:
            return
        for entry in self.compute_parameters:
            main_grad(entry.leaf)  # zeroes the gradient of a parameter that was not used
            entry.module.register_parameter(entry.name, entry.parameter)
            entry.leaf.grad = None
            set_main_grad(entry.leaf, None)
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
            self.copied = [entry for entry in self.compute_parameters if entry.is_copy]
            self._allocate_copies()
            storages = (entry.leaf.untyped_storage() for entry in self.copied)
            by_address = {storage.data_ptr(): storage for storage in storages}
            self.memory = [(storage, storage.nbytes()) for storage in by_address.values()]
        if self.copied:
            foreach_copy(*self.copies)

    def _allocate_copies(self) -> None:
        """Gives the copies memory: those of a unit's `alternating` layers expert by expert, others one by one."""
        weights = {entry.module: entry for entry in self.copied if entry.name == "weight"}
        remaining = dict.fromkeys(self.copied)
        for unit in self.stage.modules():
            names = unit.alternating if isinstance(unit, FSDPUnit) else ()
            group = [weights[layer] for name in names if (layer := getattr(unit, name)) in weights]
            if len(group) > 1:
                shards = [entry.shard for entry in group]
                buffers = alternating([shard.shape for shard in shards], group[0].leaf.dtype, shards[0].device)
                for entry, buffer in zip(group, buffers, strict=True):
                    entry.leaf.data = buffer
                    del remaining[entry]
        for dtype in {entry.leaf.dtype for entry in remaining}:
            entries = [entry for entry in remaining if entry.leaf.dtype == dtype]
            allocated = allocate_like([entry.shard for entry in entries], dtype, torch.empty)
            for entry, buffer in zip(entries, allocated, strict=True):
                entry.leaf.data = buffer
        for entry in self.copied:
            for dense_parts, tensor in zip(self.copies, (entry.leaf.detach(), entry.shard), strict=True):
                dense_parts.extend([tensor] if entry.leaf.is_contiguous() else tensor.unbind())

    def _leaves(self) -> Iterable[ComputeParameter]:
        for module in self.stage.modules():
            dtype = torch.float32 if module in self.fp32_modules else self.compute_dtype
            for name, parameter in module.named_parameters(recurse=False):
                shard = local_shard(parameter)
                data = shard if shard.dtype == dtype else shard.new_empty(0, dtype=dtype)
                leaf = nn.Parameter(data, requires_grad=parameter.requires_grad)
                leaf.grad_dtype = parameter.grad_dtype = None  # any
                if leaf.requires_grad and leaf.is_cuda:
                    zero_before_autograd(leaf)
                yield ComputeParameter(module, name, parameter, shard, leaf)

    def _attach_gradients(self, compute_parameters: Sequence[ComputeParameter]) -> None:
        """Makes autograd add the leaves' gradients to those of the stored parameters.

        The memory of new ones of matrices is left uninitialised on a GPU: the first product writes it.
        """
        fresh = [entry.parameter for entry in compute_parameters if entry.parameter.grad is None]
        plain = [parameter for parameter in fresh if not isinstance(parameter, DTensor)]
        written = dict.fromkeys(parameter for parameter in plain if parameter.is_cuda and parameter.ndim > 1)
        others = [parameter for parameter in plain if parameter not in written]
        for parameters, make in (list(written), torch.empty), (others, torch.zeros):
            for parameter, buffer in zip(parameters, allocate_like(parameters, torch.float32, make), strict=True):
                parameter.grad = buffer
        for entry in compute_parameters:
            parameter, total = entry.parameter, entry.parameter.grad
            if isinstance(parameter, DTensor):
                if total is None:
                    total = parameter.grad = zero_gradient(parameter)
                total = local_shard(total)
                if parameter.device_mesh.get_local_rank() and replica_count(parameter) > 1:
                    total.zero_()  # replicated: the first rank adds the sum so far to the next one
            entry.leaf.grad = total
            set_main_grad(entry.leaf, total, is_empty=parameter in written)


def allocate_like(tensors: Sequence[Tensor], dtype: torch.dtype, make: Callable[..., Tensor]) -> list[Tensor]:
    """Returns tensors of the same shapes in `dtype`, allocated in buckets: one allocation each would be slow."""
    allocated: list[Tensor] = []
    waiting: list[Tensor] = []
    size = 0
    for tensor in [*tensors, None]:
        if waiting and (tensor is None or size + _aligned(tensor) > BUCKET_BYTES // dtype.itemsize):
            buffers = make(size, dtype=dtype, device=waiting[0].device).split([_aligned(like) for like in waiting])
            allocated += [
                (buffer if buffer.numel() == like.numel() else buffer[: like.numel()]).view(like.shape)
                for buffer, like in zip(buffers, waiting, strict=True)
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
    for parameter in parameters:
        if isinstance(parameter, DTensor) and replica_count(parameter) > 1 and parameter.grad is not None:
            by_mesh.setdefault(parameter.device_mesh, []).append(local_shard(parameter.grad))
    for mesh, gradients in by_mesh.items():
        all_reduce_together(gradients, [mesh.get_group()])
