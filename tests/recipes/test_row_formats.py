"""Datasets in the formats that people have give the rows that Postlude's own formats give."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from postlude.data.datasets import read_rows
from postlude.hf.load import byte_tokenizer
from postlude.recipes.config.data import Examples, LabelledExamples, Pairs
from postlude.recipes.dataset import EncodedRows, StreamEncoder
from postlude.recipes.kto import read_label
from postlude.recipes.sequence_limit import SequenceLimit
from postlude.rollout.tasks import DatasetTasks

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
SHARED = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
SYSTEM = {"role": "system", "content": "be brief"}
WORSE = [*TALK[:1], {"role": "assistant", "content": "no"}]


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def encoded(
    tmp_path: Path, row: Mapping[str, Any], kind: Any = Examples, suffix: str = "jsonl", **settings: Any
) -> Any:
    data = kind(path=write(tmp_path / f"rows.{suffix}", [row, row]), **settings)
    rows: EncodedRows[Any] = EncodedRows(data, byte_tokenizer(), SequenceLimit(800))
    limit = SequenceLimit(800)
    streamed: StreamEncoder[Any] = StreamEncoder(data, byte_tokenizer(), limit, lambda cells, *_: cells)
    assert streamed([row] if suffix == "jsonl" else list(data.read()), ["a"] * (1 if suffix == "jsonl" else 2))[0] == [
        rows[0]
    ], "a stream is read alike"
    return rows[0], rows.identity(0)


@pytest.mark.parametrize(
    ("row", "same"),
    [
        ({"conversations": SHARED}, {"messages": TALK}),
        ({"conversations": TALK}, {"messages": TALK}),
        (
            {"conversations": [*SHARED[:1], {**SHARED[1], "weight": 0}, *SHARED]},
            {"messages": [*TALK[:1], {**TALK[1], "weight": 0}, *TALK]},
        ),
        ({"conversations": SHARED, "system": "be brief"}, {"messages": [SYSTEM, *TALK]}),
        ({"conversations": [{"from": "system", "value": "be brief"}, *SHARED]}, {"messages": [SYSTEM, *TALK]}),
        (
            {"conversations": [*SHARED, {"from": "tool", "value": "3"}, SHARED[1]]},
            {"messages": [*TALK, {"role": "tool", "content": "3"}, TALK[1]]},
        ),
        ({"instruction": "hi", "output": "yo"}, {"prompt": TALK[:1], "completion": "yo"}),
        (
            {"instruction": "add", "input": "1 2", "output": "3", "system": "be brief"},
            {"prompt": [SYSTEM, {"role": "user", "content": "add\n1 2"}], "completion": "3"},
        ),
        ({"messages": json.dumps(TALK)}, {"messages": TALK}),
        (
            {"prompt": json.dumps(TALK[:1]), "completion": json.dumps(TALK[1:])},
            {"prompt": TALK[:1], "completion": "yo"},
        ),
    ],
)
def test_rows_of_other_formats_equal_our_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, row: dict[str, Any], same: dict[str, Any]
) -> None:
    actual = encoded(tmp_path, row)
    assert len([record for record in caplog.records if "is read as" in record.message]) == (1 if row != same else 0)
    caplog.clear()
    assert actual == encoded(tmp_path, same)
    assert not caplog.records


def test_sharegpt_is_read_under_any_column_name(tmp_path: Path) -> None:
    assert encoded(tmp_path, {"talk": SHARED}, messages="talk") == encoded(tmp_path, {"messages": TALK})
    assert encoded(tmp_path, {"conversations": SHARED}, messages="conversations") == encoded(
        tmp_path, {"messages": TALK}
    )


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_messages_as_json_text(tmp_path: Path, suffix: str) -> None:
    expected = encoded(tmp_path, {"messages": TALK})
    assert encoded(tmp_path, {"messages": json.dumps(TALK)}, suffix=suffix) == expected
    pair = {"chosen": json.dumps(TALK), "rejected": json.dumps(WORSE)}
    assert encoded(tmp_path, pair, Pairs, suffix) == encoded(tmp_path, {"chosen": TALK, "rejected": WORSE}, Pairs)
    path = write(tmp_path / f"tasks.{suffix}", [{"prompt": json.dumps(TALK[:1])}])
    assert DatasetTasks(read_rows(path))[0].prompt == TALK[:1]


def test_text_that_only_looks_like_messages_stays_text(tmp_path: Path) -> None:
    for text in ('[{"a": 1}]', "[", "{}", "[]", '"role"'):
        (sequence, _), (other, _) = (
            encoded(tmp_path, row) for row in ({"text": text}, {"prompt": "", "completion": text})
        )
        assert sequence == other
    answer = {"prompt": "write a talk", "completion": json.dumps(TALK)}
    assert bytes(token for token in encoded(tmp_path, answer)[0].tokens if token < 256).endswith(b'"yo"}]')


def test_pairs_may_share_their_prompt(tmp_path: Path) -> None:
    apart = {"prompt": TALK[:1], "chosen": TALK[1:], "rejected": WORSE[1:]}
    assert encoded(tmp_path, {"chosen": TALK, "rejected": WORSE}, Pairs) == encoded(tmp_path, apart, Pairs)
    start = "\n\nHuman: hi\n\nAssistant: a\n\nHuman: more\n\nAssistant:"
    together = {"chosen": f"{start} good", "rejected": f"{start} goof"}
    apart = {"prompt": start, "chosen": " good", "rejected": " goof"}
    assert encoded(tmp_path, together, Pairs) == encoded(tmp_path, apart, Pairs)
    with pytest.raises(ValueError, match=r"has no prompt\. Give one \(data\.prompt names its column\)"):
        encoded(tmp_path, {"chosen": "Sure, a", "rejected": "Sure, b"}, Pairs)


@pytest.mark.parametrize(
    ("row", "formats"),
    [
        ({"messages": TALK, "prompt": "p", "completion": "c", "text": "t"}, ("messages", "completion", "text")),
        ({"messages": TALK, "conversations": SHARED}, ("messages", "sharegpt")),
        ({"instruction": "a", "input": "b", "output": "c", "text": "t"}, ("alpaca", "text")),
        ({"text": "t", "prompt": "p"}, ("completion", "text")),
    ],
)
def test_columns_of_several_formats_are_refused(tmp_path: Path, row: dict[str, Any], formats: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"columns of several formats: .* Set data\.format to one") as refused:
        encoded(tmp_path, row)
    for name in formats:
        assert f"{name} (" in str(refused.value)
        if name != "completion" or "completion" in row:
            encoded(tmp_path, row, format=name)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (
            {"conversations": [{"from": "function_call", "value": "{}"}]},
            "line 1 .* from 'function_call' with .* ShareGPT",
        ),
        ({"conversations": [*SHARED[:1], {"from": "gpt", "value": 3}]}, "'gpt' with the value '3'"),
        ({"conversations": [*SHARED[:1], {**SHARED[1], "weight": 0.5}]}, "has the weight 0.5, but a weight is 1, or 0"),
        ({"conversations": [{"from": "system", "value": "a"}, *SHARED], "system": "b"}, 'another in column "system"'),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "line 1 of rows.jsonl has a history"),
        ({"instruction": 3, "output": "b"}, "an instruction or an input that is not text"),
    ],
)
def test_what_another_format_says_and_is_not_read_is_refused(
    tmp_path: Path, row: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        encoded(tmp_path, row)


def test_labels() -> None:
    for label in (True, 1, 1.0, "true", "True", "1", "1.0"):
        assert read_label({"label": label}, "line 1", "label") is True
    for label in (False, 0, 0.0, "false", "FALSE", "0"):
        assert read_label({"label": label}, "line 1", "label") is False
    for label in (None, 2, 0.5, float("nan"), "yes", "", [1]):
        with pytest.raises(ValueError, match="but a label is true or false, or 1 or 0"):
            read_label({"label": label}, "line 1", "label")


def test_labels_beside_other_formats(tmp_path: Path) -> None:
    row = {"conversations": SHARED, "label": 1.0}
    assert encoded(tmp_path, row, LabelledExamples) == encoded(tmp_path, {"messages": TALK})
