"""What moves a rank's weights: AdamW and SGD over the parts that it stores.

AdamW in fp32 is torch's fused step. With weights or moments that are stored narrow, and with state in host memory, it
is that of `ops/adamw.py`. Both clip as they go, and leave everything alone where the gradient's norm is not finite, so
that the host need not know it before it goes on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from postlude.engine.gradients import clip
from postlude.engine.offload import PIECE_BYTES, Unit, in_host_memory, run_offloaded
from postlude.model.parallel import is_dtensor, local_shard, region
from postlude.ops.adamw import adamw_step, bias_corrections, name_seed
from postlude.ops.adamw_storage import BLOCK, AdamWHyperparameters, Moment, QuantizedMoment, TensorSlice, scales_shape
from postlude.ops.foreach import foreach_copy
from postlude.optimizer import SGD, AdamW, OptimizerConfig
from postlude.options import WeightStorage
from postlude.sharded_tensors import TensorShard

FIRST, SECOND, LOW = "exp_avg", "exp_avg_sq", "low"  # as torch calls the first two
CODES, SCALES = "_codes", "_scales"


def build(
    config: OptimizerConfig,
    parameters: Mapping[str, nn.Parameter],
    matrices: Collection[str],
    weights: WeightStorage = "fp32",
) -> ShardedAdamW | ShardedSGD:
    """The optimizer over these parameters, which are stored as `weights` says. `matrices` names those that are one."""
    if isinstance(config, AdamW):
        return ShardedAdamW(config, parameters, matrices, weights)
    if weights != "fp32":
        raise ValueError(f"weights={weights!r} are moved by AdamW alone, but the optimizer is SGD. Store them in fp32.")
    return ShardedSGD(config, parameters, matrices)


def optimizer_kind(config: OptimizerConfig, weights: WeightStorage) -> str:
    """What a checkpoint's state is of. Another kind has no use for it."""
    moments = ", 8-bit moments" if isinstance(config, AdamW) and config.moments == "8bit" else ""
    return f"{type(config).__name__}{moments}{'' if weights == 'fp32' else f', {weights} weights'}"


