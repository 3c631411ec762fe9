"""What a step needs of running answers, on the device and in fixed places: rows of numbers, and pages of keys.

A row says where its answer stands; which pages of the cache are its own is a line of a table. So answers finish, join
and change rows without a key being moved, and a step reads and writes the same memory every time.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from postlude.generate.sampler import SamplerSettings, draw
from postlude.model.context import DecodeAttend, DecodeStep, Inputs, PrefillAttend, Scan, States, Stores
from postlude.ops.attention import Scores, attend
from postlude.ops.kernels.capabilities import Backend, use_kernel
from postlude.ops.packing import Packing
from postlude.ops.paged_attention import COUNTERS, PAGE_SIZE, attend_pages, new_page_store

TOKEN, LENGTH, COUNT, LIMIT, KEY, TOP_K = range(6)  # columns of a row; see `Rows`
TEMPERATURE, TOP_P, LOG_MIN_P = range(3)  # and of its settings


class Rows:
    """`size` rows, each idle or an answer's.

    `numbers` [6, size] int64: the newest token; how many tokens there are with it, 0 in an idle row; how many of them
    are the answer's; how many it may have; where its random numbers start; how many tokens it is drawn from at most.
    `settings` [3, size] fp32: the temperature, 0 where the likeliest token is taken; top-p; the logarithm of min-p.
    `stops` [most, size] int64: tokens that end it, filled up with -1. `table` [size, most] int32: its pages. `told`
    [size, 3] fp64: what the last step drew: the token, -1 of an idle row, its log-prob, and that with which it was
    sampled.
    """

    def __init__(self, size: int, pages: int, stops: int, device: torch.device) -> None:
        self.size = size
        self.numbers = torch.zeros(6, size, dtype=torch.int64, device=device)
        self.settings = torch.zeros(3, size, dtype=torch.float32, device=device)
        self.stops = torch.full((stops, size), -1, dtype=torch.int64, device=device)
        self.table = torch.zeros(size, pages, dtype=torch.int32, device=device)
        self.told = torch.zeros(size, 3, dtype=torch.float64, device=device)
        self.all = torch.arange(size, device=device)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Rows `targets` become what rows `sources` are, but for the table; those become idle. Both [m] int64."""
        for each in (self.numbers, self.settings, self.stops):
            each.index_copy_(-1, targets, each.index_select(-1, sources))
        self.stop(sources)

    def stop(self, rows: Tensor) -> None:
        """These rows become idle."""
        self.numbers[LENGTH].index_fill_(0, rows, 0)


def sample_next(logits: Tensor, rows: Tensor, state: Rows, *, limited: bool = True, backend: Backend = "auto") -> None:
    """Draw a token for each of `rows` [n] int64 from its logits [n, vocab], tell it, and move the row on to it.

    A row whose token is its last, by its limit or its stop tokens, becomes idle. Idle rows stay as they are. Where none
    is `limited` to some tokens, nobody looks at top-k, top-p and min-p.
    """
    if use_kernel("sample_next", backend, logits.device, logits.dtype):
        kernels = importlib.import_module("postlude.ops.kernels.sample")
        kernels.sample_next(logits, rows, state.numbers, state.settings, state.stops, state.told, limited)
        return
    state.told[rows, 0] = -1
    running = state.numbers[LENGTH, rows] > 0
    rows, logits = rows[running], logits[running]
    _, length, count, limit, key, top_k = state.numbers[:, rows]
    heat, top_p, log_min_p = state.settings[:, rows]
    most = max(top_k[top_k < logits.shape[1]].tolist(), default=0) if limited else 0
    greedy = heat == 0
    settings = SamplerSettings(
        keys=key,
        temperature=torch.where(greedy, 1.0, heat)[:, None],
        greedy=greedy,
        top_k=top_k if limited else None,
        top_p=top_p if limited else None,
        log_min_p=log_min_p if limited else None,
        all_greedy=False,
        most=most,
    )
    drawn, *logprobs = draw(logits, settings, count)
    state.told[rows] = torch.stack([each.double() for each in (drawn, *logprobs)], 1)
    ended = (count + 1 >= limit) | (state.stops[:, rows] == drawn).any(0)
    state.numbers[:3, rows] = torch.stack((drawn, torch.where(ended, 0, length + 1), count + 1))


