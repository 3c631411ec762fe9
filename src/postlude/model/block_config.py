"""BlockConfig: what every block's config says of it without building it: its norms, its cost, the layouts it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self

from postlude.layout import Layout

NOMINAL_LENGTH = 4096  # sequence length at which costs are estimated for pipeline balance


def default_heads(width: int, size: int) -> tuple[int, int]:
    """How many heads, and how wide each: of `size`, together as wide as `width`; or narrower, so that they are four."""
    while size > 1 and (width % size or width // size < 4):
        size //= 2
    return width // size, size


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """What every block may choose: whether its norm stands before the work, after it, or both.

    `residual_scale` multiplies what it adds to the residual stream.
    """

    norm: Literal["pre", "post", "both"] = "pre"
    residual_scale: float = 1.0
    has_experts: ClassVar[bool] = False  # that expert parallelism can divide

    @property
    def router_shape(self) -> tuple[int, int]:
        """How many experts each token is sent to by choice, and of how many; (0, 0) where there is no choice."""
        return 0, 0

    @property
    def has_aux_losses(self) -> bool:
        """Whether it adds losses of its own to the objective's."""
        return False

    selective_share: ClassVar[float] = 0.6  # of what it keeps, about so much stays where cheap results are made again

    def flops(self, hidden_size: int) -> float:
        """Forward FLOPs a token, roughly: pipeline stages are balanced by it."""
        raise NotImplementedError(f"{type(self).__name__} must estimate its cost in flops().")

    def attention_flops(self, length: float) -> float:
        """Forward FLOPs a token spends on those before it, on average, in a sequence of this length: part of `flops`.

        `flops` has them at the nominal length.
        """
        return 0.0

    def tp_traffic(self, hidden_size: int) -> float:
        """Numbers a token moves among tensor-parallel ranks in a forward: by default it is gathered and spread."""
        return 2 * hidden_size

    def cp_traffic(self, cp: int) -> float:
        """Numbers that come to a context-parallel rank in a forward, for each of its own tokens."""
        return 0.0

    def ep_traffic(self, hidden_size: int) -> float:
        """Numbers a token takes to its experts in a forward; as many come back."""
        return 0.0

    def saved_activations(self, hidden_size: int) -> float:
        """Numbers a token leaves for the backward, roughly: memory is estimated by it."""
        return 4 * hidden_size

    def wgrad_activations(self, hidden_size: int) -> float:
        """Numbers a token leaves for the gradients of weights, where its backward has put them off, roughly.

        What products were made of, and the gradients of what they made; by default as much as for a backward.
        """
        return self.saved_activations(hidden_size)

    def check_layout(self, layout: Layout, name: str) -> None:
        """Refuse a layout that cannot divide this block, in a sentence with the nearest that can; `name` is said."""

    @classmethod
    def default_for(cls, hidden_size: int, others: Sequence[BlockConfig]) -> Self:
        """A config of usual sizes for a model of this width whose `others` are given, where nobody says which."""
        raise ValueError(
            f"{cls.__name__} does not say which sizes go with hidden_size={hidden_size}. Give one yourself: "
            "Recast(source, pattern, blocks={symbol: config})."
        )

    @staticmethod
    def as_in(others: Sequence[BlockConfig]) -> dict[str, Any]:
        """What every block chooses, as the first of these has it."""
        return {each.name: getattr(others[0], each.name) for each in fields(BlockConfig)} if others else {}
