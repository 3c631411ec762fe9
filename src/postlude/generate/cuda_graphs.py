"""DecodeGraphs: the decode step of a generator, captured as a CUDA graph for each number of rows and then replayed."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from postlude.generate.adapters import AdapterSlot, NamedAdapters
from postlude.generate.decode_rows import LENGTH
from postlude.generate.model_step import ModelStep
from postlude.generate.paged_cache import PagedCache
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
    use_rules: bool
    """Whether a row may have `LogitRules`."""
    use_masks: bool
    """Whether a row may return its sampling mask."""
    tile_shape: TileShape | None
    """The shape of the tiles of rows that read shared pages together; None if every row reads its own."""


class DecodeGraphs:
    """Runs decode steps of a `ModelStep` on a `PagedCache`.

    On a GPU each step is captured at its first use, for the model and for each shape of adapters (`AdapterSlot`). The
    graph reads weights, adapters, rows and pages at the addresses of that time. If CUDA cannot capture a step, it is
    logged once, and the host launches it every time.
    """

    def __init__(self, model_step: ModelStep, cache: PagedCache, adapters: NamedAdapters) -> None:
        self.model_step = model_step
        self.rows = model_step.rows
        self.cache = cache
        self.adapters = adapters
        self._graphs: WeakKeyDictionary[AdapterSlot, dict[DecodeStep, torch.cuda.CUDAGraph | None]]
        self._graphs = WeakKeyDictionary()
        self._pool: Any = None  # memory that all graphs share, since one runs at a time
        self._stream: torch.cuda.Stream | None = None  # for all captures, since each stream keeps its own memory

    def __call__(self, step: DecodeStep) -> None:
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
        self.cache.tile_shape = step.tile_shape
        self.rows.use_rules, self.rows.use_masks = step.use_rules, step.use_masks
        self.model_step(step.size, filtered=step.filtered)


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
