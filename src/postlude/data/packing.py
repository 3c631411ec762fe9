"""Packs sequences into microbatches of a token budget, and puts per-token results back in the caller's order."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from postlude.data.bins import BinPlan, plan_bins
from postlude.data.microbatch import IGNORE, ROUTING, Microbatch
from postlude.ops.packing import Packing, to_device

RESERVED_COLUMNS = ("tokens", "positions", "targets", "batch_indices")
COUNTS = ("sequences", "all_tokens")
"""Names of counts that are not columns. The sum of the column "mask" at MTP depth 1 is counted as "mask +1"."""
Sequences = Sequence[Sequence[int] | Tensor | NDArray[Any]] | Tensor
Columns = Mapping[str, Sequence[Any] | Tensor | NDArray[Any]]


def pack(
    sequences: Sequence[Sequence[int] | Tensor | NDArray[Any]] | Tensor,
    *,
    budget: int,
    columns: Mapping[str, Sequence[Any] | Tensor | NDArray[Any]] | None = None,
    truncate: bool = False,
    multiple_of: int = 1,
    groups: Sequence[Hashable] | None = None,
    depths: int = 0,
    temperature: float = 1.0,
) -> list[Microbatch]:
    """Packs `sequences` into few microbatches of at most `budget` tokens, balanced in cost.

    Args:
        sequences: the tokens of each sequence, [length] integers.
        budget: the maximum number of tokens in one microbatch.
        columns: by name, one entry per sequence: its value for each token, [length, ...], or one scalar that holds
            for all of them. Tensors keep their dtype; Python and numpy values become bool, int64 or float32. The one
            named "routing", [length, routers, top_k], goes to `Microbatch.routing` unshifted.
        truncate: cut a sequence longer than the budget at its end, and its columns with it, instead of raising.
        multiple_of: the number of microbatches is rounded up to a multiple of this, with empty ones if needed.
        groups: one per sequence; sequences of the same group stay in one microbatch, such as a preference pair.
        depths: the model's number of multi-token-prediction depths (`Microbatch.mtp_microbatches`).
        temperature: the one that the tokens were sampled with (`Microbatch.temperature`).

    Returns:
        The microbatches as `plan_bins` orders them, all on the device of the first sequence. Within one, sequences
        keep the caller's order. Columns are shifted to the predicting position: entry t is the value of token t + 1.
    """
    if len(sequences) == 0:
        raise ValueError("there are no sequences to pack. Skip the step when a batch is empty.")
    lengths = sequence_lengths(sequences)
    lengths = [min(length, budget) for length in lengths] if truncate else lengths
    plan = BinPlan(lengths, plan_bins(lengths, budget, multiple_of=multiple_of, groups=groups))
    bin_indices = range(len(plan.bins))
    members = plan.members(bin_indices)
    content = read_content(sequences, columns or {}, members, members, lengths)
    return build_microbatches(plan, bin_indices, content, depths, temperature)


@dataclass(frozen=True)
class BatchContent:
    """The tokens and columns of some sequences, concatenated: `tokens` [T] int64 and `columns`, each [T, ...]."""

    tokens: Tensor
    columns: Mapping[str, Tensor]


def sequence_lengths(sequences: Sequences) -> list[int]:
    lengths = []
    for index, sequence in enumerate(sequences):
        if isinstance(sequence, Tensor | np.ndarray):
            _check_one_dimensional(index, sequence)
        if len(sequence) == 0:
            raise ValueError(f"sequence {index} has no tokens. Leave out empty sequences.")
        lengths.append(len(sequence))
    return lengths


def _check_one_dimensional(index: int, sequence: Tensor | NDArray[Any]) -> None:
    if sequence.ndim != 1:
        raise ValueError(
            f"sequence {index} has shape {tuple(sequence.shape)}, but a sequence is one-dimensional, [length]. "
            f"Give a list with one such sequence per entry."
        )


def read_content(
    sequences: Sequences, columns: Columns, members: Sequence[int], indices: Sequence[int], kept_lengths: Sequence[int]
) -> BatchContent:
    """Returns the content of the sequences `members` of a batch, in that order, on the device of the first.

    `indices` are their indices in `sequences` and in every column. `kept_lengths` are the lengths of all sequences of
    the batch after truncation.
    """
    for name, entries in columns.items():
        if name in RESERVED_COLUMNS:
            raise ValueError(
                f'a column is named "{name}", but a microbatch has {name} of its own. Choose another name.'
            )
        depth_name = re.fullmatch(r"(.+) \+\d+", name)
        if name in COUNTS or (depth_name and depth_name[1] in ("tokens", *columns)):
            raise ValueError(f'a column is named "{name}", which is the name of a count. Choose another name.')
        if len(entries) != len(sequences):
            raise ValueError(
                f'column "{name}" has {len(entries)} entries for {len(sequences)} sequences. '
                "Give one entry per sequence."
            )
    lengths = [kept_lengths[member] for member in members]
    tokens = _read_sequences([sequences[index] for index in indices], members, lengths)
    full_lengths = [len(sequences[index]) for index in indices]
    return BatchContent(
        tokens,
        {
            name: _read_column(name, [entries[index] for index in indices], members, full_lengths, lengths).to(
                tokens.device
            )
            for name, entries in columns.items()
        },
    )


def build_microbatches(
    plan: BinPlan, bin_indices: Sequence[int], content: BatchContent, depths: int = 0, temperature: float = 1.0
) -> list[Microbatch]:
    """Returns the microbatches `bin_indices` of a plan, from the content of their sequences in order."""
    by_depth = [_build_depth(plan, bin_indices, content, depth, temperature) for depth in range(depths + 1)]
    if not depths:
        return by_depth[0]
    return [replace(microbatch, mtp_microbatches=tuple(mtp)) for microbatch, *mtp in zip(*by_depth, strict=True)]


def _build_depth(
    plan: BinPlan, bin_indices: Sequence[int], content: BatchContent, depth: int, temperature: float
) -> list[Microbatch]:
    """Returns the microbatches whose targets are the tokens `depth + 1` positions later (depth 0: the next token)."""
    members = plan.members(bin_indices)
    device = content.tokens.device
    lengths = np.array([plan.lengths[member] for member in members], dtype=np.int64)
    stops = np.cumsum(lengths)
    token_indices, sequence_starts = np.arange(int(lengths.sum())), stops - lengths
    batch_starts = np.array([plan.starts[member] for member in members], dtype=np.int64)
    indices = token_indices + np.repeat(batch_starts - sequence_starts, lengths)
    positions = token_indices - np.repeat(sequence_starts, lengths)
    if depth:
        indices[positions + depth >= np.repeat(lengths, lengths)] = -1
    sizes = [sum(plan.lengths[member] for member in plan.bins[bin_index]) for bin_index in bin_indices]

    def split(values: Tensor) -> tuple[Tensor, ...]:
        return values.split_with_sizes(sizes)

    def shift(values: Tensor, by: int, fill: int) -> Tensor:
        for _ in range(by):
            values = _shift_to_predictor(values, stops - 1, fill=fill)
        return values

    def count(distance: int, bin_index: int) -> int:
        """Returns the number of positions of a microbatch that have a token `distance` positions later."""
        return sum(max(0, plan.lengths[member] - distance) for member in plan.bins[bin_index])

    tokens, targets = split(shift(content.tokens, depth, 0)), split(shift(content.tokens, depth + 1, IGNORE))
    positions_of, indices_of = (split(to_device(torch.from_numpy(array), device)) for array in (positions, indices))
    columns = {name: split(shift(column, depth + 1, 0)) for name, column in content.columns.items() if name != ROUTING}
    last = to_device(torch.from_numpy(stops - 1), device)
    sequence_counts = [len(plan.bins[bin_index]) for bin_index in bin_indices]
    last_values = {
        name: column[last].split_with_sizes(sequence_counts)
        for name, column in content.columns.items()
        if name != ROUTING
    }
    routing = split(content.columns[ROUTING]) if ROUTING in content.columns and not depth else None
    return [
        Microbatch(
            tokens=tokens[i],
            packing=Packing.from_lengths([plan.lengths[member] for member in plan.bins[bin_index]], device),
            positions=positions_of[i],
            targets=targets[i],
            columns={name: column[i] for name, column in columns.items()},
            last_values={name: values[i] for name, values in last_values.items()},
            batch_indices=indices_of[i],
            sequences=tuple(plan.bins[bin_index]),
            index=bin_index,
            count=len(plan.bins),
            batch_tokens=plan.tokens,
            batch_targets=sum(max(0, length - depth - 1) for length in plan.lengths),
            target_count=count(depth + 1, bin_index),
            padding=sizes[i] - count(depth, bin_index),
            routing=None if routing is None else routing[i],
            tree=None if depth else plan.tree(bin_index),
            temperature=temperature,
        )
        for i, bin_index in enumerate(bin_indices)
    ]


def unpack(microbatches: Sequence[Microbatch], values: Sequence[Tensor], *, shifted: bool = True) -> list[Tensor]:
    """Splits per-position `values` into one tensor per sequence, in the order of the sequences given to `pack`.

    It takes whole sequences: `scatter_add` puts back the values of padded or sharded microbatches.

    Args:
        microbatches: all microbatches of one `pack` call, in any order.
        values: one tensor [T, ...] per microbatch.
        shifted: the values are shifted to the predicting position, as columns are. They are shifted back, so that
            entry i belongs to token i; entry 0, which nothing predicts, is zero. With False, entry i is position i's.

    Returns:
        One tensor [length, ...] per sequence, differentiable with respect to `values`.
    """
    _check_whole_batch(microbatches, values)
    results: dict[int, Tensor] = {}
    for microbatch, rows in zip(microbatches, values, strict=True):
        by_token = _shift_back(rows, microbatch.packing) if shifted else rows
        results |= zip(microbatch.sequences, by_token.split_with_sizes(microbatch.packing.lengths), strict=True)
    return [results[index] for index in range(len(results))]


def scatter_add(microbatch: Microbatch, values: Tensor, output: Tensor, *, shifted: bool = True) -> None:
    """Adds one microbatch's per-position `values` to `output`, at their tokens' indices in the batch.

    The microbatch may be padded or sharded over ranks: with every microbatch of every rank scattered into zeros, the
    sum over ranks is the result of `unpack`, end to end.

    Args:
        microbatch: one of a batch.
        values: [T, ...], of the dtype of `output`.
        output: [tokens of the batch, ...]. Entries of other tokens are unchanged.
        shifted: the values are shifted to the predicting position, so the value at token i's position is added at token
            i + 1, and positions without a target are left out. With False, it is added at token i.
    """
    _check_rows(microbatch, values)
    if output.shape != (microbatch.batch_tokens, *values.shape[1:]):
        expected_shape = (microbatch.batch_tokens, *values.shape[1:])
        raise ValueError(
            f"`output` has shape {tuple(output.shape)}, but the batch has {microbatch.batch_tokens} tokens "
            f"of shape {tuple(values.shape[1:])}. Give zeros of shape {expected_shape}."
        )
    has_value = microbatch.targets != IGNORE if shifted else microbatch.batch_indices >= 0
    # Ignored values add zero to the first token: boolean indexing would wait for the device.
    indices = (microbatch.batch_indices + int(shifted)).where(has_value, 0)
    output.index_add_(0, indices, values.masked_fill(~has_value.view(-1, *[1] * (values.ndim - 1)), 0))


def _shift_to_predictor(values: Tensor, last: NDArray[np.int64], *, fill: int) -> Tensor:
    """Moves each token's value, [T, ...], to the position that predicts it; `last` positions get `fill`."""
    if not _numpy_compatible(values):
        return values.roll(-1, 0).index_fill(0, to_device(torch.from_numpy(last), values.device), fill)
    before = values.numpy()
    after = np.empty_like(before)
    after[:-1] = before[1:]
    after[last] = fill
    return torch.from_numpy(after)


