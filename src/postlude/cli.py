"""The `postlude` command: its parser and exit codes. A user's mistake is one sentence and exit code 2.

Nothing here imports torch, so that help and mistakes are shown at once. Most files in `commands/` do.
"""

from __future__ import annotations

import _thread
import argparse
import contextlib
import difflib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from postlude.checks import USER_ERRORS, error_message
from postlude.commands import load_command
from postlude.commands.arguments import LAUNCH, MODEL_COMMANDS, OTHER_COMMANDS, CommandArguments, add_recipe
from postlude.error_output import print_error
from postlude.json_log import LOG_FORMAT, set_up_logging
from postlude.recipes.registry import RECIPES, Recipe, UserRecipe
from postlude.recipes.run.outcome import EXIT_DONE, EXIT_FAILED, EXIT_USER_ERROR, RunFailed
from postlude.recipes.run.start_mode import resume_command
from postlude.version import __version__

DESCRIPTION = (
    "Trains language models after pre-training: SFT, DPO, GRPO, PPO and distillation. Start with `postlude demo`. "
    "`postlude COMMAND --help` lists the options of a command."
)
DEMO = "demo"  # a command, and the packaged config that it runs
DEMO_RECIPE = replace(RECIPES["grpo"], help="train a small model with GRPO on a CPU, in minutes: `grpo demo`")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    gc.set_threshold(100_000, *gc.get_threshold()[1:])  # imports allocate much that stays, so fewer collections
    options = _parse(arguments)
    with _log_format(getattr(options, "log_format", None)):
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    try:
        with _repeat_lost_interrupts():
            return load_command(options.module)(options) or EXIT_DONE
    except USER_ERRORS as error:
        return _fail(options, error, EXIT_USER_ERROR)
    except RunFailed as error:
        return _fail(options, error, EXIT_FAILED)
    except KeyboardInterrupt:
        return _fail(options, "SIGINT ended it.", 128 + signal.SIGINT)
    except RuntimeError as error:
        from postlude.world.failure_report import RankError  # imports torch, as every command with ranks has done

        if isinstance(error, RankError):
            return _fail(options, error, EXIT_USER_ERROR if error.user_error else EXIT_FAILED)
        raise


@contextlib.contextmanager
def _log_format(chosen: str | None) -> Iterator[None]:
    """Makes this process, and the ranks that it starts, log in a format."""
    before = os.environ.get(LOG_FORMAT)
    if chosen is not None:
        os.environ[LOG_FORMAT] = chosen
    set_up_logging()
    try:
        yield
    finally:
        if chosen is not None and before is None:
            del os.environ[LOG_FORMAT]


@contextlib.contextmanager
def _repeat_lost_interrupts() -> Iterator[None]:
    """Repeats a Ctrl-C that Python prints and ignores because it came while an object was destroyed."""
    before = sys.unraisablehook

    def repeat(returning: threading.Event) -> None:
        returning.wait()
        time.sleep(0.01)  # until the object is destroyed
        _thread.interrupt_main()

    def hook(unraised: sys.UnraisableHookArgs) -> None:
        if not isinstance(unraised.exc_value, KeyboardInterrupt):
            before(unraised)
            return
        returning = threading.Event()
        threading.Thread(target=repeat, args=(returning,), daemon=True).start()
        returning.set()  # in this function an interrupt would be lost again

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def _fail(options: argparse.Namespace, reason: Exception | str, code: int) -> int:
    print_error(f"postlude {options.command}: {error_message(reason)}")
    return code


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one sentence. A recipe's config is described only for --help, because it is long."""

    recipe: Recipe | None = None

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        print_error(f"{self.prog}: {message}{'' if message.endswith('?') else '.'} See `{self.prog} --help`.")
        self.exit(EXIT_USER_ERROR)

    def refuse(self, word: str) -> NoReturn:
        """Reports an argument that no option takes, with the option that is nearest to it."""
        if not word.startswith("-"):
            self.error(f"{word!r} is one argument too many")
        near = difflib.get_close_matches(word.partition("=")[0].replace("_", "-"), self._option_string_actions, 1)
        self.error(f"{word!r} is not an option" + (f"; did you mean {near[0]}?" if near else ""))

    def format_help(self) -> str:
        if self.recipe is not None:
            from postlude.recipes.config.help import short_help

            self.description = f"{_introduction(self.recipe)}\n\n{short_help(_schema(self.recipe))}"
        return super().format_help()

    def print_keys(self, key: str | None) -> None:
        """Prints the keys of a section of the recipe's config, or with None all."""
        from postlude.recipes.config.help import full_help, key_help

        assert self.recipe is not None
        schema = _schema(self.recipe)
        if key is None:
            print(f"{self.format_usage()}\n{_introduction(self.recipe)}\n\n{full_help(schema)}")
            return
        try:
            print(key_help(schema, key))
        except ValueError as error:
            self.error(str(error).removesuffix("."))


