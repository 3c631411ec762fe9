"""HeadConfig: how the output head is computed. Part of configs, so it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, get_args

from postlude.checks import Bounds, check_bounds, check_choice
from postlude.options import Backend


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Which kernels compute log-probs, and how many logits exist at a time. The result is the same up to rounding."""

    backend: Backend = "auto"
    """Kernels of log-probs: "torch" anywhere, "triton" on a GPU; "auto" uses triton where it can run."""
    memory_budget: Annotated[int, Bounds(least=1)] | None = None
    """Bytes for the logits that exist at a time and the gradient summed over them: the head computes in chunks that
    fit. None uses enough for full speed."""

    def __post_init__(self) -> None:
        check_choice("the backend of the head", self.backend, get_args(Backend))
        check_bounds(self)
