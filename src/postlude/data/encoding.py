"""Encodes the rows of a dataset, in several processes where that is faster.

A worker process needs the tokenizer alone, no torch, so that it starts fast and stays small.
"""

from __future__ import annotations

import base64
import os
import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from postlude.pool.process_pool import open_pool

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from postlude.data.chat import Encoder, RowFormat

CHUNK = 256  # rows
ROWS_PER_PROCESS = 8 * CHUNK  # fewer are not worth the start of another process
MAX_PROCESSES = 16
CHUNK_TIMEOUT = 3600.0  # seconds
ARRAYS = {"tokens": np.int32, "mask": np.uint8, "lengths": np.int64, "sources": np.int64, "identities": np.uint8}


@dataclass(frozen=True)
class EncodedChunk:
    """Encoded rows: the tokens and masks of their sequences end to end, and the length of each sequence.

    A preference has two sequences. A row of another format has one, or one per turn where the template requires it.
    """

    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8]
    lengths: NDArray[np.int64]
    sources: NDArray[np.int64]
    """The row of each sequence."""
    identities: NDArray[np.uint8]
    """The identity of each row's task, [rows · IDENTITY_BYTES]."""
    too_long: list[tuple[int, str, int]]
    """Sequences that are left out: the row, its name and the length."""


def encode(
    encoder: Encoder,
    form: RowFormat,
    rows: Sequence[Sequence[Any]],
    names: Sequence[str],
    *,
    processes: int | None = None,
) -> Iterator[EncodedChunk]:
    """Encodes rows of one format, as `Encoder.encode_rows` takes them. Chunks come in the order of the rows.

    The number of processes does not change the result. By default it follows from the processors of this machine and
    the number of rows.
    """
    if processes is None:
        processes = min(len(os.sched_getaffinity(0)), MAX_PROCESSES, len(rows) // ROWS_PER_PROCESS)
    function = ChunkEncoder(encoder, form)
    chunks = [
        (rows[start : start + CHUNK], names[start : start + CHUNK], start) for start in range(0, len(rows), CHUNK)
    ]
    if processes > 1:
        try:
            pickle.dumps(function)
        except Exception:  # a tokenizer that cannot be pickled
            processes = 1
    if processes > 1:
        return _encode_in_processes(function, chunks, min(processes, len(chunks)))
    return (function.encode(*chunk) for chunk in chunks)


@dataclass
class ChunkEncoder:
    """Encodes one chunk of rows per call, in a worker process."""

    encoder: Encoder
    form: RowFormat

    def prepare(self) -> None:
        """Keeps the tokenizer from starting threads: each process has one processor."""
        os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def __call__(self, rows: Sequence[Sequence[Any]], names: Sequence[str], first: int) -> dict[str, Any]:
        """Returns the chunk in JSON's types, or {"error": message} where a row cannot be encoded."""
        try:
            chunk = self.encode(rows, names, first)
        except Exception as error:  # the caller raises it
            known = isinstance(error, ValueError)
            return {"error": str(error) if known else f"{names[0]} to {names[-1]}: {type(error).__name__}: {error}"}
        arrays = {name: base64.b64encode(getattr(chunk, name).tobytes()).decode() for name in ARRAYS}
        return {**arrays, "too_long": chunk.too_long}

    def encode(self, rows: Sequence[Sequence[Any]], names: Sequence[str], first: int) -> EncodedChunk:
        """Encodes rows, of which the first is row `first` of the dataset."""
        from postlude.data.chat import EncodedSequence, TooLongError
        from postlude.data.task_identity import row_identity

        sequences: list[EncodedSequence] = []
        sources: list[int] = []
        too_long = []
        for row, encoded in enumerate(self.encoder.encode_rows(self.form, rows, names), start=first):
            for sequence in [encoded] if isinstance(encoded, TooLongError) else encoded:
                if isinstance(sequence, TooLongError):
                    too_long.append((row, sequence.row, sequence.length))
                else:
                    sequences.append(sequence)
                    sources.append(row)
        return EncodedChunk(
            np.array([token for sequence in sequences for token in sequence.tokens], np.int32),
            np.array([mark for sequence in sequences for mark in sequence.mask], np.uint8),
            np.array([len(sequence) for sequence in sequences], np.int64),
            np.array(sources, np.int64),
            np.frombuffer(b"".join(row_identity(self.form, row, self.encoder.turns) for row in rows), np.uint8),
            too_long,
        )


def _encode_in_processes(
    function: ChunkEncoder, chunks: Sequence[tuple[Any, ...]], processes: int
) -> Iterator[EncodedChunk]:
    pool = open_pool(function, count=processes, timeout=CHUNK_TIMEOUT, limits=None)
    call_ids: deque[int] = deque()
    try:
        for number, (_, names, _) in enumerate(chunks):
            # Only a few chunks are submitted ahead, so that few results wait in memory.
            for chunk in chunks[number + len(call_ids) : number + 4 * processes]:
                call_ids.append(pool.submit(chunk))
            call_id = call_ids.popleft()
            result = pool.poll(None, [call_id])[call_id]
            if result.failure is not None:
                raise RuntimeError(f"encoding the rows from {names[0]} on failed: {result.error} Is memory short?")
            if "error" in result.value:  # the first in the dataset, whichever process was faster
                raise ValueError(result.value["error"])
            yield _decode(result.value)
    finally:
        pool.close()


def _decode(value: dict[str, Any]) -> EncodedChunk:
    arrays: dict[str, Any] = {
        name: np.frombuffer(base64.b64decode(value[name]), dtype) for name, dtype in ARRAYS.items()
    }
    return EncodedChunk(**arrays, too_long=[(row, name, length) for row, name, length in value["too_long"]])
