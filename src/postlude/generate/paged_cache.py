"""PagedCache: keys and values in pages of fixed size behind a page table, so that CUDA graphs can use it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from postlude.generate.decode_cache import DecodeCache, PageCopy
from postlude.model.context import DecodeAttend, Inputs, PrefillAttend, RecurrentScan, RecurrentStep, Stores
from postlude.ops.attention import ScoreConfig, attend
from postlude.ops.fp8_kv import FP8
from postlude.ops.packing import Packing, to_device
from postlude.ops.paged_attention import (
    COUNTERS,
    PAGE_SIZE,
    attend_pages,
    lengths_of_tokens,
    new_page_store,
    write_pages,
)
from postlude.ops.shared_pages import SharedPages


class PagedCache(DecodeCache):
    """`pages` pages of `PAGE_SIZE` tokens. The stores of a block are [pages, PAGE_SIZE, kv_heads, width] each.

    With `fp8`, keys and values are stored in FP8, and two more stores of width 1 have the exponents of their scales.
    """

    def __init__(self, pages: int, rows: int, device: torch.device, *, fp8: bool = False) -> None:
        super().__init__(rows, device)
        self.pages = pages
        self.fp8 = fp8
        self._table = self._lengths = torch.empty(0, device=device)
        self._tokens_per_row = 1
        self._shared: SharedPages | None = None
        self._counters = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        # The page, and the offset in it, of each prefilled token.
        self._slots = torch.empty(0, device=device), torch.empty(0, device=device)

    def begin_decode(
        self, table: Tensor, lengths: Tensor, shared: SharedPages | None = None, tokens_per_row: int = 1
    ) -> None:
        """Sets up a forward of the newest `tokens_per_row` tokens of the first n rows.

        `table` [n, pages] int32 has the pages of each row, `lengths` [n] int64 its number of tokens including these,
        0 if it is idle. With `shared`, rows with the same first pages read them together.
        """
        self._table, self._lengths, self._shared, self._prefill = table, lengths, shared, None
        self._tokens_per_row = tokens_per_row

    def begin_prefill(self, packing: Packing, pages: Sequence[Sequence[int]]) -> None:
        """Sets up a forward of whole packed sequences. `pages` lists the pages of each."""
        self._prefill = packing
        page_ids = torch.tensor([page for sequence_pages in pages for page in sequence_pages], device=self.device)
        first = Packing.from_lengths([len(sequence_pages) for sequence_pages in pages], self.device).cu_seqlens.long()
        positions = packing.positions()
        page = page_ids[first[packing.sequence_index()] + positions // PAGE_SIZE]
        self._slots = page, positions % PAGE_SIZE

    def attend(self, name: str, query: Tensor, key: Tensor, value: Tensor, score_config: ScoreConfig) -> Tensor:
        """See `DecodeState.attend`."""
        stores = self._stores_for(name, (key, value))
        if self._prefill is None:
            keys, values, *exponents = stores
            return attend_pages(
                query,
                key,
                value,
                keys,
                values,
                self._table,
                self._lengths,
                score_config,
                self._counters,
                exponents=(exponents[0], exponents[1]) if exponents else None,
                shared=self._shared,
            )
        key, value = write_pages(stores, self._slots, (key, value))
        return attend(query, key, value, self._prefill, self._prefill, score_config)

    def attend_latents(
        self, name: str, inputs: Inputs, new: Inputs, decode: DecodeAttend, prefill: PrefillAttend
    ) -> Tensor:
        """Raises: a block that reads the stores itself is not `cuda_graphable`."""
        raise NotImplementedError(f"{name} reads the stores itself, but these are in pages.")

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
            page = self._table.gather(1, by_row).flatten().long()
            slots = torch.where(lengths > 0, page, self.pages), positions % PAGE_SIZE
        for store, part in zip(self._stores[name], new, strict=True):
            store.index_put_(slots, part)
        return self._stores[name]

    def recur(self, name: str, inputs: Inputs, step: RecurrentStep, scan: RecurrentScan) -> Tensor:
        """See `DecodeState.recur`."""
        if self._prefill is not None:
            output, self._prefill_states[name] = scan(inputs, self._prefill)
            return output
        return self._recur_rows(name, inputs, step, self._tokens_per_row, self._lengths > 0)

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """See `DecodeCache`. Copies whole pages."""
        pages = torch.tensor([copy[:2] for copy in copies], dtype=torch.int64)
        sources, targets = to_device(pages, self.device).unbind(1)
        for stores in self._stores.values():
            for store in stores:
                numbers = store.view(torch.uint8) if store.dtype == FP8 else store  # torch cannot copy FP8 by an index
                numbers.index_copy_(0, targets, numbers.index_select(0, sources))
