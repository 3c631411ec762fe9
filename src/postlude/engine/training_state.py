"""TrainingState: this rank's stages, their trained parameters, the optimizer and its step counts.

An engine has one. With LoRA it has one per adapter, and one of the model alone, whose frozen tensors all share.

`StateOffload` moves what an engine holds to host memory and back, for a generator on the same GPU. Whole storages are
moved: their bytes are copied, and their device memory is freed. Tensors and views of them, such as those that FSDP and
the optimizer keep, stay the same objects, and have the same bits again afterwards. A storage that numpy or another
process uses as well is not resizable, and stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn

from postlude.engine import gradients, optimizers
from postlude.engine.failure_state import FailureState
from postlude.engine.stages import StageBuilder, Stages
from postlude.lora import AdapterConfigs
from postlude.model import LanguageModel
from postlude.model.adapters import is_adapter
from postlude.model.parallel import local_shard
from postlude.ops.adamw_storage import split_halves
from postlude.optimizer import AdamW, OptimizerConfig


class TrainingState:
    """Stages, optimizer and step counts of one adapter, or of a model of which all weights are trained."""

    def __init__(self, builder: StageBuilder, stages: Stages, optimizer: OptimizerConfig) -> None:
        self.builder, self.stages = builder, stages
        self.step = self.skipped = 0
        self.optimizer_start_step = 0
        """The step at which the optimizer was built."""
        self.steps_without_gradients = 0
        """Steps of the optimizer in which no parameter had a gradient: they count in `step`, but changed nothing."""
        self.has_gradients = False
        """Whether gradients were added since they were freed: on every rank alike, even one that trains nothing."""
        self.late_start_steps: dict[str, int] = {}
        """The steps with gradients before a parameter's moments started, if later than the optimizer; by name."""
        self.optimizer_config = optimizer
        self.optimizer = self._build_optimizer(optimizer)

    @property
    def adapters(self) -> AdapterConfigs:
        return self.builder.adapters

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        return self.stages.parameters

    @property
    def tensors(self) -> dict[str, Tensor]:
        """This rank's tensors that training may change: of a frozen model the trained parameters, else all."""
        tensors = self.stages.tensors
        return {name: tensors[name] for name in self.parameters} if self.builder.frozen else tensors

    @property
    def low_bits(self) -> dict[str, Tensor]:
        return self.optimizer.low_bits() if isinstance(self.optimizer, optimizers.ShardedAdamW) else {}

    def set_low_bits(self, low_bits: dict[str, Tensor]) -> None:
        """Sets the lower 16 bits of split weights, taking them from `low_bits`."""
        if isinstance(self.optimizer, optimizers.ShardedAdamW):
            self.optimizer.set_low_bits(low_bits)

    @property
    def optimizer_kind(self) -> str:
        return optimizers.optimizer_kind(self.optimizer_config, self.builder.options.weights)

    def step_config(self, step_config: OptimizerConfig | None) -> OptimizerConfig:
        """Returns the settings of one step: `step_config`, or the optimizer's own. Raises if its state would differ."""
        if step_config is None:
            return self.optimizer_config
        kind = optimizers.optimizer_kind(step_config, self.builder.options.weights)
        on_host = isinstance(step_config, AdamW) and step_config.offload
        if kind != self.optimizer_kind or on_host != getattr(self.optimizer_config, "offload", False):
            raise ValueError(
                f"a step's settings are of {kind}{' in host memory' * on_host}, but this optimizer's state is that of "
                f"{self.optimizer_config}. A step may change rates, decay, eps and clipping; else use set_optimizer."
            )
        return step_config

    def clipped_step(self, config: OptimizerConfig, norm: Tensor) -> float:
        """Updates the weights by `config`, with gradients clipped by their global `norm`. Returns the learning rate."""
        lr = config.lr * config.schedule.factor(self.step - self.optimizer_start_step)
        self.optimizer.clipped_step(config, lr, norm)
        return lr

    def count_step(self, finite: bool) -> None:
        """Counts a step, before its gradients are freed. A step with a non-finite gradient norm counts as skipped."""
        self.step, self.skipped = self.step + finite, self.skipped + (not finite)
        are_set = any(parameter.grad is not None for parameter in self.parameters.values())  # a caller may set them
        self.steps_without_gradients += not (self.has_gradients or are_set)

    def set_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Replaces the optimizer, and resets the moments and the schedule. Split weights keep their low bits."""
        new = self._build_optimizer(optimizer)
        if isinstance(new, optimizers.ShardedAdamW) and isinstance(self.optimizer, optimizers.ShardedAdamW):
            new.set_low_bits(self.optimizer.take_low_bits())
        self.optimizer, self.optimizer_config = new, optimizer
        self.optimizer_start_step, self.steps_without_gradients, self.late_start_steps = self.step, 0, {}

    def _build_optimizer(self, config: OptimizerConfig) -> optimizers.ShardedAdamW | optimizers.ShardedSGD:
        return optimizers.build(config, self.parameters, self.stages.matrices, self.builder.options.weights)

    def zero_grad(self) -> None:
        """Frees the gradients, and zeroes the blocks' counters."""
        self.optimizer.zero_grad(set_to_none=True)
        self.has_gradients = False
        for counter in self.stages.token_counters:
            counter.zero_()

    @torch.no_grad()
    def is_new_adapter(self) -> bool:
        """Returns whether this is an adapter whose B matrices are all zero, on every rank. Every rank calls it."""
        if not self.adapters:
            return False
        changed = torch.zeros((), device=self.builder.device)
        for name, parameter in self.parameters.items():
            if is_adapter(name) and name.endswith(".b"):
                changed += local_shard(parameter).any()
        dist.all_reduce(changed)
        return not changed.item()

    def gradient_norm(self) -> Tensor:
        return self._norm(
            {name: parameter.grad for name, parameter in self.parameters.items() if parameter.grad is not None}
        )

    def weight_norm(self) -> Tensor:
        return self._norm(self.parameters)

    def _norm(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Returns the norm of tensors by their parameters' names. Shared parameters count once, on the first stage."""
        local = [
            (tensor, gradients.replica_count(self.parameters[name]))
            for name, tensor in tensors.items()
            if not self._is_second_copy(name)
        ]
        return gradients.total_norm(local, self.builder.device)

    def free_shared_gradients(self) -> None:
        """Frees the last stage's gradients of shared parameters: the first stage has their sum."""
        for name, parameter in self.parameters.items():
            if self._is_second_copy(name):
                parameter.grad = None

    def _is_second_copy(self, name: str) -> bool:
        """Whether this is the last stage's copy of a shared parameter."""
        is_second = self.builder.mesh.layout.pp > 1 and 0 not in self.stages.models
        return is_second and name in self.builder.config.shared_parameters

    def rebuild(self) -> None:
        """Builds the stages again around the same parameters, after an exception in the middle of a pass."""
        self.stages = self.builder.rebuild(self.stages)

    def free(self) -> None:
        """Frees the memory of parameters, gradients and optimizer state. It cannot be used afterwards."""
        self.zero_grad()
        self.optimizer.state.clear()
        for parameter in self.parameters.values():
            storage = local_shard(parameter).untyped_storage()
            if storage.resizable():
                storage.resize_(0)


class TrainingStateProperties:
    """Properties of an engine's current `training_state`: that of the active adapter, or of all weights."""

    training_state: TrainingState

    @property
    def stages(self) -> Stages:
        return self.training_state.stages

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return self.training_state.parameters

    @property
    def optimizer(self) -> optimizers.ShardedAdamW | optimizers.ShardedSGD:
        return self.training_state.optimizer

    @property
    def optimizer_config(self) -> OptimizerConfig:
        return self.training_state.optimizer_config

    @property
    def step(self) -> int:
        """Optimizer steps that changed the weights."""
        return self.training_state.step

    @property
    def skipped(self) -> int:
        """Optimizer steps whose gradient norm was not finite."""
        return self.training_state.skipped


@contextmanager
def loading_in_fp32(stage: LanguageModel, low_bits: dict[str, Tensor]) -> Iterator[None]:
    """Makes the trained bf16 parameters of a stage fp32 in the block, and splits their values after it.

    The nearest bf16 numbers become the parameters again. The lower bits go to `low_bits` by name.
    """
    names = [name for name, parameter in stage.named_parameters() if _is_narrow(parameter)]
    for name in names:
        _replace(stage, name, stage.get_parameter(name).detach().float())
    yield
    for name in names:
        wide = stage.get_parameter(name).detach()
        high, low_bits[name] = split_halves(local_shard(wide))
        narrow = wide.to(torch.bfloat16)
        local_shard(narrow).copy_(high)  # ties are rounded as the optimizer does
        _replace(stage, name, narrow)


def _is_narrow(parameter: nn.Parameter) -> bool:
    return parameter.dtype == torch.bfloat16 and parameter.requires_grad


def _replace(stage: LanguageModel, name: str, values: Tensor) -> None:
    module, _, leaf = name.rpartition(".")
    setattr(stage.get_submodule(module), leaf, nn.Parameter(values))


CHUNK_BYTES = 1 << 28
"""Host memory is allocated in pieces of this size: torch rounds pinned memory up to a power of two."""


class StateOffload:
    """Moves an engine's tensors of one rank. Host memory is pinned if the device is a GPU, and kept for the next time.

    It does not communicate. Everything is on the device, or the engine refuses every call until `onload` succeeds.
    """

    def __init__(self, device: torch.device, failure_state: FailureState) -> None:
        self.device, self.failure_state = device, failure_state
        self.chunks: list[Tensor] = []
        self.moved: list[tuple[UntypedStorage, int]] = []  # storages in host memory, in its order, and their sizes

    def offload(self, training_states: Iterable[TrainingState]) -> None:
        """Copies everything to host memory, then frees it on the device. Nothing is done if it is there already."""
        if self.failure_state.offloaded:
            return
        self.failure_state.check()
        storages = {
            storage.data_ptr(): (storage, storage.nbytes())
            for storage in (local_shard(tensor).untyped_storage() for tensor in _tensors(training_states))
            if storage.device == self.device and storage.nbytes() and storage.resizable()
        }
        moved = list(storages.values())
        missing = -(-sum(size for _, size in moved) // CHUNK_BYTES) - len(self.chunks)
        for _ in range(missing):
            self.chunks.append(torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=self.device.type == "cuda"))
        for on_device, on_host in self._pieces(moved):
            on_host.copy_(on_device, non_blocking=True)
        self._synchronize()
        self.moved, self.failure_state.offloaded = moved, True
        self._free()

    def onload(self) -> None:
        """Moves everything back. Raises if the device has no memory for it; it can then be called again."""
        if not self.failure_state.offloaded:
            return
        try:
            for storage, size in self.moved:
                storage.resize_(size)
        except RuntimeError as error:
            self._free()
            needed = sum(size for _, size in self.moved) / 2**30
            raise RuntimeError(
                f"onload needs {needed:.2f} GiB on {self.device}, which it does not have ({error}): free the memory of "
                "the generator there, and call onload again."
            ) from error
        for on_device, on_host in self._pieces(self.moved):
            on_device.copy_(on_host, non_blocking=True)
        self._synchronize()
        self.moved, self.failure_state.offloaded = [], False

    def _pieces(self, storages: Sequence[tuple[UntypedStorage, int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the bytes of the storages in pieces, each with its place in host memory."""
        position = 0
        for storage, size in storages:
            data = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            start = 0
            while start < size:
                chunk, offset = divmod(position, CHUNK_BYTES)
                length = min(size - start, CHUNK_BYTES - offset)
                yield data[start : start + length], self.chunks[chunk][offset : offset + length]
                start, position = start + length, position + length

    def _free(self) -> None:
        for storage, _ in self.moved:
            storage.resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # other processes get the memory

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # kernels on any stream may use what is freed or read


def _tensors(training_states: Iterable[TrainingState]) -> Iterator[Tensor]:
    """Yields parameters, their gradients, buffers and the optimizers' state."""
    for training_state in training_states:
        for model in training_state.stages.models.values():
            for parameter in model.parameters():
                yield parameter
                if parameter.grad is not None:
                    yield parameter.grad
            yield from model.buffers()
        for state in training_state.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
