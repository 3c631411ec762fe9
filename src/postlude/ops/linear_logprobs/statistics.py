"""The statistics of a row of logits: how they are kept, joined, and turned into results and gradients.

A row ℓ of logits is carried as four numbers, its `State`: the maximum m, Σ e^(ℓ-m), Σ e^(ℓ-m)·(ℓ-m) and the target's ℓ.
Relative to the maximum, none of them overflows and no digits cancel, however large the logits. Then

    lse = m + log Σ        logprob = (ℓ_target - m) - log Σ        entropy = log Σ - (Σ·(ℓ-m)) / Σ

and with log p = (ℓ - m) - log Σ, upstream gradients g of logprob, e of entropy and z of lse give

    d_ℓ = g·[target] - p·(g + e·(entropy + log p) - z).

Backward keeps m and log Σ separately for the same reason: where logits are in the thousands, their sum loses digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# Logits are at least this, so that -inf (a bias used as a mask) and empty sums stay finite.
LOWEST = -1e30

MAXIMUM, SUM, MOMENT, TARGET = range(4)


@dataclass(frozen=True)
class TokenRows:
    """The target and logit factor of each projected token.

    logit = product · factor, or factor · tanh(product · inner) under a softcap. `targets` counts from this shard's
    first column and may point outside the shard.
    """

    targets: Tensor  # [n] int64
    factor: Tensor  # [n]
    inner: float | None

    def __getitem__(self, rows: slice) -> TokenRows:
        return TokenRows(self.targets[rows], self.factor[rows], self.inner)

    @property
    def slope(self) -> Tensor:
        """d(logit)/d(product) [n], without the softcap's slope."""
        return self.factor if self.inner is None else self.factor * self.inner


class SelectionRule(NamedTuple):
    """Which tokens are projected: those whose target is in `allowed`, a range, and not `ignore_index`."""

    ignore_index: int
    allowed: tuple[int, int]
    vocab_start: int
    dtype: torch.dtype  # of the factors
    target_count: int | None


@dataclass(frozen=True)
class Selection:
    """The tokens to project, in order, at the front of tensors with room for all; the rest is undefined.

    Where `target_count` exceeds their number, the extra positions are still valid indices.
    """

    counts: Tensor  # [3] int64: tokens to project, ignored tokens, tokens to project at no temperature above 0
    positions: Tensor  # int64
    targets: Tensor  # int64, as in `TokenRows`
    factor: Tensor
    wrong_count: Tensor | None = None  # 0-dim bool: `target_count` was wrong; None without one


@dataclass(frozen=True, kw_only=True)
class Operands:
    hidden: Tensor  # [rows, H]
    weight: Tensor  # [columns, H]
    row_range: slice
    column_range: slice


@dataclass(frozen=True, kw_only=True)
class Slab(Operands):
    """Operands with their products, and what turns these into logits."""

    products: Tensor  # [rows, columns]
    rows: TokenRows
    bias: Tensor | None  # [columns]


