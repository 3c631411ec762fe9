"""Prints the message that a command ends with after an error, and text that is not ours, without control codes."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from contextlib import suppress
from pathlib import Path

from postlude.json_log import is_json, json_line

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but newline and tab


def escape_controls(text: str) -> str:
    """Returns text that a terminal shows and does not obey: a control code becomes its number, such as \\x1b."""
    return CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def for_stdout(text: str) -> str:
    """Returns text of a model to print: as it is to a file or a pipe, without control codes to a terminal."""
    return escape_controls(text) if sys.stdout.isatty() else text


def print_error(message: str) -> None:
    """Prints the message to standard error; with several ranks, once per machine.

    torchrun ends with its own traceback and a table of what failed. The message is also written where torchrun shows
    it as the reason, so that it is among the last lines.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if _prints(file):
        with suppress(OSError):  # the terminal may be closed
            text = json_line("error", message) if is_json() else escape_controls(message)
            print(text, file=sys.stderr, flush=True)
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
