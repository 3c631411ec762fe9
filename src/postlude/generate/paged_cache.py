"""PagedCache: keys and values in pages of fixed size behind a page table, so that CUDA graphs can use it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from postlude.generate.decode_cache import DecodeCache, PageCopy, PrefillSequence
from postlude.model.context import DecodeAttend, Inputs, PrefillAttend, Stores
from postlude.ops.attention import ScoreConfig, attend
from postlude.ops.fp8_kv import FP8
from postlude.ops.latent_attention import attend_latent_pages
from postlude.ops.packing import Packing, to_device
from postlude.ops.paged_attention import (
    COUNTERS,
    PAGE_SIZE,
    attend_pages,
    lengths_of_tokens,
    new_page_store,
    read_pages,
    write_pages,
)
from postlude.ops.shared_pages import SharedPages, TileShape


class PagedCache(DecodeCache):
    """`pages` pages of `PAGE_SIZE` tokens. The stores of a block are [pages, PAGE_SIZE, kv_heads, width] each.

    `table` [rows, pages_per_row] int32 has the pages of each row. `shared` has the rows with the same first pages, in
    tiles of shape `tile_shape`, which read these together; with None every row reads its own. With `fp8`, keys and
    values are stored in FP8, and two more stores of width 1 have the exponents of their scales.
    """

    def __init__(self, pages: int, rows: int, pages_per_row: int, device: torch.device, *, fp8: bool = False) -> None:
        super().__init__(rows, device)
        self.pages = pages
        self.fp8 = fp8
        self.table = torch.zeros(rows, pages_per_row, dtype=torch.int32, device=device)
        self.shared = SharedPages.none(rows, device)
        self.tile_shape: TileShape | None = None
        self._counters = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        # The page, and the offset in it, of each prefilled token, and of each key that these see.
        self._slots = self._key_slots = torch.empty(0, device=device), torch.empty(0, device=device)

    def _set_slots(self, sequences: Sequence[PrefillSequence], positions: Tensor) -> None:
        """See `DecodeCache`. A forward has either the newest tokens of rows or sequences, without padding."""
        if self._prefill is None or self._prefill_keys is None:
            return
        assert not len(self._lengths)
        assert not self._padding
        page_ids = torch.tensor([page for sequence in sequences for page in sequence.pages], device=self.device)
        page_counts = [len(sequence.pages) for sequence in sequences]
        first = Packing.from_lengths(page_counts, self.device).cu_seqlens.long()

        def slots(packing: Packing, positions: Tensor) -> tuple[Tensor, Tensor]:
            page = page_ids[first[packing.sequence_index()] + positions // PAGE_SIZE]
            return page, positions % PAGE_SIZE

        self._slots = slots(self._prefill, positions)
        if self._prefill_keys is not self._prefill:
            self._key_slots = slots(self._prefill_keys, self._prefill_keys.positions())

    def attend(self, name: str, query: Tensor, key: Tensor, value: Tensor, score_config: ScoreConfig) -> Tensor:
        """See `DecodeState.attend`."""
        stores = self._stores_for(name, (key, value))
        if self._prefill is None or self._prefill_keys is None:
            keys, values, *exponents = stores
            count = len(self._lengths)
            return attend_pages(
                query,
                key,
                value,
                keys,
                values,
                self.table[:count],
                self._lengths,
                score_config,
                self._counters,
                exponents=(exponents[0], exponents[1]) if exponents else None,
                shared=None if self.tile_shape is None else self.shared.part(self.tile_shape, count),
            )
        key, value = write_pages(stores, self._slots, (key, value))
        if self._prefill_keys is not self._prefill:
            key, value = read_pages(stores, self._key_slots, key.dtype)
        return attend(query, key, value, self._prefill, self._prefill_keys, score_config)

    def attend_latents(
        self, name: str, inputs: Inputs, new: Inputs, decode: DecodeAttend, prefill: PrefillAttend
    ) -> Tensor:
        """See `DecodeState.attend_latents`. There is one store, of one key head."""
        (latent,) = new
        (store,) = self._stores_for(name, new)
        if self._prefill is None or self._prefill_keys is None:

            def attend_cache(queries: Inputs, keys: Tensor, values: Tensor, score_config: ScoreConfig) -> Tensor:
                table = self.table[: len(self._lengths)]
                query, query_rotated = queries
                tensors = query, query_rotated, latent[:, 0], keys, table, self._lengths
                return attend_latent_pages(*tensors, score_config.scale, self._counters)

            return decode(inputs, (store,), attend_cache)
        store[self._slots] = latent
        if self._prefill_keys is not self._prefill:
            latent = store[self._key_slots]
        return prefill(inputs, (latent,), self._prefill, self._prefill_keys)

    def _stores_for(self, name: str, new: Inputs) -> Stores:
        if name not in self._stores:
            stores = [
                new_page_store(self.pages, part.shape[1], part.shape[2], FP8 if self.fp8 else part.dtype, part.device)
                for part in new
            ]
            if self.fp8:
                stores += [new_page_store(self.pages, part.shape[1], 1, torch.int8, part.device) for part in new]
            self._stores[name] = tuple(stores)
        return self._stores[name]

    def append(self, name: str, new: Inputs) -> Stores:
        """See `DecodeCache`. Stores are [pages + 1, PAGE_SIZE, ...] each: idle rows write to the last page."""
        if name not in self._stores:
            self._stores[name] = tuple(part.new_zeros(self.pages + 1, PAGE_SIZE, *part.shape[1:]) for part in new)
        slots = self._slots
        if self._prefill is None:
            lengths = lengths_of_tokens(self._lengths, self._tokens_per_row)
            positions = (lengths - 1).clamp_min(0)
            by_row = (positions // PAGE_SIZE).view(-1, self._tokens_per_row)
            page = self.table[: len(self._lengths)].gather(1, by_row).flatten().long()
            slots = torch.where(lengths > 0, page, self.pages), positions % PAGE_SIZE
        for store, part in zip(self._stores[name], new, strict=True):
            store.index_put_(slots, part)
        return self._stores[name]

    def _running_rows(self) -> Tensor:
        """See `DecodeCache`."""
        return self._lengths > 0

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """See `DecodeCache`. Copies whole pages."""
        pages = torch.tensor([copy[:2] for copy in copies], dtype=torch.int64)
        sources, targets = to_device(pages, self.device).unbind(1)
        for stores in self._stores.values():
            for store in stores:
                numbers = store.view(torch.uint8) if store.dtype == FP8 else store  # torch cannot copy FP8 by an index
                numbers.index_copy_(0, targets, numbers.index_select(0, sources))
