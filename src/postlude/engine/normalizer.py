"""Loss normalisation: a loss is a sum over this rank's tokens, divided by a global count and nothing else.

Every rank has the counts of the whole batch before the step. Gradients, and the losses themselves, are summed over
all ranks that processed different tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from postlude.data import IGNORE, Microbatch
from postlude.objectives import Loss, Metric, Objective


def count_name(over: str, depth: int = 0) -> str:
    """Returns the name of a count at a multi-token-prediction depth. Every depth has the same count of sequences."""
    return f"{over} +{depth}" if depth and over != "sequences" else over


class LossNormalizer:
    """The counts of one batch, which divide its losses, and the weights of means.

    `counts` are sums of weights over the whole step, by name. By default they are computed from `microbatches`, which
    must then be the whole batch, not sharded. `cp_size` is the number of context-parallel ranks, which all hold the
    per-sequence values.
    """

    def __init__(
        self, microbatches: Sequence[Microbatch], counts: Mapping[str, float] | None = None, *, cp_size: int = 1
    ) -> None:
        self.microbatches = microbatches
        self.cp_size = cp_size
        self.counts_are_global = counts is not None
        self.counts = dict(counts or {})

    def count(self, over: str, depth: int = 0) -> float:
        name = count_name(over, depth)
        if name not in self.counts and self.counts_are_global:
            known = ", ".join(f'"{column}"' for column in self.counts) or "none"
            raise LookupError(
                f'a loss is a mean over "{name}", whose sum over the step is not known (known are: {known}). Add a '
                "column of that name to the batch, or pass counts=engine.count(*batches) with its sum."
            )
        if name not in self.counts:
            sums = (self.weights(over, microbatch, depth).sum(dtype=torch.float64) for microbatch in self.microbatches)
            self.counts[name] = float(sum(sums)) * self.cp_replicas(over)
        if not self.counts[name] > 0 and not (depth and self.counts[name] == 0):
            raise ValueError(
                f'a loss is a mean over "{over}", whose weights sum to {self.counts[name]:g} in this batch. '
                "Skip a batch with nothing to learn, or name other weights."
            )
        return self.counts[name] or 1.0  # avoids 0 / 0 for an MTP depth without targets: all sequences too short

    def weights(self, over: str, microbatch: Microbatch, depth: int = 0) -> Tensor:
        """Returns the weights named `over`: [T], or [n] for "sequences"."""
        if depth:
            return self.weights(over, microbatch.mtp_microbatches[depth - 1])
        match over:
            case "tokens":
                return microbatch.targets != IGNORE
            case "sequences":
                return torch.full((microbatch.packing.count,), 1.0 / self.cp_size, device=microbatch.tokens.device)
        return microbatch.column(over)

    def loss(self, loss: Loss, microbatch: Microbatch) -> Tensor:
        """Returns what this microbatch adds to the batch's loss: a scalar, fp32."""
        means = [self._sum(term, microbatch) / self.count(term.over, term.depth) for term in loss.terms()]
        return torch.stack(means).sum()

    def _sum(self, loss: Loss, microbatch: Microbatch) -> Tensor:
        if loss.values.ndim == 0:
            return loss.values.float() / self.cp_replicas(loss.over)
        weights = self.weights_of(loss, microbatch)
        return torch.where(weights != 0, loss.values.float() * weights, 0.0).sum()

    def cp_replicas(self, over: str) -> int:
        """Returns how many ranks have the same values: every context-parallel rank has those of a sequence."""
        return self.cp_size if over == "sequences" else 1

    def weights_of(self, term: Loss | Metric, microbatch: Microbatch) -> Tensor:
        """Returns the weights of `term.values`, one for each. Raises ValueError if the shapes differ."""
        weights = self.weights(term.over, microbatch, term.depth)
        if term.values.shape != weights.shape:
            raise ValueError(
                f'values over "{term.over}" have shape {tuple(term.values.shape)}, but this microbatch has weights of '
                f"shape {tuple(weights.shape)}. Give one value for each, or their sum as a scalar."
            )
        return weights


def check_counts(objective: Objective, counts: Mapping[str, float], depths: int) -> None:
    """Raises before a pass if an objective is a mean over something unknown, or whose weights sum to zero.

    The objective's method `denominators(depths)` returns pairs of a name and a depth. Without it, the error is
    raised after the pass.
    """
    denominators = getattr(objective, "denominators", None)
    normalizer = LossNormalizer((), counts)
    for over, depth in denominators(depths) if denominators is not None else ():
        normalizer.count(over, depth)
