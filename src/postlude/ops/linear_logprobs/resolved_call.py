"""ResolvedCall: the checked and resolved arguments of one call, without the tensors that receive gradients."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.checks import check_choice
from postlude.ops.batch_invariant import is_batch_invariant
from postlude.ops.kernels.capabilities import gpu_of, use_kernel, warn_of_fallback, why_unmeasured
from postlude.ops.linear_logprobs import torch_epilogue
from postlude.ops.linear_logprobs.gemm import HALF, operand_dtype
from postlude.ops.linear_logprobs.logits import LogitConfig
from postlude.ops.linear_logprobs.plan import Shape
from postlude.ops.linear_logprobs.statistics import Epilogue, SelectionRule, TokenRows
from postlude.options import HeadBackend as HeadBackend  # noqa: PLC0414

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResolvedCall:
    """Arguments of one call. `rows` and `target_positions` have the n tokens with a target; `positions` counts all."""

    rows: TokenRows
    target_positions: Tensor | None  # [n]; None if every position has a target
    positions: int
    vocab_start: int
    local_vocab_size: int  # vocabulary entries of this shard, without padding
    vocab_size: int  # those of all shards, or of this one without a group
    operand: torch.dtype  # of the GEMMs' inputs
    compute: torch.dtype  # of logits, statistics and sums
    epilogue: Epilogue
    fused: bool  # whether the fused kernels can take these operands
    group: dist.ProcessGroup | None
    memory_budget: int | None
    plain: bool  # whether all logits are held at once, and differentiated by autograd
    wrong_count: Tensor | None = None  # 0-dim bool: target_count was wrong; None if counted
    batch_invariant: bool = False  # a token's results have the same bits, whatever tokens are beside it

    def select(self, tensor: Tensor) -> Tensor:
        """[positions, ...] -> [n, ...]: the projected tokens. No copy if that is all of them."""
        return tensor if self.target_positions is None else tensor.index_select(0, self.target_positions)

    def scatter(self, tensor: Tensor) -> Tensor:
        """[n, ...] -> [positions, ...], zero where nothing was projected."""
        if self.target_positions is None:
            return tensor
        output = tensor.new_zeros(self.positions, *tensor.shape[1:])
        if self.wrong_count is not None and not tensor.shape[0] and tensor.is_floating_point():
            output.masked_fill_(self.wrong_count, torch.nan)  # no row is left to show it
        return output.index_copy_(0, self.target_positions, tensor)

    def shape(self, hidden: int, *, fused: bool = False, quantized: bool = False) -> Shape:
        """Returns the sizes for the planner. A slab holds logits or, if `fused`, only their gradients."""
        size = self.compute.itemsize
        logit_bytes: float = self.operand.itemsize if fused else self.epilogue.LOGIT_COPIES * size
        if quantized:
            from postlude.ops.kernels.linear_logprobs_quantized import QUANTIZED_BYTES  # needs triton

            logit_bytes = QUANTIZED_BYTES
        device = self.rows.targets.device.type
        return Shape(self.rows.targets.shape[0], self.local_vocab_size, hidden, logit_bytes, size, device)

    @property
    def can_quantize(self) -> bool:
        """Whether logits can be held as 16-bit codes, which their gradients overwrite."""
        return self.fused and self.operand in HALF and not self.batch_invariant


def resolve(hidden: Tensor, weight: Tensor, targets: Tensor, logit_config: LogitConfig) -> ResolvedCall:
    """Checks the arguments, finds the tokens to project and makes their per-token numbers.

    Without a `target_count` the host waits once for the device, for the number of targets and of invalid arguments.
    """
    _check_shapes(hidden, weight, targets, logit_config.bias)
    logit_scale, softcap = float(logit_config.logit_scale), logit_config.softcap
    ignore_index, target_count = logit_config.ignore_index, logit_config.target_count
    vocab_start, vocab_size = logit_config.vocab_start, logit_config.vocab_size
    group = None if logit_config.group is None or dist.get_world_size(logit_config.group) == 1 else logit_config.group
    if vocab_size is None:
        vocab_size = vocab_start + weight.shape[0]
    local_vocab_size = min(max(vocab_size - vocab_start, 0), weight.shape[0])
    # Without a group this shard is all there is, so a target must lie in it.
    allowed = (0, vocab_size) if group is not None else (vocab_start, vocab_start + local_vocab_size)

    if targets.dim() != 1 or targets.dtype != torch.int64 or not targets.is_contiguous():
        targets = targets.reshape(-1).long().contiguous()
    positions = targets.numel()
    if target_count is not None and not 0 <= target_count <= positions:
        raise ValueError(f"target_count is {target_count}, but there are {positions} targets, ignored ones included.")
    invariant, plain = is_batch_invariant(), logit_config.backend == "logits"
    if invariant and plain:
        raise ValueError(
            'backend="logits" computes all tokens in one product, whose bits depend on the batch. Use backend="auto" '
            "in the batch-invariant mode."
        )
    temperatures = _flat_temperature(logit_config.temperature, targets)
    if invariant and not isinstance(temperatures, Tensor):  # divided in fp32, as those of a generator's rows
        temperatures = torch.full((1,), temperatures, dtype=torch.float32, device=targets.device).expand(positions)
    dtype = _projection_dtype(hidden, weight)
    operand = operand_dtype(dtype, hidden.device)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    epilogue = select_epilogue(logit_config.backend, hidden.device, compute)
    scale, inner = (logit_scale, None) if softcap is None else (float(softcap), logit_scale / softcap)
    fused = can_fuse(epilogue, operand, hidden, weight)
    rule = SelectionRule(ignore_index, allowed, vocab_start, compute, target_count)
    selection = epilogue.select(targets, temperatures, scale, rule)
    count = target_count
    if count is None:
        count, ignored, invalid_temperatures = selection.counts.tolist()  # the only wait for the device
        if count + ignored < positions:
            raise _target_error(targets, ignore_index, allowed)
        if invalid_temperatures:
            raise ValueError(
                f"temperature must be above 0 at every token, but is not at {invalid_temperatures} of them."
            )
    rows, target_positions = TokenRows(selection.targets, selection.factor, inner), None
    if count < positions:
        rows, target_positions = rows[:count], selection.positions[:count]
    return ResolvedCall(
        rows=rows,
        target_positions=target_positions,
        positions=positions,
        vocab_start=vocab_start,
        local_vocab_size=local_vocab_size,
        vocab_size=local_vocab_size if group is None else vocab_size,
        operand=operand,
        compute=compute,
        epilogue=epilogue,
        fused=fused,
        group=group,
        memory_budget=logit_config.memory_budget,
        plain=plain,
        wrong_count=selection.wrong_count,
        batch_invariant=invariant,
    )


def _check_shapes(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden {list(hidden.shape)} and weight {list(weight.shape)} do not fit: "
            "hidden is [..., H] and weight is [vocabulary, H] with the same H."
        )
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"targets {list(targets.shape)} must have one entry for each of hidden's {list(hidden.shape[:-1])} tokens."
        )
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise ValueError(f"targets are vocabulary ids of an integer dtype, but these are {targets.dtype}.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {list(bias.shape)} must have one entry for each of weight's {weight.shape[0]} rows.")
    devices = {tensor.device for tensor in (hidden, weight, targets, bias) if tensor is not None}
    if len(devices) > 1:
        names = sorted(map(str, devices))
        raise ValueError(f"hidden, weight, targets and bias must share a device, but are on {names}.")


def _projection_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Returns the dtype of the plain projection: autocast's if enabled, else what the operands promote to."""
    dtype = hidden.dtype if hidden.dtype == weight.dtype else torch.promote_types(hidden.dtype, weight.dtype)
    if torch.is_autocast_enabled(hidden.device.type) and dtype != torch.float64:
        return torch.get_autocast_dtype(hidden.device.type)
    if hidden.dtype != weight.dtype:
        _warn_of_promotion(hidden.dtype, weight.dtype, dtype, hidden.device.type)
    return dtype


