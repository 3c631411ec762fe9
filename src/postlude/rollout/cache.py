"""The key/value cache: a row for each running sequence, the same in every attention block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from postlude.ops.attention import Scores, attend
from postlude.ops.decode_attention import DecodeAttention
from postlude.ops.packing import Packing


class RowCache:
    """Keys and values of `rows` sequences with room for `capacity` tokens each: [rows, capacity, kv_heads, width].

    The running sequences hold rows 0 to n - 1, so that one view covers them and no key is copied to be attended to.
    A block's store is made when the block first attends, which is when its heads are known.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rows = 0
        self.capacity = 0
        self._stores: dict[str, tuple[Tensor, Tensor]] = {}
        self._decode: DecodeAttention | None = None
        self._decoded = 0
        self._prefill: Packing | None = None
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
            self._stores[name] = (grown[0], grown[1])
        self.rows, self.capacity = rows, capacity

    def expect(self, lengths: Tensor, longest: int, prefill: Packing | None = None, padding: int = 0) -> None:
        """Say what the next forward holds: one token of each of the first n rows, then prompts for the rows after.

        `lengths` [n] int64 are the keys of each row, the new one included, and `longest` their maximum. `prefill` packs
        the prompts; its last `padding` tokens are not kept.
        """
        self._decoded = len(lengths)
        self._decode = DecodeAttention(lengths, longest) if self._decoded else None
        self._prefill = prefill
        places = torch.arange(self._decoded, device=self.device) * self.capacity + lengths - 1
        if prefill is not None:
            inside = (prefill.sequence_index() + self._decoded) * self.capacity + prefill.positions()
            places = torch.cat((places, inside[: prefill.total - padding]))
        self._places = places

    def attend(self, name: str, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Keep the new keys and values [T, kv_heads, width] of block `name`; query [T, heads, width] -> the same."""
        keys, values = self._stores_of(name, key)
        kept, decoded = len(self._places), self._decoded
        keys.flatten(0, 1).index_copy_(0, self._places, key[:kept])
        values.flatten(0, 1).index_copy_(0, self._places, value[:kept])
        outputs = []
        if self._decode is not None:
            outputs.append(self._decode(query[:decoded], keys, values, scores))
        if self._prefill is not None:
            prefill = self._prefill
            outputs.append(attend(query[decoded:], key[decoded:], value[decoded:], prefill, prefill, scores))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def copy(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """For each (source row, target row, length): the target's first keys become the source's."""
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

    def _stores_of(self, name: str, key: Tensor) -> tuple[Tensor, Tensor]:
        if name not in self._stores:
            shape = (self.rows, self.capacity, *key.shape[1:])
            self._stores[name] = (key.new_zeros(shape), key.new_zeros(shape))
        return self._stores[name]
