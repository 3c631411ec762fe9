"""EncodedDataset: the tokens of a dataset, cached on disk under a digest of all they depend on.

Arrays are memory-mapped, so that ranks of one machine share them. They are written aside and renamed, so that a cache
under its final name is complete. Checksums detect later damage, and the rows are then encoded again.

Rows are encoded in several processes where that is faster. Such a process needs the tokenizer alone, no torch, so
that it starts fast and stays small.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import logging
import os
import pickle
import shutil
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from postlude.data.chat import EncodedSequence
from postlude.data.chat_template import PLAIN_TEMPLATE
from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.data.task_identity import IDENTITY_BYTES
from postlude.durable_files import sync, sync_tree
from postlude.pool.process_pool import open_pool

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from postlude.data.chat import Encoder, RowFormat

CHUNK = 256  # rows
ROWS_PER_PROCESS = 8 * CHUNK  # fewer are not worth the start of another process
MAX_PROCESSES = 16
CHUNK_TIMEOUT = 3600.0  # seconds
CHUNK_ARRAYS = {"tokens": np.int32, "mask": np.uint8, "lengths": np.int64, "sources": np.int64, "identities": np.uint8}


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
        arrays = {name: base64.b64encode(getattr(chunk, name).tobytes()).decode() for name in CHUNK_ARRAYS}
        return {**arrays, "too_long": chunk.too_long}

    def encode(self, rows: Sequence[Sequence[Any]], names: Sequence[str], first: int) -> EncodedChunk:
        """Encodes rows, of which the first is row `first` of the dataset."""
        from postlude.data.chat import TooLongError
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
        name: np.frombuffer(base64.b64decode(value[name]), dtype) for name, dtype in CHUNK_ARRAYS.items()
    }
    return EncodedChunk(**arrays, too_long=[(row, name, length) for row, name, length in value["too_long"]])


log = logging.getLogger(__name__)

VERSION = 3  # raise it when the encoding or the format of the cache changes
ABOUT = "about.json"
PREFIX = "rows-"
ARRAYS = ("tokens", "mask", "starts", "sources", "identities")


@dataclass(frozen=True)
class EncodedDataset:
    """The tokens of every row, `sequences_per_row` sequences each.

    Sequence i is tokens[starts[i] : starts[i + 1]], and likewise its mask.
    """

    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8]
    starts: NDArray[np.int64]
    sources: NDArray[np.int64]
    """The row of the dataset that each sequence comes from."""
    identities: NDArray[np.uint8]
    """The identity of the task of every row of the dataset, [rows, IDENTITY_BYTES]."""
    sequences_per_row: int = 1
    dropped: int = 0
    """The number of sequences that were left out."""
    chat: bool = False
    """Whether the rows are messages, which the chat template formats."""

    def __len__(self) -> int:
        return (len(self.starts) - 1) // self.sequences_per_row

    def row(self, index: int) -> list[EncodedSequence]:
        return [self._sequence(index * self.sequences_per_row + offset) for offset in range(self.sequences_per_row)]

    def identity(self, index: int) -> bytes:
        """Returns the identity of a row's task. The rows of a conversation of one row per turn have the same."""
        return bytes(self.identities[self.sources[index * self.sequences_per_row]])

    def _sequence(self, index: int) -> EncodedSequence:
        span = slice(int(self.starts[index]), int(self.starts[index + 1]))
        return EncodedSequence(self.tokens[span].tolist(), self.mask[span].tolist())

    @classmethod
    def of(cls, chunks: Iterable[EncodedChunk], *, sequences_per_row: int, chat: bool = False) -> EncodedDataset:
        parts = list(chunks)
        lengths = np.concatenate([np.zeros(1, np.int64), *(part.lengths for part in parts)])
        return cls(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.mask for part in parts]),
            np.cumsum(lengths),
            np.concatenate([part.sources for part in parts]),
            np.concatenate([part.identities for part in parts]).reshape(-1, IDENTITY_BYTES),
            sequences_per_row,
            sum(len(part.too_long) for part in parts),
            chat,
        )

    def store(self, folder: Path, digest: str) -> None:
        """Writes the cache and removes caches with other digests."""
        target = folder / f"{PREFIX}{digest[:16]}"
        if target.is_dir():
            return
        aside = folder / f".{target.name}.{os.getpid()}"
        aside.mkdir(parents=True, exist_ok=True)
        for name in ARRAYS:
            np.save(aside / f"{name}.npy", getattr(self, name), allow_pickle=False)
        sums = {name: _checksum(aside / f"{name}.npy") for name in ARRAYS}
        about = {
            "digest": digest,
            "sides": self.sequences_per_row,
            "dropped": self.dropped,
            "chat": self.chat,
            "checksums": sums,
        }
        (aside / ABOUT).write_text(json.dumps(about))
        sync_tree(aside)
        try:
            aside.rename(target)
            sync(folder)
        except OSError:  # rank 0 of another machine was faster
            shutil.rmtree(aside, ignore_errors=True)
        for old in folder.glob(f"{PREFIX}*"):
            if old != target:
                shutil.rmtree(old, ignore_errors=True)

    @classmethod
    def load(cls, folder: Path, digest: str) -> EncodedDataset | None:
        """Returns the cache with a digest, or None. A damaged one is logged and removed."""
        target = folder / f"{PREFIX}{digest[:16]}"
        if not target.is_dir():
            return None
        try:
            about = json.loads((target / ABOUT).read_text())
            if about["digest"] != digest:
                return None
            for name in ARRAYS:
                if _checksum(target / f"{name}.npy") != about["checksums"][name]:
                    raise ValueError(f"{name}.npy is not what was written")
            arrays: Any = {name: np.load(target / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ARRAYS}
            return cls(**arrays, sequences_per_row=about["sides"], dropped=about["dropped"], chat=about["chat"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("the encoded rows in %s are damaged (%s); they are encoded again.", target, error)
            shutil.rmtree(target, ignore_errors=True)
            return None


@functools.cache
def _versions() -> tuple[str, str]:
    return version("transformers"), version("tokenizers")


def cache_key(files: Sequence[Path], tokenizer: ChatTokenizer, settings: Mapping[str, Any]) -> str:
    """Returns a digest of all that encoded rows depend on: dataset files, tokenizer, template and settings."""
    digest = hashlib.sha256()

    def add(part: str | bytes) -> None:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)

    add(json.dumps([VERSION, *_versions()]))
    add(json.dumps(dict(settings), sort_keys=True, default=str))
    add(
        json.dumps(
            [type(tokenizer).__name__, tokenizer.chat_template or PLAIN_TEMPLATE, tokenizer.eos_token_id], default=str
        )
    )
    add(json.dumps(dict(tokenizer.special_tokens_map), sort_keys=True, default=str))  # templates write them
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None and (file := getattr(tokenizer, "vocab_file", None)) is not None:
        add(_hash(Path(file)))
    vocabulary: dict[str, int] = getattr(tokenizer, "get_vocab", dict)() if backend is None else {}
    add(json.dumps(vocabulary, sort_keys=True) if backend is None else backend.to_str())
    add(json.dumps(sorted(tokenizer.get_added_vocab().items())))
    for file in files:
        add(file.suffix)
        add(_hash(file))
    return digest.hexdigest()


def _hash(file: Path) -> bytes:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").digest()


def _checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum
