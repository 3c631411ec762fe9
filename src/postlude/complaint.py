"""The one sentence that a command ends with when something is wrong, where whoever started it will see it."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path


def complain(sentence: str) -> None:
    """Say it on standard error; among ranks, once a machine.

    torchrun ends with a traceback of its own and a table of what failed. The sentence stands there as well, as the
    reason, so that it is among the last things shown.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(sentence, file=sys.stderr)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):  # it has been said already
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).write_text(json.dumps({"message": sentence, "timestamp": int(time.time())}))
