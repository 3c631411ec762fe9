"""Several datasets and streams in a recipe: exact shares, the same rows in every layout, resumed exactly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postlude.data.streamed_rows import RowStream, StreamedRows
from postlude.hf.load import byte_tokenizer
from postlude.recipes.config.data import Examples, LabelledExamples, Pairs
from postlude.recipes.config.load import ConfigError, load, to_yaml
from postlude.recipes.config.recipe_configs import DistillConfig, DPOConfig, KTOConfig, OnPolicyData, SFTConfig
from postlude.recipes.dataset import EncodedRows, StreamEncoder
from postlude.recipes.kto import check_labels
from postlude.recipes.registry import RECIPES
from postlude.recipes.report.metrics import explain
from postlude.recipes.row_sources import (
    MixedRows,
    ShuffledRows,
    dataset_names,
    next_dataset,
    whole_weights,
)
from postlude.recipes.sequence_limit import SequenceLimit
from tests.conftest import Ranks


@given(st.lists(st.integers(1, 60), min_size=2, max_size=6))
def test_every_prefix_follows_the_weights_within_one_row(weights: list[int]) -> None:
    total, counts = sum(weights), [0] * len(weights)
    for row in range(1, 2 * total + 1):
        counts[next_dataset(weights, counts)] += 1
        assert all(
            abs(count - Fraction(row * weight, total)) < 1 for count, weight in zip(counts, weights, strict=True)
        )
    assert counts == [2 * weight for weight in weights], "exact where a share is a whole number"


def test_weights_are_exact_numbers() -> None:
    assert whole_weights([None, None], [0.7, 0.3]) == [7, 3]
    assert whole_weights([5, 9, 9], [1, 2.5, 1e-1]) == [10, 25, 1]
    assert whole_weights([6, 4], [None, None]) == [3, 2], "without weights the sizes"
    with pytest.raises(ValueError, match="Give each a weight"):
        whole_weights([6, None], [None, None])


def mixed(weights: Sequence[float | None], *sizes: int, held_out: int = 0) -> MixedRows[Any]:
    datasets = [[(name, number) for number in range(size)] for name, size in zip("abc", sizes, strict=False)]
    sources = {str(rows[0][0]): ShuffledRows(Contents(rows), held_out=held_out, seed=5) for rows in datasets}
    return MixedRows(sources, weights)


class Contents(list[Any]):
    """Rows that are compared by their number, whatever their dataset."""

    def identity(self, index: int) -> bytes:
        return bytes([self[index][1]])


def test_a_mixture_without_weights_has_every_row_once_an_epoch() -> None:
    rows = mixed([None, None, None], 7, 4, 1)
    assert rows.size == 12
    for epoch in range(1, 4):
        taken_rows = rows.take(12)
        assert len(set(taken_rows)) == 12
        assert rows.progress == epoch
    assert rows.metrics() == {"rows/a": 21.0, "rows/b": 12.0, "rows/c": 3.0}
    info = explain("rows/a")
    assert info is not None
    assert "dataset a " in info.meaning


def test_each_dataset_has_its_own_epochs() -> None:
    rows = mixed([3, 1], 4, 10)
    taken_rows = rows.take(16)
    assert [name for name, _ in taken_rows].count("a") == 12
    first = [row for row in taken_rows if row[0] == "a"]
    assert all(len(set(first[start : start + 4])) == 4 for start in (0, 4, 8))
    assert first[:4] != first[4:8], "shuffled again"


def test_restored_mixture_continues_at_the_exact_row() -> None:
    expected_rows = mixed([0.7, 0.3], 7, 5).take(60)
    for count in range(40):
        first, second = mixed([0.7, 0.3], 7, 5), mixed([0.7, 0.3], 7, 5)
        first.take(count)
        second.restore(json.loads(json.dumps(first.state())))
        assert second.take(20) == expected_rows[count : count + 20]
        assert sum(second.metrics().values()) == count + 20
    with pytest.raises(ValueError, match=r"the saved mixture is of a, b with weights \[7, 3\], but .* \[1, 1\]"):
        mixed([1, 1], 7, 5).restore(mixed([0.7, 0.3], 7, 5).state())


def test_rows_held_out_of_one_dataset_are_removed_from_all() -> None:
    rows = mixed([1, 1], 9, 6, held_out=2)
    assert rows.held_out == [("a", 7), ("a", 8), ("b", 4), ("b", 5)]
    assert {number for _, number in rows.take(50)} == {0, 1, 2, 3, 6}
    with pytest.raises(ValueError, match="every row of a dataset has a prompt that another dataset holds out"):
        mixed([1, 1], 2, 3, held_out=1).exclude({bytes([0])})


def test_datasets_are_named_after_their_files() -> None:
    paths = [Path("a/x.jsonl.gz"), Path("b/x.parquet"), Path("org/chat@main"), Path("folder")]
    assert dataset_names(paths) == ["x", "x-2", "chat", "folder"]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sums(path: Path, count: int, first: int = 0) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": str(n + 1)}]}
        for n in range(first, first + count)
    ]
    return write(path, rows)


def test_a_list_of_datasets_is_read_from_a_config_and_written_back(tmp_path: Path) -> None:
    file, second = tmp_path / "my.yaml", "{path: org/chat, split: test, weight: 1, streaming: true}"
    file.write_text(f"data:\n- {{path: a.jsonl, weight: 2}}\n- {second}\nsteps: 3\n")
    config = load(SFTConfig, file)
    assert [str(dataset.path) for dataset in config.data.datasets] == ["a.jsonl", "org/chat"]  # type: ignore[union-attr]
    second_file = tmp_path / "again.yaml"
    second_file.write_text(to_yaml(config))
    assert load(SFTConfig, second_file) == config
    line = load(DPOConfig, None, ["--data=[{path: a, weight: 1}, {path: b, weight: 2}]"])
    assert [dataset.weight for dataset in line.data.datasets] == [1, 2]  # type: ignore[union-attr]
    assert isinstance(load(SFTConfig, None, ["--data.path=a"]).data, Examples)


@pytest.mark.parametrize("config", [SFTConfig, DPOConfig, KTOConfig])
def test_a_path_alone_is_a_dataset(tmp_path: Path, config: Any) -> None:
    file = tmp_path / "my.yaml"
    (tmp_path / "rows.jsonl").write_text("")
    file.write_text("data: rows.jsonl")
    expected = load(config, None, [f"--data.path={tmp_path}/rows.jsonl"])
    assert load(config, file) == load(config, None, ["--data", f"{tmp_path}/rows.jsonl"]) == expected
    for path in (tmp_path / "rows.jsonl", f"{tmp_path}/rows.jsonl"):
        assert load(config, None, settings=[{"data": path}]) == expected
    teacher = {"teacher": "tiny-dense"}
    distilled = load(DistillConfig, None, settings=[teacher | {"data": tmp_path / "rows.jsonl"}]).data
    assert isinstance(distilled, Examples)
    assert distilled.path == tmp_path / "rows.jsonl"
    assert isinstance(load(DistillConfig, None, ["--data", "on_policy"], [teacher]).data, OnPolicyData)
    prompts = load(config, None, ["--data", "a.jsonl", "--data.prompt", "question"]).data
    assert (str(prompts.path), prompts.prompt) == ("a.jsonl", "question")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("data: [{path: a}, {path: b, weight: 2}]", "a has no weight, but others have. Give all or none."),
        ("data: [{path: a}, {path: b, streaming: true}]\nsteps: 2", "Give each dataset a weight"),
        ("data: {path: a, weight: 2}", "data.weight is set, but there is one dataset"),
        ("data: {path: a, streaming: true}", "data.streaming is true, so the number of rows is unknown. Set steps."),
        ("data:\n- {path: a}\n- {pth: b}", 'config key "data.1.pth" is unknown'),
        ("data:\n- {path: a, weight: 0}\n- {path: b, weight: 1}", 'config key "data.0.weight" is "0"'),
        ("data: [{path: a}]", "data"),
        ("data: null", 'config key "data" is "null"'),
    ],
)
def test_invalid_dataset_list_gives_clear_error(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(text + "\n")
    with pytest.raises(ConfigError) as error:
        load(SFTConfig, file)
    assert sentence in str(error.value)


def streamed(data: Any, budget: int = 400, **options: Any) -> StreamedRows[Any]:
    encoder: StreamEncoder[Any] = StreamEncoder(
        data, byte_tokenizer(), SequenceLimit(budget), lambda encoded, *_: encoded
    )
    return StreamedRows(encoder.files, encoder, encoder.identity, **options)


PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}


@pytest.mark.parametrize("kind", ["conversations", "text", "pairs"])
def test_unshuffled_stream_equals_the_encoded_dataset(tmp_path: Path, kind: str) -> None:
    if kind == "conversations":
        data: Any = Examples(path=sums(tmp_path / "a.jsonl", 300))
    elif kind == "text":
        data = Examples(path=write(tmp_path / "a.jsonl", [{"text": f"row {n}"} for n in range(300)]))
    else:
        data = Pairs(path=write(tmp_path / "a.jsonl", [PAIR | {"prompt": f"{n}="} for n in range(300)]))
    rows: EncodedRows[Any] = EncodedRows(data, byte_tokenizer(), SequenceLimit(400))
    source: ShuffledRows[Any] = ShuffledRows(rows, held_out=0, seed=0, shuffle=False)
    stream = streamed(data)
    assert [stream.take(7) for _ in range(100)] == [source.take(7) for _ in range(100)]
    identities = [rows.identity(index) for index in range(20)]
    first = [stream.identity(row) for _, row in RowStream(stream.files).read(20)]
    assert identities == ([identity for identity in first for _ in range(len(rows) // 300)])[:20]


def test_stream_rows_are_refused_or_dropped_like_dataset_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "x" * (90 if n == 280 else 5) + str(n)} for n in range(300)])
    stream = streamed(Examples(path=path), budget=50)
    stream.take(200)
    with pytest.raises(ValueError, match=r"line 281 of a\.jsonl has .* tokens in \"text\", too many for budget=50"):
        stream.take(90)
    assert len(streamed(Examples(path=path, overlong="drop"), budget=50).take(299)) == 299
    broken = write(tmp_path / "b.jsonl", [{"text": "x"}] * 300 + [{"txt": "y"}])
    with pytest.raises(ValueError, match=r"line 301 of b\.jsonl|dataset b\.jsonl has no column"):
        streamed(Examples(path=broken)).take(301)


def test_kto_accepts_one_file_per_label(tmp_path: Path) -> None:
    row = {"prompt": "1", "completion": "2"}
    good, bad = (
        LabelledExamples(path=write(tmp_path / f"{label}.jsonl", [row | {"label": label}])) for label in (True, False)
    )
    assert check_labels([good, bad]) == "1 desirable rows of 2"
    with pytest.raises(ValueError, match=r"every row of True\.jsonl is desirable"):
        check_labels([good])


def trained(group: Any, directory: str, data: str, *overrides: str, command: str = "sft") -> list[dict[str, Any]]:
    common = ("--budget=128", "--batch_size=4", "--steps=6", "--save_every=2", "--held_out.every=2", "--export=false")
    arguments = ["--run", f"{directory}/run", f"--data={data}", *common, "--optimizer.lr=1e-3", *overrides]
    config = load(RECIPES[command].config, None, arguments)
    RECIPES[command].run(config, "cpu")
    rows = [json.loads(line) for line in (config.run / "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "epoch", "eval/loss", "rows/one", "rows/two")
    return [{key: value for key, value in row.items() if key in names} for row in rows]


@pytest.mark.slow  # four runs on one and two ranks
def test_mixture_with_a_stream_is_the_same_in_every_layout_and_after_resuming(ranks: Ranks, tmp_path: Path) -> None:
    first_file, two = sums(tmp_path / "one.jsonl", 9), sums(tmp_path / "two.jsonl", 13, first=50)
    stream = f"{{path: {two}, weight: 1, streaming: true, shuffle_buffer: 5}}"
    data = f"[{{path: {first_file}, weight: 3}}, {stream}]"
    (uninterrupted,) = ranks(1, trained, str(tmp_path / "whole"), data, "--held_out.rows=2")
    assert (uninterrupted[-1]["rows/one"], uninterrupted[-1]["rows/two"]) == (18.0, 6.0)
    ranks(1, trained, str(tmp_path / "parts"), data, "--held_out.rows=2", "--steps=4")
    (parts,) = ranks(1, trained, str(tmp_path / "parts"), data, "--held_out.rows=2")
    assert parts == uninterrupted
    for layout in ("dp_shard=2", "pp=2"):
        folder = str(tmp_path / layout)
        results = ranks(2, trained, folder, data, "--held_out.rows=2", f"--layout={layout}")
        for rows, expected in zip(results[0], uninterrupted, strict=True):
            assert rows == pytest.approx(expected, rel=1e-4)


def test_cache_of_one_dataset_is_not_used_for_another(tmp_path: Path) -> None:
    from postlude.recipes.dataset import cache_folder

    config = load(SFTConfig, None, ["--data=[{path: a}, {path: b}]"])
    folders = [cache_folder(tmp_path, config.data, data) for data in config.data.datasets]  # type: ignore[union-attr]
    assert len(set(folders)) == 2
    single = load(SFTConfig, None, ["--data.path=a"]).data
    assert cache_folder(tmp_path, single, single) == tmp_path / "cache"  # type: ignore[arg-type]
