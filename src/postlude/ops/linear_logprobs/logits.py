"""LogitConfig: how a linear head makes them. The one value behind every function of a head, with fields as keywords."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.ops.linear_logprobs.backends import Backend


class LogitOptions(TypedDict, total=False):
    """The fields of `LogitConfig`, as type checkers know the keywords of a call. What they mean stands there."""

    bias: Tensor | None
    temperature: float | Tensor
    logit_scale: float
    softcap: float | None
    ignore_index: int
    target_count: int | None
    vocab_start: int
    vocab_size: int | None
    group: dist.ProcessGroup | None
    backend: Backend
    memory_budget: int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class LogitConfig:
    """How logits are made of hidden states [..., H] and weight [V, H], this rank's rows of the output embedding.

        logits = softcap(logit_scale · (hidden @ weightᵀ + bias)) / temperature,   softcap(x) = c · tanh(x / c)

    in this order, which is that of transformers' models: scale, then softcap, then temperature.

    Args:
        bias: [V] or None.
        temperature: a number, or a tensor with one entry a token. It receives no gradient.
        logit_scale: multiplies before the softcap.
        softcap: bound of the logits before the temperature, or None.
        ignore_index: marks positions without a target. They are not projected at all: every result is 0 there, and so
            is `hidden`'s gradient.
        target_count: how many targets are not `ignore_index`, where the host knows: then it never waits for the
            device. It is a promise, as is that every target is inside the vocabulary and every temperature above 0.
            Without it the host waits once and refuses what is not so; a broken promise makes every result and
            gradient of the call NaN.
        vocab_start: vocabulary id of weight's first row.
        vocab_size: ids from this one on are padding: they are not projected, and their weight's gradient is 0.
            By default every row of weight is real. Needed with `group`.
        group: the ranks that hold the other rows. All pass the same hidden and targets and receive the same results,
            for one collective a call forward and none backward. `hidden`'s gradient is then **this rank's part**:
            hand hidden in through `copy_to_group` if it is replicated, or through `gather_from_sequence` if it is
            sharded over tokens (`postlude.ops.collectives`), and its gradient is complete. The loss must be computed
            alike on every rank.
        backend: "torch" runs anywhere, "triton" needs CUDA; "auto" takes triton where it can.
        memory_budget: bytes for the logits slab and the summed gradient, results and returned gradients not counted;
            by default enough for full speed. The smallest slab is one column, however small the budget.

    Mixed dtypes are projected in what they promote to (autocast's dtype where that is on), always summed in fp32 or
    better; every gradient has its own tensor's dtype.
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
    backend: Backend = "auto"
    memory_budget: int | None = None

    def __post_init__(self) -> None:
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"softcap must be above 0, but is {self.softcap}. Leave it None for no softcap.")
        if self.memory_budget is not None and self.memory_budget <= 0:
            raise ValueError(
                f"memory_budget must be above 0 bytes, but is {self.memory_budget}. Leave it None for the default."
            )
        if self.group is not None and self.vocab_size is None:
            raise ValueError(
                "vocab_size is needed with group: a rank knows its own shard alone, not the whole vocabulary."
            )

    def shape(self, products: Tensor) -> Tensor:
        """hidden @ weightᵀ + bias -> logits, but for the temperature."""
        if self.logit_scale != 1.0:
            products = products * self.logit_scale
        return products if self.softcap is None else self.softcap * torch.tanh(products / self.softcap)

    def replace(self, **changes: Unpack[LogitOptions]) -> LogitConfig:
        """The same, but for what is named."""
        if not changes:
            return self
        if not changes.keys() <= self.__dict__.keys():
            return dataclasses.replace(self, **changes)  # which says what it does not know
        made = object.__new__(LogitConfig)  # a sixth of replace's time, before every call of a head
        made.__dict__.update(self.__dict__, **changes)
        made.__post_init__()
        return made


DEFAULT_LOGITS = LogitConfig()
