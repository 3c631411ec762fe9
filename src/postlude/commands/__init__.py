"""The commands of `postlude`: `run(options)` returns the exit code, if it is not 0.

`arguments.py` has the options of all.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

Command = Callable[[argparse.Namespace], int | None]


def load_command(name: str) -> Command:  # noqa: PLR0912 - a branch for each command
    """Returns `run` of a command. Imports its file only, since most files import torch."""
    run: Command
    match name:
        case "chat":
            from postlude.commands.generate import run_chat as run
        case "completion":
            from postlude.commands.completion import run
        case "convert":
            from postlude.commands.convert import run
        case "env":
            from postlude.commands.env import run
        case "generate":
            from postlude.commands.generate import run
        case "info":
            from postlude.commands.info import run
        case "launch":
            from postlude.commands.launch import run
        case "logprobs":
            from postlude.commands.logprobs import run
        case "plan":
            from postlude.commands.plan import run
        case "recipe":
            from postlude.commands.recipe import run
        case "report":
            from postlude.commands.watch import run_report as run
        case "schema":
            from postlude.commands.recipe import run_schema as run
        case "serve":
            from postlude.commands.serve import run
        case "status":
            from postlude.commands.status import run
        case "tinker":
            from postlude.commands.tinker import run
        case "trace":
            from postlude.commands.trace import run
        case "verify":
            from postlude.commands.verify import run
        case "watch":
            from postlude.commands.watch import run
        case _:
            raise ValueError(f"{name!r} is not a file of `commands/`.")
    return run