@functools.cache
def _warn_of_promotion(hidden: torch.dtype, weight: torch.dtype, dtype: torch.dtype, device: str) -> None:
    """Warns once that a GPU computes logits in fp32, without the fast half-precision kernels."""
    if device == "cuda" and dtype == torch.float32 and (hidden in HALF or weight in HALF):
        log.warning(
            "linear_logprobs: hidden is %s and weight is %s, so logits are computed in fp32, several times slower. "
            "Set cast_hidden=True, or cast one to the other's dtype, for the fast kernels.",
            hidden,
            weight,
        )


def _flat_temperature(temperature: float | Tensor, targets: Tensor) -> float | Tensor:
    if not isinstance(temperature, Tensor):
        if temperature <= 0:
            raise ValueError(f"temperature must be above 0, but is {temperature}. For the greedy choice use topk=1.")
        return float(temperature)
    if temperature.numel() not in (1, targets.numel()):
        raise ValueError(
            f"temperature {list(temperature.shape)} must be a number or have one entry for each of "
            f"{targets.numel()} tokens."
        )
    return temperature.detach().reshape(-1).to(targets.device).expand(targets.numel())


def _target_error(targets: Tensor, ignore_index: int, allowed: tuple[int, int]) -> ValueError:
    low, high = allowed
    invalid = ((targets != ignore_index) & ((targets < low) | (targets >= high))).nonzero()[:, 0].tolist()
    return ValueError(
        f"target {int(targets[invalid[0]])} at position {invalid[0]} is outside the vocabulary, {low} to {high - 1} "
        f"({len(invalid)} such of {targets.numel()}). Mark a position without a target by ignore_index={ignore_index}."
    )


def select_epilogue(backend: HeadBackend, device: torch.device, dtype: torch.dtype) -> Epilogue:
    """Returns the epilogue for tensors on `device` whose logits are computed in `dtype`."""
    check_choice("the head's backend", backend, get_args(HeadBackend))
    if backend == "logits" or not use_kernel("linear_logprobs", backend, device, dtype):
        return torch_epilogue
    from postlude.ops.kernels import linear_logprobs_rows  # needs triton

    return linear_logprobs_rows


def can_fuse(epilogue: Epilogue, operand: torch.dtype, hidden: Tensor, weight: Tensor) -> bool:
    """Whether the fused kernels can take these operands: tensor copies need half precision and 16-byte steps."""
    if epilogue is torch_epilogue or (hidden.is_cuda and operand not in HALF):
        return False
    if reason := why_unmeasured("linear_logprobs_fused", gpu_of(hidden.device)):
        warn_of_fallback("linear_logprobs_fused", reason)
        return False
    return all(
        tensor.dtype == operand
        and tensor.is_contiguous()
        and tensor.data_ptr() % 16 == 0
        and tensor.shape[-1] * tensor.element_size() % 16 == 0
        for tensor in (hidden, weight)
    )
