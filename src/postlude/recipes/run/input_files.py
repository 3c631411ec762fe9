"""The files that a config names, with a fingerprint of each: a run is resumed with the same data, models and code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from postlude.data.datasets import dataset_files
from postlude.data.hub import hub_repo
from postlude.hf.builtin import BUILTIN
from postlude.hf.read_model import SMALL_FILES, resolve_path
from postlude.recipes.config import schema
from postlude.recipes.run.config_changes import MAY_CHANGE, is_covered, user_code_hashes

WHOLE = 16 << 20  # bytes of a file up to which all of it is read
STRIDE, BLOCK = 4 << 20, 4 << 10  # of a larger file: bytes between blocks, and of a block
WEIGHTS = ".safetensors"


def input_files(config: Any) -> dict[str, list[str]]:
    """Returns the files that a config names by key: each path and its fingerprint.

    They are datasets, models, chat templates and code, but none that may change when a run resumes. Datasets are read
    as a whole; streams and models as in `fingerprint`. A dataset or a model of the Hub has its commit.
    """
    plain, paths = schema.plain(config), list(schema.input_paths(type(config)))
    files = user_code_hashes(plain)
    for key, value, section in _leaves(plain):
        kinds = {
            kind
            for path, section_kind, kind in paths
            if is_covered(key, (path,)) and section.get(schema.KIND, section_kind) == section_kind
        }
        if isinstance(value, str) and not is_covered(key, MAY_CHANGE):
            if "path" in kinds:
                files[key] = [value, _fingerprint(value, section)]
            elif "model" in kinds:
                files[key] = [value, _model_fingerprint(value)]
    return files


def fingerprint(files: Sequence[Path], *, whole: bool = False) -> str:
    """Returns a digest of files, which finds every realistic change of a large one without reading all of it.

    It covers names and sizes; all bytes of files up to 16 MiB, or with `whole` of all; of a larger one 4 KiB of every
    4 MiB, and of safetensors also the header with the start and the end of each tensor.
    """
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        size = file.stat().st_size
        digest.update(json.dumps([file.name, size]).encode())
        with file.open("rb") as opened:
            if whole or size <= WHOLE:
                while block := opened.read(WHOLE):
                    digest.update(block)
                continue
            for offset in sorted({*range(0, size, STRIDE), size - BLOCK, *_tensor_ends(file)}):
                opened.seek(offset)
                digest.update(opened.read(BLOCK))
    return digest.hexdigest()


def _tensor_ends(file: Path) -> Iterator[int]:
    """Yields where the blocks at the start and the end of each tensor are, and those of the header."""
    if file.suffix != WEIGHTS:
        return
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    yield from range(0, 8 + length, BLOCK)
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            yield from (8 + length + first, 8 + length + max(first, last - BLOCK))


def _fingerprint(path: str, section: Mapping[str, Any]) -> str:
    """Returns the fingerprint of a dataset, or of a file."""
    if "split" not in section:
        return fingerprint([Path(path).expanduser()], whole=True)
    if not Path(path).exists() and (repo := hub_repo(path, "dataset")) is not None:
        return repo.snapshot().folder.name
    files = dataset_files(Path(path), section["config"], section["split"])
    return fingerprint(files, whole=not section.get("streaming"))


def _model_fingerprint(source: str) -> str:
    if source in BUILTIN:
        return "built in"
    if not Path(source).expanduser().exists() and (repo := hub_repo(source, "model")) is not None:
        return repo.snapshot().folder.name
    path = resolve_path(source)
    entries = sorted(path.iterdir()) if path.is_dir() else [path]
    return fingerprint([file for file in entries if file == path or file.suffix in (*SMALL_FILES, WEIGHTS)])


def _leaves(
    value: Any, path: str = "", section: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yields every value of a config that is no section or list, with its key and the section that it is in."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, schema.join(path, str(name)), value)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, schema.join(path, str(index)), section)
    else:
        yield path, value, section or {}
