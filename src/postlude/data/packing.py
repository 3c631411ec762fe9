"""Pack sequences into microbatches of a fixed token budget, and put per-token results back in the caller's order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from postlude.data.microbatch import IGNORE, Microbatch
from postlude.ops.packing import Packing

RESERVED_COLUMNS = ("tokens", "positions", "targets", "places")

# A decoder layer of width h spends 24·h² FLOPs on a token's matrices and 2·h·length on its causal attention: they are
# equal at length 12·h, here with h = 4096. Only the balance of the bins depends on it, never their number.
ATTENTION_PARITY_LENGTH = 12 * 4096


def pack(
    sequences: Sequence[Sequence[int] | Tensor | NDArray[Any]] | Tensor,
    *,
    budget: int,
    columns: Mapping[str, Sequence[Any] | Tensor | NDArray[Any]] | None = None,
    truncate: bool = False,
    multiple_of: int = 1,
    groups: Sequence[Hashable] | None = None,
) -> list[Microbatch]:
    """Pack `sequences` into as few microbatches of at most `budget` tokens as the packer can, evened out in cost.

    Args:
        sequences: the tokens of each sequence, [length] integers.
        budget: the most tokens in one microbatch.
        columns: by name, one entry per sequence: its value for each token, [length, ...], or one scalar that holds
            for all of them. Tensors keep their dtype; Python and numpy values become bool, int64 or float32.
        truncate: cut a sequence longer than the budget at its end, and its columns with it, instead of refusing it.
        multiple_of: the number of microbatches is rounded up to a multiple of this, with empty ones if need be.
        groups: one per sequence; sequences of the same group stay in one microbatch, as a pair to compare must.

    Returns:
        The microbatches as `plan_bins` orders them, all on the device of the first sequence. Within one, sequences
        keep the caller's order. Columns are aligned to the predicting position: entry t is the value of token t + 1.
    """
    tokens = _read_sequences(sequences)
    lengths = [len(sequence) for sequence in tokens]
    kept = [min(length, budget) for length in lengths] if truncate else lengths
    bins = plan_bins(kept, budget, multiple_of=multiple_of, groups=groups)

    batch = Packing.from_lengths(kept, tokens[0].device)
    all_tokens = torch.cat([_cut(sequence, keep) for sequence, keep in zip(tokens, kept, strict=True)])
    all_targets = _align(all_tokens, batch, fill=IGNORE)
    all_columns = {
        name: _align(_read_column(name, entries, lengths, kept).to(all_tokens.device), batch, fill=0)
        for name, entries in (columns or {}).items()
    }
    all_positions = batch.positions()
    microbatches = []
    for index, (members, rows) in enumerate(zip(bins, _rows_of_bins(bins, batch), strict=True)):
        microbatches.append(
            Microbatch(
                tokens=all_tokens[rows],
                packing=Packing.from_lengths([kept[member] for member in members], rows.device),
                positions=all_positions[rows],
                targets=all_targets[rows],
                columns={name: column[rows] for name, column in all_columns.items()},
                places=rows,
                sequences=tuple(members),
                index=index,
                count=len(bins),
                batch_tokens=len(all_tokens),
                batch_targets=len(all_tokens) - len(tokens),
                target_count=len(rows) - len(members),
            )
        )
    return microbatches


def unpack(microbatches: Sequence[Microbatch], values: Sequence[Tensor], *, shifted: bool = True) -> list[Tensor]:
    """Split per-position `values` into one tensor per sequence, in the order `pack` was given the sequences.

    For whole sequences: the values of padded or cut microbatches are put back by `scatter`.

    Args:
        microbatches: all microbatches of one `pack` call, in any order.
        values: one tensor [T, ...] per microbatch.
        shifted: the values are aligned to the predicting position, as columns are. They are shifted back, so that
            entry i belongs to token i; entry 0, which nothing predicts, is zero. With False, entry i is position i's.

    Returns:
        One tensor [length, ...] per sequence, differentiable with respect to `values`.
    """
    _check_whole_batch(microbatches, values)
    results: dict[int, Tensor] = {}
    for microbatch, rows in zip(microbatches, values, strict=True):
        by_token = _align_back(rows, microbatch.packing) if shifted else rows
        results |= zip(microbatch.sequences, by_token.split_with_sizes(microbatch.packing.lengths), strict=True)
    return [results[index] for index in range(len(results))]


def scatter(microbatch: Microbatch, values: Tensor, into: Tensor, *, shifted: bool = True) -> None:
    """Add one microbatch's per-position `values` to `into`, at their tokens' places among the caller's.

    The microbatch may be padded or cut over ranks: with every microbatch of every rank scattered into zeros, the sum
    over ranks is what `unpack` would give, laid end to end.

    Args:
        microbatch: one of a batch.
        values: [T, ...], of the dtype of `into`.
        into: [tokens of the batch, ...]. Tokens the microbatch says nothing about stay as they are.
        shifted: the values are aligned to the predicting position, so the value at token i's position is added at token
            i + 1, and positions without a target are left out. With False, it is added at token i.
    """
    if values.ndim == 0 or values.shape[0] != len(microbatch):
        raise ValueError(
            f"the values of microbatch {microbatch.index} have shape {tuple(values.shape)}, but it holds "
            f"{len(microbatch)} tokens. Give one value per position, [{len(microbatch)}, ...]."
        )
    if into.shape != (microbatch.batch_tokens, *values.shape[1:]):
        wanted = (microbatch.batch_tokens, *values.shape[1:])
        raise ValueError(
            f"the values are to go into shape {tuple(into.shape)}, but the batch has {microbatch.batch_tokens} tokens "
            f"of shape {tuple(values.shape[1:])}. Give zeros of shape {wanted}."
        )
    kept = microbatch.targets != IGNORE if shifted else microbatch.places >= 0
    # What is left out adds zero to the first token: picking out the rest would wait for the device.
    places = (microbatch.places + int(shifted)).where(kept, 0)
    into.index_add_(0, places, values.masked_fill(~kept.view(-1, *[1] * (values.ndim - 1)), 0))


def plan_bins(
    lengths: Sequence[int], budget: int, *, multiple_of: int = 1, groups: Sequence[Hashable] | None = None
) -> list[list[int]]:
    """Divide sequences of these `lengths` into bins of at most `budget` tokens: lists of ascending indices.

    The number of bins comes first: the better of best-fit and first-fit decreasing, rounded up to `multiple_of`.
    The cost (matrices plus quadratic attention) is then evened out over that many bins, as far as the budget allows.
    Bins come costliest first and empty ones last, so neighbours, which data-parallel ranks run at the same time, cost
    alike. The same lengths always give the same bins. Sequences of one of `groups`, one per sequence, stay together.
    """
    if groups is not None:
        members = _members(groups, lengths, budget)
        together = plan_bins([sum(lengths[each] for each in part) for part in members], budget, multiple_of=multiple_of)
        return [sorted(each for part in parts for each in members[part]) for parts in together]
    for name, value in (("budget", budget), ("multiple_of", multiple_of)):
        if value < 1:
            raise ValueError(f"{name} is {value}, but the least is 1. Give a positive {name}.")
    for index, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"sequence {index} has length {length}, but the least is 1. Leave out empty sequences.")
        if length > budget:
            raise ValueError(
                f"sequence {index} has {length} tokens, over the budget of {budget}. "
                f"Raise the budget to at least {length}, or pack with truncate=True."
            )
    bins = fewest_bins(lengths, budget)
    bins += [[] for _ in range(-len(bins) % multiple_of)]
    bins = even_bins(bins, lengths, budget)
    return sorted((sorted(members) for members in bins), key=lambda members: -bin_cost(members, lengths))


def _members(groups: Sequence[Hashable], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """The sequences of each group, in the order in which groups appear."""
    if len(groups) != len(lengths):
        raise ValueError(f"there are {len(groups)} groups for {len(lengths)} sequences. Give one per sequence.")
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    for group, part in members.items():
        total = sum(lengths[index] for index in part)
        if total > budget:
            raise ValueError(
                f"sequences {', '.join(map(str, part))} of group {group!r} stay together and have {total} tokens, over "
                f"the budget of {budget}. Raise the budget to at least {total}, or shorten them."
            )
    return list(members.values())


def bin_cost(members: Sequence[int], lengths: Sequence[int]) -> int:
    """Return the relative cost of running these sequences in one microbatch; an integer, so that ties are exact."""
    return sum(_cost(lengths[member]) for member in members)


def fewest_bins(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return the smaller of the best-fit and first-fit decreasing bins: neither is always the better one."""
    longest_first = _longest_first(lengths)
    bins = _best_fit(longest_first, lengths, budget)
    if len(bins) * budget - sum(lengths) < budget:  # no fewer bins could hold the tokens
        return bins
    return min(bins, _first_fit(longest_first, lengths, budget), key=len)


