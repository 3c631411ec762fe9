"""HeadConfig: how the output head is computed. Part of configs, so it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, get_args

from postlude.checks import Bounds, check_bounds, check_choice
from postlude.options import HeadBackend


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Which kernels compute log-probs, and how many logits exist at a time. The result is the same up to rounding."""

    backend: HeadBackend = "auto"
    """Kernels of log-probs: "torch" anywhere, "triton" on a GPU; "auto" uses triton where it can run. "logits" is the
    plain product with all logits in memory, differentiated by autograd: to compare with, and to debug."""
    memory_budget: Annotated[int, Bounds(least=1)] | None = None
    """Bytes for the logits that exist at a time and the gradient summed over them: the head computes in chunks that
    fit. None uses enough for full speed."""

    def __post_init__(self) -> None:
        check_choice("the backend of the head", self.backend, get_args(HeadBackend))
        check_bounds(self)
        check_logits_budget(self.backend, self.memory_budget)


def check_logits_budget(backend: HeadBackend, memory_budget: int | None) -> None:
    """Raises ValueError for a memory budget of a head that holds all logits."""
    if backend == "logits" and memory_budget is not None:
        raise ValueError(
            f'memory_budget is {memory_budget}, but backend="logits" holds all logits at a time. Leave memory_budget '
            "out, or use another backend."
        )
