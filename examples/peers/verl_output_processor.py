"""verl: log-probs and entropy in Megatron's hook, at any temperature, in place of its fused forward and of its patches
for MTP and for the combined 1F1B schedule."""

from typing import Any

from torch import Tensor

from postlude.integrations.megatron import LogprobsProcessor, MegatronContext


def verl_output_processor(*, context: Any, **hook: Any) -> Tensor:
    """`context.temperature` and the labels of verl's call -> log-probs and entropy, both with a gradient: [2, b, s].

    One tensor, which a schedule plan needs: `log_probs, entropy = output.unbind()`.
    """
    values = MegatronContext(temperature=context.temperature)
    return LogprobsProcessor(entropy=True, returns="tensor")(context=values, **hook)
