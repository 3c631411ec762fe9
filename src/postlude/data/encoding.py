"""Rows of a dataset to tokens, in several processes where that is faster.

Run as a script, this file is one of those processes: it gets an encoder, then chunks of rows, and answers each with the
tokens. It needs the tokenizer alone, no torch, so that it starts fast and stays small.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from postlude.data.chat import Encoder, RowFormat

CHUNK = 256  # rows
WORTH = 8 * CHUNK  # rows that make one more process worth its start
MOST = 16  # processes


@dataclass(frozen=True)
class EncodedChunk:
    """Rows that were encoded: their tokens and masks one after the other, and how long each sequence is.

    A preference has two sequences; a row of another form has one, or one a turn where the template asks for that.
    `sources` are the places of the sequences' rows among those that were given. `too_long` says of sequences that are
    not here the place of their row, their name, and how long they are.
    """

    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8]
    lengths: NDArray[np.int64]
    sources: NDArray[np.int64]
    too_long: list[tuple[int, str, int]]


def encode(
    encoder: Encoder,
    form: RowFormat,
    rows: Sequence[Sequence[Any]],
    names: Sequence[str],
    *,
    processes: int | None = None,
) -> Iterator[EncodedChunk]:
    """Encode rows of one form, as `Encoder.encode_rows` takes them; chunks come in the order of the rows.

    How many processes there are changes nothing; by default as many as this machine has processors to spare and the
    rows are worth.
    """
    if processes is None:
        processes = min(len(os.sched_getaffinity(0)), MOST, len(rows) // WORTH)
    parts = [(rows[start : start + CHUNK], names[start : start + CHUNK], start) for start in range(0, len(rows), CHUNK)]
    packed = None
    if processes > 1:
        with contextlib.suppress(Exception):  # a tokenizer that cannot be sent: here, then
            packed = pickle.dumps((encoder, form))
    if packed is None:
        yield from (_encoded(encoder, form, *part) for part in parts)
    else:
        yield from _in_processes(packed, parts, processes)


def _encoded(
    encoder: Encoder, form: RowFormat, rows: Sequence[Sequence[Any]], names: Sequence[str], first: int
) -> EncodedChunk:
    from postlude.data.chat import EncodedSequence, TooLongError

    sequences: list[EncodedSequence] = []
    sources: list[int] = []
    too_long = []
    for place, made in enumerate(encoder.encode_rows(form, rows, names)):
        for each in [made] if isinstance(made, TooLongError) else made:
            if isinstance(each, TooLongError):
                too_long.append((first + place, each.row, each.length))
            else:
                sequences.append(each)
                sources.append(first + place)
    return EncodedChunk(
        np.array([token for each in sequences for token in each.tokens], np.int32),
        np.array([mark for each in sequences for mark in each.mask], np.uint8),
        np.array([len(each) for each in sequences], np.int64),
        np.array(sources, np.int64),
        too_long,
    )


def _in_processes(packed: bytes, parts: Sequence[tuple[Any, ...]], count: int) -> Iterator[EncodedChunk]:
    """Each process has one part at a time. What they answer is given on in the order of the parts."""
    done: dict[int, Any] = {}
    processes = [_Process(packed) for _ in range(min(count, len(parts)))]
    try:
        following = 0
        for number in range(len(parts)):
            while number not in done:
                for process in processes:
                    # Not far ahead of what was given on, so that little waits in memory.
                    if process.part is None and following < min(len(parts), number + 4 * count):
                        process.give(following, parts[following])
                        following += 1
                busy = {process.answers: process for process in processes if process.part is not None}
                for ready in wait(list(busy)):
                    process = busy[ready]  # type: ignore[index]
                    part, process.part = process.part, None
                    assert part is not None
                    done[part] = process.answer()
            found = done.pop(number)
            if isinstance(found, str):  # of several mistakes the first in the dataset, whoever was faster
                raise ValueError(found)
            yield found
    finally:
        for process in processes:
            process.end()


class _Process:
    """A process that encodes, the number of the part that it is at, and the name of its first row."""

    def __init__(self, packed: bytes) -> None:
        self.part: int | None = None
        self.first = ""
        calls_in, calls_out = os.pipe()
        answers_in, answers_out = os.pipe()
        self.calls = Connection(calls_out, readable=False)
        self.answers = Connection(answers_in, writable=False)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__)), str(calls_in), str(answers_out)],
                stdin=subprocess.DEVNULL,
                pass_fds=(calls_in, answers_out),
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
            )
        finally:
            os.close(calls_in)
            os.close(answers_out)
        self.calls.send_bytes(pickle.dumps([path or str(Path.cwd()) for path in sys.path]))
        self.calls.send_bytes(packed)

    def give(self, part: int, rows: tuple[Any, ...]) -> None:
        """Send it rows."""
        self.part, self.first = part, rows[1][0]
        self.calls.send_bytes(pickle.dumps(rows))

    def answer(self) -> EncodedChunk | str:
        """What it made of them, or a sentence that says why it could not."""
        try:
            found = pickle.loads(self.answers.recv_bytes())
        except EOFError:
            raise RuntimeError(
                f"a process that encodes rows ended with exit code {self.process.wait()} at the rows from {self.first} "
                f"on; was memory short?"
            ) from None
        return found if isinstance(found, str) else EncodedChunk(*found)

    def end(self) -> None:
        """End it, whatever it is at."""
        self.process.kill()
        self.process.wait()
        self.calls.close()
        self.answers.close()


def _serve(calls: Connection, answers: Connection) -> None:
    """Encode what comes until the other side goes away."""
    sys.path[:] = pickle.loads(calls.recv_bytes())
    encoder, form = pickle.loads(calls.recv_bytes())
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            rows, names, first = pickle.loads(calls.recv_bytes())
            try:
                made = _encoded(encoder, form, rows, names, first)
                found: Any = (made.tokens, made.mask, made.lengths, made.sources, made.too_long)
            except Exception as error:  # the other side raises it
                known = isinstance(error, ValueError)
                found = str(error) if known else f"{names[0]} to {names[-1]}: {type(error).__name__}: {error}"
            answers.send_bytes(pickle.dumps(found))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1]), writable=False), Connection(int(sys.argv[2]), readable=False))
