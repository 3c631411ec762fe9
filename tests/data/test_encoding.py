"""Encoding rows gives the same tokens with any number of processes and from the cache."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from postlude.data import encoded_dataset
from postlude.data.chat import Encoder
from postlude.data.encoded_dataset import EncodedChunk, EncodedDataset, encode
from postlude.hf.load import CHAT_TEMPLATE, byte_tokenizer
from postlude.recipes.config.data import Examples, Pairs
from postlude.recipes.dataset import EncodedRows
from postlude.recipes.sequence_limit import SequenceLimit


def conversation_row(number: int) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": "é" * (number % 7 + 1)}]
    return messages * (number % 3 + 1)


TALKS = [[conversation_row(number)] for number in range(30)]
NAMES = [f"row {number}" for number in range(len(TALKS))]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(encoded_dataset, "CHUNK", 4)
    return


def all_chunks(chunks: Iterator[EncodedChunk]) -> tuple[list[int], list[int], list[int], list[tuple[int, str, int]]]:
    read_chunks = list(chunks)
    columns = [
        np.concatenate([getattr(chunk, name) for chunk in read_chunks]).tolist()
        for name in ("tokens", "mask", "lengths")
    ]
    return columns[0], columns[1], columns[2], [row for chunk in read_chunks for row in chunk.too_long]


@pytest.mark.slow
def test_number_of_processes_does_not_change_the_result() -> None:
    encoder = Encoder(tokenizer=byte_tokenizer(), max_length=100)
    alone = all_chunks(encode(encoder, "conversation", TALKS, NAMES, processes=1))
    assert alone[3]  # some do not fit
    assert len(alone[2]) + len(alone[3]) == len(TALKS)
    assert all_chunks(encode(encoder, "conversation", TALKS, NAMES, processes=3)) == alone
    encoded_rows = [
        encoder.encode_rows("conversation", [row], [name])[0] for row, name in zip(TALKS, NAMES, strict=True)
    ]
    assert alone[0] == [
        token for row in encoded_rows if isinstance(row, list) for sequence in row for token in sequence.tokens
    ]


@pytest.mark.slow
def test_the_first_of_several_bad_rows_is_reported() -> None:
    rows = [*TALKS]
    for place in (6, 13, 27):
        rows[place] = [[{"role": "user", "content": None}]]
    encoder = Encoder(tokenizer=byte_tokenizer())
    for processes in (1, 2):
        with pytest.raises(ValueError, match=r"message 0 \(user\) of row 6 is null"):
            list(encode(encoder, "conversation", rows, NAMES, processes=processes))


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_errors_of_templates_and_tokenizers_name_the_row(processes: int) -> None:
    refusing = byte_tokenizer()
    refusing.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('No system.') }}{% endif %}" + CHAT_TEMPLATE
    )
    for broken, reason in (
        ([{"role": "system", "content": "Be."}, *conversation_row(1)], "the chat template fails: No system."),
        ([{"role": "user", "content": "\ud83d"}, *conversation_row(1)], "the tokenizer fails: "),
    ):
        rows = [*TALKS[:13], [broken], *TALKS[14:]]
        with pytest.raises(ValueError, match=f"^row 13 cannot be encoded: {reason}"):
            list(encode(Encoder(tokenizer=refusing), "conversation", rows, NAMES, processes=processes))


def test_encoding_process_does_not_import_torch() -> None:
    needed = "import sys, postlude.data.encoded_dataset, postlude.data.chat"
    done = subprocess.run(
        [sys.executable, "-c", f"{needed}; sys.exit('torch' in sys.modules)"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def dataset(path: Path, count: int = 10) -> Path:
    path.write_text("".join(json.dumps({"messages": conversation_row(number)}) + "\n" for number in range(count)))
    return path


def rows_of(encoded_rows: EncodedRows[Any]) -> list[Any]:
    return [encoded_rows[index] for index in range(len(encoded_rows))]


def test_cached_rows_equal_newly_encoded_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Examples(path=dataset(tmp_path / "a.jsonl"), overlong="drop")
    fresh = EncodedRows(data, byte_tokenizer(), SequenceLimit(100), tmp_path / "cache")
    assert 0 < len(fresh) < 10
    assert not (tmp_path / "cache").exists()  # until it is asked for
    fresh.store()
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    two = EncodedRows(Pairs(path=pairs), byte_tokenizer(), SequenceLimit(100), tmp_path / "two")
    two.store()
    monkeypatch.setattr("postlude.recipes.dataset.encode", lambda *_, **__: pytest.fail("it was kept"))
    reopened = EncodedRows(data, byte_tokenizer(), SequenceLimit(100), tmp_path / "cache")
    assert rows_of(reopened) == rows_of(fresh)
    assert (str(reopened), reopened.largest) == (str(fresh), fresh.largest)
    assert rows_of(EncodedRows(Pairs(path=pairs), byte_tokenizer(), SequenceLimit(100), tmp_path / "two")) == rows_of(
        two
    )


def test_cache_key_covers_everything_that_changes_the_tokens(tmp_path: Path) -> None:
    path = dataset(tmp_path / "a.jsonl")
    data = Examples(path=path, overlong="cut")

    def digest(
        data: Any = data, budget: int = 400, template: str = CHAT_TEMPLATE, added: str = "", **special: str
    ) -> str:
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = template
        for name, token in special.items():
            setattr(tokenizer, name, token)
        if added:
            tokenizer.add_tokens([added])
        return str(EncodedRows(data, tokenizer, SequenceLimit(budget)).digest)

    base = digest()
    assert digest() == base
    other_settings = [
        digest(budget=401),
        digest(template="#" + CHAT_TEMPLATE),
        digest(added="é"),
        digest(bos_token="<|im_start|>"),
        digest(eos_token="<|im_end|>"),
        digest(pad_token="<|im_end|>"),
        digest(data.model_copy(update={"tools": "functions"})),
        digest(data.model_copy(update={"turns": "last"})),
        digest(data.model_copy(update={"overlong": "drop"})),
        digest(data.model_copy(update={"path": dataset(tmp_path / "b.jsonl", 9)})),
    ]
    path.write_text(path.read_text().replace("3?", "4?"))
    other_settings.append(digest())
    assert len({base, *other_settings}) == 1 + len(other_settings)
    moved = dataset(tmp_path / "elsewhere.jsonl")
    assert digest(data.model_copy(update={"path": moved})) == base  # where it lies changes nothing


@pytest.mark.parametrize("damage", ["cut", "flipped", "unreadable", "missing"])
def test_a_damaged_cache_is_encoded_again(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    data = Examples(path=dataset(tmp_path / "a.jsonl"))
    fresh = EncodedRows(data, byte_tokenizer(), SequenceLimit(500), tmp_path / "cache")
    fresh.store()
    (folder,) = (tmp_path / "cache").iterdir()
    tokens = folder / "tokens.npy"
    complete_bytes = tokens.read_bytes()
    match damage:
        case "cut":
            tokens.write_bytes(complete_bytes[:-7])
        case "flipped":
            tokens.write_bytes(complete_bytes[:-1] + bytes([complete_bytes[-1] ^ 1]))
        case "unreadable":
            (folder / "about.json").write_text("{")
        case "missing":
            (folder / "mask.npy").unlink()
    with caplog.at_level(logging.WARNING):
        reopened = EncodedRows(data, byte_tokenizer(), SequenceLimit(500), tmp_path / "cache")
    assert "are damaged" in caplog.text
    assert "encoded again" in caplog.text
    assert rows_of(reopened) == rows_of(fresh)
    reopened.store()
    assert EncodedDataset.load(tmp_path / "cache", reopened.digest) is not None


def test_only_the_newest_cache_entries_are_kept(tmp_path: Path) -> None:
    data = Examples(path=dataset(tmp_path / "a.jsonl"))
    for budget in (500, 600):
        EncodedRows(data, byte_tokenizer(), SequenceLimit(budget), tmp_path / "cache").store()
    assert [path.name.startswith("rows-") for path in (tmp_path / "cache").iterdir()] == [True]


def rows_in(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_tools_of_a_row_reach_the_template(tmp_path: Path) -> None:
    knows = byte_tokenizer()
    knows.chat_template = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}" + CHAT_TEMPLATE
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    path = rows_in(
        tmp_path / "a.jsonl", [{"messages": conversation_row(1), "tools": tools}, {"messages": conversation_row(1)}]
    )
    with_tools, without = rows_of(EncodedRows(Examples(path=path), knows, SequenceLimit(400)))
    assert knows.decode(with_tools.tokens) == "[look]" + knows.decode(without.tokens)
    assert rows_of(EncodedRows(Examples(path=path, tools="other"), knows, SequenceLimit(400))) == [without, without]
    pair = {"prompt": conversation_row(1)[:1], "chosen": "a", "rejected": "b", "tools": tools}
    (sequences_per_row,) = rows_of(
        EncodedRows(Pairs(path=rows_in(tmp_path / "b.jsonl", [pair])), knows, SequenceLimit(400))
    )
    assert all(knows.decode(side.tokens).startswith("[look]") for side in sequences_per_row)
    with pytest.raises(ValueError, match=r"line 1 of a\.jsonl has tools, which the tokenizer's chat template does not"):
        EncodedRows(Examples(path=path), byte_tokenizer(), SequenceLimit(400))


def test_error_names_row_that_is_neither_text_nor_messages(tmp_path: Path) -> None:
    for row in ({"prompt": "q", "completion": 5}, {"text": 5}, {"prompt": conversation_row(1)[:1], "completion": 5}):
        path = rows_in(tmp_path / "a.jsonl", [row])
        with pytest.raises(ValueError, match=r"the completion of line 1 of a\.jsonl is 5, but a completion is text"):
            EncodedRows(Examples(path=path), byte_tokenizer(), SequenceLimit(400))


def test_error_names_unknown_roles(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    known = [{"role": role, "content": "x"} for role in ("system", "developer", "user", "tool", "assistant")]
    path = rows_in(tmp_path / "a.jsonl", [{"messages": known}])
    EncodedRows(Examples(path=path), byte_tokenizer(), SequenceLimit(400))
    assert not caplog.text
    unknown_role = [{"role": "human", "content": "x"}, *known]
    EncodedRows(
        Examples(path=rows_in(path, [{"messages": messages} for messages in (known, unknown_role, unknown_role)])),
        byte_tokenizer(),
        SequenceLimit(400),
    )
    assert 'line 2 of a.jsonl has a message of role "human", as have 1 more rows: chat templates' in caplog.text


def test_error_names_pairs_with_equal_completions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pairs = [{"prompt": "a", "chosen": "b", "rejected": rejected} for rejected in ("c", "b", "b")]
    path = rows_in(tmp_path / "a.jsonl", pairs[:1])
    EncodedRows(Pairs(path=path), byte_tokenizer(), SequenceLimit(400))
    assert not caplog.text
    encoded_rows = EncodedRows(Pairs(path=rows_in(path, pairs)), byte_tokenizer(), SequenceLimit(400))
    assert len(encoded_rows) == 3
    assert "line 2 of a.jsonl has the same tokens chosen and rejected, as have 1 more pairs: nothing" in caplog.text
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    EncodedRows(
        Pairs(path=rows_in(path, [{"chosen": messages, "rejected": messages}])), byte_tokenizer(), SequenceLimit(400)
    )
    assert "line 1 of a.jsonl has the same tokens" in caplog.text
