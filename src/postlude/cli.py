"""The `postlude` command: what it is asked for, and in which words. A user's mistake is one sentence and exit code 2.

Nothing here needs torch, so that help and mistakes are answered at once; a command's own file (`commands/`) imports
what it needs when it is asked for.
"""

from __future__ import annotations

import _thread
import argparse
import contextlib
import difflib
import gc
import importlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, cast

from postlude.checks import USER_ERRORS, error_message
from postlude.error_output import print_error
from postlude.hf.builtin import BUILTIN, PACKAGED
from postlude.layout import Layout
from postlude.plan.hardware import HARDWARE
from postlude.recipes.registry import RECIPES, Recipe, UserRecipe
from postlude.recipes.run.outcome import DONE, FAILED, MISTAKE, RunFailed
from postlude.recipes.run.start_mode import resume_command
from postlude.verify.choices import OBJECTIVES, OVERLAPS, RECOMPUTE, TOLERANCES
from postlude.version import __version__

DTYPES = tuple(TOLERANCES)
MODEL_HELP = "a model directory (Hugging Face's or Postlude's own), a .gguf file, or a built-in model: " + ", ".join(
    [*BUILTIN, *PACKAGED]
)
DEVICE_HELP = "default: cuda where there is a GPU, else cpu"
Command = Callable[[argparse.Namespace], int | None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    gc.set_threshold(100_000, *gc.get_threshold()[1:])  # imports make much that stays; looking for garbage in it costs
    options = _parse(arguments)
    try:
        with _interrupts_kept():
            run = cast(Command, importlib.import_module(f"postlude.commands.{options.module}").run)
            return run(options) or DONE
    except USER_ERRORS as error:
        return _told(options, error, MISTAKE)
    except RunFailed as error:
        return _told(options, error, FAILED)
    except KeyboardInterrupt:
        return _told(options, "SIGINT ended it.", 128 + signal.SIGINT)
    except RuntimeError as error:
        from postlude.world.failure_report import RankError  # torch, which has been imported where a rank failed

        if isinstance(error, RankError):
            return _told(options, error, MISTAKE if error.user_error else FAILED)
        raise


@contextlib.contextmanager
def _interrupts_kept() -> Iterator[None]:
    """A ctrl-C that comes while an object is taken down is shown and forgotten by Python: here it comes again."""
    before = sys.unraisablehook

    def again(unraised: sys.UnraisableHookArgs) -> None:
        if isinstance(unraised.exc_value, KeyboardInterrupt):
            threading.Timer(0.01, _thread.interrupt_main).start()  # by then the object is gone
        else:
            before(unraised)

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = before


def _told(options: argparse.Namespace, words: Exception | str, code: int) -> int:
    print_error(f"postlude {options.command}: {error_message(words)}")
    return code


class _Parser(argparse.ArgumentParser):
    """Answers a wrong word with one sentence. A recipe's describes its config when that is asked for: it is long."""

    recipe: Recipe | None = None

    def error(self, message: str) -> NoReturn:
        print_error(f"{self.prog}: {message}{'' if message.endswith('?') else '.'} See `{self.prog} --help`.")
        self.exit(MISTAKE)

    def format_help(self) -> str:
        if self.recipe is not None:
            from postlude.recipes.config.load import describe

            self.description = "Fields are set in CONFIG.yaml and by --field value, which beats it:\n\n"
            self.description += describe(self.recipe.config)
        return super().format_help()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    words = list(sys.argv[1:] if arguments is None else arguments)
    recipes = dict(RECIPES)
    if words and ".py:" in words[0]:
        recipes[words[0]] = _user_recipe(words[0])
    file = words.pop(1) if words[:1] and words[0] in recipes and words[1:] and not words[1].startswith("-") else None
    parser, commands = _parser(recipes)
    if words and not words[0].startswith("-") and words[0] not in commands:
        near = difflib.get_close_matches(words[0], commands, 1)
        there = f"did you mean {near[0]}?" if near else f"there are {', '.join(commands)}"
        parser.error(f"{words[0]!r} is not a command; {there}")
    options, unknown = parser.parse_known_args(words)
    options.overrides, options.config = unknown, file and Path(file)
    options.resume_command = resume_command(arguments if arguments is not None else sys.argv[1:])
    if unknown and options.command not in recipes:
        known = [f"--{name}" for name in vars(options)]
        near = difflib.get_close_matches(unknown[0].split("=")[0], known, 1)
        options.parser.error(f"{unknown[0]!r} is not an option" + (f"; did you mean {near[0]}?" if near else ""))
    return options


def _user_recipe(name: str) -> Recipe:
    """Returns the recipe of a trainer path/to/file.py:Trainer. Exits if there is none."""
    try:
        return UserRecipe.load(name)
    except (ValueError, AttributeError) as error:
        print_error(f"postlude: {error_message(error)}")
        sys.exit(MISTAKE)


def _parser(recipes: Mapping[str, Recipe]) -> tuple[argparse.ArgumentParser, list[str]]:
    """Returns the parser and the names of its commands."""
    parser = _Parser(prog="postlude", description="A PyTorch-native post-training core.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"postlude {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    command = commands.add_parser("info", help="pattern, parameters by block, memory by dtype", allow_abbrev=False)
    command.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    command.set_defaults(module="info", parser=command)

    _add_convert(commands.add_parser("convert", help="write any source as a model directory", allow_abbrev=False))

    _add_logprobs(commands.add_parser("logprobs", help="score a text token by token", allow_abbrev=False))

    _add_verify(
        commands.add_parser(
            "verify", help="prove that a parallel layout computes what one rank computes", allow_abbrev=False
        )
    )
    _add_generate(commands.add_parser("generate", help="answers of a model to prompts", allow_abbrev=False))
    _add_chat(commands.add_parser("chat", help="talk with a model in the terminal", allow_abbrev=False))
    _add_serve(
        commands.add_parser("serve", help="answers of a model over HTTP: rollouts, OpenAI's API", allow_abbrev=False)
    )
    _add_trace(
        commands.add_parser("trace", help="draw what every rank does when, from a real step", allow_abbrev=False)
    )
    _add_plan(commands.add_parser("plan", help="what a step in a layout takes, before it runs", allow_abbrev=False))

    for name, recipe in recipes.items():
        command = commands.add_parser(
            name,
            help=recipe.help,
            usage=f"postlude {name} [CONFIG.yaml] [--field value ...] [options]",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_argument(
            "--dry-run",
            action="store_true",
            help="check everything, print it and stop",
        )
        command.add_argument(
            "--resume-from",
            metavar="step-N",
            help="go back to that checkpoint of the run; steps after it are done again",
        )
        command.add_argument(
            "--from",
            dest="from_checkpoint",
            metavar="RUN/step-N",
            help="begin with the weights of another run's checkpoint, in place of --model",
        )
        command.add_argument(
            "--nproc", type=_count, help="ranks to start on this machine (default: as the layout needs)"
        )
        command.add_argument("--device", choices=("cpu", "cuda"), help=DEVICE_HELP)
        command.add_argument("--timeout", type=_above_zero, default=600.0, help="seconds to wait for a silent rank")
        command.add_argument(
            "--ray",
            nargs="?",
            const="local",
            metavar="ADDRESS",
            help="run on Ray: one that is started for this run, or the cluster at ADDRESS (auto: the one there is)",
        )
        command.set_defaults(module="recipe", parser=command)
        command.recipe = recipe

    command = commands.add_parser("schema", help="a recipe's config as JSON Schema, for editors", allow_abbrev=False)
    command.add_argument("recipe", metavar="RECIPE", choices=RECIPES, help=", ".join(RECIPES))
    command.add_argument("--to", metavar="FILE", type=Path, help="where to (default: standard output)")
    command.set_defaults(module="schema", parser=command)

    command = commands.add_parser("report", help="write a run's report, or compare several", allow_abbrev=False)
    command.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="run directories")
    command.add_argument("--to", metavar="FILE", type=Path, help="where to (default: report.html in the first one)")
    command.set_defaults(module="report", parser=command)
    return parser, list(commands.choices)


# What an option takes. A mistake is said by argparse, with the option's name before it, and before torch is imported.


def _above_zero(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (number := float(text)) < float("inf"):
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


def _count(text: str) -> int:
    if not (text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _from_zero(text: str) -> float:
    with contextlib.suppress(ValueError):
        if (number := float(text)) >= 0:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")


def _port(text: str) -> int:
    if not (text.isdigit() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is not from 1 to 65535, or 0 for one that is free")
    return int(text)


def _layout(text: str) -> str:
    try:
        Layout.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removesuffix(".")) from error
    return text


def _add_overlap(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--overlap",
        nargs="?",
        const=True,
        default=False,
        choices=OVERLAPS,
        help="hide exchanges with experts behind compute; or, in a pipeline, fill its bubble with weight gradients",
    )


def _add_verify(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", help=f"{MODEL_HELP}; or a config.json, for fresh weights")
    chosen = command.add_mutually_exclusive_group(required=True)
    chosen.add_argument(
        "--layout", action="append", type=_layout, metavar="pp=2,cp=2", help="a layout to compare; may be repeated"
    )
    chosen.add_argument("--grid", action="store_true", help="compare the standard set of layouts, up to 8 ranks")
    command.add_argument(
        "--objective", action="append", choices=OBJECTIVES, help="what to minimise; may be repeated (default: grpo)"
    )
    command.add_argument("--recompute", choices=RECOMPUTE, default="none", help="recompute activations")
    _add_overlap(command)
    command.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype to compute in (default: float32)")
    limits = ", ".join(f"{limit:g} in {name}" for name, limit in TOLERANCES.items())
    command.add_argument("--tolerance", type=_from_zero, help=f"relative to the largest value (default: {limits})")
    command.add_argument("--device", choices=("cpu", "cuda"), help=DEVICE_HELP)
    command.add_argument(
        "--backend",
        choices=("gloo", "nccl"),
        help="how ranks communicate (default: nccl with a GPU for each, else gloo); nccl lets ranks share a GPU",
    )
    command.add_argument("--seed", type=int, default=0, help="of the batch and of fresh weights")
    command.add_argument(
        "--timeout", type=_above_zero, default=600.0, help="seconds after which a silent rank is given up"
    )
    command.set_defaults(module="verify", parser=command)


def _add_logprobs(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    command.add_argument("--text", required=True, help="the text to score; - reads standard input")
    command.add_argument("--dtype", choices=DTYPES, help="dtype to compute in (default: the source's)")
    command.add_argument("--device", help=f"device to compute on ({DEVICE_HELP})")
    command.set_defaults(module="logprobs", parser=command)


def _add_generate(command: argparse.ArgumentParser) -> None:
    _add_sampling(command)
    command.add_argument(
        "--prompt", action="append", help="what to answer; may be repeated (default, and -: standard input)"
    )
    command.add_argument("--n", type=_count, default=1, help="answers to each prompt (default: 1)")
    command.add_argument(
        "--plain", action="store_true", help="go on from the prompt as it is, without the model's chat template"
    )
    command.add_argument("--json", action="store_true", help="a JSON object a line for each answer, with its tokens")
    command.set_defaults(module="generate", parser=command)


def _add_chat(command: argparse.ArgumentParser) -> None:
    _add_sampling(command)
    command.set_defaults(module="chat", parser=command)


def _add_sampling(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    command.add_argument("--system", help="a system message before the first of the user's")
    command.add_argument("--max-new-tokens", type=_count, default=512, help="the most of an answer (default: 512)")
    command.add_argument("--temperature", type=_from_zero, default=1.0, help="0: the likeliest token (default: 1)")
    command.add_argument("--top-k", type=int, default=0, help="draw from the likeliest k tokens (default: all)")
    command.add_argument("--top-p", type=_above_zero, default=1.0, help="draw from the fewest of this probability")
    command.add_argument(
        "--min-p", type=_from_zero, default=0.0, help="draw from those this share as likely as the best"
    )
    command.add_argument("--stop", action="append", metavar="TEXT", help="text that ends an answer; may be repeated")
    command.add_argument("--seed", type=int, help="of the draws (default: another each time)")
    command.add_argument("--dtype", choices=DTYPES, help="dtype to compute in (default: the source's)")
    command.add_argument("--device", help=f"device to compute on ({DEVICE_HELP})")
    command.add_argument("--threads", type=_count, help="threads to compute with on a CPU (default: all cores)")
    command.add_argument("--max-batch-tokens", type=_count, help="tokens that the cache has room for (default: 65536)")


def _add_serve(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    command.add_argument("--host", default="127.0.0.1", help="address to listen at (default: this machine only)")
    command.add_argument("--port", type=_port, default=0, help="port (default: a free one)")
    command.add_argument(
        "--api-key",
        metavar="KEY",
        help="key that requests must send as `Authorization: Bearer KEY`; needed if other machines can connect. Better "
        "set POSTLUDE_API_KEY: a process list shows the command line",
    )
    command.add_argument("--name", help="name of the model (default: MODEL)")
    command.add_argument("--dtype", choices=DTYPES, help="dtype to compute in (default: the source's)")
    command.add_argument("--device", help=f"device to compute on ({DEVICE_HELP})")
    command.add_argument("--threads", type=_count, help="threads to compute with on a CPU (default: all cores)")
    command.add_argument("--max-sequences", type=_count, help="most completions at once (default: 256)")
    command.add_argument("--max-batch-tokens", type=_count, help="tokens that the cache has room for (default: 65536)")
    command.add_argument(
        "--max-prefill-tokens", type=_count, help="tokens of new prompts that join a step (default: 8192)"
    )
    command.add_argument("--empty", action="store_true", help="start without weights; POST /weights loads them")
    command.set_defaults(module="serve", parser=command)


def _add_trace(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", help=f"{MODEL_HELP}; or a config.json, for fresh weights")
    command.add_argument(
        "--layout", default="", type=_layout, metavar="dp_shard=2,ep=2", help="how to divide it (default: one rank)"
    )
    _add_overlap(command)
    command.add_argument("--plain", action="store_true", help="with --overlap: draw a step without it, too")
    command.add_argument("--microbatches", type=_count, help="of each data-parallel rank (default: 2·pp, at least 4)")
    command.add_argument("--tokens", type=int, default=512, help="of a microbatch (default: 512)")
    command.add_argument("--recompute", choices=RECOMPUTE, default="none", help="recompute activations")
    command.add_argument("--dtype", choices=DTYPES, help="dtype to compute in (default: float32, on a GPU bfloat16)")
    command.add_argument("--device", choices=("cpu", "cuda"), help=DEVICE_HELP)
    command.add_argument("--seed", type=int, default=0, help="of the batch and of fresh weights")
    command.add_argument("--nproc", type=_count, help="ranks to start on this machine (default: as the layout needs)")
    command.add_argument(
        "--timeout", type=_above_zero, default=600.0, help="seconds after which a silent rank is given up"
    )
    command.add_argument("--to", metavar="DIR", type=Path, required=True, help="where timeline.svg and trace.json go")
    command.set_defaults(module="trace", parser=command)


def _add_plan(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", help=f"{MODEL_HELP}; or a config.json alone")
    command.add_argument("--layout", metavar="pp=2,ep=8", help="degrees of parallelism (default: data-parallel alone)")
    command.add_argument(
        "--gpus", type=_count, help="GPUs in all (default: as the layout needs); dp_shard takes the rest"
    )
    command.add_argument("--seq", type=_count, required=True, help="tokens of a sequence")
    command.add_argument("--budget", type=_count, help="tokens of a microbatch (default: one sequence)")
    command.add_argument(
        "--batch-tokens", type=_count, help="tokens of a step (default: 4 microbatches a pipeline rank)"
    )
    _add_overlap(command)
    command.add_argument("--recompute", choices=RECOMPUTE, default="none", help="recompute activations")
    command.add_argument("--mtp", type=int, default=0, metavar="DEPTHS", help="train so many tokens further ahead")
    command.add_argument(
        "--gpu",
        default="h100",
        metavar="NAME",
        help=f"{', '.join(HARDWARE)}, or a .json of numbers (default: h100)",
    )
    command.add_argument("--search", action="store_true", help="propose the best layouts of --gpus that fit")
    command.set_defaults(module="plan", parser=command)


def _add_convert(command: argparse.ArgumentParser) -> None:
    command.add_argument("source", metavar="SRC", help=MODEL_HELP)
    command.add_argument("target", metavar="DST", help="directory to write")
    command.add_argument("--dtype", choices=DTYPES, help="dtype of the written weights (default: the source's)")
    command.add_argument(
        "--pattern",
        metavar="'[*-]{4}'",
        help="give the model another pattern; blocks that are the same at the same place keep their weights, "
        "and a model that no Hugging Face family describes is written as Postlude's own (docs/models.md)",
    )
    command.add_argument(
        "--mtp", action="store_true", help="keep the multi-token-prediction depths that the source's files hold"
    )
    command.add_argument("--seed", type=int, default=0, help="of weights that are fresh")
    command.add_argument("--overwrite", action="store_true", help="replace a model that is in DST already")
    command.set_defaults(module="convert", parser=command)


if __name__ == "__main__":
    sys.exit(main())
