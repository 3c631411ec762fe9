"""DecodeGraphs: the decode step of a generator, captured as a CUDA graph for each number of rows and then replayed."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from postlude.data import Microbatch
from postlude.generate.adapters import AdapterSlot, NamedAdapters
from postlude.generate.decode_rows import LENGTH, TOKEN, DecodeRows, sample_after_drafts, sample_next
from postlude.generate.draft import TOKENS_PER_STEP, Drafter
from postlude.generate.forward import DecodeMicrobatches, all_logits, all_logits_and_hidden
from postlude.generate.paged_cache import PagedCache
from postlude.generate.routing_record import RoutingRecord
from postlude.model import LanguageModel
from postlude.model.parallel import is_dtensor
from postlude.ops.kernels.capabilities import why_no_triton
from postlude.ops.shared_pages import TileShape

log = logging.getLogger(__name__)

# Numbers of rows that a graph is captured for, then multiples of the last. A capture takes 0.03 s, once.
BUCKETS = (8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)


def bucket(rows: int) -> int:
    """Returns the smallest number of rows, at least this, that a graph is captured for."""
    largest = BUCKETS[-1]
    return next((size for size in BUCKETS if size >= rows), -(-rows // largest) * largest)


@dataclass(frozen=True)
class DecodeStep:
    """A decode step of the first `size` rows, as it is captured."""

    size: int
    filtered: bool
    """Whether a row may have top-k, top-p or min-p: see `sample_next`."""
    tile_shape: TileShape | None
    """The shape of the tiles of rows that read shared pages together; None if every row reads its own."""


class DecodeGraphs:
    """Runs decode steps: forward, sampling and the check for the end of completions; with a `drafter` also drafts.

    On a GPU each step is captured at its first use, for the model and for each slot of adapters. The graph reads
    weights, adapters, rows and pages at the addresses of that time. If CUDA cannot capture a step, it is logged once,
    and the host launches it every time.
    """

    def __init__(
        self,
        model: LanguageModel,
        adapters: NamedAdapters,
        rows: DecodeRows,
        cache: PagedCache,
        drafter: Drafter | None = None,
        routing_record: RoutingRecord | None = None,
    ) -> None:
        self.model = model
        self.adapters = adapters
        self.rows = rows
        self.cache = cache
        self.drafter = drafter
        self.routing_record = routing_record
        self._microbatches = DecodeMicrobatches()
        self._graphs: WeakKeyDictionary[AdapterSlot, dict[DecodeStep, torch.cuda.CUDAGraph | None]]
        self._graphs = WeakKeyDictionary()
        self._pool: Any = None  # memory that all graphs share, since one runs at a time
        self._stream: torch.cuda.Stream | None = None  # for all captures, since each stream keeps its own memory

    def __call__(self, step: DecodeStep) -> None:
        """Runs one step."""
        if not self.rows.numbers.is_cuda:
            self._step(step)
            return
        graphs = self._graphs.setdefault(self.adapters.slot, {})
        if step not in graphs:
            graphs[step] = self._warm_up_and_capture(step)
        graph = graphs[step]
        if graph is None:
            self._step(step)
        else:
            graph.replay()

    def _warm_up_and_capture(self, step: DecodeStep) -> torch.cuda.CUDAGraph | None:
        lengths = self.rows.numbers[LENGTH]
        saved_lengths = lengths.clone()
        lengths.zero_()  # a step of idle rows changes nothing
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._step(step)  # compiles kernels and allocates what is allocated once
            graph = self._capture(step)
        torch.cuda.current_stream().wait_stream(self._stream)
        lengths.copy_(saved_lengths)
        return graph

    def _capture(self, step: DecodeStep) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._step(step)
            finally:
                graph.capture_end()
        except RuntimeError as error:
            reason = str(error.__context__ or error).splitlines()[0]
            log.warning(
                "a step of %d rows cannot be captured as a CUDA graph, so the host launches it, which is slow: %s",
                step.size,
                reason,
            )
            return None
        self._pool = graph.pool()
        return graph

    def _step(self, step: DecodeStep) -> None:
        rows, size, drafter = self.rows, step.size, self.drafter
        newest, lengths = rows.numbers[TOKEN, :size], rows.numbers[LENGTH, :size]
        if drafter is None:
            microbatch = self._begin_forward(step, newest[:, None], lengths)
            logits = self.model(microbatch, output_processor=all_logits, decode_state=self.cache)
            if self.routing_record is not None:
                self.routing_record.store()
            sample_next(logits, rows.all[:size], rows, filtered=step.filtered)
            return
        drafts = drafter.propose(self._begin_forward(step, *drafter.unread_tokens(size)), size, filtered=step.filtered)
        lengths_with_draft = torch.where(lengths > 0, lengths + 1, 0)
        microbatch = self._begin_forward(step, torch.stack((newest, drafts), 1), lengths_with_draft)
        logits, hidden = self.model(microbatch, output_processor=all_logits_and_hidden, decode_state=self.cache)
        if self.routing_record is not None:
            self.routing_record.store()
        drafter.keep(hidden)
        logits = logits.unflatten(0, (size, TOKENS_PER_STEP))
        self.cache.accept(sample_after_drafts(logits, drafts, rows, filtered=step.filtered))

    def _begin_forward(self, step: DecodeStep, tokens: Tensor, lengths: Tensor) -> Microbatch:
        """Returns a microbatch of tokens [size, tokens_per_row] of the first rows, and sets up the cache for it.

        `lengths` [size] are the rows' numbers of tokens including these, 0 in idle rows.
        """
        rows, size = self.rows, step.size
        shared = None if step.tile_shape is None else rows.shared.part(step.tile_shape, size)
        self.cache.begin_decode(rows.table[:size], lengths, shared, tokens.shape[1])
        return self._microbatches(tokens, lengths)


def why_no_cuda_graph(model: LanguageModel) -> str | None:
    """Returns why the decode steps of this model cannot be captured, or None if they can."""
    weight = model.embedding.weight
    if not weight.is_cuda:
        return f"the model is on {weight.device.type}"
    if any(is_dtensor(parameter) for parameter in model.parameters()):
        return "several ranks share its weights, or they are gathered for every forward"
    return why_no_triton(weight.device, weight.dtype, False) or next(
        (
            f"{block.name} ({type(block).__name__}) is not cuda_graphable"
            for block in model.blocks
            if not block.cuda_graphable
        ),
        None,
    )


def addresses(model: LanguageModel) -> tuple[int, ...]:
    """Returns the addresses of a model's weights and buffers."""
    return tuple(tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))
