"""HeadConfig: how the output head is computed, as a value without torch: configs are made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, get_args

from postlude.checks import Bounds, check_bounds, check_choice
from postlude.options import Backend


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Which kernels compute log-probs, and how many logits exist at one time. Neither changes a result's meaning."""

    backend: Backend = "auto"
    """Who computes log-probs: "torch" anywhere, "triton" on a GPU; "auto" takes triton where it can run."""
    memory_budget: Annotated[int, Bounds(least=1)] | None = None
    """Bytes for the logits that exist at one time and a gradient that is summed over them: the head works in chunks
    that fit. None takes enough for full speed."""

    def __post_init__(self) -> None:
        check_choice("the backend of the head", self.backend, get_args(Backend))
        check_bounds(self)
