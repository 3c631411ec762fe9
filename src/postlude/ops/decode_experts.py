"""Experts of few rows, for decoding. Nothing here has gradients.

A step of decoding gives each expert few rows, so its products take as long as reading the weights of the experts that
are chosen. Sorting rows by expert takes a dozen kernels. Here one kernel chooses experts and lists their rows, each of
two products reads these rows where they are, and one kernel adds a token's experts to the residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from postlude.ops.activation import Activation
from postlude.ops.batch_invariant import is_batch_invariant
from postlude.ops.decode_linear import COUNTERS
from postlude.ops.kernels.capabilities import EMPTY, Backend, use_kernel

MAX_ROWS = 64  # of an expert on average: with more, products take longer than reading weights
SIZE_MULTIPLE = 16  # features of weights are multiples of this


@dataclass(frozen=True, eq=False)
class ExpertMLPs:
    """Experts, each an MLP: weights [E, out, in] and biases [E, out], and the activation between the products.

    See `GatedConfig` for the other fields.
    """

    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    activation: Activation
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return (*(() if self.gate is None else (self.gate,)), self.up, self.down)


@dataclass(frozen=True, eq=False)
class ChosenExperts:
    """The experts of tokens: `choice` and `weights` [T, top_k], and by expert.

    `slots` [E, T] begin with an expert's slots, as many as its count in `counts` [E], in any order.
    """

    choice: Tensor
    weights: Tensor
    slots: Tensor
    counts: Tensor


def decodes_experts(
    hidden: Tensor, top_k: int, experts: ExpertMLPs, selection_bias: Tensor | None, *, backend: Backend = "auto"
) -> bool:
    """Whether `add_experts` applies to the rows `hidden` [T, H] of a decode step."""
    count, few = len(experts.up), len(hidden) * top_k <= MAX_ROWS * len(experts.up)
    if backend == "auto" and (not few or not hidden.is_cuda or is_batch_invariant()):
        return False
    weights, unsupported_reason = experts.weights, None
    if not len(hidden):
        unsupported_reason = EMPTY
    elif not all(weight.dtype == hidden.dtype and weight.is_contiguous() for weight in (hidden, *weights)):
        unsupported_reason = "rows and experts are not dense and of one dtype"
    elif any(size % SIZE_MULTIPLE for weight in weights for size in weight.shape[1:]):
        unsupported_reason = f"features of experts are no multiples of {SIZE_MULTIPLE}: {list(experts.up.shape[1:])}"
    elif count > COUNTERS:
        unsupported_reason = f"{count} experts are more than {COUNTERS}"
    elif selection_bias is not None and selection_bias.dtype != torch.float32:
        unsupported_reason = f"the selection bias is in {selection_bias.dtype}"
    return use_kernel("decode_experts", backend, hidden.device, hidden.dtype, unsupported_reason=unsupported_reason)


def choose_experts(
    logits: Tensor,
    selection_bias: Tensor | None,
    counters: Tensor,
    top_k: int,
    *,
    softmax: bool,
    normalise: bool,
    scale: float,
    dtype: torch.dtype,
) -> ChosenExperts:
    """Chooses the `top_k` experts of each token by router `logits` [T, E]: see `MoEConfig`.

    `counters` [COUNTERS] int32 are zero; `add_experts` makes them zero again.
    """
    from postlude.ops.kernels.decode_experts import route  # needs triton

    counts = counters[: logits.shape[1]]
    choice, weights, slots = route(
        logits, selection_bias, counts, top_k, softmax=softmax, normalise=normalise, scale=scale, dtype=dtype
    )
    return ChosenExperts(choice, weights, slots, counts)


def add_experts(
    hidden: Tensor, tokens: Tensor, chosen: ChosenExperts, experts: ExpertMLPs, shared: Tensor | None
) -> Tensor:
    """Returns `hidden` [T, H], plus the weighted sum of each token's experts of `tokens` [T, H], plus `shared`."""
    from postlude.ops.kernels.decode_experts import merge, products, tile_for  # needs triton

    routing, rows_per_expert = (chosen.counts, chosen.slots), chosen.choice.numel() / len(experts.up)
    gate = None if experts.gate is None else (experts.gate, experts.gate_bias)
    features = products(
        tokens, *routing, gate, (experts.up, experts.up_bias), chosen.choice.shape[1],
        tile_for(rows_per_expert, gate is not None), activation=experts.activation,
        alpha=experts.alpha, limit=experts.limit, up_offset=experts.up_offset,
    )  # fmt: skip
    tile = tile_for(rows_per_expert, False)
    rows = products(features, *routing, None, (experts.down, experts.down_bias), 1, tile)
    return merge(hidden, rows, chosen.weights, shared, chosen.counts)
