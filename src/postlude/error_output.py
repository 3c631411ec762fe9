"""Prints the message that a command ends with after an error."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path


def print_error(message: str) -> None:
    """Prints the message to standard error; with several ranks, once per machine.

    torchrun ends with its own traceback and a table of what failed. The message is also written where torchrun shows
    it as the reason, so that it is among the last lines.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if _prints(file):
        with suppress(OSError):  # the terminal may be closed
            print(message, file=sys.stderr, flush=True)
    if file:
        with suppress(OSError):  # it is printed already
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).write_text(json.dumps({"message": message, "timestamp": int(time.time())}))


def _prints(file: str | None) -> bool:
    """Returns whether this rank prints: the first to fail under torchrun, else the first of the machine."""
    if file:
        printed = Path(file).parent.parent / "postlude-said"  # next to the folders of this machine's ranks
        try:
            printed.parent.mkdir(parents=True, exist_ok=True)
            printed.open("x").close()
        except FileExistsError:
            return False
        except OSError:
            pass  # as without torchrun
        else:
            return True
    return os.environ.get("LOCAL_RANK", "0") == "0"
