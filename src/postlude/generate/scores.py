"""score_tokens: log-probs of tokens that are given, of the likeliest ones at their places, and of other targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from postlude.data import pack, unpack
from postlude.model import LanguageModel, OutputInputs

TARGETS = "score_ids"


@torch.no_grad()
def score_tokens(
    model: LanguageModel,
    sequences: Sequence[Tensor],
    budget: int,
    *,
    k: int = 0,
    targets: Tensor | None = None,
    temperature: float = 1.0,
) -> dict[str, list[Tensor]]:
    """Returns values per token of each sequence, on the CPU: entry i is of token i, and entry 0 is 0.

    They are "logprobs", with `k` also "top" and "ids" of the likeliest tokens, and with `targets` "targets".
    Microbatches have `budget` tokens, or as many as the longest sequence.
    """

    def processor(inputs: OutputInputs, context: Any) -> dict[str, Tensor]:
        head, microbatch = inputs.head, inputs.microbatch
        values = {"logprobs": head.logprobs(inputs.hidden, microbatch.targets, temperature=temperature).logprob}
        if k:
            values["top"], values["ids"] = head.topk(inputs.hidden, k, temperature=temperature)
        if targets is not None:
            values["targets"] = head.logprobs_at(inputs.hidden, microbatch.targets, microbatch.column(TARGETS))[1]
        return values

    columns = {} if targets is None else {TARGETS: [targets]}
    longest = max(map(len, sequences))
    device = next(model.parameters()).device
    microbatches = [packed.to(device) for packed in pack(sequences, budget=max(budget, longest), columns=columns)]
    results = [model(microbatch, output_processor=processor) for microbatch in microbatches]
    return {
        name: [row.cpu() for row in unpack(microbatches, [result[name] for result in results])] for name in results[0]
    }
