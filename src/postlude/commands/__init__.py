"""The commands of `postlude`, one file each: `run(options)` returns the exit code, if it is not 0."""

from __future__ import annotations

import argparse
from collections.abc import Callable

Command = Callable[[argparse.Namespace], int | None]


def load_command(name: str) -> Command:  # noqa: PLR0912 - a branch for each command
    """Returns `run` of a command. Imports its file only, since most files import torch."""
    run: Command
    match name:
        case "chat":
            from postlude.commands.chat import run
        case "convert":
            from postlude.commands.convert import run
        case "env":
            from postlude.commands.env import run
        case "generate":
            from postlude.commands.generate import run
        case "info":
            from postlude.commands.info import run
        case "logprobs":
            from postlude.commands.logprobs import run
        case "plan":
            from postlude.commands.plan import run
        case "recipe":
            from postlude.commands.recipe import run
        case "report":
            from postlude.commands.report import run
        case "schema":
            from postlude.commands.schema import run
        case "serve":
            from postlude.commands.serve import run
        case "tinker":
            from postlude.commands.tinker import run
        case "trace":
            from postlude.commands.trace import run
        case "verify":
            from postlude.commands.verify import run
        case _:
            raise ValueError(f"{name!r} is not a file of `commands/`.")
    return run
