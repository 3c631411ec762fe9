"""Files that must survive a loss of power are on the disk before a rename makes them current."""

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from postlude import Engine
from postlude import ranks as started
from postlude.data.encoded_dataset import EncodedDataset
from postlude.durable_files import publish, write_atomic
from postlude.hf.export import export_hf
from postlude.hf.peft import write_adapter
from postlude.hf.read_model import model_from_hf
from postlude.model import LanguageModel
from tests.engine.training import config


def inode(path: Any) -> tuple[int, int, int]:
    about = os.stat(path)
    return about.st_dev, about.st_ino, 0 if stat.S_ISDIR(about.st_mode) else about.st_size


@contextmanager
def renames(patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yields what was renamed within the block before it was on the disk, and renames that are not on it at the end."""
    synced: set[tuple[int, int, int]] = set()
    faults: list[str] = []
    folders: dict[tuple[int, int, int], Path] = {}
    fsync = os.fsync

    def record_sync(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(inode(descriptor))
        folders.pop(inode(descriptor), None)

    def checked(rename: Callable[..., None]) -> Callable[..., None]:
        def run(source: Path, target: Path, **options: Any) -> None:
            if not Path(target).name.endswith((".replaced", ".old")):  # what is moved out of the way
                below = [path for path in (Path(source), *Path(source).rglob("*")) if inode(path) not in synced]
                faults.extend(f"{path.name} of {Path(target).name}" for path in below)
            rename(source, target, **options)
            folders[inode(Path(target).parent)] = Path(target).parent

        return run

    with patch.context() as within:
        within.setattr(os, "fsync", record_sync)
        within.setattr(os, "rename", checked(os.rename))
        within.setattr(os, "replace", checked(os.replace))
        yield faults
    faults.extend(f"the entries of {folder}" for folder in folders.values())


def checkpoint(directory: Path) -> None:
    with started(device="cpu"):
        engine = Engine(config("tiny-dense", num_hidden_layers=1), device="cpu")
        engine.save(directory / "checkpoint")


def export(directory: Path) -> None:
    model = LanguageModel(model_from_hf(config("tiny-dense", num_hidden_layers=1))[1])
    export_hf(model, directory / "model", max_shard_bytes=200_000)
    export_hf(model, directory / "model", overwrite=True)
    (directory / "notes").mkdir()
    export_hf(model, directory / "notes")


def adapter(directory: Path) -> None:
    write_adapter(directory / "adapter", {"r": 1}, {"a": torch.ones(2)})


def encoded_rows(directory: Path) -> None:
    empty: Any = np.zeros(1, np.int64)
    EncodedDataset(empty, empty, empty, empty, empty).store(directory, "digest")


def nested(directory: Path) -> None:
    (directory / "new" / "below").mkdir(parents=True)
    (directory / "new" / "below" / "file").write_text("text")
    publish(directory / "new", directory / "published")


@pytest.mark.parametrize("write", [checkpoint, export, adapter, encoded_rows, nested])
def test_all_is_on_the_disk_before_the_rename_that_makes_it_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None]
) -> None:
    with renames(monkeypatch) as faults:
        write(tmp_path)
    assert not faults


def test_a_link_that_waits_beside_a_file_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("other")
    for name in (".report.html.aside", ".report.html.partial"):
        (tmp_path / name).symlink_to(tmp_path / "other")
    write_atomic(tmp_path / "report.html", b"new")
    assert (tmp_path / "report.html").read_bytes() == b"new"
    assert (tmp_path / "other").read_text() == "other"