def _concatenate(pieces: Sequence[Tensor]) -> Tensor:
    """Returns torch.cat along the first dimension, by numpy where possible."""
    if not all(map(_numpy_compatible, pieces)):
        return torch.cat(list(pieces))
    return torch.from_numpy(np.concatenate([piece.numpy() for piece in pieces]))


def _numpy_compatible(tensor: Tensor) -> bool:
    """Whether numpy can process a tensor instead of torch: it is on the CPU, has a numpy dtype and needs no gradient.

    A step waits for this work. numpy avoids torch's thread pool, which took a hundred times as long for such small
    tensors on a busy machine.
    """
    return tensor.device.type == "cpu" and not tensor.requires_grad and tensor.dtype not in _NOT_IN_NUMPY


_NOT_IN_NUMPY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def _shift_back(values: Tensor, packing: Packing) -> Tensor:
    """Moves each predicting position's value, [T, ...], to the token it predicts."""
    first_positions = packing.cu_seqlens[:-1].to(values.device, torch.int64)
    return values.roll(1, 0).index_fill(0, first_positions, 0)


def _truncate(values: Tensor, length: int) -> Tensor:
    return values if len(values) == length else values[:length]


def _read_sequences(sequences: Sequence[Any], members: Sequence[int], kept_lengths: Sequence[int]) -> Tensor:
    """Returns the tokens of the sequences `members`, end to end: [T] int64 on one device."""
    tokens: list[Tensor] = []
    for member, sequence, kept_length in zip(members, sequences, kept_lengths, strict=True):
        ids = _read_tensor(f"sequence {member}", sequence)
        _check_one_dimensional(member, ids)
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise ValueError(
                f"sequence {member} holds {ids.dtype}, but tokens are integers. Give the token ids of a tokenizer."
            )
        tokens.append(_truncate(ids, kept_length).to(tokens[0].device if tokens else None, torch.int64))
    all_tokens = _concatenate(tokens) if tokens else torch.zeros(0, dtype=torch.int64)
    if len(all_tokens) and (all_tokens.numpy() if _numpy_compatible(all_tokens) else all_tokens).min() < 0:
        member, lowest = next((m, int(ids.min())) for m, ids in zip(members, tokens, strict=True) if ids.min() < 0)
        raise ValueError(
            f"sequence {member} holds token {lowest}, but the minimum is 0. "
            f"Mark tokens that are not trained on in a column, not in the tokens."
        )
    return all_tokens


