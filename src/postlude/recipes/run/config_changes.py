"""What may change when a run resumes: settings, and the files that a config names, with a fingerprint of each."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from postlude.data.datasets import dataset_files
from postlude.data.hub import hub_repo
from postlude.hf.builtin import BUILTIN
from postlude.hf.read_model import SMALL_FILES, resolve_path
from postlude.recipes.config import schema
from postlude.recipes.config.keys import is_covered, written_key
from postlude.user_code import CALL, CallFunction
from postlude.world.agreement import RankFailure, gather_and_decide

WHOLE = 16 << 20  # bytes of a file up to which all of it is read
STRIDE, BLOCK = 4 << 20, 4 << 10  # of a larger file: bytes between blocks, and of a block
WEIGHTS = ".safetensors"
InputFiles: TypeAlias = Mapping[str, Sequence[str]]
"""The files that a config names, as `input_files` returns them."""


@dataclass(frozen=True)
class AllowedChanges:
    """How the config of a run may differ from the one that its directory has."""

    keys: Collection[str] = ()
    """Dotted keys. They and all below take their new value."""
    defaults: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """By key, the values at which it may be if the directory's config does not have it."""
    files: Callable[[], InputFiles] = dict
    """Returns the files that the config names. They may not have changed, unless it has `file_changes: allow`."""


NO_CHANGES = AllowedChanges()


def allowed_changes(config: Any) -> AllowedChanges:
    """Returns how this config of a recipe may differ from that of the run it resumes."""
    files = functools.cache(functools.partial(input_files, config))
    return AllowedChanges(MAY_CHANGE, schema.default_values(type(config)), files)


def input_files(config: Any) -> dict[str, list[str]]:
    """Returns the files that a config names by key: each path and its fingerprint.

    They are datasets, models, chat templates and code, but none that may change when a run resumes. Datasets are read
    as a whole; streams and models as in `fingerprint`. A dataset or a model of the Hub has its commit.
    """
    files = user_code_hashes(schema.plain(config))
    for key, value, kind, section in schema.input_values(config):
        if not is_covered(key, MAY_CHANGE):
            if kind == "path":
                files[key] = [value, _fingerprint(value, section)]
            elif kind == "model":
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


MISSING = object()
SHOWN = 3  # differences that a sentence names
ENVIRONMENTS = (
    "environment",
    "environment.environments.*",
    "data.environment",
    "evaluation.sets.*.environment",
    "sets.*.environment",
)
CALLS = (  # where and how long rewards are computed, not which
    "workers",
    "episode_workers",
    "worker_limits",
    "timeout",
    *(f"rewards.*.{name}" for name in ("timeout", "concurrency", "retries", "device", "url", "key_variable")),
)

MAY_CHANGE = (
    # placement and computation
    "run",
    "layout",
    "budget",
    "context_length",
    "head",
    "recompute",
    "overlap",
    "gather_once",
    "offload_activations",
    "optimizer.offload",
    "warm_start.optimizer.offload",
    "sampling.draft",
    "data.sampling.draft",
    "rollout",
    "data.rollout",
    "cluster",
    # length and learning rate
    "steps",
    "epochs",
    "optimizer.lr",
    "optimizer.schedule",
    "optimizer.weight_decay",
    "selection_bias_rate",
    "router_losses",
    "optimizer.max_grad_norm",
    "warm_start.optimizer.lr",
    "warm_start.optimizer.schedule",
    "warm_start.optimizer.weight_decay",
    "warm_start.optimizer.max_grad_norm",
    # logging and checkpoints
    "save_every",
    "keep_checkpoints",
    "evaluation.every",
    "evaluation.tasks",  # but not the tasks: see `Split`
    "held_out.every",
    "loggers",
    "observe",
    "export",
    "push_to_hub",
    "save_completions",
    "data.save_completions",
    # limits and reward workers
    "max_skipped_steps",
    "limits",
    "file_changes",
    *(f"{environment}.{name}" for environment in ENVIRONMENTS for name in CALLS),
)
"""Dotted paths that may change when a run resumes, with everything below them. "*" is any name."""


def differences(new: Any, old: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields every dotted path at which two configs differ, with the old and the new value, or MISSING."""
    if isinstance(new, dict) and isinstance(old, dict):
        for name in [*new, *(name for name in old if name not in new)]:
            inner = f"{path}.{name}" if path else str(name)
            yield from differences(new.get(name, MISSING), old.get(name, MISSING), inner)
    elif all(isinstance(value, list) and value and isinstance(value[0], dict) for value in (new, old)) and (
        len(new) == len(old)
    ):
        for index, items in enumerate(zip(new, old, strict=True)):
            yield from differences(*items, f"{path}.{index}")
    elif new != old:
        yield path, old, new


def user_code_hashes(value: Any, path: str = "") -> dict[str, list[str]]:
    """Returns the user code of a config by key: each file.py:name and a hash of the file; also functions of a call."""
    if isinstance(value, CallFunction):
        return {path: [str(value), value.digest]}
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        named = re.fullmatch(r"(.+\.py):[^\W\d]\w*", value) if isinstance(value, str) else None
        file = Path(named[1]).expanduser() if named else None
        if file is None or not file.is_file():
            return {}
        return {path: [value, hashlib.sha256(file.read_bytes()).hexdigest()[:16]]}
    hashes: dict[str, list[str]] = {}
    for name, item in items:
        hashes |= user_code_hashes(item, f"{path}.{name}" if path else str(name))
    return hashes


def describe_differences(differing: list[tuple[str, Any, Any]]) -> str:
    words = [
        f"{written_key(path)} is {format_value(old)} there and {format_value(new)} here"
        for path, old, new in differing[:SHOWN]
    ]
    beyond = len(differing) - SHOWN
    return "; ".join(words) + (f"; and {beyond} more" if beyond > 0 else "")


def describe_files(changed: Mapping[str, str]) -> str:
    """Names changed files and functions, given by their keys."""
    kinds = {key: "the function " * value.startswith(CALL) for key, value in changed.items()}
    return " and ".join(f"{kinds[key]}{value.removeprefix(CALL)} ({key})" for key, value in changed.items())


def refused_files(run: Path, changed: Mapping[str, str]) -> str:
    them, new = ("them", "the new ones") if len(changed) > 1 else ("it", "the new one")
    restore = f"{describe_files(changed)} changed since {run} was last started. Restore {them}, "
    if any(key.endswith("path") and not key.startswith("evaluation.") for key in changed):
        new += " (of a dataset to train on, only with as many rows as before)"
    if any(value.startswith(CALL) for value in changed.values()):
        return f'{restore}pass file_changes="allow" to resume with {new}, or give another directory as run.'
    return f"{restore}set --file_changes allow to resume with {new}, or give another directory (--run)."


def format_value(value: Any) -> str:
    return "nothing" if value is MISSING else repr(value)


def check_same_config(config: Mapping[str, Any]) -> None:
    """Raises ValueError if ranks have different configs, which could deadlock."""

    def compare(configs: list[Mapping[str, Any]]) -> None:
        for rank, rank_config in enumerate(configs):
            for path, rank0_value, value in differences(rank_config, configs[0]):
                raise ValueError(
                    f"rank {rank} was given another config than rank 0: {path} is {format_value(value)}, and "
                    f"{format_value(rank0_value)} on rank 0. Start all ranks with the same command and the same file."
                )

    try:
        gather_and_decide(lambda: config, compare)
    except RankFailure as failure:
        raise failure.cause from None
