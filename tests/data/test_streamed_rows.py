"""Streams: rows of files in order, shuffled with a buffer, resumed exactly, never read completely."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from postlude.data.datasets import permutation, read_parquet, stream_files
from postlude.data.streamed_rows import RowStream, StreamedRows
from tests.hub_server import serve_hub, use_hub

ROWS = [{"n": number, "text": "é" * (number % 3)} for number in range(23)]


def as_lines(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n\n" * (row["n"] % 4 == 0) + "\n" for row in rows).encode()


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.with_suffix(".jsonl").write_bytes(as_lines(rows))
    return path.with_suffix(".jsonl")


def write_gzip(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(as_lines(rows)))
    return path.with_suffix(".jsonl.gz")


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist([dict(row) for row in rows])
    pyarrow.parquet.write_table(table, path.with_suffix(".parquet"), row_group_size=5)
    return path.with_suffix(".parquet")


WRITERS: list[Callable[[Path, Sequence[Mapping[str, Any]]], Path]] = [write_jsonl, write_gzip, write_parquet]


def numbers(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[list[int]]:
    """Encodes a row as its number. Drops every seventh row and returns two sequences for every fifth."""
    return [[] if row["n"] % 7 == 6 else [row["n"]] * (2 if row["n"] % 5 == 4 else 1) for row in rows]


EPOCH = [number for (entry,) in [(row,) for row in ROWS] for number in numbers([entry], [""])[0]]


def stream(files: Sequence[Path], **options: Any) -> StreamedRows[int]:
    return StreamedRows(files, numbers, lambda row: bytes([row["n"] % 11]), **options)


@pytest.fixture(params=WRITERS, ids=["jsonl", "gzip", "parquet"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    pytest.importorskip("pyarrow.parquet")
    cuts = (0, 9, 9, 23)
    return [request.param(tmp_path / f"part{i}", ROWS[cuts[i] : cuts[i + 1]]) for i in (0, 2)]


def test_stream_gives_rows_in_order(files: list[Path]) -> None:
    reader = RowStream(files)
    read = reader.read(4) + reader.read(100)
    assert [row for _, row in read] == ROWS
    if files[0].suffix == ".jsonl":
        assert read[1][0] == "line 4 of part0.jsonl", "blank lines count"
    assert reader.read(1) == [], "the epoch is over"


def test_any_position_continues_with_the_next_row(files: list[Path]) -> None:
    all_rows = RowStream(files).read(100)
    for count in range(len(ROWS)):
        first = RowStream(files)
        first.read(count)
        assert RowStream(files, first.position).read(100) == all_rows[count:]


@pytest.mark.parametrize("buffer", [None, 1, 5, 100])
def test_every_epoch_has_each_row_once(files: list[Path], buffer: int | None) -> None:
    rows = stream(files, seed=3, buffer=buffer)
    epochs = [rows.take(len(EPOCH)) for _ in range(3)]
    assert all(sorted(epoch) == sorted(EPOCH) for epoch in epochs)
    if buffer in (None, 1):
        assert epochs == [EPOCH] * 3
    else:
        assert epochs[0] != epochs[1] != EPOCH
    other_seed = stream(files, seed=4, buffer=buffer)
    assert (other_seed.take(len(EPOCH)) == epochs[0]) == (buffer in (None, 1)), "the seed decides the order"


def test_shuffle_buffer_permutes_consecutive_rows(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a", ROWS)
    rows = StreamedRows([path], lambda rows, _: [[row["n"]] for row in rows], lambda row: b"", seed=3, buffer=10)
    expected = [start + place for number, start, size in ((0, 0, 10), (1, 10, 10), (2, 20, 3))
                for place in permutation(size, 3, 0, number)]  # fmt: skip
    assert rows.take(23) == expected
    assert rows.take(10) == permutation(10, 3, 1, 0), "the epoch is part of the seed"


@pytest.mark.parametrize("buffer", [None, 5, 100])
def test_restored_stream_continues_at_the_exact_row(files: list[Path], buffer: int | None) -> None:
    expected = stream(files, seed=3, buffer=buffer).take(3 * len(EPOCH))
    for count in range(2 * len(EPOCH)):
        first, second = (stream(files, seed=3, buffer=buffer) for _ in range(2))
        first.take(count)
        second.restore(json.loads(json.dumps(first.state())))
        assert second.take(7) == expected[count : count + 7]


def test_rows_per_call_does_not_change_the_order(files: list[Path]) -> None:
    single, together = (stream(files, seed=3, buffer=6) for _ in range(2))
    assert [row for _ in range(40) for row in single.take(1)] == together.take(17) + together.take(23)


def test_first_rows_and_their_duplicates_are_held_out(files: list[Path]) -> None:
    rows = stream(files, held_out=2, buffer=4)
    assert rows.held_out == [0, 1]
    assert rows.held_out_identities == {b"\0", b"\1"}
    kept_numbers = [number for number in EPOCH if number % 11 > 1]
    assert sorted(rows.take(len(kept_numbers))) == sorted(kept_numbers)
    rows = stream(files)
    rows.exclude({b"\0", b"\1"})
    assert rows.take(len(kept_numbers)) == kept_numbers


def test_a_stream_without_a_row_to_train_on_ends(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a", ROWS[:3])
    rows = stream([path])
    rows.exclude({bytes([number]) for number in range(11)})
    with pytest.raises(ValueError, match="has no row to train on: there is none, or all are held out or too long"):
        rows.take(1)
    with pytest.raises(ValueError, match=r"4 rows are to be held out, but .* has 3 different prompts"):
        stream([path], held_out=4)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(ValueError, match="has no row to train on"):
        stream([empty]).take(1)


def test_restoring_another_streams_state_is_refused(files: list[Path]) -> None:
    state = stream(files, seed=3, buffer=5).state()
    for options, name in (({"seed": 4, "buffer": 5}, "seed"), ({"seed": 3}, "buffer")):
        with pytest.raises(ValueError, match=f"the saved position of the stream has {name}"):
            stream(files, **options).restore(state)
    with pytest.raises(ValueError, match="has files 2, but this one has 1"):
        stream(files[:1], seed=3, buffer=5).restore(state)


def test_parquet_is_read_by_row_groups(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow.parquet")
    path = write_parquet(tmp_path / "a", ROWS)
    for skip in (0, 4, 5, 12, 23):
        rows = list(read_parquet(path, skip))
        assert [row for _, row in rows] == ROWS[skip:]
        assert [place for place, _ in rows[:1]] == [f"row {skip} of a.parquet"][: len(rows)]


def test_a_file_of_the_hub_is_downloaded_when_the_stream_reaches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    parts = {f"train-{i}.jsonl": as_lines(ROWS[10 * i : 10 * i + 10]) for i in range(3)}
    with serve_hub({("datasets", "org/big"): parts}) as hub:
        use_hub(monkeypatch, hub.url, tmp_path / "cache")
        reader = RowStream(stream_files(Path("org/big")))
        assert [row for _, row in reader.read(10)] == ROWS[:10]
        assert not any("train-1" in request for request in hub.requests)
        assert [row for _, row in reader.read(11)] == ROWS[10:21]
        assert any("train-2" in request for request in hub.requests)
