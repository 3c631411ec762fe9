"""LogitConfig: how a linear head computes logits. Every function of the head takes one, with fields as keywords."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.head import check_logits_budget
from postlude.options import HeadBackend


class LogitOptions(TypedDict, total=False):
    """The fields of `LogitConfig` as keywords of a call, for type checkers."""

    bias: Tensor | None
    temperature: float | Tensor
    logit_scale: float
    softcap: float | None
    ignore_index: int
    target_count: int | None
    vocab_start: int
    vocab_size: int | None
    group: dist.ProcessGroup | None
    backend: HeadBackend
    memory_budget: int | None
    cast_hidden: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class LogitConfig:
    """The computation of logits from hidden [..., H] and weight [V, H], this rank's rows of the output embedding.

        logits = softcap(logit_scale · (hidden @ weightᵀ + bias)) / temperature,   softcap(x) = c · tanh(x / c)

    in this order, as in transformers: scale, then softcap, then temperature.

    Args:
        bias: [V] or None.
        temperature: a number, or a tensor with one entry per token. It receives no gradient.
        logit_scale: multiplies before the softcap.
        softcap: bound of the logits before the temperature, or None.
        ignore_index: marks positions without a target. They are not projected: results and `hidden`'s gradient are 0.
        target_count: how many targets are not `ignore_index`, if the host knows. It then never waits for the device.
            The caller promises this number, and that every target is in the vocabulary and every temperature above 0:
            otherwise all results and gradients are NaN. Without it the host waits once and raises ValueError instead.
        vocab_start: vocabulary id of weight's first row.
        vocab_size: ids from this one on are padding: they are not projected, and their weight gradient is 0.
            By default every row of weight is real. Needed with `group`.
        group: the ranks that hold the other rows. All pass the same hidden and targets and receive the same results,
            with one collective per call forward and none backward. `hidden`'s gradient is then **this rank's part**:
            pass hidden through `copy_to_group` if it is replicated, or `gather_from_sequence` if it is sharded over
            tokens (`postlude.ops.collectives`), to complete it. Every rank must compute the same loss.
        backend: "torch" runs anywhere, "triton" needs CUDA; "auto" takes triton where it can run. "logits" is the
            plain product, differentiated by autograd: it holds all logits, and is there to compare with.
        cast_hidden: casts hidden to the weight's dtype, and so its gradient. With fp32 hidden and a bf16 weight the
            kernels for half precision then compute the products, which are summed in fp32.
        memory_budget: bytes for the logits slab and the summed gradient, without results and returned gradients; by
            default enough for full speed. The smallest slab is one column, however small the budget.

    Other mixed dtypes are projected in the dtype they promote to (autocast's if enabled). Products are always summed in
    fp32 or better, and every gradient has its tensor's dtype.
    """

    bias: Tensor | None = None
    temperature: float | Tensor = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    ignore_index: int = -100
    target_count: int | None = None
    vocab_start: int = 0
    vocab_size: int | None = None
    group: dist.ProcessGroup | None = None
    backend: HeadBackend = "auto"
    memory_budget: int | None = None
    cast_hidden: bool = False

    def __post_init__(self) -> None:
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"softcap must be above 0, but is {self.softcap}. Leave it None for no softcap.")
        if self.memory_budget is not None and self.memory_budget <= 0:
            raise ValueError(
                f"memory_budget must be above 0 bytes, but is {self.memory_budget}. Leave it None for the default."
            )
        check_logits_budget(self.backend, self.memory_budget)
        if self.group is not None and self.vocab_size is None:
            raise ValueError(
                "vocab_size is needed with group: a rank knows its own shard alone, not the whole vocabulary."
            )

    def transform(self, products: Tensor) -> Tensor:
        """hidden @ weightᵀ + bias -> logits before the temperature."""
        if self.logit_scale != 1.0:
            products = products * self.logit_scale
        return products if self.softcap is None else self.softcap * torch.tanh(products / self.softcap)

    def operand(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Returns `hidden` as it is projected by `weight`."""
        return hidden.to(weight.dtype) if self.cast_hidden else hidden

    def replace(self, **changes: Unpack[LogitOptions]) -> LogitConfig:
        """Returns a copy with the given changes."""
        if not changes:
            return self
        if not changes.keys() <= self.__dict__.keys():
            return dataclasses.replace(self, **changes)  # raises for an unknown name
        changed = object.__new__(LogitConfig)  # a sixth of dataclasses.replace's time, before every call of a head
        changed.__dict__.update(self.__dict__, **changes)
        changed.__post_init__()
        return changed


DEFAULT_LOGITS = LogitConfig()
