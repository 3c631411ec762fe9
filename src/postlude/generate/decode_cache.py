"""DecodeCache: the `DecodeState` of a generator. `PagedCache` and `RowCache` implement it.

A block keeps stores, which grow with the sequence (keys, values, latents), or states of fixed size (a recurrence, the
last inputs of a convolution). Both are allocated when the block first uses them, since only then are the shapes known.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from postlude.model.context import DecodeState, Inputs, RecurrentScan, RecurrentStep, States, Stores
from postlude.ops.packing import Packing, to_device

PageCopy = tuple[int, int, int]
"""Source page, target page, and the number of tokens to copy."""


@dataclass(frozen=True)
class PrefillSequence:
    """A sequence to prefill, and its pages, which have the keys and values of the first `cached` tokens already."""

    tokens: Sequence[int]
    """All of them, the cached ones too."""
    pages: Sequence[int]
    cached: int = 0

    @property
    def new_tokens(self) -> Sequence[int]:
        """The tokens that a forward has to run: at least one."""
        return self.tokens[self.cached :]


class DecodeCache(DecodeState, ABC):
    """States of `rows` rows, [rows, ...] each. Subclasses add the stores."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows = rows
        self.device = device
        self._stores: dict[str, Stores] = {}
        self._states: dict[str, States] = {}
        self._prefill_states: dict[str, States] = {}  # states after each sequence of the last prefill, [sequences, ...]
        self._draft_states: dict[str, list[States]] = {}  # by block, the states after each draft token
        # The current forward: see `begin_forward`.
        self._lengths = torch.empty(0, dtype=torch.int64, device=device)
        self._tokens_per_row, self._sequence_count, self._padding = 1, 0, 0
        self._prefill: Packing | None = None
        self._prefill_keys: Packing | None = None
        self.recurrent = False  # whether a block keeps states, which are those after the newest token alone
        self.choices: dict[str, Tensor] | None = None  # by block, experts chosen in the last forward, if recorded

    @property
    def size_in_bytes(self) -> int:
        """Bytes of all stores and states."""
        tensors = [tensor for stored in (*self._stores.values(), *self._states.values()) for tensor in stored]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def begin_forward(
        self,
        lengths: Tensor,
        tokens_per_row: int = 1,
        sequences: Sequence[PrefillSequence] = (),
        padding: int = 0,
    ) -> tuple[Packing, Tensor] | None:
        """Sets up a forward of the newest `tokens_per_row` tokens of the first n rows, then of `sequences`.

        `lengths` [n] int64 are the rows' numbers of tokens including these, 0 in idle rows. After the sequences come
        `padding` tokens, a separate sequence, which is not stored. Returns the packing of the sequences' new tokens and
        of the padding, and their positions [T] int64; None without either.
        """
        self._lengths, self._tokens_per_row = lengths, tokens_per_row
        self._sequence_count, self._padding = len(sequences), padding
        self._prefill = self._prefill_keys = None
        if not sequences and not padding:
            self._set_slots(sequences, lengths[:0])
            return None
        cached = [sequence.cached for sequence in sequences] + ([0] if padding else [])
        counts = [len(sequence.new_tokens) for sequence in sequences] + ([padding] if padding else [])
        self._prefill = self._prefill_keys = prefill = Packing.from_lengths(counts, self.device)
        positions = prefill.positions()
        if any(cached):
            keys = [before + count for before, count in zip(cached, counts, strict=True)]
            self._prefill_keys = Packing.from_lengths(keys, self.device)
            positions = positions + to_device(torch.tensor(cached), self.device)[prefill.sequence_index()]
        self._set_slots(sequences, positions)
        return prefill, positions

    @abstractmethod
    def _set_slots(self, sequences: Sequence[PrefillSequence], positions: Tensor) -> None:
        """Sets where the stores take the tokens of the current forward. `positions` are those of the new tokens."""

    def record_routing(self, name: str, choice: Tensor) -> None:
        """See `DecodeState.record_routing`."""
        if self.choices is not None:
            self.choices[name] = choice

    def prefill_states(self, index: int) -> Mapping[str, States]:
        """Returns a copy of the states after one sequence of the last prefill, by block."""
        return {name: tuple(state[index].clone() for state in states) for name, states in self._prefill_states.items()}

    def set_prefill_states(self, name: str, states: States) -> None:
        """Sets the states of `name` after the sequences of the last prefill, [sequences, ...] each."""
        self._prefill_states[name] = states

    def reset_prefill_states(self, indices: Sequence[int], names: Sequence[str]) -> None:
        """Zeroes the states of some blocks after these sequences of the last prefill, as before their first token."""
        for state in (state for name in names for state in self._prefill_states.get(name, ())):
            state[indices] = 0

    def start_rows(self, rows: Tensor, sources: Tensor, older: Sequence[Mapping[str, States]]) -> None:
        """Sets the states that the sequences of `rows` [n] start from, and frees those of the last prefill.

        `sources` [n] int64 are indices of sequences: those of the last prefill, followed by the `older` ones.
        """
        for name in dict.fromkeys((*self._prefill_states, *(older[0] if older else ()))):
            for part, state in enumerate(self._row_states(name, older)):
                last = [self._prefill_states[name][part]] if name in self._prefill_states else []
                before = [torch.stack([states[name][part] for states in older])] if older else []
                state.index_copy_(0, rows, torch.cat((*last, *before)).index_select(0, sources))
        self._prefill_states = {}

    def _row_states(self, name: str, older: Sequence[Mapping[str, States]]) -> States:
        """Returns the states of all rows under `name`."""
        if name not in self._states:
            like = (
                self._prefill_states[name]
                if name in self._prefill_states
                else tuple(state[None] for state in older[0][name])
            )
            self._states[name] = tuple(state.new_zeros(self.rows, *state.shape[1:]) for state in like)
        return self._states[name]

    def states(self, name: str) -> States:
        """Returns the states of all rows under `name`."""
        return self._states[name]

    def set_states(self, name: str, states: States, running: Tensor | None = None) -> None:
        """Sets the states of the first n rows under `name`, [n, ...] each; of those alone that are `running` [n]."""
        for state, new in zip(self._states[name], states, strict=True):
            rows = state[: len(new)]
            rows.copy_(new if running is None else torch.where(_per_row(running, new), new, rows))

    def recur(self, name: str, inputs: Inputs, step: RecurrentStep, scan: RecurrentScan) -> Tensor:
        """See `DecodeState.recur`."""
        decoded, outputs = len(self._lengths) * self._tokens_per_row, []
        if decoded:
            outputs.append(self._recur_rows(name, tuple(part[:decoded] for part in inputs), step))
        if self._prefill is not None:
            assert self._prefill_keys is self._prefill, "states have no earlier tokens to continue from"
            self.recurrent = True
            output, states = scan(tuple(part[decoded:] for part in inputs), self._prefill)
            outputs.append(output)
            self.set_prefill_states(name, tuple(state[: self._sequence_count] for state in states))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _recur_rows(self, name: str, inputs: Inputs, step: RecurrentStep) -> Tensor:
        """Runs the tokens of each row in order, [n · tokens_per_row, ...]. Keeps the states after the first token."""
        tokens_per_row = self._tokens_per_row
        by_row = tuple(part.unflatten(0, (-1, tokens_per_row)) for part in inputs)
        outputs, running = [], self._running_rows()
        later: list[States] = []
        states = tuple(state[: len(by_row[0])] for state in self._states[name])
        for index in range(tokens_per_row):
            if index:
                states = tuple(state.clone() for state in states)
                later.append(states)
            outputs.append(step(tuple(part[:, index] for part in by_row), states, running))
        if tokens_per_row == 1:
            return outputs[0]
        self._draft_states[name] = later
        return torch.stack(outputs, 1).flatten(0, 1)

    def _running_rows(self) -> Tensor | None:
        """Returns which of the forward's rows are not idle, [n] bool; None if all run."""
        return None

    def accept(self, counts: Tensor) -> None:
        """Accepts the first `counts` [n] int64 tokens of each of the first n rows; at most 1 in an idle row.

        States continue after the last accepted token. Rejected keys and values are overwritten by later tokens.
        """
        for name, later in self._draft_states.items():
            for number, states in enumerate(later, start=2):
                self.set_states(name, states, counts >= number)
        self._draft_states = {}

    def move(self, sources: Tensor, targets: Tensor, copies: Sequence[PageCopy]) -> None:
        """Copies the states of rows `sources` to rows `targets`, both [m] int64. `copies` has the same on the host."""
        for states in self._states.values():
            for state in states:
                state.index_copy_(0, targets, state.index_select(0, sources))

    @abstractmethod
    def append(self, name: str, new: Inputs) -> Stores:
        """Stores `new` tensors of the forward's tokens, [T, ...] each, under `name`. Returns the stores."""

    def stores(self, name: str) -> Stores:
        """Returns the stores under `name`."""
        return self._stores[name]

    @abstractmethod
    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copies stores from pages to pages."""

    def save(self, pages: Sequence[int], stop: int, start: int = 0) -> Mapping[str, Stores]:
        """Returns the stores of a sequence's tokens by block, if its pages do not keep them for others; else {}."""
        return {}

    def restore(self, rows: Sequence[int], saved: Sequence[Mapping[str, Stores]]) -> None:
        """Writes what `save` returned for the first tokens of a sequence, in parts, to these rows."""

    def clear(self, row: int) -> None:
        """Removes NaNs from a row."""


def _per_row(mask: Tensor, states: Tensor) -> Tensor:
    """Returns a mask [n] with the dimensions of states [n, ...]."""
    return mask.view(-1, *(1,) * (states.ndim - 1))
