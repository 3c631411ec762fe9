"""An objective of your own for a recipe: postlude grpo CONFIG.yaml --objective examples/objective.py:soft_clip"""

import torch

from postlude import Loss, OutputInputs
from postlude.objectives import mean


def soft_clip(inputs: OutputInputs, *, sharpness: float = 4.0, bonus: float = 0.0) -> Loss:
    """Policy gradient whose ratio is bounded smoothly: the further it is from 1, the less it still teaches."""
    batch, over = inputs.microbatch, "response_mask"
    stats = inputs.head.logprobs(inputs.hidden, batch.targets, entropy=True)
    ratio = (stats.logprob - batch.column("old_logprobs")).exp()
    bounded = 4.0 / sharpness * torch.sigmoid(sharpness * (ratio - 1.0))
    losses = -batch.column("advantages") * bounded - bonus * stats.entropy
    return Loss(losses, over, {"ratio": mean(ratio, over), "entropy": mean(stats.entropy, over)})
