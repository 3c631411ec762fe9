"""Rows to tokens: as many processes as one likes, and what was kept, are the same to the token."""

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

from postlude.data import encoding
from postlude.data.chat import Encoder
from postlude.data.encoding import Chunk, encode
from postlude.data.kept import KeptRows
from postlude.hf.tokenizer import CHAT_TEMPLATE, byte_tokenizer
from postlude.recipes.encodings import Encodings
from postlude.recipes.examples import Examples, Pairs


def talk(number: int) -> list[dict[str, Any]]:
    said = [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": "é" * (number % 7 + 1)}]
    return said * (number % 3 + 1)


TALKS = [[talk(number)] for number in range(30)]
NAMES = [f"row {number}" for number in range(len(TALKS))]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(encoding, "CHUNK", 4)
    return


def whole(chunks: Iterator[Chunk]) -> tuple[list[int], list[int], list[int], list[tuple[int, str, int]]]:
    found = list(chunks)
    columns = [
        np.concatenate([getattr(each, name) for each in found]).tolist() for name in ("tokens", "mask", "lengths")
    ]
    return columns[0], columns[1], columns[2], [each for chunk in found for each in chunk.too_long]


@pytest.mark.slow
def test_the_number_of_processes_changes_nothing() -> None:
    encoder = Encoder(tokenizer=byte_tokenizer(), max_length=100)
    alone = whole(encode(encoder, "conversation", TALKS, NAMES, processes=1))
    assert alone[3]  # some do not fit
    assert len(alone[2]) + len(alone[3]) == len(TALKS)
    assert whole(encode(encoder, "conversation", TALKS, NAMES, processes=3)) == alone
    each = [encoder.all("conversation", [row], [name])[0] for row, name in zip(TALKS, NAMES, strict=True)]
    assert alone[0] == [token for made in each if hasattr(made, "tokens") for token in made.tokens]


@pytest.mark.slow
def test_of_several_mistakes_the_first_in_the_dataset_is_told() -> None:
    rows = [*TALKS]
    for place in (6, 13, 27):
        rows[place] = [[{"role": "user", "content": None}]]
    encoder = Encoder(tokenizer=byte_tokenizer())
    for processes in (1, 2):
        with pytest.raises(ValueError, match=r"message 0 \(user\) of row 6 is null"):
            list(encode(encoder, "conversation", rows, NAMES, processes=processes))


def test_a_process_that_encodes_needs_no_torch() -> None:
    needed = "import sys, postlude.data.encoding, postlude.data.chat"
    done = subprocess.run(
        [sys.executable, "-c", f"{needed}; sys.exit('torch' in sys.modules)"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def dataset(path: Path, count: int = 10) -> Path:
    path.write_text("".join(json.dumps({"messages": talk(number)}) + "\n" for number in range(count)))
    return path


def rows_of(kept: Encodings[Any]) -> list[Any]:
    return [kept[index] for index in range(len(kept))]


def test_what_was_kept_equals_what_is_encoded_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Examples(path=dataset(tmp_path / "a.jsonl"), overlong="drop")
    fresh = data.read(byte_tokenizer(), 100, tmp_path / "cache")
    assert 0 < len(fresh) < 10
    assert not (tmp_path / "cache").exists()  # until it is asked for
    fresh.store()
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    two = Pairs(path=pairs).read(byte_tokenizer(), 100, tmp_path / "two")
    two.store()
    monkeypatch.setattr("postlude.recipes.encodings.encode", lambda *_, **__: pytest.fail("it was kept"))
    again = data.read(byte_tokenizer(), 100, tmp_path / "cache")
    assert rows_of(again) == rows_of(fresh)
    assert (str(again), again.largest) == (str(fresh), fresh.largest)
    assert rows_of(Pairs(path=pairs).read(byte_tokenizer(), 100, tmp_path / "two")) == rows_of(two)


def test_whatever_decides_the_tokens_decides_whether_they_are_kept(tmp_path: Path) -> None:
    path = dataset(tmp_path / "a.jsonl")
    data = Examples(path=path, overlong="cut")

    def digest(data: Any = data, budget: int = 400, template: str = CHAT_TEMPLATE, added: str = "") -> str:
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = template
        if added:
            tokenizer.add_tokens([added])
        return str(data.read(tokenizer, budget).digest)

    base = digest()
    assert digest() == base
    others = [
        digest(budget=401),
        digest(template="#" + CHAT_TEMPLATE),
        digest(added="é"),
        digest(data.model_copy(update={"turns": "last"})),
        digest(data.model_copy(update={"overlong": "drop"})),
        digest(data.model_copy(update={"path": dataset(tmp_path / "b.jsonl", 9)})),
    ]
    path.write_text(path.read_text().replace("3?", "4?"))
    others.append(digest())
    assert len({base, *others}) == 1 + len(others)
    moved = dataset(tmp_path / "elsewhere.jsonl")
    assert digest(data.model_copy(update={"path": moved})) == base  # where it lies changes nothing


@pytest.mark.parametrize("damage", ["cut", "flipped", "unreadable", "missing"])
def test_what_is_damaged_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    data = Examples(path=dataset(tmp_path / "a.jsonl"))
    fresh = data.read(byte_tokenizer(), 500, tmp_path / "cache")
    fresh.store()
    (folder,) = (tmp_path / "cache").iterdir()
    tokens = folder / "tokens.npy"
    whole = tokens.read_bytes()
    match damage:
        case "cut":
            tokens.write_bytes(whole[:-7])
        case "flipped":
            tokens.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        case "unreadable":
            (folder / "about.json").write_text("{")
        case "missing":
            (folder / "mask.npy").unlink()
    with caplog.at_level(logging.WARNING):
        again = data.read(byte_tokenizer(), 500, tmp_path / "cache")
    assert "are damaged" in caplog.text
    assert "made anew" in caplog.text
    assert rows_of(again) == rows_of(fresh)
    again.store()
    assert KeptRows.load(tmp_path / "cache", again.digest) is not None


def test_only_the_newest_rows_are_kept(tmp_path: Path) -> None:
    data = Examples(path=dataset(tmp_path / "a.jsonl"))
    for budget in (500, 600):
        data.read(byte_tokenizer(), budget, tmp_path / "cache").store()
    assert [each.name.startswith("rows-") for each in (tmp_path / "cache").iterdir()] == [True]
