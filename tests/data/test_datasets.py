"""Datasets: file errors are reported before a run starts; a resumed order equals the uninterrupted one."""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path

import pytest

from postlude.data.datasets import RowOrder, read_rows

ROWS = [{"prompt": f"é {i}", "answer": i} for i in range(5)]


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def lines(rows: list[dict[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_jsonl_rows_are_named_by_line(tmp_path: Path) -> None:
    text = "\N{ZERO WIDTH NO-BREAK SPACE}" + lines(ROWS[:2]) + "\n  \n" + lines(ROWS[2:]).rstrip("\n")
    rows = read_rows(write(tmp_path / "train.jsonl", text)).require("prompt", "answer")
    assert list(rows) == ROWS
    assert [rows.location(i) for i in (0, 2)] == ["line 1 of train.jsonl", "line 5 of train.jsonl"]
    assert rows.columns == ("prompt", "answer")


def test_parquet_equals_jsonl(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    nested = [{**row, "messages": [{"role": "user", "content": "hi"}]} for row in ROWS]
    parquet.write_table(pyarrow.Table.from_pylist(nested), tmp_path / "train.parquet", row_group_size=2)
    rows = read_rows(tmp_path / "train.parquet")
    assert list(rows) == list(read_rows(write(tmp_path / "train.jsonl", lines(nested))))
    assert rows.location(3) == "row 3 of train.parquet"
    write(tmp_path / "torn.parquet", (tmp_path / "train.parquet").read_bytes()[:100])
    with pytest.raises(ValueError, match=r"torn\.parquet cannot be read as parquet: "):
        read_rows(tmp_path / "torn.parquet")


def test_parquet_with_a_column_twice_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table([[1], [2]], names=["a", "a"]), tmp_path / "train.parquet")
    with pytest.raises(ValueError, match=r'train\.parquet cannot be read as parquet: it has the column "a" twice'):
        read_rows(tmp_path / "train.parquet")


def test_parquet_drops_null_keys_that_only_other_rows_have(tmp_path: Path) -> None:
    """All structs of a column have the same keys; those that a row lacks are null and are dropped."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    calls = [[{"function": {"name": "look", "arguments": arguments}}] for arguments in ({"a": 1}, {"b": "x"})]
    nested = [{"messages": [{"role": "assistant", "tool_calls": call}], "other": None} for call in calls]
    nested.append({"messages": [{"role": "user", "content": "hi"}], "other": "x"})
    parquet.write_table(pyarrow.Table.from_pylist(nested), tmp_path / "train.parquet")
    assert list(read_rows(tmp_path / "train.parquet")) == nested


@pytest.mark.parametrize("name", ["a.csv", "a.CSV", "a.csv.gz", "a.jsonl.gz", "a.json.gz", "a.json", "list.json"])
def test_every_format_holds_the_same_rows(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": 'é, "x"\ny', "completion": "1"}, {"prompt": "b\u2028b", "completion": None}]
    if ".csv" in name.lower():
        text = "\N{ZERO WIDTH NO-BREAK SPACE}" + 'prompt,completion\r\n"é, ""x""\ny",1\r\n\r\nb\u2028b,\r\n'
    else:
        text = json.dumps(rows, indent=1) if name == "list.json" else lines(rows)  # type: ignore[arg-type]
    write(tmp_path / name, gzip.compress(text.encode()) if name.endswith(".gz") else text)
    assert list(read_rows(tmp_path / name)) == rows
    assert list(read_rows(tmp_path)) == rows


def test_error_names_files_of_a_folder_that_are_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "a.jsonl", lines(ROWS))
    for name in ("dataset_infos.json", "dataset_info.json", "README.md", "._a.jsonl", "_SUCCESS", "LICENSE"):
        write(tmp_path / name, '{"default": 1}')
    (tmp_path / "b.jsonl").mkdir()
    assert list(read_rows(tmp_path)) == ROWS
    assert not caplog.text
    for name in ("b.arrow", "c.jsonl.zst"):
        write(tmp_path / name, "x")
    assert list(read_rows(tmp_path)) == ROWS
    assert "not read" in caplog.text
    assert "b.arrow, c.jsonl.zst." in caplog.text


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("d.csv", "a,b\n1,2\n1,2,3\n", r"line 3 of d\.csv has 3 cells, but its first line names 2 columns"),
        ("d.csv", "a,b,a\n1,2,3\n", r'd\.csv has the column "a" twice\. Rename one'),
        ("d.csv", b"a,b\n\xff,1\n", r"d\.csv is not UTF-8 text"),
        ("d.csv", 'a,b\n"1,2\n', r"line 2 of d\.csv is not CSV: unexpected end of data"),
        ("d.jsonl.gz", "no gzip", r"d\.jsonl\.gz cannot be read as gzip"),
        (
            "d.jsonl.gz",
            gzip.compress(b"{}\n" * 9, mtime=0)[:-12],
            r"d\.jsonl\.gz cannot be read as gzip: .*cut off",
        ),
        ("d.json", '[{"a": 1},\n{"a" 2}]', r"d\.json is not JSON: .* at line 2, column 6"),
        ("d.json", '[{"b": [{"a": 1, "a": 2}]}]', r'd\.json cannot be read: it has the key "a" twice\. Write'),
        ("d.json", '[{"a": 1},\n2]', r"row 1 of d\.json holds a JSON int"),
        ("d.json", '[{"a": ' + "[" * 50_000 + "]" * 50_000 + "}]", r"d\.json cannot be read: .*recursion"),
        ("d.jsonl", '{"a": ' + "9" * 5000 + "}\n", r"line 1 of d\.jsonl cannot be read: Exceeds the limit"),
    ],
)
def test_broken_file_of_another_format_gives_clear_error(
    tmp_path: Path, name: str, text: str | bytes, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_rows(write(tmp_path / name, text))


def test_folder_is_read_file_by_file_in_name_order(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", lines(ROWS[2:]))
    write(tmp_path / "a.jsonl", lines(ROWS[:2]))
    write(tmp_path / "README.md", "not rows")
    rows = read_rows(tmp_path)
    assert list(rows) == ROWS
    assert rows.location(2) == "line 1 of b.jsonl"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            lines(ROWS) + '{"prompt": "tor',
            r"line 6 of d\.jsonl is not JSON: Unterminated string starting at column 12\. .*was the file cut off\?",
        ),
        (lines(ROWS[:1]) + "{'a': 1}\n" + lines(ROWS), r"line 2 of d\.jsonl is not JSON: .* at column 2\.$"),
        ('{"a": 1, "b": 1, "a": 2}\n', r'line 1 of d\.jsonl cannot be read: it has the key "a" twice\. Fix it, or'),
        ("[1, 2]\n", r"line 1 of d\.jsonl holds a JSON list, but a row is an object"),
        (b'{"a": 1}\n{"a": "\xff"}\n', r"line 2 of d\.jsonl is not UTF-8 text: "),
        ("\n\n", r"d\.jsonl has no rows\. Give a file"),
        ("", r"d\.jsonl has no rows\. Give a file"),
    ],
)
def test_broken_file_gives_clear_error(tmp_path: Path, text: str | bytes, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_rows(write(tmp_path / "d.jsonl", text))


def test_missing_column_error_suggests_the_nearest_name(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", lines([{"promt": "x", "answer": 1}]))
    expected = 'dataset train.jsonl has no column "prompt"; it has: "promt", "answer"; did you mean "promt"?'
    with pytest.raises(ValueError, match="no column") as caught:
        read_rows(path).require("answer", "prompt")
    assert str(caught.value) == expected
    path = write(tmp_path / "train.jsonl", lines([*ROWS, {"answer": 1}, {"prompt": None, "answer": 1}]))
    with pytest.raises(ValueError, match=r'line 6 of train\.jsonl has no value in column "prompt", as do 1 more\.'):
        read_rows(path).require("prompt")
    write(path, lines([{"prompt": None, "answer": "1"}] * 2))
    with pytest.raises(ValueError, match=r'line 1 of .*\.jsonl has no value in column "prompt", as do 1 more\.'):
        read_rows(path).require("prompt")


def test_missing_file_error_suggests_the_nearest_name(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", lines(ROWS))
    with pytest.raises(FileNotFoundError, match=r"there is no dataset .*trian\.jsonl; did you mean .*train\.jsonl\?"):
        read_rows(tmp_path / "trian.jsonl")
    with pytest.raises(FileNotFoundError, match="the current directory is"):
        read_rows(tmp_path / "nowhere" / "x.jsonl")
    with pytest.raises(ValueError, match=r'ends in "\.xlsx", but \.jsonl, \.json, \.csv .* and \.parquet can be read'):
        read_rows(write(tmp_path / "train.xlsx", "a,b"))
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ValueError, match=r"pipe\.jsonl is neither a file nor a folder"):
        read_rows(tmp_path / "pipe.jsonl")
    (tmp_path / "outer" / "data").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"outer has no rows to read.* did you mean .*outer/data\?"):
        read_rows(tmp_path / "outer")


def test_parquet_without_pyarrow_gives_install_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="needs the package pyarrow: pip install pyarrow"):
        read_rows(write(tmp_path / "train.parquet", "x"))


def test_every_epoch_visits_every_row_once() -> None:
    sampler = RowOrder(7, seed=3)
    epochs = [sampler.take(7) for _ in range(4)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert RowOrder(7, seed=4).take(28) != [row for epoch in epochs for row in epoch]


def test_row_order_does_not_depend_on_the_call_sizes() -> None:
    expected = RowOrder(10, seed=1).take(57)
    pieces = RowOrder(10, seed=1)
    assert [row for count in (0, 3, 10, 24, 20) for row in pieces.take(count)] == expected


def test_row_order_is_stable_across_versions() -> None:
    assert RowOrder(8, seed=0).take(16) == [6, 3, 5, 0, 7, 2, 1, 4, 3, 1, 0, 4, 5, 6, 7, 2]


@pytest.mark.parametrize("count", [0, 3, 7, 14, 16])
def test_resumed_order_equals_the_uninterrupted_one(count: int) -> None:
    first = RowOrder(7, seed=5)
    first.take(count)
    second = RowOrder(7, seed=5)
    second.restore(json.loads(json.dumps(first.state())))
    assert second.take(20) == first.take(20)


@pytest.mark.parametrize("other_sampler", [RowOrder(8, seed=5), RowOrder(7, seed=6)])
def test_resuming_with_another_order_is_refused(other_sampler: RowOrder) -> None:
    with pytest.raises(ValueError, match=r"the saved order has (size|seed) \w+, but this one has \w+"):
        other_sampler.restore(RowOrder(7, seed=5).state())


def test_damaged_state_and_invalid_settings_give_clear_errors() -> None:
    with pytest.raises(ValueError, match=r"stands at row 9 of 7 in epoch 0\. It is damaged"):
        RowOrder(7).restore({**RowOrder(7).state(), "position": 9})
    with pytest.raises(ValueError, match="size is 0"):
        RowOrder(0)
    with pytest.raises(ValueError, match="seed is -1"):
        RowOrder(1, seed=-1)
    with pytest.raises(ValueError, match="count is -1"):
        RowOrder(1).take(-1)