class _Help(argparse.Action):
    """Prints the help of a recipe: `--help`, `--help KEY` and `--help-all`."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        assert isinstance(parser, _Parser)
        try:
            if values is None:
                parser.print_help()
            else:
                parser.print_keys(values or None)
            sys.stdout.flush()
        except BrokenPipeError:  # `--help-all | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is written there at the end
        parser.exit()


def _schema(recipe: Recipe) -> dict[str, Any]:
    """Returns the JSON Schema of a recipe's config."""
    from postlude.recipes.config.keys import stored_schema

    if not isinstance(recipe, UserRecipe):
        return stored_schema(recipe.command)
    from postlude.recipes.config.schema import structure  # needs pydantic and the classes of the config

    return structure(recipe.config, helpful=True)


def _introduction(recipe: Recipe) -> str:
    from postlude.recipes.config.packaged import config_names

    names = ", ".join(name for name in config_names(recipe.command) if "/" not in name)
    packaged = f", or the name of a config that comes with Postlude: {names}" if names else ""
    return (
        f"{_sentence(recipe.help)}\n\n"
        f"CONFIG is a YAML file{packaged}.\n"
        "Each key below is a key of that file. --key value sets it too, and overrides the file.\n"
        "--dry-run checks a run and prints its config without starting it; other options are at the end."
    )


def _sentence(summary: str) -> str:
    return f"{summary[:1].upper()}{summary[1:]}."


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    words = list(sys.argv[1:] if arguments is None else arguments)
    recipes = dict(RECIPES)
    if words and ".py:" in words[0]:
        recipes[words[0]] = _user_recipe(words[0])
    place = 3 if words[:1] == [LAUNCH] else 1 if words[:1] and words[0] in recipes else len(words)
    file = words.pop(place) if words[place:] and not any(word.startswith("-") for word in words[: place + 1]) else None
    recipes[DEMO] = DEMO_RECIPE
    file = DEMO if words[:1] == [DEMO] else file
    chosen = next((word for word in words if not word.startswith("-")), "")
    parser, commands = _parser(recipes, chosen)
    if words and not words[0].startswith("-") and words[0] not in commands:
        near = difflib.get_close_matches(words[0], commands, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(commands)}"
        parser.error(f"{words[0]!r} is not a command; {hint}")
    options, unknown = parser.parse_known_args(words)
    options.overrides, options.config = unknown, file and Path(file)
    options.resume_command = resume_command(arguments if arguments is not None else sys.argv[1:])
    if unknown and options.command not in (*recipes, LAUNCH):
        options.parser.refuse(unknown[0])
    return options


def _user_recipe(name: str) -> Recipe:
    try:
        return UserRecipe.load(name)
    except (ValueError, AttributeError) as error:
        print_error(f"postlude: {error_message(error)}")
        sys.exit(EXIT_USER_ERROR)


def _parser(recipes: Mapping[str, Recipe], chosen: str | None = None) -> tuple[argparse.ArgumentParser, list[str]]:
    """Returns the parser, with the options of the chosen command or of all, and the names of all commands."""
    parser = _Parser(prog="postlude", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"postlude {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    def add(table: Mapping[str, CommandArguments]) -> None:
        for name, (summary, add_arguments) in table.items():
            command = commands.add_parser(name, help=summary, description=_sentence(summary))
            if chosen in (name, None):
                add_arguments(command)
            command.set_defaults(module=name, parser=command)

    add(MODEL_COMMANDS)
    for name, recipe in recipes.items():
        command = commands.add_parser(
            name,
            help=recipe.help,
            usage=f"postlude {name} {'' if name == DEMO else '[CONFIG] '}[--key value ...] [options]",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=False,
        )
        if chosen in (name, None):
            add_recipe(command, _Help)
        command.set_defaults(module="recipe", parser=command)
        command.recipe = recipe
    add(OTHER_COMMANDS)
    return parser, list(commands.choices)


if __name__ == "__main__":
    sys.exit(main())
