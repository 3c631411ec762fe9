"""RunOutcome: the end of a run, in `ending.json` in its directory. A running or killed run has none."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from postlude.durable_files import write_atomic
from postlude.recipes.config.secrets import mask

OUTCOME_FILE = "ending.json"
KEYS = {"outcome": "status", "step": "step", "sentence": "message", "code": "exit_code"}  # in the file: of RunOutcome
OutcomeStatus = Literal["finished", "interrupted", "failed"]

EXIT_DONE, EXIT_FAILED, EXIT_USER_ERROR = 0, 1, 2
"""Exit codes: finished; the run failed; nothing was started because of a user's mistake. A run that a signal ended
exits with 128 plus the signal's number."""


class RunFailed(Exception):
    """A run failed after some steps, for a reason that is not a mistake in its command."""


@dataclass(frozen=True)
class RunOutcome:
    """The end of a run: its status, its last logged step, and the reason if it did not finish."""

    status: OutcomeStatus
    step: int
    message: str = ""
    exit_code: int = EXIT_DONE


def write_outcome(run: Path, outcome: RunOutcome) -> None:
    values = mask({key: getattr(outcome, field) for key, field in KEYS.items()})
    write_atomic(run / OUTCOME_FILE, json.dumps(values, ensure_ascii=False).encode(errors="backslashreplace"))


def read_outcome(run: Path) -> RunOutcome | None:
    path = run / OUTCOME_FILE
    try:
        return RunOutcome(**{KEYS[key]: value for key, value in json.loads(path.read_text()).items()})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} does not say how a run ended ({error}); delete it.") from error


def clear_outcome(run: Path) -> None:
    (run / OUTCOME_FILE).unlink(missing_ok=True)
