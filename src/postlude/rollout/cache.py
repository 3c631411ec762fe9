"""What blocks keep of running sequences: a row for each, the same in every block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from postlude.model.context import AttendStores, Begin, GoOn, Inputs, Recur, Scan, States, Stores
from postlude.ops.attention import Scores, attend
from postlude.ops.decode_attention import DecodeAttention
from postlude.ops.packing import Packing


class RowCache:
    """What grows with each of `rows` sequences, with room for `capacity` tokens: [rows, capacity, kv_heads, width].

    Beside them, states of blocks that need one of a fixed size for each sequence, [rows, ...].

    The running sequences hold rows 0 to n - 1, so that one view covers them and no key is copied to be attended to.
    A block's stores are made when it first asks, which is when its shapes are known.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rows = 0
        self.capacity = 0
        self._stores: dict[str, Stores] = {}
        self._states: dict[str, States] = {}
        self._decode: DecodeAttention | None = None
        self._decoded = 0
        self._prefill: Packing | None = None
        self._begun = 0  # sequences of the prefill that are kept
        self._places = torch.empty(0, dtype=torch.int64, device=device)

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

    def expect(self, lengths: Tensor, longest: int, prefill: Packing | None = None, padding: int = 0) -> None:
        """Say what the next forward holds: one token of each of the first n rows, then prompts for the rows after.

        `lengths` [n] int64 are the keys of each row, the new one included, and `longest` their maximum. `prefill` packs
        the prompts; its last `padding` tokens are not kept.
        """
        self._decoded = len(lengths)
        self._decode = DecodeAttention(lengths, longest) if self._decoded else None
        self._prefill = prefill
        self._begun = 0 if prefill is None else prefill.count - (padding > 0)
        places = torch.arange(self._decoded, device=self.device) * self.capacity + lengths - 1
        if prefill is not None:
            inside = (prefill.sequence_index() + self._decoded) * self.capacity + prefill.positions()
            places = torch.cat((places, inside[: prefill.total - padding]))
        self._places = places

    def attend(self, name: str, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """See `Running.attend`."""

        def go_on(inputs: Inputs, stores: Stores, attend_stores: AttendStores) -> Tensor:
            (query, _, _), (keys, values) = inputs, stores
            return attend_stores(query, keys, values, scores)

        def begin(inputs: Inputs, packing: Packing) -> Tensor:
            query, key, value = inputs
            return attend(query, key, value, packing, packing, scores)

        return self.grow(name, (query, key, value), (key, value), go_on, begin)

    def grow(self, name: str, inputs: Inputs, new: Inputs, go_on: GoOn, begin: Begin) -> Tensor:
        """See `Running.grow`."""
        stores = self._stores_of(name, new)
        for store, each in zip(stores, new, strict=True):
            store.flatten(0, 1).index_copy_(0, self._places, each[: len(self._places)])
        decoded, outputs = self._decoded, []
        if self._decode is not None:
            outputs.append(go_on(tuple(each[:decoded] for each in inputs), stores, self._decode))
        if self._prefill is not None:
            outputs.append(begin(tuple(each[decoded:] for each in inputs), self._prefill))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def recur(self, name: str, inputs: Inputs, step: Recur, scan: Scan) -> Tensor:
        """See `Running.recur`."""
        decoded, outputs = self._decoded, []
        if decoded:
            states = self._states[name]  # made when these sequences began
            output, new = step(tuple(each[:decoded] for each in inputs), tuple(each[:decoded] for each in states))
            outputs.append(output)
            self._keep(name, slice(0, decoded), new)
        if self._prefill is not None:
            output, new = scan(tuple(each[decoded:] for each in inputs), self._prefill)
            outputs.append(output)
            self._keep(name, slice(decoded, decoded + self._begun), tuple(each[: self._begun] for each in new))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def states(self, row: int) -> Mapping[str, States]:
        """A copy of the states of one row, by block."""
        return {name: tuple(each[row].clone() for each in states) for name, states in self._states.items()}

    def set_states(self, row: int, states: Mapping[str, States]) -> None:
        """Give a row the states of another, as `states` returned them."""
        for name, own in states.items():
            self._keep(name, slice(row, row + 1), tuple(each[None] for each in own))

    def copy(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """For each (source row, target row, length): the target's first keys become the source's, and its states."""
        moves = [move for move in moves if move[0] != move[1]]
        if not moves:
            return
        lengths = Packing.from_lengths([length for _, _, length in moves], self.device)
        rows = torch.tensor([move[:2] for move in moves], device=self.device)[lengths.sequence_index()]  # [T, 2]
        source, target = (rows * self.capacity + lengths.positions()[:, None]).unbind(1)
        for stores in self._stores.values():
            for store in stores:
                flat = store.flatten(0, 1)
                flat.index_copy_(0, target, flat.index_select(0, source))
        source, target = torch.tensor([move[:2] for move in moves], device=self.device).unbind(1)
        for states in self._states.values():
            for state in states:
                state.index_copy_(0, target, state.index_select(0, source))

    def _stores_of(self, name: str, new: Inputs) -> Stores:
        if name not in self._stores:
            self._stores[name] = tuple(each.new_zeros(self.rows, self.capacity, *each.shape[1:]) for each in new)
        return self._stores[name]

    def _keep(self, name: str, rows: slice, states: States) -> None:
        if name not in self._states:
            self._states[name] = tuple(each.new_zeros(self.rows, *each.shape[1:]) for each in states)
        for own, new in zip(self._states[name], states, strict=True):
            own[rows] = new


def _with_rows(state: Tensor, rows: int) -> Tensor:
    grown = state.new_zeros(rows, *state.shape[1:])
    kept = min(rows, len(state))
    grown[:kept] = state[:kept]
    return grown
