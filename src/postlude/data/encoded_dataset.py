"""Rows as tokens, kept on disk under a name that is made of all they depend on, so that a start encodes nothing twice.

Arrays are memory-mapped: ranks of one machine share what they read. They are written aside and renamed, so that what
has its name is whole; what a disk made of it since is known by checksums, and made anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from postlude.data.chat import EncodedSequence
from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.data.encoding import EncodedChunk

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

VERSION = 2  # of how rows are encoded and kept; raise it where either changes
ABOUT = "about.json"
PREFIX = "rows-"
ARRAYS = ("tokens", "mask", "starts", "sources")


@dataclass(frozen=True)
class EncodedDataset:
    """Every row as tokens: `sequences_per_row` sequences each.

    Sequence i is tokens[starts[i] : starts[i + 1]], as is its mask.
    """

    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8]
    starts: NDArray[np.int64]
    sources: NDArray[np.int64]
    """The row of the dataset that each sequence is of."""
    sequences_per_row: int = 1
    dropped: int = 0
    """Sequences of the dataset that are not here."""

    def __len__(self) -> int:
        """The number of rows."""
        return (len(self.starts) - 1) // self.sequences_per_row

    def row(self, index: int) -> list[EncodedSequence]:
        """The sequences of one row."""
        return [self._sequence(index * self.sequences_per_row + side) for side in range(self.sequences_per_row)]

    def first_of(self, index: int) -> int:
        """The first of the rows here that are of the same row of the dataset: a conversation may be one a turn."""
        return (
            int(np.searchsorted(self.sources, self.sources[index * self.sequences_per_row])) // self.sequences_per_row
        )

    def content(self, index: int) -> bytes:
        """What tells rows apart that are held out: all tokens before the first learned one; without a prompt, the row.

        Of a conversation that is one row a turn, it is the first turn's. No more is read than that, as every row is
        asked for it.
        """
        first = self.first_of(index) * self.sequences_per_row
        end, start = first + self.sequences_per_row, int(self.starts[first])
        prompt = int(self.mask[start : int(self.starts[first + 1])].view(bool).argmax())
        stop = start + prompt if prompt > 1 else int(self.starts[end])  # more than a token that begins every text
        return self.tokens[start:stop].tobytes()

    def _sequence(self, index: int) -> EncodedSequence:
        part = slice(int(self.starts[index]), int(self.starts[index + 1]))
        return EncodedSequence(self.tokens[part].tolist(), self.mask[part].tolist())

    @classmethod
    def of(cls, chunks: Iterable[EncodedChunk], *, sequences_per_row: int) -> EncodedDataset:
        """All chunks of a dataset."""
        found = list(chunks)
        lengths = np.concatenate([np.zeros(1, np.int64), *(each.lengths for each in found)])
        return cls(
            np.concatenate([each.tokens for each in found]),
            np.concatenate([each.mask for each in found]),
            np.cumsum(lengths),
            np.concatenate([each.sources for each in found]),
            sequences_per_row,
            sum(len(each.too_long) for each in found),
        )

    def store(self, folder: Path, digest: str) -> None:
        """Keep the rows, in place of those that were kept under other digests."""
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
            "sequences_per_row": self.sequences_per_row,
            "dropped": self.dropped,
            "checksums": sums,
        }
        (aside / ABOUT).write_text(json.dumps(about))
        try:
            aside.rename(target)
        except OSError:  # another machine's first rank was faster, with the same
            shutil.rmtree(aside, ignore_errors=True)
        for old in folder.glob(f"{PREFIX}*"):
            if old != target:
                shutil.rmtree(old, ignore_errors=True)

    @classmethod
    def load(cls, folder: Path, digest: str) -> EncodedDataset | None:
        """What was kept under a digest; None where nothing was, or it is damaged, which is said and cleared away."""
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
            return cls(**arrays, sequences_per_row=about["sequences_per_row"], dropped=about["dropped"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("the encoded rows in %s are damaged (%s); they are made anew.", target, error)
            shutil.rmtree(target, ignore_errors=True)
            return None


def cache_key(files: Sequence[Path], tokenizer: ChatTokenizer, settings: Mapping[str, Any]) -> str:
    """What encoded rows depend on, in a word: the dataset's bytes, the tokenizer, its template, all settings."""
    whole = hashlib.sha256()

    def add(part: str | bytes) -> None:
        data = part.encode() if isinstance(part, str) else part
        whole.update(len(data).to_bytes(8, "little") + data)

    add(json.dumps([VERSION, version("transformers"), version("tokenizers")]))
    add(json.dumps(dict(settings), sort_keys=True, default=str))
    add(json.dumps([type(tokenizer).__name__, tokenizer.chat_template, tokenizer.eos_token_id], default=str))
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
    return whole.hexdigest()


def _hash(file: Path) -> bytes:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").digest()


def _checksum(file: Path) -> int:
    found = 0
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            found = zlib.crc32(block, found)
    return found
