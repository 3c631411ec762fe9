"""The one sentence that a command ends with when something is wrong, where whoever started it will see it."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path


def print_error(sentence: str) -> None:
    """Say it on standard error; among ranks, once a machine.

    torchrun ends with a traceback of its own and a table of what failed. The sentence stands there as well, as the
    reason, so that it is among the last things shown.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if _speaks(file):
        with suppress(OSError):  # a terminal that has hung up shows nothing
            print(sentence, file=sys.stderr, flush=True)
    if file:
        with suppress(OSError):  # it has been said already
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).write_text(json.dumps({"message": sentence, "timestamp": int(time.time())}))


def _speaks(file: str | None) -> bool:
    """Whether this rank says it: the first of the machine or, where torchrun ends all others, the first that fails."""
    if file:
        said = Path(file).parent.parent / "postlude-said"  # beside the folders of this machine's ranks
        try:
            said.parent.mkdir(parents=True, exist_ok=True)
            said.open("x").close()
        except FileExistsError:
            return False
        except OSError:
            pass  # as without torchrun
        else:
            return True
    return os.environ.get("LOCAL_RANK", "0") == "0"
