"""One forward of a generator: tokens of rows that go on, whole sequences for rows that begin, no padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.data.microbatch import IGNORE, Microbatch
from postlude.generate.row_cache import RowCache
from postlude.model import OutputInputs
from postlude.ops.decode_attention import consecutive_positions
from postlude.ops.packing import Packing
from postlude.world.mesh import Axis


def packed(
    cache: RowCache,
    tp: Axis,
    going_on: Tensor,
    ends: Sequence[int],
    beginning: Sequence[Sequence[int]] = (),
    *,
    first: int | None = None,
) -> Microbatch:
    """The microbatch of the next forward, which `cache` is told of.

    `going_on` [n, each] int64 are the next tokens of the first n rows, and `ends` how many tokens each row has up to
    the last of them. `beginning` are sequences for the rows from `first` on, by default those after the n. What is
    missing to a multiple of the tensor-parallel ranks, or to anything at all, is filled up at the end.
    """
    device, (count, each) = going_on.device, going_on.shape
    tokens = [token for sequence in beginning for token in sequence]
    lengths = [len(sequence) for sequence in beginning]
    total = going_on.numel() + len(tokens)
    padding = -total % tp.size if total else tp.size
    if padding:
        tokens += [0] * padding
        lengths.append(padding)
    total += padding
    keys = torch.tensor(ends, dtype=torch.int64, device=device)
    prefill = Packing.from_lengths(lengths, device) if lengths else None
    positions = consecutive_positions(keys - each, each)
    next_tokens = going_on.flatten()
    cache.expect(keys, max(ends, default=0), prefill, padding, each=each, first=first)
    places = torch.arange(total, device=device)
    return Microbatch(
        tokens=torch.cat((next_tokens, next_tokens.new_tensor(tokens))) if tokens else next_tokens,
        packing=Packing.from_lengths([each] * count + lengths, device),
        positions=positions if prefill is None else torch.cat((positions, prefill.positions())),
        targets=torch.full_like(places, IGNORE),
        columns={},
        batch_indices=places if not padding else places.masked_fill(places >= total - padding, -1),
        sequences=tuple(range(count + len(lengths))),
        index=0,
        count=1,
        batch_tokens=total,
        batch_targets=0,
        target_count=0,
        padding=padding,
    )


def logits_at(inputs: OutputInputs, places: Tensor) -> tuple[Tensor, Tensor]:
    """An output processor: logits fp32 [m, vocab] after the tokens at `places` [m], and the states [T, H] of all.

    Alike on every tensor-parallel rank. No other position is projected.
    """
    head = inputs.head
    states = inputs.gather(inputs.hidden)
    hidden = states.index_select(0, places)
    missing = -len(places) % head.tp.size
    if missing:
        hidden = F.pad(hidden, (0, 0, 0, missing))
    return head.logits(hidden[slice(*head.tp.block(len(hidden)))])[: len(places)].float(), states