def state_shard(state: Tensor, parameter: Tensor) -> TensorShard:
    """Which part of a whole state this is that a rank keeps of its part of a parameter."""
    like = state if is_dtensor(state) else parameter
    starts, shape = tuple(where.start for where in region(like)), tuple(like.shape)
    if local_shard(state).shape != local_shard(like).shape:  # a number a block of them
        starts, shape = (*starts[:-1], starts[-1] // BLOCK), scales_shape(shape)
    return TensorShard(local_shard(state), starts, shape)


class ShardedAdamW(torch.optim.Optimizer):
    """AdamW, each parameter's state in plain tensors of what this rank stores of it.

    With `moments="8bit"` those of matrices are in eight bits; with `offload` the state of matrices is in host memory.
    `weights` says how matrices and vectors of bf16 are stored: "split" keeps their lower halves here.
    """

    def __init__(
        self,
        config: AdamW,
        parameters: Mapping[str, nn.Parameter],
        matrices: Collection[str],
        weights: WeightStorage = "fp32",
    ) -> None:
        self.config, self.weights = config, weights
        self.names = {parameter: name for name, parameter in parameters.items()}
        self.matrices = {parameter for name, parameter in parameters.items() if name in matrices}
        self.scale: Tensor | None = None
        groups = [
            {"params": members, "weight_decay": decay}
            for is_matrix, decay in ((True, config.weight_decay), (False, 0.0))
            if (members := [each for each in parameters.values() if (each in self.matrices) == is_matrix])
        ]
        super().__init__(groups, {"lr": config.lr})
        if config.moments == "8bit":
            for parameter in parameters.values():
                if parameter in self.matrices:
                    self._check_blocks(parameter)

    def clipped_step(self, lr: float, norm: Tensor) -> None:
        """Step, by gradients clipped as a whole one of this norm is. Where it is not finite, nothing is changed."""
        limit = self.config.max_grad_norm
        factor = torch.ones_like(norm) if limit is None else (limit / (norm + 1e-6)).clamp(max=1.0)
        self.scale = torch.stack([factor, norm.isfinite()]).float()
        for group in self.param_groups:
            group["lr"] = lr
        try:
            self.step()
        finally:
            self.scale = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient, by `scale` if there is one."""
        config, away = self.config, list[Unit]()
        for group in self.param_groups:
            rates = AdamWHyperparameters(group["lr"], config.betas, config.eps, group["weight_decay"])
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in moved:
                if not self.state[parameter]:
                    self.state[parameter] = self._fresh(parameter)
            wide, narrow = list[nn.Parameter](), list[nn.Parameter]()
            for parameter in moved:
                (wide if self._is_wide(parameter) else narrow).append(parameter)
            self._step_wide(wide, rates)
            for pieces, work in self._units(narrow, rates):
                if pieces[0].device == self._device:
                    work(pieces)
                else:
                    away.append((pieces, work))
        run_offloaded(away, self._device)

    @property
    def _device(self) -> torch.device:
        return next(iter(self.names)).device

    def _is_wide(self, parameter: Tensor) -> bool:
        """Whether all of it is in fp32 and on the device, as torch has it."""
        on_host = self.config.offload and parameter in self.matrices
        return parameter.dtype == torch.float32 and FIRST in self.state[parameter] and not on_host

    def _step_wide(self, parameters: Sequence[nn.Parameter], rates: AdamWHyperparameters) -> None:
        if not parameters:
            return
        states = [self.state[parameter] for parameter in parameters]
        scale = None if self.scale is None else 1.0 / self.scale
        adamw(
            [local_shard(parameter) for parameter in parameters],
            [local_shard(_gradient(parameter)) for parameter in parameters],
            [state[FIRST] for state in states],
            [state[SECOND] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            grad_scale=None if scale is None else scale[0],
            found_inf=None if self.scale is None else 1.0 - self.scale[1],
            amsgrad=False,
            beta1=rates.betas[0],
            beta2=rates.betas[1],
            lr=rates.lr,
            weight_decay=rates.decay,
            eps=rates.eps,
            maximize=False,
        )

    def _units(self, parameters: Sequence[nn.Parameter], rates: AdamWHyperparameters) -> Iterator[Unit]:
        """The work on each of these, in pieces where its state is in host memory."""
        if not parameters:
            return
        steps = [self.state[parameter]["step"] for parameter in parameters]
        scale = torch.ones(2, device=self._device) if self.scale is None else self.scale
        counted = torch.stack(steps) + scale[1]
        foreach_copy(steps, list(counted.unbind()))
        for parameter, now in zip(parameters, bias_corrections(counted, rates).unbind(), strict=True):
            yield from self._pieces(parameter, now, rates, scale)

    def _pieces(
        self, parameter: nn.Parameter, now: Tensor, rates: AdamWHyperparameters, scale: Tensor
    ) -> Iterator[Unit]:
        state = {name: each for name, each in self.state[parameter].items() if name != "step"}
        weight, gradient, (first, *others) = (
            local_shard(parameter),
            local_shard(_gradient(parameter)),
            region(parameter),
        )
        if not weight.numel():
            return
        key, shape, names = name_seed(self.names[parameter]), tuple(parameter.shape), list(state)
        rows = len(weight)
        if self.config.offload and parameter in self.matrices:
            bytes_of_row = sum(each.numel() * each.element_size() for each in state.values()) // rows
            rows = max(1, PIECE_BYTES // max(bytes_of_row, 1))
        for start in range(0, len(weight), rows):
            cut = slice(start, start + rows)
            place = TensorSlice.of((slice(first.start + start, first.stop), *others), shape)
            work = partial(_narrow_step, names, weight[cut], gradient[cut], now, rates, scale, place, key)
            yield [each[cut] for each in state.values()], work

    def low_bits(self) -> dict[str, Tensor]:
        """What bf16 weights lack of fp32, of what this rank stores, by name: nothing before the first step."""
        return {name: self.state[each][LOW] for each, name in self.names.items() if LOW in self.state.get(each, {})}

    def take_low_bits(self, other: ShardedAdamW) -> None:
        """Go on from the weights that another optimizer of the same parameters leaves, whose state is let go of."""
        for parameter in self.names:
            low = other.state.pop(parameter, {}).get(LOW)  # moments go first: there may be no room for both
            if low is not None:
                self.state[parameter] = self._fresh(parameter)
                self.state[parameter][LOW].copy_(low)

    def _fresh(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The state before the first step: zeros."""
        part, matrix = local_shard(parameter), parameter in self.matrices
        shape, wanted = tuple(part.shape), dict[str, tuple[tuple[int, ...], torch.dtype]]()
        for name in (FIRST, SECOND):
            if matrix and self.config.moments == "8bit":
                wanted[name + CODES] = shape, torch.uint8
                wanted[name + SCALES] = scales_shape(shape), torch.float32
            else:
                wanted[name] = shape, torch.float32
        if parameter.dtype == torch.bfloat16 and self.weights == "split":
            wanted[LOW] = shape, torch.int16
        on_host = matrix and self.config.offload
        found = {
            name: in_host_memory(size, dtype, part.device)
            if on_host
            else torch.zeros(size, dtype=dtype, device=part.device)
            for name, (size, dtype) in wanted.items()
        }
        return {"step": torch.zeros((), device=part.device), **found}

    def _check_blocks(self, parameter: nn.Parameter) -> None:
        """A block that several ranks share would have several scales."""
        where, whole = region(parameter)[-1], parameter.shape[-1]
        if where.start % BLOCK or (where.stop % BLOCK and where.stop != whole):
            raise ValueError(
                f"8-bit moments are kept in blocks of {BLOCK} along the rows of a matrix, but of {whole} columns of "
                f'{self.names[parameter]} this rank stores {where.start} to {where.stop}. Use moments="fp32", or a '
                f"layout that cuts rows at multiples of {BLOCK}."
            )


def _narrow_step(
    names: Sequence[str],
    weight: Tensor,
    gradient: Tensor,
    now: Tensor,
    rates: AdamWHyperparameters,
    scale: Tensor,
    place: TensorSlice,
    key: int,
    pieces: Sequence[Tensor],
) -> None:
    state = dict(zip(names, pieces, strict=True))

    def moment(name: str) -> Moment:
        return state[name] if name in state else QuantizedMoment(state[name + CODES], state[name + SCALES])

    adamw_step(
        weight,
        gradient,
        moment(FIRST),
        moment(SECOND),
        now,
        rates,
        low=state.get(LOW),
        scale=scale,
        key=key,
        place=place,
    )


class ShardedSGD(torch.optim.SGD):
    """Torch's SGD."""

    def __init__(self, config: SGD, parameters: Mapping[str, nn.Parameter], matrices: Collection[str]) -> None:
        self.config = config
        groups: dict[Any, dict[str, Any]] = {}
        for name, parameter in parameters.items():
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None  # a step wants one
            decay = config.weight_decay if name in matrices else 0.0
            groups.setdefault((mesh, decay), {"params": [], "weight_decay": decay})["params"].append(parameter)
        # Not fused: DTensors have no fused step of it.
        super().__init__(list(groups.values()), lr=config.lr, momentum=config.momentum, foreach=True)

    def clipped_step(self, lr: float, norm: Tensor) -> None:
        """Step, by gradients clipped as a whole one of this norm is. Where it is not finite, nothing is changed."""
        found, limit = float(norm), self.config.max_grad_norm
        if not math.isfinite(found):
            return
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if limit is not None and found > limit:
            clip(parameters, limit, found)
        for group in self.param_groups:
            group["lr"] = lr
        self.step()


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
