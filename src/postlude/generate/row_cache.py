"""RowCache: one growing page per sequence, so that attention reads keys and values without a page table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from postlude.generate.decode_cache import DecodeCache, PageCopy, PrefillSequence
from postlude.model.context import (
    AttendCache,
    DecodeAttend,
    Inputs,
    PrefillAttend,
    Stores,
)
from postlude.ops.attention import ScoreConfig, attend
from postlude.ops.decode_attention import DecodeAttention, consecutive_positions
from postlude.ops.fp8_kv import round_heads
from postlude.ops.packing import Packing


class RowCache(DecodeCache):
    """Page i belongs to row i and has room for `capacity` tokens: stores are [rows, capacity, kv_heads, width] each.

    The running sequences are in rows 0 to n - 1, so that one view covers them. With `fp8`, keys and values are rounded
    to FP8 but stored in their own dtype, which attention reads without a copy.
    """

    def __init__(self, device: torch.device, *, fp8: bool = False) -> None:
        super().__init__(0, device)
        self.capacity = 0
        self.longest = 0  # tokens of the longest row of the next step, without its drafts
        self.fp8 = fp8
        self._attention: DecodeAttention | None = None
        # Indices in the flattened stores: of the forward's tokens, and of the keys that its prefilled tokens see.
        self._slots = self._key_slots = torch.empty(0, dtype=torch.int64, device=device)

    def resize(self, rows: int, capacity: int) -> None:
        """Changes the number and the capacity of rows. Tokens within the old and the new bounds are kept."""
        if (rows, capacity) == (self.rows, self.capacity):
            return
        kept_rows, kept_capacity = min(rows, self.rows), min(capacity, self.capacity)
        for name, stores in self._stores.items():
            # One block at a time, so that peak memory is the cache and one block. Masked keys must be finite, so zeros.
            grown = tuple(store.new_zeros(rows, capacity, *store.shape[2:]) for store in stores)
            for new, old in zip(grown, stores, strict=True):
                new[:kept_rows, :kept_capacity] = old[:kept_rows, :kept_capacity]
            self._stores[name] = grown
        for name, states in self._states.items() if rows != self.rows else ():
            self._states[name] = tuple(_with_rows(state, rows) for state in states)
        self.rows, self.capacity = rows, capacity

    def _set_slots(self, sequences: Sequence[PrefillSequence], positions: Tensor) -> None:
        """See `DecodeCache`. No row is idle, and none has more tokens than `longest` and its drafts."""
        lengths, tokens_per_row, padding = self._lengths, self._tokens_per_row, self._padding
        longest = self.longest + tokens_per_row - 1
        self._attention = DecodeAttention(lengths, longest, tokens_per_row) if len(lengths) else None
        starts = torch.arange(len(lengths), device=self.device) * self.capacity + (lengths - tokens_per_row)
        self._slots = consecutive_positions(starts, tokens_per_row)
        if self._prefill is None or self._prefill_keys is None:
            return
        rows = [row for sequence in sequences for row in sequence.pages]
        first = torch.tensor(rows + ([0] if padding else []), device=self.device) * self.capacity
        new = first[self._prefill.sequence_index()] + positions
        self._slots = torch.cat((self._slots, new[: len(new) - padding]))
        if self._prefill_keys is not self._prefill:
            keys = first[self._prefill_keys.sequence_index()] + self._prefill_keys.positions()
            self._key_slots = keys[: len(keys) - padding]

    def attend(self, name: str, query: Tensor, key: Tensor, value: Tensor, score_config: ScoreConfig) -> Tensor:
        """See `DecodeState.attend`."""
        if self.fp8:
            key, value = round_heads(key), round_heads(value)

        def decode(inputs: Inputs, stores: Stores, attend_cache: AttendCache) -> Tensor:
            keys, values = stores
            return attend_cache(inputs, keys, values, score_config)

        def prefill(inputs: Inputs, stored: Inputs, queries: Packing, keys: Packing) -> Tensor:
            (query,), (key, value) = inputs, stored
            return attend(query, key, value, queries, keys, score_config)

        return self.attend_latents(name, (query,), (key, value), decode, prefill)

    def attend_latents(
        self, name: str, inputs: Inputs, new: Inputs, decode: DecodeAttend, prefill: PrefillAttend
    ) -> Tensor:
        """See `DecodeState.attend_latents`."""
        stores, queries, keys = self.append(name, new), self._prefill, self._prefill_keys
        if queries is None or keys is None:
            return decode(inputs, stores, self._attend_cache)
        decoded = len(self._lengths) * self._tokens_per_row
        if keys is queries:
            stored = tuple(part[decoded:] for part in new)
        else:
            stored = tuple(
                torch.cat((store.flatten(0, 1)[self._key_slots], part[len(part) - self._padding :]))
                for store, part in zip(stores, new, strict=True)
            )
        outputs = prefill(tuple(part[decoded:] for part in inputs), stored, queries, keys)
        if self._attention is None:
            return outputs
        return torch.cat((decode(tuple(part[:decoded] for part in inputs), stores, self._attend_cache), outputs))

    def _attend_cache(self, queries: Inputs, keys: Tensor, values: Tensor, score_config: ScoreConfig) -> Tensor:
        assert self._attention is not None  # there are rows
        return self._attention(torch.cat(queries, dim=-1), keys, values, score_config)

    def move(self, sources: Tensor, targets: Tensor, copies: Sequence[PageCopy]) -> None:
        """See `DecodeCache`. Also moves the stores."""
        super().move(sources, targets, copies)
        self.copy(copies)

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """See `DecodeCache`. Reads all sources before it writes."""
        packing = Packing.from_lengths([length for _, _, length in copies], self.device)
        rows = torch.tensor([copy[:2] for copy in copies], device=self.device)[packing.sequence_index()]  # [T, 2]
        sources, targets = (rows * self.capacity + packing.positions()[:, None]).unbind(1)
        for stores in self._stores.values():
            for store in stores:
                flat = store.flatten(0, 1)
                flat.index_copy_(0, targets, flat.index_select(0, sources))

    def save(self, pages: Sequence[int], stop: int, start: int = 0) -> Mapping[str, Stores]:
        """See `DecodeCache`. Returns copies, since the page belongs to a row."""
        (row,) = pages
        return {
            name: tuple(store[row, start:stop].clone() for store in stores) for name, stores in self._stores.items()
        }

    def restore(self, rows: Sequence[int], saved: Sequence[Mapping[str, Stores]]) -> None:
        """See `DecodeCache`."""
        for name in saved[0]:
            parts = [torch.cat(part) for part in zip(*(by_name[name] for by_name in saved), strict=True)]
            for store, part in zip(self._stores_for(name, parts), parts, strict=True):
                store[rows, : len(part)] = part

    def clear(self, row: int) -> None:
        """Zeroes a row, since masked keys must be finite."""
        for tensors in (*self._stores.values(), *self._states.values()):
            for tensor in tensors:
                tensor[row] = 0

    def append(self, name: str, new: Inputs) -> Stores:
        """See `DecodeCache`. Stores are [rows, capacity, ...] each."""
        stores, token_count = self._stores_for(name, new), len(self._slots)
        for store, part in zip(stores, new, strict=True):
            store.flatten(0, 1).index_copy_(0, self._slots, part[:token_count])
        return stores

    def _stores_for(self, name: str, parts: Sequence[Tensor]) -> Stores:
        if name not in self._stores:
            self._stores[name] = tuple(part.new_zeros(self.rows, self.capacity, *part.shape[1:]) for part in parts)
        return self._stores[name]


def _with_rows(state: Tensor, rows: int) -> Tensor:
    resized = state.new_zeros(rows, *state.shape[1:])
    copied = min(rows, len(state))
    resized[:copied] = state[:copied]
    return resized
