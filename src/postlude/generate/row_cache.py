"""RowCache: one page a sequence, which grows, so that attention reads keys and values where they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from postlude.generate.decode_cache import Copy, DecodeCache
from postlude.model.context import AttendCache, DecodeAttend, DecodeStep, Inputs, PrefillAttend, Scan, States, Stores
from postlude.ops.attention import ScoreConfig, attend
from postlude.ops.decode_attention import DecodeAttention, consecutive_positions
from postlude.ops.packing import Packing


class RowCache(DecodeCache):
    """Page i belongs to row i and has room for `capacity` tokens: stores [rows, capacity, kv_heads, width].

    The running sequences hold rows 0 to n - 1, so that one view covers them.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(0, device)
        self.capacity = 0
        self._attention: DecodeAttention | None = None
        self._decoded, self._each, self._sequences = 0, 1, 0
        self._later: dict[str, list[States]] = {}  # by block, the states after each token of a row but the first
        self._places = torch.empty(0, dtype=torch.int64, device=device)  # of the forward's tokens, row by row

    def resize(self, rows: int, capacity: int) -> None:
        """Change the room there is. What lies within the old and the new bounds is kept."""
        if (rows, capacity) == (self.rows, self.capacity):
            return
        kept_rows, kept = min(rows, self.rows), min(capacity, self.capacity)
        for name, stores in self._stores.items():
            # One block at a time, so that the peak is the cache and one block. Zero, since masked keys must be finite.
            grown = tuple(store.new_zeros(rows, capacity, *store.shape[2:]) for store in stores)
            for new, old in zip(grown, stores, strict=True):
                new[:kept_rows, :kept] = old[:kept_rows, :kept]
            self._stores[name] = grown
        for name, states in self._states.items() if rows != self.rows else ():
            self._states[name] = tuple(_with_rows(state, rows) for state in states)
        self.rows, self.capacity = rows, capacity

    def announce(
        self,
        lengths: Tensor,
        longest: int,
        each: int = 1,
        prefill: Packing | None = None,
        rows: Sequence[int] = (),
        padding: int = 0,
    ) -> None:
        """Say what the next forward holds: the newest `each` tokens of the first n rows, then whole sequences.

        `lengths` [n] int64 are the tokens of each row with these, and `longest` their maximum. `prefill` packs the
        sequences that start in `rows`; its last `padding` tokens, a sequence of their own, are not kept.
        """
        self._decoded, self._each, self._prefill, self._sequences = len(lengths), each, prefill, len(rows)
        self._attention = DecodeAttention(lengths, longest, each) if len(lengths) else None
        starts = torch.arange(len(lengths), device=self.device) * self.capacity + (lengths - each)
        self._places = consecutive_positions(starts, each)
        if prefill is not None:
            targets = torch.tensor([*rows, *([0] if padding else [])], device=self.device)
            places = targets[prefill.sequence_index()] * self.capacity + prefill.positions()
            self._places = torch.cat((self._places, places[: prefill.total - padding]))

    def attend(self, name: str, query: Tensor, key: Tensor, value: Tensor, score_config: ScoreConfig) -> Tensor:
        """See `DecodeState.attend`."""

        def decode(inputs: Inputs, stores: Stores, attend_cache: AttendCache) -> Tensor:
            (query, _, _), (keys, values) = inputs, stores
            return attend_cache(query, keys, values, score_config)

        def prefill(inputs: Inputs, packing: Packing) -> Tensor:
            query, key, value = inputs
            return attend(query, key, value, packing, packing, score_config)

        return self.attend_latents(name, (query, key, value), (key, value), decode, prefill)

    def attend_latents(
        self, name: str, inputs: Inputs, new: Inputs, decode: DecodeAttend, prefill: PrefillAttend
    ) -> Tensor:
        """See `DecodeState.attend_latents`."""
        stores = self.put(name, new)
        if self._prefill is None:
            assert self._attention is not None  # a forward of nothing is not asked for
            return decode(inputs, stores, self._attention)
        if self._attention is None:
            return prefill(inputs, self._prefill)
        decoded = self._decoded * self._each
        outputs = decode(tuple(part[:decoded] for part in inputs), stores, self._attention)
        return torch.cat((outputs, prefill(tuple(part[decoded:] for part in inputs), self._prefill)))

    def recur(self, name: str, inputs: Inputs, step: DecodeStep, scan: Scan) -> Tensor:
        """See `DecodeState.recur`."""
        decoded, outputs = self._decoded * self._each, []
        if decoded:
            outputs.append(self._recur_rows(name, tuple(part[:decoded] for part in inputs), step))
        if self._prefill is not None:
            output, states = scan(tuple(part[decoded:] for part in inputs), self._prefill)
            outputs.append(output)
            self.set_last_states(name, tuple(state[: self._sequences] for state in states))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _recur_rows(self, name: str, inputs: Inputs, step: DecodeStep) -> Tensor:
        """The tokens of every row one after another, [n · each, ...] -> the same. Keeps the states after the first."""
        by_row = tuple(part.unflatten(0, (-1, self._each)) for part in inputs)
        rows, outputs, after = slice(0, self._decoded), [], []
        states = tuple(state[rows] for state in self._states[name])
        for index in range(self._each):
            output, states = step(tuple(part[:, index] for part in by_row), states)
            outputs.append(output)
            after.append(states)
        self.keep(name, rows, after[0])
        if self._each == 1:
            return outputs[0]
        self._later[name] = after[1:]
        return torch.stack(outputs, 1).flatten(0, 1)

    def settle(self, counts: Tensor) -> None:
        """Keep the first `counts` [n] int64 of the tokens that each of the first n rows decoded, from 1 to `each`.

        States go on from the last that is kept. Keys need nothing: later tokens are written over the rest.
        """
        for name, later in self._later.items():
            for number, states in enumerate(later, start=2):
                for state, new in zip(self._states[name], states, strict=True):
                    kept = (counts >= number).view(-1, *(1,) * (new.ndim - 1))
                    state[: len(counts)] = torch.where(kept, new, state[: len(counts)])
        self._later = {}

    def keep(self, name: str, rows: slice, states: States) -> None:
        """Keep states [rows, ...] of these rows under `name`."""
        for state, new in zip(self._states[name], states, strict=True):
            state[rows] = new

    def kept(self, name: str) -> States:
        """Returns the states of all rows under `name`."""
        return self._states[name]

    def move(self, sources: Tensor, targets: Tensor, copies: Sequence[Copy]) -> None:
        """See `DecodeCache`. Moves what grows as well."""
        super().move(sources, targets, copies)
        self.copy(copies)

    def copy(self, copies: Sequence[Copy]) -> None:
        """See `DecodeCache`. Reads all before it writes any."""
        packing = Packing.from_lengths([length for _, _, length in copies], self.device)
        rows = torch.tensor([copy[:2] for copy in copies], device=self.device)[packing.sequence_index()]  # [T, 2]
        sources, targets = (rows * self.capacity + packing.positions()[:, None]).unbind(1)
        for stores in self._stores.values():
            for store in stores:
                flat = store.flatten(0, 1)
                flat.index_copy_(0, targets, flat.index_select(0, sources))

    def save(self, pages: Sequence[int], length: int) -> Mapping[str, Stores]:
        """See `DecodeCache`. Returns copies, because the page belongs to a row."""
        (row,) = pages
        return {name: tuple(store[row, :length].clone() for store in stores) for name, stores in self._stores.items()}

    def restore(self, rows: Sequence[int], saved: Mapping[str, Stores]) -> None:
        """See `DecodeCache`."""
        for name, parts in saved.items():
            for store, part in zip(self._stores[name], parts, strict=True):
                store[rows, : len(part)] = part

    def clear(self, row: int) -> None:
        """Set what is kept of a row to zero, because masked keys must be finite."""
        for tensors in (*self._stores.values(), *self._states.values()):
            for tensor in tensors:
                tensor[row] = 0

    def put(self, name: str, new: Inputs) -> Stores:
        """Keep what is `new` of the forward's tokens, each [T, ...], under `name`.

        Returns all that is kept there, each [rows, capacity, ...], by the positions of a row's tokens.
        """
        if name not in self._stores:
            self._stores[name] = tuple(part.new_zeros(self.rows, self.capacity, *part.shape[1:]) for part in new)
        stores, kept = self._stores[name], len(self._places)
        for store, part in zip(stores, new, strict=True):
            store.flatten(0, 1).index_copy_(0, self._places, part[:kept])
        return stores

    def stored(self, name: str) -> Stores:
        """Returns all that `put` kept under `name`."""
        return self._stores[name]


def _with_rows(state: Tensor, rows: int) -> Tensor:
    resized = state.new_zeros(rows, *state.shape[1:])
    kept = min(rows, len(state))
    resized[:kept] = state[:kept]
    return resized
