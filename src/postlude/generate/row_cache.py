"""What blocks keep of running sequences: a row for each, the same in every block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from postlude.model.context import AttendCache, DecodeAttend, DecodeStep, Inputs, PrefillAttend, Scan, States, Stores
from postlude.ops.attention import Scores, attend
from postlude.ops.decode_attention import DecodeAttention, consecutive_positions
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
        self._each = 1
        self._later: dict[str, list[States]] = {}  # by block, the states after each token of a row but the first
        self._prefill: Packing | None = None
        self._begun = slice(0, 0)  # rows of the sequences that begin
        self._places = torch.empty(0, dtype=torch.int64, device=device)
        self.choices: dict[str, Tensor] | None = None  # of the last forward by block, where someone records them

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

    def record_routing(self, name: str, choice: Tensor) -> None:
        """See `DecodeState.record_routing`."""
        if self.choices is not None:
            self.choices[name] = choice

    def expect(
        self,
        lengths: Tensor,
        longest: int,
        prefill: Packing | None = None,
        padding: int = 0,
        *,
        each: int = 1,
        first: int | None = None,
    ) -> None:
        """Say what the next forward holds: `each` tokens of the first n rows, then prompts for rows from `first` on.

        `lengths` [n] int64 are the keys of each row, the new ones included, and `longest` their maximum. `prefill`
        packs the prompts, for the rows after the n unless `first` says otherwise; its last `padding` tokens are not
        kept.
        """
        decoded = self._decoded = len(lengths)
        first = decoded if first is None else first
        self._each = each
        self._decode = DecodeAttention(lengths, longest, each) if decoded else None
        self._prefill = prefill
        self._begun = slice(first, first + (0 if prefill is None else prefill.count - (padding > 0)))
        places = consecutive_positions(
            torch.arange(decoded, device=self.device) * self.capacity + (lengths - each), each
        )
        if prefill is not None:
            inside = (prefill.sequence_index() + first) * self.capacity + prefill.positions()
            places = torch.cat((places, inside[: prefill.total - padding]))
        self._places = places

    def attend(self, name: str, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """See `DecodeState.attend`."""

        def go_on(inputs: Inputs, stores: Stores, attend_stores: AttendCache) -> Tensor:
            (query, _, _), (keys, values) = inputs, stores
            return attend_stores(query, keys, values, scores)

        def begin(inputs: Inputs, packing: Packing) -> Tensor:
            query, key, value = inputs
            return attend(query, key, value, packing, packing, scores)

        return self.attend_latents(name, (query, key, value), (key, value), go_on, begin)

    def attend_latents(
        self, name: str, inputs: Inputs, new: Inputs, go_on: DecodeAttend, begin: PrefillAttend
    ) -> Tensor:
        """See `DecodeState.attend_latents`."""
        stores = self.put(name, new)
        if self._prefill is None:
            assert self._decode is not None  # a forward of nothing is not asked for
            return go_on(inputs, stores, self._decode)
        if self._decode is None:
            return begin(inputs, self._prefill)
        decoded = self._decoded * self._each
        going_on = go_on(tuple(each[:decoded] for each in inputs), stores, self._decode)
        return torch.cat((going_on, begin(tuple(each[decoded:] for each in inputs), self._prefill)))

    def recur(self, name: str, inputs: Inputs, step: DecodeStep, scan: Scan) -> Tensor:
        """See `DecodeState.recur`."""
        decoded, outputs = self._decoded * self._each, []
        if decoded:
            outputs.append(self._steps(name, tuple(each[:decoded] for each in inputs), step))
        if self._prefill is not None:
            output, new = scan(tuple(each[decoded:] for each in inputs), self._prefill)
            outputs.append(output)
            begun = self._begun.stop - self._begun.start
            self.keep(name, self._begun, tuple(each[:begun] for each in new))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _steps(self, name: str, inputs: Inputs, step: DecodeStep) -> Tensor:
        """The tokens of every row, one after another: [n · each, ...] -> the same. The first one's states are kept."""
        rows, outputs, after = slice(0, self._decoded), [], []
        states = tuple(each[rows] for each in self._states[name])  # made when these sequences began
        by_row = tuple(each.unflatten(0, (-1, self._each)) for each in inputs)
        for place in range(self._each):
            output, states = step(tuple(each[:, place] for each in by_row), states)
            outputs.append(output)
            after.append(states)
        self.keep(name, rows, after[0])
        self._later[name] = after[1:]
        return torch.stack(outputs, 1).flatten(0, 1)

    def settle(self, counts: Tensor) -> None:
        """Say how many of the tokens of each row that went on are to stay, `counts` [n] int64, from 1 to `each`.

        States then go on from the last that stays. What grows needs no word: later tokens are written over the rest.
        """
        for name, later in self._later.items():
            for number, states in enumerate(later, start=2):
                for own, new in zip(self._states[name], states, strict=True):
                    stays = (counts >= number).view(-1, *(1,) * (new.ndim - 1))
                    own[: len(counts)] = torch.where(stays, new, own[: len(counts)])
        self._later = {}

    def keep(self, name: str, rows: slice, states: States) -> None:
        """Keep states [rows, ...] of these rows under `name`, a block's or one's own."""
        if name not in self._states:
            self._states[name] = tuple(each.new_zeros(self.rows, *each.shape[1:]) for each in states)
        for own, new in zip(self._states[name], states, strict=True):
            own[rows] = new

    def kept(self, name: str) -> States:
        """The states of all rows under `name`."""
        return self._states[name]

    def forget(self, rows: Sequence[int], names: Sequence[str]) -> None:
        """Put the states of some blocks back to the beginning of a sequence, in these rows."""
        for row in rows:
            for states in (self._states[name] for name in names if name in self._states):
                for each in states:
                    each[row] = 0

    def clear(self, rows: Sequence[int]) -> None:
        """Forget all that is kept of these rows: what follows in them meets zeros, since masked keys must be finite."""
        for tensors in (*self._stores.values(), *self._states.values()) if rows else ():
            for each in tensors:
                each[list(rows)] = 0

    def states(self, row: int) -> Mapping[str, States]:
        """A copy of the states of one row, by block."""
        return {name: tuple(each[row].clone() for each in states) for name, states in self._states.items()}

    def set_states(self, row: int, states: Mapping[str, States]) -> None:
        """Give a row the states of another, as `states` returned them."""
        for name, own in states.items():
            self.keep(name, slice(row, row + 1), tuple(each[None] for each in own))

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

    def put(self, name: str, new: Inputs) -> Stores:
        """Keep what is `new` of the forward's tokens, each [T, ...], under `name`, a block's or one's own.

        Returns all that is kept there, each [rows, capacity, ...]: of a row, by the places of its tokens.
        """
        if name not in self._stores:
            self._stores[name] = tuple(each.new_zeros(self.rows, self.capacity, *each.shape[1:]) for each in new)
        stores, kept = self._stores[name], len(self._places)
        for store, each in zip(stores, new, strict=True):
            store.flatten(0, 1).index_copy_(0, self._places, each[:kept])
        return stores

    def stored(self, name: str) -> Stores:
        """All that `put` kept under `name`."""
        return self._stores[name]


def _with_rows(state: Tensor, rows: int) -> Tensor:
    grown = state.new_zeros(rows, *state.shape[1:])
    kept = min(rows, len(state))
    grown[:kept] = state[:kept]
    return grown