def even_bins(bins: list[list[int]], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return as many bins of more even cost, or `bins` where the budget leaves no room for better ones.

    Of two divisions, the better has the cheaper costliest bin; at a tie the second costliest decides, and so on.
    """

    def unevenness(division: list[list[int]]) -> list[int]:
        return sorted((bin_cost(members, lengths) for members in division), reverse=True)

    evened = _cheapest_fit(_longest_first(lengths), lengths, budget, len(bins))
    return bins if evened is None else min(bins, evened, key=unevenness)


def _cost(length: int) -> int:
    return length * (ATTENTION_PARITY_LENGTH + length)


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])


def _best_fit(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Put each sequence in the fullest bin that can take it."""
    bins: list[list[int]] = []
    bins_by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of bins_by_room, ascending
    for member in order:
        length = lengths[member]
        place = bisect_left(rooms, length)
        if place == len(rooms):
            chosen, room = len(bins), budget
            bins.append([])
        else:
            room = rooms[place]
            chosen = bins_by_room[room].pop()
            if not bins_by_room[room]:
                del bins_by_room[room], rooms[place]
        bins[chosen].append(member)
        if room > length:
            if room - length not in bins_by_room:
                bins_by_room[room - length] = []
                insort(rooms, room - length)
            bins_by_room[room - length].append(chosen)
    return bins


def _first_fit(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Put each sequence in the first bin that can take it, found by descent in a tree of the most room."""
    bins: list[list[int]] = []
    leaves = 1 << (len(order) - 1).bit_length()
    most_room = [budget] * (2 * leaves)  # node k is over nodes 2k and 2k + 1; the last `leaves` nodes are the bins
    for member in order:
        node = 1
        while node < leaves:
            node *= 2
            node += most_room[node] < lengths[member]
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(member)
        most_room[node] -= lengths[member]
        while node > 1:
            node //= 2
            most_room[node] = max(most_room[2 * node], most_room[2 * node + 1])
    return bins


def _cheapest_fit(order: Sequence[int], lengths: Sequence[int], budget: int, count: int) -> list[list[int]] | None:
    """Put each sequence in the cheapest of `count` bins that can take it; None when at some point none can.

    `order` is longest first: a bin found too full is set aside until the lengths have come down to its room.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    room = [budget] * count
    open_bins = [(0, chosen) for chosen in range(count)]  # (cost, bin)
    set_aside: list[tuple[int, int, int]] = []  # (-room, cost, bin)
    heapify(open_bins)
    for member in order:
        length = lengths[member]
        while set_aside and -set_aside[0][0] >= length:
            heappush(open_bins, heappop(set_aside)[1:])
        while open_bins and room[open_bins[0][1]] < length:
            cost, chosen = heappop(open_bins)
            heappush(set_aside, (-room[chosen], cost, chosen))
        if not open_bins:
            return None
        cost, chosen = heappop(open_bins)
        bins[chosen].append(member)
        room[chosen] -= length
        heappush(open_bins, (cost + _cost(length), chosen))
    return bins


def _align(values: Tensor, packing: Packing, *, fill: int) -> Tensor:
    """Move each token's value, [T, ...], to the position that predicts it."""
    last_positions = packing.cu_seqlens[1:].to(torch.int64) - 1
    return values.roll(-1, 0).index_fill(0, last_positions, fill)


def _align_back(values: Tensor, packing: Packing) -> Tensor:
    """Move each predicting position's value, [T, ...], to the token it predicts."""
    first_positions = packing.cu_seqlens[:-1].to(values.device, torch.int64)
    return values.roll(1, 0).index_fill(0, first_positions, 0)


def _rows_of_bins(bins: list[list[int]], batch: Packing) -> tuple[Tensor, ...]:
    """Return for each bin the rows of the batch that its sequences occupy, [T] int64."""
    order = [member for members in bins for member in members]
    reordered = Packing.from_lengths([batch.lengths[member] for member in order], batch.cu_seqlens.device)
    rows = batch.cu_seqlens[order][reordered.sequence_index()] + reordered.positions()
    return rows.split_with_sizes([sum(batch.lengths[member] for member in members) for members in bins])


def _cut(values: Tensor, keep: int) -> Tensor:
    return values if len(values) == keep else values[:keep]


def _read_sequences(sequences: Sequence[Sequence[int] | Tensor | NDArray[Any]] | Tensor) -> list[Tensor]:
    """Return the tokens of each sequence as [length] int64 on one device."""
    if len(sequences) == 0:
        raise ValueError("there are no sequences to pack, but the least is 1. Skip the step when a batch is empty.")
    tokens: list[Tensor] = []
    for index, sequence in enumerate(sequences):
        read = _read_tensor(f"sequence {index}", sequence)
        if read.ndim != 1:
            raise ValueError(
                f"sequence {index} has shape {tuple(read.shape)}, but a sequence is one-dimensional, [length]. "
                f"Give a list with one such sequence per entry."
            )
        if len(read) == 0:
            raise ValueError(f"sequence {index} has no tokens, but the least is 1. Leave out empty sequences.")
        if read.is_floating_point() or read.is_complex() or read.dtype == torch.bool:
            raise ValueError(
                f"sequence {index} holds {read.dtype}, but tokens are integers. Give the token ids of a tokenizer."
            )
        tokens.append(read.to(tokens[0].device if tokens else None, torch.int64))
    if torch.cat(tokens).min() < 0:
        index, lowest = next((index, int(each.min())) for index, each in enumerate(tokens) if each.min() < 0)
        raise ValueError(
            f"sequence {index} holds token {lowest}, but the least is 0. "
            f"Mark what is not to be learned in a column, not in the tokens."
        )
    return tokens


def _read_column(
    name: str, entries: Sequence[Any] | Tensor | NDArray[Any], lengths: list[int], kept: list[int]
) -> Tensor:
    """Return the column's values for all kept tokens in the caller's order, [tokens of the batch, ...]."""
    if name in RESERVED_COLUMNS:
        raise ValueError(f'a column is named "{name}", but a microbatch has {name} of its own. Choose another name.')
    if len(entries) != len(lengths):
        raise ValueError(
            f'column "{name}" has {len(entries)} entries for {len(lengths)} sequences. Give one entry per sequence.'
        )
    pieces = [_read_tensor(f'column "{name}" of sequence {index}', entry) for index, entry in enumerate(entries)]
    plain = not any(isinstance(entry, Tensor) for entry in entries)
    if plain and {values.dtype for values in pieces} == {torch.int64, torch.float32}:
        pieces = [values.float() for values in pieces]  # 1 and 0.5 are numbers of one kind to whoever writes them
    first = pieces[0]
    for index, (values, length) in enumerate(zip(pieces, lengths, strict=True)):
        if values.ndim > 0 and values.shape[0] != length:
            raise ValueError(
                f'column "{name}" has {len(values)} values for sequence {index}, which has {length} tokens. '
                f"Give {length}, one per token, or one scalar for all."
            )
        if values.dtype != first.dtype or values.shape[1:] != first.shape[1:]:
            raise ValueError(
                f'column "{name}" holds {values.dtype} of shape {tuple(values.shape[1:])} per token for '
                f"sequence {index}, but {first.dtype} of shape {tuple(first.shape[1:])} for sequence 0. "
                f"Give all the same dtype and shape."
            )
    if all(values.ndim == 0 for values in pieces):
        return torch.stack(pieces).repeat_interleave(torch.tensor(kept, device=pieces[0].device))
    return torch.cat(
        [
            _cut(values, keep) if values.ndim > 0 else values.expand(keep)
            for values, keep in zip(pieces, kept, strict=True)
        ]
    )


def _read_tensor(what: str, value: Any) -> Tensor:
    """Return a tensor as it is, and Python or numpy values as bool, int64 or float32."""
    if isinstance(value, Tensor):
        return value
    dtypes = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float32}
    try:
        array = np.asarray(value)
        return torch.from_numpy(array.astype(dtypes[array.dtype.kind]))
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"{what} is a {type(value).__name__} that does not read as numbers of one shape. "
            f"Give a tensor, a numpy array, or Python numbers."
        ) from error