class Epilogue(Protocol):
    """The operations of a backend on tokens, slabs and rows: the only part in which backends differ."""

    LOGIT_COPIES: int
    """The number of copies of a slab in memory, itself included."""

    def select(self, targets: Tensor, temperature: float | Tensor, scale: float, rule: SelectionRule) -> Selection:
        """Selects tokens; their factor is scale / temperature.

        If their number is not `target_count`, another target is invalid, or a temperature is not above 0, every factor
        is NaN.
        """
        ...

    def accumulate(self, slab: Slab, state: Tensor, *, entropy: bool) -> None:
        """Joins the slab's logits to its rows' `state` [4, rows]. Does not change the products."""

    def results(self, state: Tensor) -> Results:
        """Returns the results of a finished state [4, n]. Entropy is valid only if the moment was accumulated."""
        ...

    def coefficients(
        self, rows: TokenRows, normalizer: Tensor, entropy: Tensor, upstream: Upstream, target_positions: Tensor | None
    ) -> Tensor:
        """Returns [5, n]: m, log Σ, a, b, c with d_product = a·[target] - p·(b + c·log p), from the rows' results.

        The upstream gradients of row i are at index target_positions[i], or i if it is None. a, b and c include
        `rows.slope`, but not the softcap's slope.
        """
        ...

    def differentiate(self, slab: Slab, coefficients: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the gradient [rows, columns] of the products, in `dtype`. May overwrite the products."""
        ...

    def scale(self, tensor: Tensor, factor: Tensor) -> Tensor:
        """Multiplies the tensor by a 0-dim tensor in place."""
        ...


def empty_state(rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the state [4, n] of rows without any logit."""
    state = torch.full((4, rows), LOWEST, dtype=dtype, device=device)
    state[SUM : MOMENT + 1] = 0
    return state


def transform(slab: Slab) -> tuple[Tensor, Tensor | None]:
    """Returns the slab's logits [rows, columns], and the softcap's slope if any. Does not change the products."""
    rows = slab.rows
    shifted = slab.products if slab.bias is None else slab.products + slab.bias
    if rows.inner is None:
        return (shifted * rows.factor[:, None]).clamp_(min=LOWEST), None
    capped = shifted * rows.inner
    decay = capped.abs().mul_(-2).exp_()
    # 1 - tanh² = 4d/(1+d)² with d = e^(-2|x|): keeps its digits where tanh rounds to 1.
    slope = 4 * decay / (1 + decay).square_()
    return capped.tanh_().mul_(rows.factor[:, None]), slope


def merge(states: Tensor) -> Tensor:
    """Merges states of disjoint parts of the same rows, [parts, 4, n] -> [4, n]."""
    maximum = states[:, MAXIMUM].amax(0)
    gap = states[:, MAXIMUM] - maximum
    decay = gap.exp()
    moment = (states[:, MOMENT] + gap * states[:, SUM]) * decay
    return torch.stack((maximum, (states[:, SUM] * decay).sum(0), moment.sum(0), states[:, TARGET].amax(0)))


@dataclass(frozen=True)
class TopKLogits:
    """The k largest logits of each row so far, [n, k], best first; id -1 marks an empty entry."""

    logits: Tensor
    ids: Tensor

    @staticmethod
    def empty(rows: int, k: int, dtype: torch.dtype, device: torch.device) -> TopKLogits:
        ids = torch.full((rows, k), -1, dtype=torch.int64, device=device)
        return TopKLogits(torch.full((rows, k), -torch.inf, dtype=dtype, device=device), ids)

    def __getitem__(self, rows: slice) -> TopKLogits:
        return TopKLogits(self.logits[rows], self.ids[rows])

    @staticmethod
    def stacked(parts: Sequence[TopKLogits]) -> TopKLogits:
        return TopKLogits(torch.cat([part.logits for part in parts]), torch.cat([part.ids for part in parts]))

    def merged(self, logits: Tensor, ids: Tensor) -> TopKLogits:
        """Returns the best k of these and others, [n, any] each."""
        k = self.logits.shape[1]
        best, place = torch.cat((self.logits, logits), 1).topk(k, dim=1)
        return TopKLogits(best, torch.cat((self.ids, ids), 1).gather(1, place))

    def merged_slab(self, logits: Tensor, first: int) -> TopKLogits:
        """Returns the best k of these and a slab [n, columns] whose column 0 is vocabulary entry `first`."""
        best, place = logits.topk(min(self.logits.shape[1], logits.shape[1]), dim=1)
        return self.merged(best, place + first)


def merge_ranks(state: Tensor, top: TopKLogits | None, group: dist.ProcessGroup) -> tuple[Tensor, TopKLogits | None]:
    """Merges the results that each rank of `group` has for its part of the vocabulary, with one collective."""
    # Ids travel as the bits of the state's own dtype: int32 in fp32, int64 in float64.
    bits = torch.int32 if state.dtype == torch.float32 else torch.int64
    local = state
    if top is not None:
        local = torch.cat((state, top.logits.t(), top.ids.to(bits).view(state.dtype).t()))
    size = dist.get_world_size(group)
    gathered = local.new_empty(size * local.shape[0], local.shape[1])
    dist.all_gather_into_tensor(gathered, local, group=group)
    gathered = gathered.view(size, *local.shape)
    if top is None:
        return merge(gathered), None
    rows, k = top.logits.shape
    logits, ids = (
        part.permute(2, 0, 1).reshape(rows, size * k) for part in (gathered[:, 4 : 4 + k], gathered[:, 4 + k :])
    )
    empty = TopKLogits.empty(rows, k, state.dtype, state.device)
    return merge(gathered[:, :4]), empty.merged(logits, ids.view(bits).long())


@dataclass(frozen=True)
class Results:
    """The row statistics of a finished state, [n] each."""

    state: Tensor  # [4, n]
    logprob: Tensor
    entropy: Tensor
    normalizer: Tensor  # [2, n]: m and log Σ

    @property
    def lse(self) -> Tensor:
        return self.normalizer.sum(0)

    @property
    def top1(self) -> Tensor:
        """Whether no logit is larger than the target's."""
        return self.state[TARGET] >= self.state[MAXIMUM]


@dataclass(frozen=True)
class Upstream:
    """Gradients of the results, one per token each; None is zero."""

    logprob: Tensor | None
    entropy: Tensor | None
    lse: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class RequestedStats:
    entropy: bool
    lse: bool
    top1: bool
    topk: int = 0
