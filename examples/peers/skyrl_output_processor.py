"""SkyRL: log-probs and entropy [B, S - 1] in Megatron's hook, in place of its fused chunked log-prob."""

from typing import Any

from torch import Tensor

from postlude.integrations.megatron import LogprobsProcessor, MegatronContext


def skyrl_output_processor(*, input_ids: Tensor, context: dict[str, Any], **hook: Any) -> tuple[Tensor, Tensor]:
    """Entry i is of token i + 1. SkyRL projects once more for the entropy, which then has no gradient; here it has."""
    targets = input_ids.roll(-1, dims=1)
    targets[:, -1] = -100  # predicts nothing: not projected
    values = MegatronContext(targets, context["temperature"])
    stats = LogprobsProcessor(entropy=True)(input_ids=input_ids, context=values, **hook)
    return stats.logprob[:, :-1], stats.entropy[:, :-1]
