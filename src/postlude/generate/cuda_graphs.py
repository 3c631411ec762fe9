"""The decode step of a generator. On a GPU it is recorded once for a number of rows and replayed by one launch."""

from __future__ import annotations

import logging
from typing import Any

import torch

from postlude.generate.decode_rows import LENGTH, TOKEN, DecodeRows, sample_next
from postlude.generate.forward import DecodeMicrobatches, all_logits
from postlude.generate.paged_cache import PagedCache
from postlude.model import LanguageModel
from postlude.model.parallel import is_dtensor
from postlude.ops.kernels.capabilities import why_no_triton

log = logging.getLogger(__name__)

# Rows of a recorded step, then multiples of the last: a step costs by these, and to record one takes 0.03 s, once.
BUCKETS = (8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)


def bucket(rows: int) -> int:
    """Returns the fewest rows, at least this many, that a step is recorded for."""
    most = BUCKETS[-1]
    return next((size for size in BUCKETS if size >= rows), -(-rows // most) * most)


class DecodeSteps:
    """Decode steps of a model: forward, sampling, and whether completions end, for the first `size` of the rows.

    On a GPU each size is recorded when it is first asked for. The recording reads weights, rows and pages where
    they were then. If CUDA cannot record a step, a warning says so once, and the host launches these steps.
    """

    def __init__(self, model: LanguageModel, rows: DecodeRows, cache: PagedCache) -> None:
        self.model = model
        self.rows = rows
        self.cache = cache
        self._microbatches = DecodeMicrobatches()
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph | None] = {}
        self._pool: Any = None  # memory that all recordings share, since one runs at a time
        self._stream: torch.cuda.Stream | None = None  # one for all: each stream keeps memory of its own

    def __call__(self, size: int, *, limited: bool = True) -> None:
        """Run one step of the first `size` rows. See `sample_next` for `limited`."""
        if not self.rows.numbers.is_cuda:
            self._step(size, limited)
            return
        if (size, limited) not in self._graphs:
            self._graphs[size, limited] = self._record(size, limited)
        graph = self._graphs[size, limited]
        if graph is None:
            self._step(size, limited)
        else:
            graph.replay()

    def _record(self, size: int, limited: bool) -> torch.cuda.CUDAGraph | None:
        lengths = self.rows.numbers[LENGTH]
        kept = lengths.clone()
        lengths.zero_()  # idle rows leave everything as it is
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._step(size, limited)  # compiles kernels, and makes what is made once
            graph = self._captured(size, limited)
        torch.cuda.current_stream().wait_stream(self._stream)
        lengths.copy_(kept)
        return graph

    def _captured(self, size: int, limited: bool) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._step(size, limited)
            finally:
                graph.capture_end()
        except RuntimeError as error:
            why = str(error.__context__ or error).splitlines()[0]
            log.warning(
                "a step of %d rows cannot be recorded, so the host makes every one, which is slow: %s", size, why
            )
            return None
        self._pool = graph.pool()
        return graph

    def _step(self, size: int, limited: bool) -> None:
        rows = self.rows
        lengths = rows.numbers[LENGTH, :size]
        self.cache.decode(rows.table[:size], lengths)
        microbatch = self._microbatches(rows.numbers[TOKEN, :size, None], lengths)
        logits = self.model(microbatch, output_processor=all_logits, decode_state=self.cache)
        sample_next(logits, rows.all[:size], rows, limited=limited)


def graph_obstacle(model: LanguageModel) -> str | None:
    """Returns why the decode steps of this model cannot be recorded, or None if they can."""
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
    """Returns where a model's weights and buffers lie."""
    return tuple(tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))
