"""The microbatches of a generator, the output processors that return logits, and log-probs of tokens that are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.data import pack, unpack
from postlude.data.microbatch import IGNORE, Microbatch
from postlude.generate.decode_cache import DecodeCache, PrefillSequence
from postlude.model import LanguageModel, OutputInputs
from postlude.ops.decode_attention import consecutive_positions
from postlude.ops.packing import Packing, to_device

TARGETS = "score_ids"


def microbatch_of(tokens: Tensor, packing: Packing, positions: Tensor, padding: int = 0) -> Microbatch:
    """Returns a microbatch of packed tokens [T] without targets. Its last `padding` tokens are a padding sequence."""
    indices = torch.arange(packing.total, device=tokens.device)
    return Microbatch(
        tokens=tokens,
        packing=packing,
        positions=positions,
        targets=torch.full_like(indices, IGNORE),
        columns={},
        batch_indices=indices if not padding else indices.masked_fill(indices >= packing.total - padding, -1),
        sequences=tuple(range(packing.count)),
        index=0,
        count=1,
        batch_tokens=packing.total,
        batch_targets=0,
        target_count=0,
        padding=padding,
    )


class Microbatches:
    """Microbatches of the next tokens of rows, followed by sequences. Each call sets up the cache for them.

    They are padded at the end to a multiple of the tensor-parallel ranks. For the next tokens alone, the parts that
    depend only on the shape are built once.
    """

    def __init__(self, cache: DecodeCache, tp: int) -> None:
        self.cache = cache
        self.tp = tp
        self._by_shape: dict[tuple[int, int], Microbatch] = {}

    def __call__(
        self,
        tokens: Tensor,
        lengths: Tensor,
        sequences: Sequence[PrefillSequence] = (),
    ) -> Microbatch:
        """Returns tokens [n, tokens_per_row] of the first n rows, then the new tokens of the sequences.

        `lengths` [n] int64 are the rows' numbers of tokens including these, 0 in idle rows.
        """
        device, (count, tokens_per_row) = self.cache.device, tokens.shape
        positions = consecutive_positions((lengths - tokens_per_row).clamp_min(0), tokens_per_row)
        prefilled = [token for sequence in sequences for token in sequence.new_tokens]
        padding = -(tokens.numel() + len(prefilled)) % self.tp
        tokens = tokens.flatten()
        prefill = self.cache.begin_forward(lengths, tokens_per_row, sequences, padding)
        if prefill is None:
            if (count, tokens_per_row) not in self._by_shape:
                packing = Packing.from_lengths([tokens_per_row] * count, device)
                self._by_shape[count, tokens_per_row] = microbatch_of(tokens, packing, positions)
            return replace(self._by_shape[count, tokens_per_row], tokens=tokens, positions=positions)
        packing, prefill_positions = prefill
        if count:
            packing = Packing.from_lengths([*[tokens_per_row] * count, *packing.lengths], device)
        new = to_device(torch.tensor(prefilled + [0] * padding, dtype=torch.int64), device)
        return microbatch_of(torch.cat((tokens, new)), packing, torch.cat((positions, prefill_positions)), padding)


def all_logits_and_hidden(inputs: OutputInputs, context: None) -> tuple[Tensor, Tensor]:
    """Returns logits [T, vocab] and hidden states [T, H]. An output processor."""
    return inputs.head.logits(inputs.hidden), inputs.gather(inputs.hidden)


def logits_at(inputs: OutputInputs, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Returns logits [m, vocab] at `indices` [m], and all hidden states [T, H]. An output processor.

    The same on every tensor-parallel rank. No other token is projected.
    """
    tp, hidden = inputs.head.tp, inputs.gather(inputs.hidden)
    chosen = hidden[indices]
    if tp.size > 1:
        chosen = F.pad(chosen, (0, 0, 0, -len(indices) % tp.size))
        chosen = chosen[slice(*tp.block(len(chosen)))]
    return inputs.head.logits(chosen)[: len(indices)], hidden


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
