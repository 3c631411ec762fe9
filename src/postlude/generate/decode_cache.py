"""DecodeCache: what blocks keep of the sequences that are being generated. `PagedCache` and `RowCache` are the two.

What a block keeps grows with the sequence (keys and values, latents) or has a fixed size (a recurrence, the last inputs
of a convolution). Blocks create their part when they first ask, because only then are its shapes known.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from postlude.model.context import DecodeState, States, Stores
from postlude.ops.packing import Packing

Copy = tuple[int, int, int]
"""Source page, target page, and how many tokens of it."""


class DecodeCache(DecodeState, ABC):
    """Fixed-size states of `rows` rows, each [rows, ...]. Subclasses add what grows."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows = rows
        self.device = device
        self._stores: dict[str, Stores] = {}
        self._states: dict[str, States] = {}
        self._last: dict[str, States] = {}  # after each sequence of the last prefill, [sequences, ...]
        self._prefill: Packing | None = None  # the whole sequences of the current forward, if it has any
        self.choices: dict[str, Tensor] | None = None  # experts chosen in the last forward by block, if recorded

    @property
    def size_in_bytes(self) -> int:
        """Of all stores and states."""
        tensors = [tensor for kept in (*self._stores.values(), *self._states.values()) for tensor in kept]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def record_routing(self, name: str, choice: Tensor) -> None:
        """See `DecodeState.record_routing`."""
        if self.choices is not None:
            self.choices[name] = choice

    def last_states(self, index: int) -> Mapping[str, States]:
        """Returns a copy of the states after one sequence of the last prefill, by block."""
        return {name: tuple(state[index].clone() for state in states) for name, states in self._last.items()}

    def set_last_states(self, name: str, states: States) -> None:
        """Keep states after the sequences of the last prefill, each [sequences, ...], under `name`."""
        self._last[name] = states

    def reset_last_states(self, indices: Sequence[int], names: Sequence[str]) -> None:
        """Set the states of some blocks after these sequences of the last prefill to zero, as before a sequence."""
        for state in (state for name in names for state in self._last.get(name, ())):
            state[indices] = 0

    def enter(self, rows: Tensor, sources: Tensor, older: Sequence[Mapping[str, States]]) -> None:
        """Give `rows` [n] the states that their sequences start from, and forget those of the last prefill.

        `sources` [n] int64 index the sequences of the last prefill, followed by the `older` ones.
        """
        for name in self._last or (older[0] if older else ()):
            for part, state in enumerate(self._row_states(name, older)):
                last = [self._last[name][part]] if name in self._last else []
                before = [torch.stack([states[name][part] for states in older])] if older else []
                state.index_copy_(0, rows, torch.cat((*last, *before)).index_select(0, sources))
        self._last = {}

    def _row_states(self, name: str, older: Sequence[Mapping[str, States]]) -> States:
        """Returns the states of all rows under `name`."""
        if name not in self._states:
            like = self._last[name] if name in self._last else tuple(state[None] for state in older[0][name])
            self._states[name] = tuple(state.new_zeros(self.rows, *state.shape[1:]) for state in like)
        return self._states[name]

    def move(self, sources: Tensor, targets: Tensor, copies: Sequence[Copy]) -> None:
        """Copy the states of rows `sources` to rows `targets`, both [m] int64; `copies` says the same on the host."""
        for states in self._states.values():
            for state in states:
                state.index_copy_(0, targets, state.index_select(0, sources))

    @abstractmethod
    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy what grows from pages to pages."""

    def save(self, pages: Sequence[int], length: int) -> Mapping[str, Stores]:
        """Returns what pages hold of a sequence and will not keep for those who start from it, by block."""
        return {}

    def restore(self, rows: Sequence[int], saved: Mapping[str, Stores]) -> None:
        """Give rows what `save` returned."""

    def clear(self, row: int) -> None:
        """Remove what is not a number from a row."""
