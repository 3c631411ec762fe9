"""How a run ended, in its directory: `outcome.json`. A run that goes on has none, nor has one that was killed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from postlude.recipes.run.durable_files import write_atomic

OUTCOME_FILE = "outcome.json"
OutcomeStatus = Literal["finished", "interrupted", "failed"]


DONE, FAILED, MISTAKE = 0, 1, 2
"""Exit codes: all is done; a run ended because of something in it; nothing was begun, for a mistake of the user's. One
that a signal ended has 128 and the signal's number."""


class RunFailed(Exception):
    """A run that had made steps came upon something that was no mistake in its command."""


@dataclass(frozen=True)
class RunOutcome:
    """What became of a run, the last step it logged, and the sentence it ended with where it ended badly."""

    outcome: OutcomeStatus
    step: int
    sentence: str = ""
    code: int = DONE
    """The command's exit code."""


def write_outcome(run: Path, outcome: RunOutcome) -> None:
    """Say how a run ended."""
    write_atomic(run / OUTCOME_FILE, json.dumps(asdict(outcome), ensure_ascii=False).encode(errors="backslashreplace"))


def read_outcome(run: Path) -> RunOutcome | None:
    """How a run ended; None while it goes on, or if nothing could be said of it any more."""
    path = run / OUTCOME_FILE
    try:
        return RunOutcome(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} does not say how a run ended ({error}); take it away.") from error


def clear_outcome(run: Path) -> None:
    """A run that goes on has not ended."""
    (run / OUTCOME_FILE).unlink(missing_ok=True)