def _read_column(
    name: str, entries: Sequence[Any], members: Sequence[int], lengths: Sequence[int], kept_lengths: Sequence[int]
) -> Tensor:
    """Returns a column's values for the kept tokens of the sequences `members`, end to end: [T, ...]."""
    if not entries:
        return torch.zeros(0)
    if {type(entry) for entry in entries} in ({bool}, {int}, {float}):  # one number per sequence
        numbers = _read_tensor(f'column "{name}"', entries).numpy()
        return torch.from_numpy(np.repeat(numbers, kept_lengths))
    pieces = [
        _read_tensor(f'column "{name}" of sequence {member}', entry)
        for member, entry in zip(members, entries, strict=True)
    ]
    if has_no_dtype(entries) and {values.dtype for values in pieces} == {torch.int64, torch.float32}:
        pieces = [values.float() for values in pieces]  # a caller may write 1 and 0.5 in one column
    first = pieces[0]
    for member, values, length in zip(members, pieces, lengths, strict=True):
        if values.ndim > 0 and values.shape[0] != length:
            raise ValueError(
                f'column "{name}" has {len(values)} values for sequence {member}, which has {length} tokens. '
                f"Give {length}, one per token, or one scalar for all."
            )
        if values.dtype != first.dtype or values.shape[1:] != first.shape[1:]:
            raise ValueError(
                f'column "{name}" holds {values.dtype} of shape {tuple(values.shape[1:])} per token for '
                f"sequence {member}, but {first.dtype} of shape {tuple(first.shape[1:])} for sequence {members[0]}. "
                f"Give all the same dtype and shape."
            )
    if all(values.ndim == 0 for values in pieces):
        return torch.stack(pieces).repeat_interleave(torch.tensor(kept_lengths, device=first.device))
    return _concatenate(
        [
            _truncate(values, kept_length) if values.ndim > 0 else values.expand(kept_length)
            for values, kept_length in zip(pieces, kept_lengths, strict=True)
        ]
    )


