"""StartMode: options of a command that are not part of the run's config, such as --resume-from."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from postlude.recipes.config.secrets import mask_arguments

CHECKPOINTS, EXPORTED_MODEL = "checkpoints", "model"  # in a run directory: checkpoints, and the exported model
EXPORTED_ADAPTER = "adapter"  # with LoRA
ROWS = "rows"  # datasets that a call from Python gave as values
STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class StartMode:
    """The checkpoint to resume from, and the command to resume again."""

    resume_from: int | None = None
    """Step of the checkpoint to resume from; None takes the newest."""
    command: str = ""
    """The command that resumes the run."""


RESUME_NEWEST = StartMode()
"""From the newest checkpoint, or from the beginning if there is none."""


def parse_step(text: str) -> int:
    """Reads step-100, step-000100 or 100."""
    match = re.fullmatch(r"(?:step-)?(\d+)", text)
    if match is None:
        raise ValueError(f"{text!r} names no step; write step-100, for the checkpoint after step 100.")
    return int(match[1])


def find_checkpoint(text: str) -> Path:
    """Returns the checkpoint RUN/step-100, which may also be a path in the run directory."""
    path = Path(text).expanduser()
    match = STEP.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{text!r} names no checkpoint; write RUN/step-100, for the one after step 100 of a run.")
    folder = path.parent if path.parent.name == CHECKPOINTS else path.parent / CHECKPOINTS
    checkpoint = folder / f"step-{int(match[1]):06d}"
    if not checkpoint.is_dir():
        saved = ", ".join(sorted(path.name for path in folder.glob("step-*"))) if folder.is_dir() else ""
        raise FileNotFoundError(f"there is no checkpoint {checkpoint}; {folder.parent} has {saved or 'none'}.")
    return checkpoint


def resume_command(words: Sequence[str]) -> str:
    """Returns the command that resumes a run: the one that started it, without secrets, --resume-from, --overwrite."""
    arguments: list[str] = []
    skipping = False
    for word in words:
        if not skipping and word not in ("--resume-from", "--overwrite") and not word.startswith("--resume-from="):
            arguments.append(word)
        skipping = word == "--resume-from"
    return shlex.join(["postlude", *mask_arguments(arguments)])