def _check_whole_batch(microbatches: Sequence[Microbatch], values: Sequence[Tensor]) -> None:
    """Refuse values that do not fit the microbatches, and microbatches that are not one whole batch."""
    if len(values) != len(microbatches):
        raise ValueError(
            f"there are {len(values)} tensors of values for {len(microbatches)} microbatches. Give one per microbatch."
        )
    for microbatch, rows in zip(microbatches, values, strict=True):
        if rows.ndim == 0 or rows.shape[0] != len(microbatch):
            raise ValueError(
                f"the values of microbatch {microbatch.index} have shape {tuple(rows.shape)}, but it holds "
                f"{len(microbatch)} tokens. Give one value per position, [{len(microbatch)}, ...]."
            )
        if microbatch.count != len(microbatches):
            raise ValueError(
                f"microbatch {microbatch.index} is one of {microbatch.count}, but {len(microbatches)} were given. "
                f"Give all microbatches of one pack call."
            )
        if microbatch.padding or microbatch.context is not None:
            raise ValueError(
                f"microbatch {microbatch.index} is padded or cut over ranks, but unpack splits whole sequences. "
                f"Put its values back with scatter."
            )
    found = sorted(index for microbatch in microbatches for index in microbatch.sequences)
    for expected, index in enumerate(found):
        if index != expected:
            fault = f"sequence {index} is there twice" if index < expected else f"sequence {expected} is missing"
            raise ValueError(f"{fault} in these microbatches. Give each microbatch of one pack call once.")
