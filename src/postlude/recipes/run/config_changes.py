"""Which settings a run may be given anew when it goes on, and how two configs, and the code they name, differ."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

MISSING = object()
SHOWN = 3  # differences that a sentence names

MAY_CHANGE = (
    # where and how it is computed
    "run",
    "layout",
    "budget",
    "head",
    "recompute",
    "overlap",
    "gather_once",
    "optimizer.offload",
    "warm_start.optimizer.offload",
    "sampling.draft",
    "data.sampling.draft",
    "rollout",
    "data.rollout",
    "cluster",
    # how long, and how fast
    "steps",
    "epochs",
    "optimizer.lr",
    "optimizer.schedule",
    "optimizer.weight_decay",
    "selection_bias_rate",
    "optimizer.max_grad_norm",
    "warm_start.optimizer.lr",
    "warm_start.optimizer.schedule",
    "warm_start.optimizer.weight_decay",
    "warm_start.optimizer.max_grad_norm",
    # how often, and where to
    "save_every",
    "keep_checkpoints",
    "evaluation.every",
    "held_out.every",
    "loggers",
    "wandb",  # what a run has that began before there were others
    "export",
    # when to give up, and who judges
    "max_skipped_steps",
    "limits",
    "code_changes",
    "environment.workers",
    "environment.timeout",
    "data.environment.workers",
    "data.environment.timeout",
)
"""Dotted paths: each, or what is below it, may be changed when a run goes on, and counts from then on."""


def differences(new: Any, old: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every dotted path at which two configs differ, with the old value and the new; MISSING where there is none."""
    if isinstance(new, dict) and isinstance(old, dict):
        for name in [*new, *(name for name in old if name not in new)]:
            inner = f"{path}.{name}" if path else str(name)
            yield from differences(new.get(name, MISSING), old.get(name, MISSING), inner)
    elif new != old:
        yield path, old, new


def user_code_hashes(value: Any, path: str = "") -> dict[str, list[str]]:
    """The user's code that a config names, by key: each file.py:name in it, and a hash of the file's bytes."""
    if isinstance(value, Mapping):
        parts: Any = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    else:
        named = re.fullmatch(r"(.+\.py):[^\W\d]\w*", value) if isinstance(value, str) else None
        file = Path(named[1]).expanduser() if named else None
        if file is None or not file.is_file():
            return {}
        return {path: [value, hashlib.sha256(file.read_bytes()).hexdigest()[:16]]}
    found: dict[str, list[str]] = {}
    for name, each in parts:
        found |= user_code_hashes(each, f"{path}.{name}" if path else str(name))
    return found


def is_covered(path: str, by: Collection[str]) -> bool:
    """Whether a path is one of these, or below one."""
    return any(path == each or path.startswith(f"{each}.") for each in by)


def describe_differences(found: list[tuple[str, Any, Any]]) -> str:
    """Differences in words."""
    words = [f"{path} is {format_value(old)} there and {format_value(new)} here" for path, old, new in found[:SHOWN]]
    beyond = len(found) - SHOWN
    return "; ".join(words) + (f"; and {beyond} more" if beyond > 0 else "")


def format_value(value: Any) -> str:
    """A value as a sentence has it."""
    return "nothing" if value is MISSING else repr(value)