class PagedCache:
    """Keys and values in `pages` pages of `PAGE_SIZE` tokens: stores of each block, [pages, PAGE_SIZE, heads, width].

    Beside them, states of blocks that need one of a fixed size for each of `rows` rows, [rows, ...].

    A forward either takes the newest token of each row, as rows and table have it, or whole sequences that begin.
    A block's stores are made when it first asks, which is when its shapes are known.
    """

    def __init__(self, pages: int, rows: int, device: torch.device) -> None:
        self.pages = pages
        self.rows = rows
        self.device = device
        self._stores: dict[str, Stores] = {}
        self._states: dict[str, States] = {}
        self._last: dict[str, States] = {}  # after the sequences that the last forward took as wholes, [count, ...]
        self._table = self._lengths = torch.empty(0, device=device)
        self._counters = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        self._begun: tuple[Packing, Tensor, Tensor] | None = None

    @property
    def size_in_bytes(self) -> int:
        """Of all stores and states."""
        every = (*self._stores.values(), *self._states.values())
        return sum(each.numel() * each.element_size() for tensors in every for each in tensors)

    def go_on(self, table: Tensor, lengths: Tensor) -> None:
        """The next forward takes the newest token of n rows: `table` [n, most] int32, `lengths` [n] int64."""
        self._table, self._lengths, self._begun = table, lengths, None

    def begin(self, packing: Packing, pages: Sequence[Sequence[int]]) -> None:
        """The next forward takes packed sequences as wholes; their tokens go to these pages, a list for each."""
        inside = torch.tensor([page for own in pages for page in own], device=self.device)
        first = Packing.from_lengths([len(own) for own in pages], self.device).cu_seqlens.long()
        positions = packing.positions()
        page = inside[first[packing.sequence_index()] + positions // PAGE_SIZE]
        self._begun = packing, page, positions % PAGE_SIZE

    def attend(self, name: str, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """See `DecodeState.attend`."""
        keys, values = self._stores_for(name, (key, value))
        if self._begun is None:
            return attend_pages(query, key, value, keys, values, self._table, self._lengths, scores, self._counters)
        packing, pages, slots = self._begun
        for store, each in ((keys, key), (values, value)):
            store[pages, slots] = each
        return attend(query, key, value, packing, packing, scores)

    def attend_latents(
        self, name: str, inputs: Inputs, new: Inputs, go_on: DecodeAttend, begin: PrefillAttend
    ) -> Tensor:
        """See `DecodeState.attend_latents`.

        A block that grows in its own way does not say that it is `cuda_graphable`.
        """
        raise NotImplementedError(f"{name} looks at stores itself, which a cache in pages does not show.")

    def _stores_for(self, name: str, new: Inputs) -> Stores:
        if name not in self._stores:
            self._stores[name] = tuple(
                new_page_store(self.pages, each.shape[1], each.shape[2], each.dtype, each.device) for each in new
            )
        return self._stores[name]

    def recur(self, name: str, inputs: Inputs, step: DecodeStep, scan: Scan) -> Tensor:
        """See `DecodeState.recur`."""
        if self._begun is not None:
            output, self._last[name] = scan(inputs, self._begun[0])
            return output
        kept = tuple(each[: len(self._lengths)] for each in self._states[name])  # made when these sequences began
        output, new = step(inputs, kept)
        for own, each in zip(kept, new, strict=True):
            running = (self._lengths > 0).view(-1, *(1,) * (each.ndim - 1))
            own.copy_(torch.where(running, each, own))
        return output

    def last_states(self, place: int) -> Mapping[str, States]:
        """By block, the states after one of the sequences that the last forward took as wholes. A copy."""
        return {name: tuple(each[place].clone() for each in states) for name, states in self._last.items()}

    def enter(self, rows: Tensor, sources: Tensor, older: Sequence[Mapping[str, States]]) -> None:
        """Give `rows` [n] the states that their sequences begin with, and forget the last forward's.

        `sources` [n] int64 says which: those after the sequences of the last forward, counted on by `older` ones.
        """
        for name in self._last or (older[0] if older else ()):
            for part, own in enumerate(self._rows_of(name, older)):
                there = [self._last[name][part]] if name in self._last else []
                before = [torch.stack([each[name][part] for each in older])] if older else []
                own.index_copy_(0, rows, torch.cat((*there, *before)).index_select(0, sources))
        self._last = {}

    def _rows_of(self, name: str, older: Sequence[Mapping[str, States]]) -> States:
        """The states of all rows under `name`."""
        if name not in self._states:
            like = self._last[name] if name in self._last else tuple(each[None] for each in older[0][name])
            self._states[name] = tuple(each.new_zeros(self.rows, *each.shape[1:]) for each in like)
        return self._states[name]

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Rows `targets` get the states of rows `sources`, both [m] int64."""
        for states in self._states.values():
            for each in states:
                each.index_copy_(0, targets, each.index_select(0, sources))

    def record_routing(self, name: str, choice: Tensor) -> None:
        """See `DecodeState.record_routing`. Nobody records them here."""

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Pages `targets` become what pages `sources` are, both [m] int64."""
        for stores in self._stores.values():
            for store in stores:
                store.index_copy_(0, targets, store.index_select(0, sources))
