"""verl: log-probs and entropy in Megatron's hook, at any temperature, in place of its fused forward."""

from types import SimpleNamespace
from typing import Any

from postlude.integrations.megatron import LogprobsProcessor, MegatronContext


def verl_output_processor(*, context: Any, **hook: Any) -> SimpleNamespace:
    """`context.temperature` and the labels of verl's call -> `log_probs` and `entropy`, both with a gradient."""
    values = MegatronContext(temperature=context.temperature)
    stats = LogprobsProcessor(entropy=True)(context=values, **hook)
    return SimpleNamespace(log_probs=stats.logprob, entropy=stats.entropy)
