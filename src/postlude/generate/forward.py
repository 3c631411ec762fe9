"""The microbatches of a generator, and the output processors that return its logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.data.microbatch import IGNORE, Microbatch
from postlude.generate.row_cache import RowCache
from postlude.model import OutputInputs
from postlude.ops.decode_attention import consecutive_positions
from postlude.ops.packing import Packing, to_device


def microbatch_of(tokens: Tensor, packing: Packing, positions: Tensor, padding: int = 0) -> Microbatch:
    """Returns packed tokens [T] without targets. The last `padding` tokens are a sequence of padding."""
    places = torch.arange(packing.total, device=tokens.device)
    return Microbatch(
        tokens=tokens,
        packing=packing,
        positions=positions,
        targets=torch.full_like(places, IGNORE),
        columns={},
        batch_indices=places if not padding else places.masked_fill(places >= packing.total - padding, -1),
        sequences=tuple(range(packing.count)),
        index=0,
        count=1,
        batch_tokens=packing.total,
        batch_targets=0,
        target_count=0,
        padding=padding,
    )


def prefill_microbatch(sequences: Sequence[Sequence[int]], device: torch.device) -> Microbatch:
    """Returns whole sequences."""
    packing = Packing.from_lengths([len(sequence) for sequence in sequences], device)
    tokens = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.int64)
    return microbatch_of(to_device(tokens, device), packing, packing.positions())


class DecodeMicrobatches:
    """Microbatches of the next tokens of n rows. What depends on n alone is made once."""

    def __init__(self) -> None:
        self._by_shape: dict[tuple[int, int], Microbatch] = {}

    def __call__(self, tokens: Tensor, lengths: Tensor) -> Microbatch:
        """Returns tokens [n, each] of rows that have `lengths` [n] tokens with these."""
        count, each = tokens.shape
        positions = consecutive_positions((lengths - each).clamp_min(0), each)
        tokens = tokens.flatten()
        if (count, each) not in self._by_shape:
            packing = Packing.from_lengths([each] * count, tokens.device)
            self._by_shape[count, each] = microbatch_of(tokens, packing, positions)
        return replace(self._by_shape[count, each], tokens=tokens, positions=positions)


class MixedMicrobatches:
    """Microbatches of the next tokens of rows together with whole sequences that start, announced to a cache.

    They are padded at the end to a multiple of the tensor-parallel ranks, and to at least one token.
    """

    def __init__(self, cache: RowCache, tp: int) -> None:
        self.cache = cache
        self.tp = tp
        self._decode = DecodeMicrobatches()

    def __call__(
        self, tokens: Tensor, lengths: Sequence[int], sequences: Sequence[Sequence[int]] = (), rows: Sequence[int] = ()
    ) -> Microbatch:
        """Returns tokens [n, each] of the first n rows, which have `lengths` tokens with these, then the sequences."""
        device, (count, each) = self.cache.device, tokens.shape
        prefilled = [token for sequence in sequences for token in sequence]
        total = tokens.numel() + len(prefilled)
        padding = -total % self.tp if total else self.tp
        on_device, longest = torch.tensor(lengths, dtype=torch.int64, device=device), max(lengths, default=0)
        if not prefilled and not padding:
            self.cache.announce(on_device, longest, each)
            return self._decode(tokens, on_device)
        ends = [len(sequence) for sequence in sequences] + ([padding] if padding else [])
        packing = Packing.from_lengths(ends, device)
        self.cache.announce(on_device, longest, each, packing, rows, padding)
        positions = torch.cat((consecutive_positions(on_device - each, each), packing.positions()))
        whole = torch.cat((tokens.flatten(), tokens.new_tensor(prefilled + [0] * padding)))
        return microbatch_of(whole, Packing.from_lengths([each] * count + ends, device), positions, padding)


def all_logits(inputs: OutputInputs, context: None) -> Tensor:
    """An output processor: logits [T, vocab], the same on every tensor-parallel rank."""
    return inputs.head.logits(inputs.hidden)


def all_logits_and_hidden(inputs: OutputInputs, context: None) -> tuple[Tensor, Tensor]:
    """An output processor: logits [T, vocab] and hidden states [T, H]."""
    return inputs.head.logits(inputs.hidden), inputs.gather(inputs.hidden)


def logits_at(inputs: OutputInputs, indices: Tensor) -> tuple[Tensor, Tensor]:
    """An output processor: logits [m, vocab] of the tokens at `indices` [m], and the hidden states [T, H] of all.

    The same on every tensor-parallel rank. No other token is projected.
    """
    tp, hidden = inputs.head.tp, inputs.gather(inputs.hidden)
    chosen = hidden[indices]
    if tp.size > 1:
        chosen = F.pad(chosen, (0, 0, 0, -len(indices) % tp.size))
        chosen = chosen[slice(*tp.block(len(chosen)))]
    return inputs.head.logits(chosen)[: len(indices)], hidden
