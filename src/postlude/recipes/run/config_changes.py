"""Settings that may change when a run resumes; differences of two configs and of the code that they name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from postlude.user_code import CALL, CallFunction
from postlude.world.agreement import RankFailure, gather_and_decide

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
    "worker_limits",
    "timeout",
    *(f"rewards.*.{name}" for name in ("timeout", "concurrency", "retries", "device", "url", "key_variable")),
)
MIXTURE = re.compile(r"(?<![^.])(?:datasets|environments)\.(?=\d)")  # the keys that a list of a mixture stands for

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


def is_covered(path: str, by: Collection[str]) -> bool:
    """Returns whether a path is one of these, or below one."""
    keys = path.split(".")
    return any(
        len(keys) >= len(names := covering.split("."))
        and all(name in ("*", key) for name, key in zip(names, keys, strict=False))
        for covering in by
    )


def written_key(path: str) -> str:
    """Returns a key as users write it: environment.1.path for environment.environments.1.path."""
    return MIXTURE.sub("", path)


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
    """Returns why a run with changed files is not resumed."""
    them, new = ("them", "the new ones") if len(changed) > 1 else ("it", "the new one")
    restore = f"{describe_files(changed)} changed since {run} was last started. Restore {them}, "
    if any(key.endswith("path") and not key.startswith("evaluation.") for key in changed):
        new += " (of a dataset to train on, only with as many rows as before)"
    if any(value.startswith(CALL) for value in changed.values()):
        return f'{restore}pass file_changes="allow" to resume with {new}, or give another directory as run.'
    return f"{restore}set --file_changes allow to resume with {new}, or give another directory (--run)."


def format_value(value: Any) -> str:
    """Returns a value as a message shows it."""
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
