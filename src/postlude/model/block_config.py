"""BlockConfig: what is known of a block without building it: its norms, its cost, the layouts that it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from postlude.checks import Bounds, Finite
from postlude.layout import Layout

NOMINAL_LENGTH = 4096  # sequence length at which costs are estimated for pipeline balance
Size: TypeAlias = Annotated[int, Bounds(least=1)]
SizeOrZero: TypeAlias = Annotated[int, Bounds(least=0)]
NormPosition: TypeAlias = Literal["pre", "post", "both"]
"""The position of a block's norm: before its computation, after it, or both."""


def default_heads(width: int, size: int) -> tuple[int, int]:
    """Returns the number of heads and their size: `size`, or less so that at least four divide `width`."""
    while size > 1 and (width % size or width // size < 4):
        size //= 2
    return width // size, size


@dataclass(frozen=True)
class LayerMetric:
    """One number that describes a block of one layer in one pass."""

    value: float
    worst: Literal["max", "min"] = "max"
    """Whether the worst layer has the largest or the smallest value."""


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Fields of every block: whether its norm is before the computation, after it, or both.

    `residual_scale` multiplies what the block adds to the residual stream.
    """

    norm: NormPosition = "pre"
    residual_scale: Finite = 1.0
    has_experts: ClassVar[bool] = False  # which expert parallelism divides
    caches_latents: ClassVar[bool] = False  # whether decoding caches latents in place of keys and values

    @property
    def router_shape(self) -> tuple[int, int]:
        """(top_k, experts) of a router; (0, 0) without one."""
        return 0, 0

    @property
    def has_aux_losses(self) -> bool:
        """Whether it adds auxiliary losses to the objective's."""
        return False

    @property
    def counts_batch(self) -> bool:
        """Whether its losses need counts of the whole batch, from a pass before the training pass."""
        return False

    @property
    def metric_sums(self) -> Mapping[str, int]:
        """The sums that a block adds to `Block.metric_sums` in training, with their sizes, in the order of reduction.

        Sums of more than one number are written to `layers.jsonl` too, one list per layer and step.
        """
        return {}

    def metrics(self, sums: Mapping[str, Sequence[float]]) -> Mapping[str, LayerMetric]:
        """Returns the metrics of one block by name, from its sums over the tokens of all ranks."""
        return {}

    selective_share: ClassVar[float] = 0.6  # share of saved activations that selective recompute keeps
    kernel_share: ClassVar[float] = 1.0
    """The share of `saved_activations` that fused GPU kernels keep; they recompute activation functions and norms."""

    def flops(self, hidden_size: int) -> float:
        """Returns forward FLOPs per token, roughly. Pipeline stages are balanced by it."""
        raise NotImplementedError(f"{type(self).__name__} must estimate its cost in flops().")

    def attention_flops(self, length: float) -> float:
        """Returns forward FLOPs per token spent on earlier tokens, on average, in a sequence of this length.

        `flops` includes them at the nominal length.
        """
        return 0.0

    def tp_traffic(self, hidden_size: int) -> float:
        """Returns numbers per token moved among tensor-parallel ranks in a forward. Default: gather and scatter."""
        return 2 * hidden_size

    def cp_traffic(self, cp: int) -> float:
        """Returns numbers that a context-parallel rank receives in a forward, per token of its own."""
        return 0.0

    def ep_traffic(self, hidden_size: int) -> float:
        """Returns numbers per token sent to experts in a forward; as many come back."""
        return 0.0

    def saved_activations(self, hidden_size: int) -> float:
        """Returns numbers per token saved for the backward, roughly. Memory is estimated by it."""
        return 4 * hidden_size

    def wgrad_activations(self, hidden_size: int) -> float:
        """Returns numbers per token kept for deferred weight gradients, roughly.

        The inputs of products and the gradients of their outputs; by default as much as for a backward.
        """
        return self.saved_activations(hidden_size)

    def check_layout(self, layout: Layout, name: str) -> None:
        """Raises ValueError for a layout that cannot divide this block `name`, with the nearest that can."""

    @classmethod
    def default_for(cls, hidden_size: int, others: Sequence[BlockConfig]) -> Self:
        """Returns a config of default sizes for a model of this width with these `others`."""
        raise ValueError(
            f"{cls.__name__} does not say which sizes go with hidden_size={hidden_size}. Give one yourself: "
            "Recast(source, pattern, blocks={symbol: config})."
        )

    @staticmethod
    def shared_fields(others: Sequence[BlockConfig]) -> dict[str, Any]:
        """Returns the fields of every block as the first of `others` has them."""
        return {field.name: getattr(others[0], field.name) for field in fields(BlockConfig)} if others else {}
