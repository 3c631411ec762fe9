"""NeMo RL: log-probs [B, S - 1] in Megatron's hook, in place of its copy of GPTModel.forward."""

from typing import Any

from torch import Tensor

from postlude.integrations.megatron import LogprobsProcessor, MegatronContext


def nemo_rl_output_processor(*, labels: Tensor, context: None, **hook: Any) -> Tensor:
    """`labels` are the tokens themselves, as NeMo RL passes them; entry i is of token i + 1."""
    targets = labels.roll(-1, dims=1)
    targets[:, -1] = -100  # predicts nothing: not projected
    return LogprobsProcessor()(labels=None, context=MegatronContext(targets), **hook).logprob[:, :-1]
