"""How a command begins a run: what is about this start alone, and no part of what the run is."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from postlude.recipes.config.secrets import mask_arguments

CHECKPOINTS, MODEL = "checkpoints", "model"  # in a run's directory; the second is what it exports
STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class StartMode:
    """What a command says of this start alone."""

    resume_from: int | None = None
    """The step of this run to go back to, of those it has checkpoints of; none takes the newest."""
    command: str = ""
    """What to type to go on with the run."""


RESUME_NEWEST = StartMode()
"""From the newest checkpoint, or the beginning where there is none."""


def parse_step(text: str) -> int:
    """The step that is meant by step-100, step-000100 or 100."""
    found = re.fullmatch(r"(?:step-)?(\d+)", text)
    if found is None:
        raise ValueError(f"{text!r} names no step; write step-100, for the checkpoint after step 100.")
    return int(found[1])


def find_checkpoint(text: str) -> Path:
    """The checkpoint that is meant by RUN/step-100; its path in the run's directory will do as well."""
    path = Path(text).expanduser()
    found = STEP.fullmatch(path.name)
    if found is None:
        raise ValueError(f"{text!r} names no checkpoint; write RUN/step-100, for the one after step 100 of a run.")
    folder = path.parent if path.parent.name == CHECKPOINTS else path.parent / CHECKPOINTS
    checkpoint = folder / f"step-{int(found[1]):06d}"
    if not checkpoint.is_dir():
        there = ", ".join(sorted(each.name for each in folder.glob("step-*"))) if folder.is_dir() else ""
        raise FileNotFoundError(f"there is no checkpoint {checkpoint}; {folder.parent} has {there or 'none'}.")
    return checkpoint


def resume_command(words: Sequence[str]) -> str:
    """The command that goes on with a run, of the one that began it: all but what was about that start alone.

    It is shown and written, so it has no secrets (`recipes/config/secrets.py`).
    """
    kept: list[str] = []
    skipping = False
    for word in words:
        if not skipping and word != "--resume-from" and not word.startswith("--resume-from="):
            kept.append(word)
        skipping = word == "--resume-from"
    return shlex.join(["postlude", *mask_arguments(kept)])
