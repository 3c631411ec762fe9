"""The epilogue in plain PyTorch: any device, any floating dtype. `Epilogue` explains its functions."""

from __future__ import annotations

import torch
from torch import Tensor

from postlude.ops.linear_logprobs.statistics import (
    LOWEST,
    MAXIMUM,
    MOMENT,
    SUM,
    TARGET,
    Results,
    Selection,
    SelectionRule,
    Slab,
    TokenRows,
    Upstream,
    merge,
    transform,
)

LOGIT_COPIES = 3  # the products, their logits, and one intermediate


def select(targets: Tensor, temperature: float | Tensor, scale: float, rule: SelectionRule) -> Selection:
    (low, high), dtype, target_count = rule.allowed, rule.dtype, rule.target_count
    ignored = targets == rule.ignore_index
    selected = (targets >= low) & (targets < high) & ~ignored
    if isinstance(temperature, Tensor):
        factor, invalid_temperature = scale / temperature.to(dtype), selected & ~(temperature > 0)
    else:
        factor, invalid_temperature = (
            torch.full_like(targets, scale / temperature, dtype=dtype),
            torch.zeros_like(selected),
        )
    positions = torch.nonzero_static(selected, size=targets.numel(), fill_value=0)[:, 0]
    counts, factor, wrong_count = torch.stack((selected, ignored, invalid_temperature)).sum(1), factor[positions], None
    if target_count is not None:
        count, ignored_count, invalid_count = counts.unbind()
        wrong_count = (count != target_count) | (ignored_count != targets.numel() - target_count) | (invalid_count != 0)
        factor = factor.masked_fill(wrong_count, torch.nan)
    return Selection(counts, positions, targets[positions] - rule.vocab_start, factor, wrong_count)


def accumulate(slab: Slab, state: Tensor, *, entropy: bool) -> None:
    logits, _ = transform(slab)
    owned, column = _target_columns(slab)
    slab_state = torch.zeros_like(state)
    slab_state[TARGET] = torch.where(owned, logits.gather(1, column), LOWEST)[:, 0]
    slab_state[MAXIMUM] = logits.amax(1)
    gap = logits.sub_(slab_state[MAXIMUM][:, None])
    share = gap.exp()
    slab_state[SUM] = share.sum(1)
    if entropy:
        slab_state[MOMENT] = share.mul_(gap).sum(1)
    state.copy_(merge(torch.stack((state, slab_state))))


def results(state: Tensor) -> Results:
    maximum, total, moment, target = state.unbind(0)
    log_total = total.log()
    return Results(
        state=state,
        logprob=(target - maximum) - log_total,
        entropy=(log_total - moment / total).clamp_(min=0),
        normalizer=torch.stack((maximum, log_total)),
    )


def coefficients(
    rows: TokenRows, normalizer: Tensor, entropy: Tensor, upstream: Upstream, target_positions: Tensor | None
) -> Tensor:
    at_target, linear, at_all = (
        torch.zeros_like(entropy)
        if row is None
        else (row if target_positions is None else row[target_positions]) * rows.slope
        for row in (upstream.logprob, upstream.entropy, upstream.lse)
    )
    return torch.stack((*normalizer, at_target, at_target + linear * entropy - at_all, linear))


def differentiate(slab: Slab, coefficients: Tensor, dtype: torch.dtype) -> Tensor:
    logits, slope = transform(slab)
    owned, column = _target_columns(slab)
    maximum, log_total, at_target, constant, linear = (row[:, None] for row in coefficients)
    log_p = logits.sub_(maximum).sub_(log_total)
    gradient = torch.exp(log_p, out=slab.products)
    gradient.mul_(log_p.mul_(-linear).sub_(constant))
    gradient.scatter_add_(1, column, at_target * owned)
    if slope is not None:
        gradient.mul_(slope)
    return gradient.to(dtype)


def scale(tensor: Tensor, factor: Tensor) -> Tensor:
    return tensor.mul_(factor)


def _target_columns(slab: Slab) -> tuple[Tensor, Tensor]:
    """Returns whether the slab holds each row's target, and its column (clamped), [rows, 1] each."""
    columns = slab.products.shape[1]
    column = (slab.rows.targets - slab.column_range.start)[:, None]
    return (column >= 0) & (column < columns), column.clamp(0, columns - 1)
