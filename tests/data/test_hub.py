"""The Hugging Face Hub: a repository is downloaded once and then read from the cache; errors are clear."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from postlude.data.datasets import dataset_files, read_rows
from postlude.data.hub import choose_files, hub_repo
from tests.hub_server import Hub, serve_hub, use_hub

README = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: "main/train-*"}
  - {split: test, path: ["main/test.jsonl"]}
- config_name: socratic
  data_files: socratic/**
---
# A dataset
"""


def rows(*numbers: int) -> bytes:
    return "".join(json.dumps({"text": f"row {number}"}) + "\n" for number in numbers).encode()


REPOS = {
    ("datasets", "org/stated"): {
        "README.md": README,
        "main/train-00000-of-00002.jsonl": rows(0, 1),
        "main/train-00001-of-00002.jsonl": rows(2),
        "main/test.jsonl": rows(3),
        "socratic/a/rows.jsonl": rows(4),
        "weights.bin": b"no rows",
    },
    ("datasets", "org/named"): {"data/train.jsonl": rows(0), "data/validation-0.jsonl": rows(1), "b/x.jsonl": rows(2)},
    ("models", "org/model"): {"config.json": b"{}"},
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    with serve_hub(REPOS) as hub:
        use_hub(monkeypatch, hub.url, tmp_path / "cache")
        yield hub


def texts(name: str, **choice: str) -> list[str]:
    return [str(row["text"]).removeprefix("row ") for row in read_rows(name, **choice)]


def test_a_dataset_is_downloaded_by_config_and_split(hub: Hub) -> None:
    assert texts("org/stated", config="main") == ["0", "1", "2"]
    assert not any("socratic" in request or "weights" in request for request in hub.requests), "only what is read"
    assert texts("org/stated", config="main", split="test") == ["3"]
    assert texts("org/stated", config="socratic") == ["4"]
    assert texts("org/named") == ["0"]
    assert texts("org/named", split="validation") == ["1"]
    assert texts("org/named@main", config="b") == ["2"]


def test_a_cached_dataset_needs_no_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = texts("org/stated", config="main")
    hub.requests.clear()
    assert texts("org/stated", config="main") == first
    assert not hub.requests, "the list of files is kept"
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache", offline=True)
    assert texts("org/stated", config="main") == first
    with pytest.raises(FileNotFoundError, match=r"org/stated .*is not complete in the cache .*HF_HUB_OFFLINE is set"):
        read_rows("org/stated", config="main", split="test")


def test_cache_filled_by_other_tools_is_read(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download("org/named", repo_type="dataset", cache_dir=str(tmp_path / "cache"))
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache", offline=True)
    assert texts("org/named") == ["0"]


def test_failed_download_raises_instead_of_giving_a_smaller_dataset(hub: Hub) -> None:
    hub.fails_for = "main/train-00001-of-00002.jsonl"
    with pytest.raises(FileNotFoundError, match=r"dataset org/stated .* cannot be downloaded: "):
        read_rows("org/stated", config="main")
    hub.fails_for = ""
    assert texts("org/stated", config="main") == ["0", "1", "2"]


def test_only_one_of_several_processes_downloads(hub: Hub) -> None:
    """The lock is per open file, so threads can stand in for processes."""
    results: list[list[str]] = []
    threads = [threading.Thread(target=lambda: results.append(texts("org/named"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [["0"]] * 4
    assert sum(request.startswith("GET /datasets/org/named/resolve") for request in hub.requests) == 1


@pytest.mark.parametrize(
    ("name", "choice", "sentence"),
    [
        ("org/nothing", {}, "'org/nothing' is no directory here, and the Hugging Face Hub has no dataset of that name"),
        ("org/named@v9", {}, "dataset org/named has no revision 'v9' on the Hugging Face Hub. Give a branch"),
        ("org/named", {"split": "dev"}, "has no split 'dev'; it has: train, validation. Set split"),
        ("org/named", {"config": "c"}, "has no configuration 'c'; its folders are: b, data"),
        ("org/stated", {}, "has the configurations main, socratic, and none is the default. Set config"),
        ("org/stated", {"config": "x"}, "has no configuration 'x'; it has: main, socratic"),
        ("org/model", {}, "has no dataset of that name"),
    ],
)
def test_wrong_name_gives_clear_error(hub: Hub, name: str, choice: dict[str, str], sentence: str) -> None:
    with pytest.raises((FileNotFoundError, ValueError)) as error:
        read_rows(name, **choice)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_gated_dataset_error_says_what_to_accept(hub: Hub) -> None:
    hub.gated.add("org/named")
    with pytest.raises(FileNotFoundError, match=r"is gated .*huggingface.co/datasets/org/named, then log in with `hf"):
        read_rows("org/named")


def test_connection_error_names_id_reason_and_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path)
    with pytest.raises(FileNotFoundError) as error:
        read_rows("org/named")
    for part in ("dataset org/named", "Connection refused", "`hf download org/named --repo-type dataset`", "HF_HOME"):
        assert part in str(error.value)


def test_path_is_never_treated_as_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    assert hub_repo("org/name", "model") is None, "org is a directory, so its missing file is a mistake in a path"
    for path in ("name", "a/b/c", "/a/b", "./a", "../a", "~/a", "a/b@", "models/Qwen3-8B", "datasets/rows"):
        assert hub_repo(path, "model") is None
    repo = hub_repo("other/name.v2@refs/pr/1", "model")
    assert repo is not None
    assert (repo.id, repo.revision) == ("other/name.v2", "refs/pr/1")
    with pytest.raises(FileNotFoundError, match=r"there is no dataset no/rows\.jsonl"):
        dataset_files(Path("no/rows.jsonl"))


def test_folder_has_splits(tmp_path: Path) -> None:
    for name in ("a/train.jsonl", "a/test.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(rows(len(name)))
    assert dataset_files(tmp_path, config="a", split="test") == [tmp_path / "a/test.jsonl"]
    with pytest.raises(ValueError, match=r"is not a folder, so it has no config or split to choose. Leave them out"):
        dataset_files(tmp_path / "a/train.jsonl", split="train")


def test_files_without_a_split_name_are_the_training_split() -> None:
    assert choose_files(["b.jsonl", "a.jsonl"], "", None, None, "d") == ["a.jsonl", "b.jsonl"]
    assert choose_files(["test/a.jsonl"], "", None, None, "d") == ["test/a.jsonl"], "the only split there is"
    assert choose_files(["latest/a.jsonl"], "", None, "train", "d") == ["latest/a.jsonl"], "test is no part of a word"
    stated = "---\nconfigs:\n- data_files: '*.jsonl'\n  data_dir: x\n---\n"
    assert choose_files(["x/a.jsonl", "x/y/b.jsonl", "c.jsonl"], stated, None, None, "d") == ["x/a.jsonl"]
