"""RouterLosses: the auxiliary losses of MoE routers. Part of configs, so it needs no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from postlude.checks import NonNegative, check_bounds, check_choice

Balance = Literal["sequence", "batch"]
"""What a balance loss counts the shares of experts in: each sequence, or the whole batch."""


@dataclass(frozen=True, kw_only=True)
class RouterLosses:
    """Auxiliary losses of every router, in place of those of the model's config."""

    balance_coefficient: NonNegative | None = None
    """Coefficient of the balance loss, experts · Σ share of slots · mean score (1 when even), as in DeepSeek-V3 and
    Megatron; transformers' coefficient times top_k is the same. None takes the model config's, which is 0 unless it
    has output_router_logits."""
    z_coefficient: NonNegative | None = None
    """Coefficient of the z-loss, the mean squared logsumexp of the router's logits; none takes the model config's,
    which is 0 for a Hugging Face model."""
    balance: Balance | None = None
    """"sequence" takes shares and mean scores in each sequence and averages by length, "batch" over the whole batch,
    which costs one more forward of it, without the head. None takes the model config's, which is "sequence" for a
    Hugging Face model."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.balance is not None:
            check_choice("router_losses.balance", self.balance, get_args(Balance))

    @property
    def changes(self) -> dict[str, Any]:
        """The values that are set, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}
