"""AdamW and SGD over the shards that a rank stores.

AdamW in fp32 is torch's fused step. Large tensors on a GPU, weights or moments below 32 bits, and state in host memory
use the step of `ops/adamw.py`. Both clip inside the step and change nothing if the gradient's norm is not finite, so
that they need no synchronisation to read the norm. SGD reads it on the host.

Optimizer state in host memory is copied to the device and back piece by piece during a step, while it computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from postlude.engine.gradients import clip
from postlude.model.parallel import is_dtensor, local_shard, region
from postlude.ops.adamw import adamw_step, bias_corrections, name_seed
from postlude.ops.adamw_storage import BLOCK, AdamWHyperparameters, Moment, QuantizedMoment, TensorSlice, scales_shape
from postlude.ops.foreach import foreach_copy
from postlude.optimizer import SGD, AdamW, OptimizerConfig
from postlude.options import WeightStorage
from postlude.sharded_tensors import TensorShard

LARGE = 1 << 22  # elements; a tensor with at least so many on a GPU is updated by a kernel launch of its own
FIRST, SECOND, LOW = "exp_avg", "exp_avg_sq", "low"  # as torch calls the first two
CODES, SCALES = "_codes", "_scales"
PIECE_BYTES = 1 << 26
"""Bytes that are copied to the device at a time, unless a single row has more."""
SLOTS = 3
"""Pieces on the device at a time: one that arrives, one that is computed on, one that leaves."""
ALIGNED = 256

OffloadedWork = tuple[Sequence[Tensor], Callable[[Sequence[Tensor]], None]]
"""Pieces of host memory, and a function that updates copies of them in place."""


def build(
    config: OptimizerConfig,
    parameters: Mapping[str, nn.Parameter],
    matrices: Collection[str],
    weight_storage: WeightStorage = "fp32",
) -> ShardedAdamW | ShardedSGD:
    if isinstance(config, AdamW):
        return ShardedAdamW(config, parameters, matrices, weight_storage)
    if weight_storage != "fp32":
        raise ValueError(f"weights={weight_storage!r} need AdamW, but the optimizer is SGD. Store them in fp32.")
    return ShardedSGD(config, parameters, matrices)


def optimizer_kind(config: OptimizerConfig, weight_storage: WeightStorage) -> str:
    """Returns the kind of state that a checkpoint holds. Only an optimizer of the same kind can load it."""
    moments = ", 8-bit moments" if isinstance(config, AdamW) and config.moments == "8bit" else ""
    return f"{type(config).__name__}{moments}{'' if weight_storage == 'fp32' else f', {weight_storage} weights'}"


def state_shard(state: Tensor, parameter: Tensor) -> TensorShard:
    like = state if is_dtensor(state) else parameter
    starts, shape = tuple(dimension.start for dimension in region(like)), tuple(like.shape)
    if local_shard(state).shape != local_shard(like).shape:  # one number per quantisation block
        starts, shape = (*starts[:-1], starts[-1] // BLOCK), scales_shape(shape)
    return TensorShard(local_shard(state), starts, shape)


class ShardedAdamW(torch.optim.Optimizer):
    """AdamW with each parameter's state as plain tensors of this rank's shard.

    With `moments="8bit"` the moments of matrices have eight bits; with `offload` the state of matrices is in host
    memory. With `weight_storage="split"` the state has the lower 16 bits of fp32 weights, and the
    parameters are the upper 16, as bf16.
    """

    def __init__(
        self,
        config: AdamW,
        parameters: Mapping[str, nn.Parameter],
        matrices: Collection[str],
        weight_storage: WeightStorage = "fp32",
    ) -> None:
        self.config, self.weight_storage = config, weight_storage
        self.names = {parameter: name for name, parameter in parameters.items()}
        self.matrices = dict.fromkeys(parameter for name, parameter in parameters.items() if name in matrices)
        self.scale: Tensor | None = None  # during `clipped_step`: [clip factor, 1 if the norm is finite else 0]
        vectors = [parameter for parameter in parameters.values() if parameter not in self.matrices]
        # A rank may train nothing: of an adapter that has no layer on its pipeline stage.
        groups = [{"params": list(self.matrices), "decays": True}, {"params": vectors, "decays": False}]
        super().__init__(groups, {})
        _set_groups(self, config.lr, config.weight_decay, betas=config.betas, eps=config.eps)
        if config.moments == "8bit":
            for parameter in parameters.values():
                if parameter in self.matrices:
                    self._check_blocks(parameter)

    def clipped_step(self, config: OptimizerConfig, lr: float, norm: Tensor) -> None:
        """Steps by `config`, with gradients clipped by the global `norm`. Changes nothing if it is not finite."""
        assert isinstance(config, AdamW)
        limit = config.max_grad_norm
        factor = torch.ones_like(norm) if limit is None else (limit / (norm + 1e-6)).clamp(max=1.0)
        self.scale = torch.stack([factor, norm.isfinite()]).float()
        _set_groups(self, lr, config.weight_decay, betas=config.betas, eps=config.eps)
        try:
            self.step()
        finally:
            self.scale = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient, with gradients times the clip factor in a `clipped_step`."""
        offloaded = list[OffloadedWork]()
        for group in self.param_groups:
            hyperparameters = AdamWHyperparameters(group["lr"], group["betas"], group["eps"], group["weight_decay"])
            updated = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in updated:
                if not self.state[parameter]:
                    self.state[parameter] = self._initial_state(parameter)
            torch_parameters = [parameter for parameter in updated if self._uses_torch_step(parameter)]
            self._torch_step(torch_parameters, hyperparameters)
            kernel_parameters = [parameter for parameter in updated if not self._uses_torch_step(parameter)]
            for pieces, work in self._updates(kernel_parameters, hyperparameters):
                if pieces[0].device == self._device:
                    work(pieces)
                else:
                    offloaded.append((pieces, work))
        if offloaded:
            run_offloaded(offloaded, self._device)

    @property
    def _device(self) -> torch.device:
        return next(iter(self.names)).device

    def _uses_torch_step(self, parameter: Tensor) -> bool:
        """Returns whether torch's fused step updates a parameter: it takes many tensors, in fp32 on the device.

        For large ones on a GPU it takes 1.4 times as long as our kernel, as it also writes the scaled gradient.
        """
        on_host = self.config.offload and parameter in self.matrices
        large = parameter.is_cuda and local_shard(parameter).numel() >= LARGE
        return parameter.dtype == torch.float32 and FIRST in self.state[parameter] and not on_host and not large

    def _torch_step(self, parameters: Sequence[nn.Parameter], hyperparameters: AdamWHyperparameters) -> None:
        if not parameters:
            return
        states = [self.state[parameter] for parameter in parameters]
        divisor = None if self.scale is None else 1.0 / self.scale  # torch divides by `grad_scale`
        adamw(
            [local_shard(parameter) for parameter in parameters],
            [local_shard(_gradient(parameter)) for parameter in parameters],
            [state[FIRST] for state in states],
            [state[SECOND] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            grad_scale=None if divisor is None else divisor[0],
            found_inf=None if self.scale is None else 1.0 - self.scale[1],
            amsgrad=False,
            beta1=hyperparameters.betas[0],
            beta2=hyperparameters.betas[1],
            lr=hyperparameters.lr,
            weight_decay=hyperparameters.decay,
            eps=hyperparameters.eps,
            maximize=False,
        )

    def _updates(
        self, parameters: Sequence[nn.Parameter], hyperparameters: AdamWHyperparameters
    ) -> Iterator[OffloadedWork]:
        """Yields the update of each parameter, in pieces if its state is in host memory."""
        if not parameters:
            return
        steps = [self.state[parameter]["step"] for parameter in parameters]
        scale = torch.ones(2, device=self._device) if self.scale is None else self.scale
        step_counts = torch.stack(steps) + scale[1]
        foreach_copy(steps, list(step_counts.unbind()))
        corrections = bias_corrections(step_counts, hyperparameters).unbind()
        for parameter, correction in zip(parameters, corrections, strict=True):
            yield from self._update_pieces(parameter, correction, hyperparameters, scale)

    def _update_pieces(
        self, parameter: nn.Parameter, correction: Tensor, hyperparameters: AdamWHyperparameters, scale: Tensor
    ) -> Iterator[OffloadedWork]:
        state = {name: tensor for name, tensor in self.state[parameter].items() if name != "step"}
        weight, gradient = local_shard(parameter), local_shard(_gradient(parameter))
        row_slice, *other_slices = region(parameter)
        if not weight.numel():
            return
        seed, shape, rows = name_seed(self.names[parameter]), tuple(parameter.shape), len(weight)
        if self.config.offload and parameter in self.matrices:
            bytes_of_row = sum(tensor.numel() * tensor.element_size() for tensor in state.values()) // rows
            rows = max(1, PIECE_BYTES // max(bytes_of_row, 1))

        def update(start: int, pieces: Sequence[Tensor]) -> None:
            """Updates the rows from `start` on, given the pieces of their state."""
            piece, by_name = slice(start, start + rows), dict(zip(state, pieces, strict=True))
            adamw_step(
                weight[piece],
                gradient[piece],
                _moment(by_name, FIRST),
                _moment(by_name, SECOND),
                correction,
                hyperparameters,
                low=by_name.get(LOW),
                scale=scale,
                seed=seed,
                bounds=TensorSlice.of((slice(row_slice.start + start, row_slice.stop), *other_slices), shape),
            )

        for start in range(0, len(weight), rows):
            yield [tensor[start : start + rows] for tensor in state.values()], partial(update, start)

    def low_bits(self) -> dict[str, Tensor]:
        return {name: self.state[key][LOW] for key, name in self.names.items() if LOW in self.state.get(key, {})}

    def take_low_bits(self) -> dict[str, Tensor]:
        """Returns the low bits and frees the state, moments included: there may be no memory for two of them."""
        low_bits = self.low_bits()
        self.state.clear()
        return low_bits

    def set_low_bits(self, low_bits: dict[str, Tensor]) -> None:
        """Takes the low bits of split weights from the mapping one by one, and makes the state that has them.

        Parameters in fp32 get theirs too: a checkpoint has the state of all parameters or of none.
        """
        for parameter, name in self.names.items() if self.weight_storage == "split" else ():
            self.state[parameter] = self._initial_state(parameter)
            if LOW in self.state[parameter]:
                self.state[parameter][LOW].copy_(low_bits.pop(name))

    def _initial_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        shard, is_matrix = local_shard(parameter), parameter in self.matrices
        shape, specs = tuple(shard.shape), dict[str, tuple[tuple[int, ...], torch.dtype]]()
        for name in (FIRST, SECOND):
            if is_matrix and self.config.moments == "8bit":
                specs[name + CODES] = shape, torch.uint8
                specs[name + SCALES] = scales_shape(shape), torch.float32
            else:
                specs[name] = shape, torch.float32
        if parameter.dtype == torch.bfloat16 and self.weight_storage == "split":
            specs[LOW] = shape, torch.int16
        on_host = is_matrix and self.config.offload
        state = {
            name: in_host_memory(size, dtype, shard.device)
            if on_host
            else torch.zeros(size, dtype=dtype, device=shard.device)
            for name, (size, dtype) in specs.items()
        }
        return {"step": torch.zeros((), device=shard.device), **state}

    def _check_blocks(self, parameter: nn.Parameter) -> None:
        """Raises if ranks share a quantisation block of 8-bit moments: it would have several scales."""
        columns, total = region(parameter)[-1], parameter.shape[-1]
        if columns.start % BLOCK or (columns.stop % BLOCK and columns.stop != total):
            raise ValueError(
                f"8-bit moments are kept in blocks of {BLOCK} along the last dimension, but of {total} columns of "
                f'{self.names[parameter]} this rank stores {columns.start} to {columns.stop}. Use moments="fp32", or a '
                f"layout that divides columns at multiples of {BLOCK}."
            )


def _moment(state: Mapping[str, Tensor], name: str) -> Moment:
    return state[name] if name in state else QuantizedMoment(state[name + CODES], state[name + SCALES])


class ShardedSGD(torch.optim.SGD):
    """torch's SGD, with one parameter group per mesh and weight decay, and clipping by the global norm."""

    def __init__(self, config: SGD, parameters: Mapping[str, nn.Parameter], matrices: Collection[str]) -> None:
        self.config = config
        groups: dict[Any, dict[str, Any]] = {}
        for name, parameter in parameters.items():
            # A foreach step needs one mesh per group.
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            decays = name in matrices
            groups.setdefault((mesh, decays), {"params": [], "decays": decays})["params"].append(parameter)
        # Not fused: torch has no fused SGD for DTensors. A rank may train nothing.
        super().__init__(list(groups.values()) or [{"params": [], "decays": False}], lr=config.lr, foreach=True)
        _set_groups(self, config.lr, config.weight_decay, momentum=config.momentum)

    def clipped_step(self, config: OptimizerConfig, lr: float, norm: Tensor) -> None:
        assert isinstance(config, SGD)
        host_norm, limit = float(norm), config.max_grad_norm
        if not math.isfinite(host_norm):
            return
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if limit is not None and host_norm > limit:
            clip(parameters, limit, host_norm)
        _set_groups(self, lr, config.weight_decay, momentum=config.momentum)
        self.step()


def _set_groups(optimizer: torch.optim.Optimizer, lr: float, weight_decay: float, **settings: Any) -> None:
    for group in optimizer.param_groups:
        group |= {"lr": lr, "weight_decay": weight_decay if group["decays"] else 0.0, **settings}


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def in_host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, pin_memory=device.type == "cuda")


def run_offloaded(works: Sequence[OffloadedWork], device: torch.device) -> None:
    """Runs each function on the GPU, while the next one's pieces arrive and the last one's leave.

    Host memory may be read when the device has finished its queue.
    """
    if not works:
        return
    current = torch.cuda.current_stream(device)
    inward, outward = torch.cuda.Stream(device), torch.cuda.Stream(device)
    slot_bytes = max(sum(map(_aligned_bytes, pieces)) for pieces, _ in works)
    slots = [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
    slot_free: list[torch.cuda.Event | None] = [None] * SLOTS
    inward.wait_stream(current)  # which may have used the slots' memory until now
    for number, (pieces, work) in enumerate(works):
        slot = number % SLOTS
        copies = _views(slots[slot], pieces)
        if (free := slot_free[slot]) is not None:
            inward.wait_event(free)
        with torch.cuda.stream(inward):
            for piece, copy in zip(pieces, copies, strict=True):
                copy.copy_(piece, non_blocking=True)
        current.wait_event(inward.record_event())
        work(copies)
        outward.wait_event(current.record_event())
        with torch.cuda.stream(outward):
            for piece, copy in zip(pieces, copies, strict=True):
                piece.copy_(copy, non_blocking=True)
        slot_free[slot] = outward.record_event()
    current.wait_stream(outward)


def _aligned_bytes(piece: Tensor) -> int:
    return -(-piece.numel() * piece.element_size() // ALIGNED) * ALIGNED


def _views(slot: Tensor, pieces: Sequence[Tensor]) -> list[Tensor]:
    views, start = [], 0
    for piece in pieces:
        flat = slot[start : start + piece.numel() * piece.element_size()]
        views.append(flat.view(piece.dtype).view(piece.shape))
        start += _aligned_bytes(piece)
    return views
