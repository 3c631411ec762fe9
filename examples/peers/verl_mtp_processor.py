"""verl: MTP's losses without its logits, for models with postlude's `OutputHook`."""

from typing import Any

from examples.peers.verl_output_processor import verl_output_processor
from torch import Tensor

from postlude.integrations.megatron import LogprobsProcessor, MegatronDepth


def verl_mtp_processor(*, mtp: tuple[MegatronDepth, ...], **hook: Any) -> tuple[Tensor, list[Tensor]]:
    """Returns what `verl_output_processor` does, and the mean negative log-prob of each depth's tokens."""
    logprobs = [depth(LogprobsProcessor()).logprob for depth in mtp]  # [b, s], 0 where the loss mask is
    losses = [-rows.sum() / depth.loss_mask.sum().clamp(min=1) for rows, depth in zip(logprobs, mtp, strict=True)]
    return verl_output_processor(**hook), losses
