"""The commands of `postlude`, one file each: `run(options)` returns the exit code, if it is not 0."""

from __future__ import annotations

import argparse
from collections.abc import Callable

Command = Callable[[argparse.Namespace], int | None]


def load_command(name: str) -> Command:  # noqa: PLR0911, PLR0912  # a branch for each command
    """Returns `run` of a command. Imports its file only, since most files import torch."""
    match name:
        case "chat":
            from postlude.commands import chat

            return chat.run
        case "convert":
            from postlude.commands import convert

            return convert.run
        case "env":
            from postlude.commands import env

            return env.run
        case "generate":
            from postlude.commands import generate

            return generate.run
        case "info":
            from postlude.commands import info

            return info.run
        case "logprobs":
            from postlude.commands import logprobs

            return logprobs.run
        case "plan":
            from postlude.commands import plan

            return plan.run
        case "recipe":
            from postlude.commands import recipe

            return recipe.run
        case "report":
            from postlude.commands import report

            return report.run
        case "schema":
            from postlude.commands import schema

            return schema.run
        case "serve":
            from postlude.commands import serve

            return serve.run
        case "tinker":
            from postlude.commands import tinker

            return tinker.run
        case "trace":
            from postlude.commands import trace

            return trace.run
        case "verify":
            from postlude.commands import verify

            return verify.run
    raise ValueError(f"{name!r} is not a file of `commands/`.")