def has_no_dtype(entries: Sequence[Any] | Tensor | NDArray[Any]) -> bool:
    """Whether a column has no dtype of its own, as none of its entries is a tensor."""
    return not isinstance(entries, Tensor) and not any(isinstance(entry, Tensor) for entry in entries)


def _read_tensor(name: str, value: Any) -> Tensor:
    """Returns a tensor as it is, and Python or numpy values as bool, int64 or float32."""
    if isinstance(value, Tensor):
        return value
    dtypes = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float32}
    try:
        array = np.asarray(value)
        return torch.from_numpy(array.astype(dtypes[array.dtype.kind]))
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"{name} is a {type(value).__name__} that cannot be converted to a tensor of numbers. "
            f"Give a tensor, a numpy array, or Python numbers."
        ) from error


def _check_rows(microbatch: Microbatch, values: Tensor) -> None:
    if values.ndim == 0 or values.shape[0] != len(microbatch):
        raise ValueError(
            f"the values of microbatch {microbatch.index} have shape {tuple(values.shape)}, but it holds "
            f"{len(microbatch)} tokens. Give one value per position, [{len(microbatch)}, ...]."
        )


def _check_whole_batch(microbatches: Sequence[Microbatch], values: Sequence[Tensor]) -> None:
    """Raises ValueError if values do not fit the microbatches, or the microbatches are not one whole batch."""
    if len(values) != len(microbatches):
        raise ValueError(
            f"there are {len(values)} tensors of values for {len(microbatches)} microbatches. Give one per microbatch."
        )
    for microbatch, rows in zip(microbatches, values, strict=True):
        _check_rows(microbatch, rows)
        if microbatch.count != len(microbatches):
            raise ValueError(
                f"microbatch {microbatch.index} is one of {microbatch.count}, but {len(microbatches)} were given. "
                f"Give all microbatches of one pack call."
            )
        if microbatch.padding or microbatch.sequence_rows is not None:
            raise ValueError(
                f"microbatch {microbatch.index} is padded or sharded over ranks, but unpack splits whole sequences. "
                f"Put its values back with scatter_add."
            )
    indices = sorted(index for microbatch in microbatches for index in microbatch.sequences)
    for expected, index in enumerate(indices):
        if index != expected:
            fault = f"sequence {index} appears twice" if index < expected else f"sequence {expected} is missing"
            raise ValueError(f"{fault} in these microbatches. Give each microbatch of one pack call once.")
