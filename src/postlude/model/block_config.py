"""BlockConfig: what every block's config says of it without building it: its norms, its cost, the layouts it fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from postlude.layout import Layout

NOMINAL_LENGTH = 4096  # sequence length at which costs are estimated for pipeline balance


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """What every block may choose: whether its norm stands before the work, after it, or both.

    `residual_scale` multiplies what it adds to the residual stream.
    """

    norm: Literal["pre", "post", "both"] = "pre"
    residual_scale: float = 1.0
    has_experts: ClassVar[bool] = False  # that expert parallelism can divide

    def flops(self, hidden_size: int) -> float:
        """Forward FLOPs a token, roughly: pipeline stages are balanced by it."""
        raise NotImplementedError(f"{type(self).__name__} must estimate its cost in flops().")

    def kept(self, hidden_size: int) -> float:
        """Numbers a token leaves for the backward, roughly: memory is estimated by it."""
        return 4 * hidden_size

    def fits(self, layout: Layout, name: str) -> None:
        """Refuse a layout that cannot divide this block, in a sentence with the nearest that can; `name` is said."""
