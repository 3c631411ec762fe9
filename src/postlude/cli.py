"""The `postlude` command and its options. A user's mistake is one sentence and exit code 2.

Nothing here imports torch, so that help and mistakes are shown at once. Most files in `commands/` do.
"""

from __future__ import annotations

import _thread
import argparse
import contextlib
import difflib
import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, get_args

from postlude.checks import USER_ERRORS, error_message
from postlude.commands import load_command
from postlude.error_output import print_error
from postlude.hf.builtin import BUILTIN, PACKAGED
from postlude.option_types import above_zero, count, count_from_zero, from_zero, layer_choice, layout, lora, port, seed
from postlude.options import ZERO_BUBBLE, Dtype, Recompute
from postlude.recipes.registry import RECIPES, Recipe, UserRecipe
from postlude.recipes.run.outcome import EXIT_DONE, EXIT_FAILED, EXIT_USER_ERROR, RunFailed
from postlude.recipes.run.start_mode import resume_command
from postlude.version import __version__

DTYPES = get_args(Dtype)
MODEL_HELP = (
    "a model directory (Hugging Face's or Postlude's own), ORG/NAME on the Hugging Face Hub, a .gguf file, or a "
    f"built-in model: {', '.join([*BUILTIN, *PACKAGED])}"
)
DESCRIPTION = (
    "Trains language models after pre-training: SFT, DPO, GRPO, PPO and distillation. Start with `postlude demo`. "
    "`postlude COMMAND --help` lists the options of a command."
)
DEVICE_HELP = "default: cuda where there is a GPU, else cpu"
DEMO = "demo"  # a command, and the packaged config that it runs
DEMO_RECIPE = replace(RECIPES["grpo"], help="train a small model with GRPO on a CPU, in minutes: `grpo demo`")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    gc.set_threshold(100_000, *gc.get_threshold()[1:])  # imports allocate much that stays, so fewer collections
    options = _parse(arguments)
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
def _repeat_lost_interrupts() -> Iterator[None]:
    """Repeats a Ctrl-C that Python prints and ignores because it came while an object was destroyed."""
    before = sys.unraisablehook

    def hook(unraised: sys.UnraisableHookArgs) -> None:
        if isinstance(unraised.exc_value, KeyboardInterrupt):
            threading.Timer(0.01, _thread.interrupt_main).start()  # after the object is destroyed
        else:
            before(unraised)

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
            from postlude.recipes.config.packaged import config_names
            from postlude.recipes.config.schema import describe

            names = ", ".join(name for name in config_names(self.recipe.command) if "/" not in name)
            packaged = f", or the name of a config that comes with Postlude: {names}" if names else ""
            self.description = (
                f"{_sentence(self.recipe.help)}\n\n"
                f"CONFIG is a YAML file{packaged}.\n"
                "Each field below is a key of that file. --field value sets it too, and overrides the file.\n"
                "--dry-run checks a run and prints its config without starting it; other options are at the end.\n\n"
            )
            self.description += describe(self.recipe.config)
        return super().format_help()


def _sentence(summary: str) -> str:
    return f"{summary[:1].upper()}{summary[1:]}."


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    words = list(sys.argv[1:] if arguments is None else arguments)
    recipes = dict(RECIPES)
    if words and ".py:" in words[0]:
        recipes[words[0]] = _user_recipe(words[0])
    file = words.pop(1) if words[:1] and words[0] in recipes and words[1:] and not words[1].startswith("-") else None
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
    if unknown and options.command not in recipes:
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

    def add(name: str, summary: str, add_arguments: Callable[[argparse.ArgumentParser], None]) -> None:
        command = commands.add_parser(name, help=summary, description=_sentence(summary))
        if chosen in (name, None):
            add_arguments(command)
        command.set_defaults(module=name, parser=command)

    add(
        "info",
        "show a model's pattern, parameters by block, and memory by dtype",
        lambda command: _add_model(command, "; or an adapter of peft"),
    )
    add("convert", "convert any model source to a model directory", _add_convert)
    add("logprobs", "print the log-prob of every token of a text", _add_logprobs)
    add("verify", "check that a parallel layout gives the results of one rank", _add_verify)
    add("generate", "sample completions of prompts", _add_generate)
    add("chat", "chat with a model in the terminal", _add_sampling)
    add("serve", "serve a model over HTTP, with OpenAI's API", _add_serve)
    add("tinker", "serve models for training over HTTP, with the Tinker API", _add_tinker)
    add("trace", "run a training step and draw a timeline of all ranks", _add_trace)
    add("plan", "estimate time and memory of a training step in a layout", _add_plan)
    for name, recipe in recipes.items():
        command = commands.add_parser(
            name,
            help=recipe.help,
            usage=f"postlude {name} {'' if name == DEMO else '[CONFIG] '}[--field value ...] [options]",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if chosen in (name, None):
            _add_recipe(command)
        command.set_defaults(module="recipe", parser=command)
        command.recipe = recipe
    add("schema", "print a recipe's config as JSON Schema, for editors", _add_schema)
    add("env", "print versions, devices and kernels, for a bug report", _add_env)
    add("report", "write the report of a run, or compare several", _add_report)
    return parser, list(commands.choices)


# Options that several commands have.


def _add_model(command: argparse.ArgumentParser, also: str = "") -> None:
    command.add_argument("model", metavar="MODEL", help=MODEL_HELP + also)


def _add_address(command: argparse.ArgumentParser) -> None:
    command.add_argument("--host", default="127.0.0.1", help="address to listen at (default: this machine only)")
    command.add_argument("--port", type=port, default=0, help="port (default: a free one)")


def _add_overlap(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--overlap",
        nargs="?",
        const=True,
        default=False,
        choices=(ZERO_BUBBLE,),
        help="overlap the experts' all-to-all with compute; or fill the pipeline bubble with weight gradients",
    )


def _add_lora(command: argparse.ArgumentParser, purpose: str) -> None:
    command.add_argument("--lora", type=lora, metavar="rank=8,targets=q_proj,v_proj", help=purpose)


def _add_recompute(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--recompute", choices=get_args(Recompute), default="none", help="activations to recompute in the backward"
    )


def _add_layers(command: argparse.ArgumentParser, name: str, purpose: str) -> None:
    layers = "in all layers, or in some: 1:-1, ::3, 0,5"
    command.add_argument(
        name, nargs="?", const=True, default=False, type=layer_choice, metavar="LAYERS", help=f"{purpose}, {layers}"
    )


def _add_offload(command: argparse.ArgumentParser) -> None:
    _add_layers(command, "--offload-activations", "keep activations in host memory")


def _add_device_and_timeout(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", choices=("cpu", "cuda"), help=DEVICE_HELP)
    command.add_argument(
        "--timeout", type=above_zero, default=600.0, help="seconds to wait for a rank that does not respond"
    )


def _add_dtype_and_device(command: argparse.ArgumentParser) -> None:
    command.add_argument("--dtype", choices=DTYPES, help="dtype to compute in (default: the source's)")
    command.add_argument("--device", help=f"device to compute on ({DEVICE_HELP})")


# The other options of each command.


def _add_recipe(command: argparse.ArgumentParser) -> None:
    option = command.add_argument
    option("--dry-run", action="store_true", help="run the preflight only")
    option("--resume-from", metavar="step-N", help="resume from this checkpoint; later steps are repeated")
    option(
        "--from",
        dest="from_checkpoint",
        metavar="RUN/step-N",
        help="start from the weights of another run's checkpoint, instead of --model",
    )
    option("--overwrite", action="store_true", help="delete the run in the run directory, and start afresh")
    option("--nproc", type=count, help="ranks to start on this machine (default: those of the layout)")
    _add_device_and_timeout(command)
    _add_ray(command)


def _add_ray(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--ray",
        nargs="?",
        const="local",
        metavar="ADDRESS",
        help="run the ranks on Ray: started for this command, or the cluster at ADDRESS (auto: the running one)",
    )


def _add_schema(command: argparse.ArgumentParser) -> None:
    command.add_argument("recipe", metavar="RECIPE", choices=RECIPES, help=", ".join(RECIPES))
    command.add_argument("--to", metavar="FILE", type=Path, help="output file (default: standard output)")


def _add_env(command: argparse.ArgumentParser) -> None:
    command.add_argument("--gpu", metavar="NAME", help="list the kernels of this GPU, such as A100, instead")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def _add_report(command: argparse.ArgumentParser) -> None:
    command.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="run directories")
    command.add_argument(
        "--to", metavar="FILE", type=Path, help="output file (default: report.html in the first run directory)"
    )


def _add_verify(command: argparse.ArgumentParser) -> None:
    from postlude.verify.choices import OBJECTIVES, TOLERANCES

    option = command.add_argument
    _add_model(command, "; or a config.json, for random weights")
    chosen = command.add_mutually_exclusive_group(required=True)
    chosen.add_argument(
        "--layout", action="append", type=layout, metavar="pp=2,cp=2", help="layout to compare; may be repeated"
    )
    chosen.add_argument("--grid", action="store_true", help="compare the standard set of layouts, up to 8 ranks")
    option("--objective", action="append", choices=OBJECTIVES, help="objective; may be repeated (default: grpo)")
    _add_lora(command, "compare the gradients of adapters, and those of one rank with the merged model and with peft")
    _add_recompute(command)
    _add_offload(command)
    _add_overlap(command)
    option("--share-prefixes", action="store_true", help="let sequences begin alike, and compute what they share once")
    _add_layers(command, "--fp8", "multiply in FP8, and the rest in float64 on the CPU")
    option("--dtype", choices=DTYPES, help="dtype to compute in (default: float32)")
    limits = ", ".join(f"{limit:g} in {name}" for name, limit in TOLERANCES.items())
    option("--tolerance", type=from_zero, help=f"tolerance relative to the largest value (default: {limits})")
    _add_device_and_timeout(command)
    option(
        "--backend",
        choices=("gloo", "nccl"),
        help="communication backend (default: nccl with a GPU for each rank, else gloo)",
    )
    option("--seed", type=seed, default=0, help="random seed")


def _add_logprobs(command: argparse.ArgumentParser) -> None:
    _add_model(command)
    command.add_argument("--text", required=True, help="text to score; - reads standard input")
    _add_context_length(command)
    _add_dtype_and_device(command)
    _add_trust(command)


def _add_generate(command: argparse.ArgumentParser) -> None:
    option = command.add_argument
    _add_sampling(command)
    option("--prompt", action="append", help="prompt; may be repeated (default, and -: standard input)")
    option("--n", type=count, default=1, help="completions of each prompt (default: 1)")
    option("--plain", action="store_true", help="send the prompt as it is, without the chat template")
    option("--json", action="store_true", help="print one JSON object per completion, with its tokens")


def _add_sampling(command: argparse.ArgumentParser) -> None:
    option = command.add_argument
    _add_model(command)
    option("--system", help="system message")
    option("--max-new-tokens", type=count, default=512, help="maximum tokens of a completion (default: 512)")
    option("--temperature", type=from_zero, default=1.0, help="sampling temperature; 0 is greedy (default: 1)")
    option("--top-k", type=int, default=0, help="sample from the k most likely tokens (default: all)")
    option("--top-p", type=above_zero, default=1.0, help="sample from the smallest set with this probability")
    option("--min-p", type=from_zero, default=0.0, help="sample from tokens with this fraction of the top probability")
    option("--stop", action="append", metavar="TEXT", help="string that ends a completion; may be repeated")
    option("--seed", type=seed, help="random seed (default: a new one each time)")
    _add_dtype_and_device(command)
    _add_trust(command)
    option("--threads", type=count, help="CPU threads (default: all cores)")
    _add_context_length(command)
    option("--max-batch-tokens", type=count, help="tokens in the KV cache (default: 65536)")


def _add_trust(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--trust-remote-code", action="store_true", help="run Python files of the model's directory as its tokenizer"
    )


def _add_context_length(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--context-length", type=count, help="maximum tokens of prompt and completion (default: the model's own)"
    )


def _add_serve(command: argparse.ArgumentParser) -> None:
    option = command.add_argument
    _add_model(command)
    _add_address(command)
    option(
        "--api-key",
        metavar="KEY",
        help="key that requests must send as `Authorization: Bearer KEY`; needed if other machines can connect. Prefer "
        "the variable POSTLUDE_API_KEY: process lists show command lines",
    )
    option("--name", help="name of the model (default: MODEL)")
    _add_dtype_and_device(command)
    _add_trust(command)
    option("--threads", type=count, help="CPU threads (default: all cores)")
    _add_context_length(command)
    option("--max-sequences", type=count, help="maximum completions at a time (default: 256)")
    option("--max-batch-tokens", type=count, help="tokens in the KV cache (default: 65536)")
    option("--max-prefill-tokens", type=count, help="maximum prompt tokens of a prefill step (default: 8192)")
    option("--empty", action="store_true", help="start without weights; POST /weights loads them")


def _add_tinker(command: argparse.ArgumentParser) -> None:
    option = command.add_argument
    option("models", metavar="MODEL", nargs="+", help=f"NAME=MODEL, or MODEL alone: {MODEL_HELP}")
    option("--layout", default="", type=layout, metavar="dp_shard=2", help="layout (default: one rank)")
    _add_address(command)
    saved = "directory of what is saved (default: runs/tinker)"
    option("--state", metavar="DIR", type=Path, default=Path("runs/tinker"), help=saved)
    keys = "keys that clients must send (tml-…), one a line; needed if other machines can connect"
    option("--key-file", metavar="FILE", type=Path, help=keys)
    option("--max-models", type=count, default=64, help="models trained at the same time (default: 64)")
    per_key = "models of one key among them (default: --max-models divided by the keys of --key-file)"
    option("--max-models-per-key", type=count, metavar="N", help=per_key)
    full = "models among them of which all weights are trained, without LoRA (default: 1; 0 refuses them)"
    option("--max-full-models", type=count_from_zero, default=1, metavar="N", help=full)
    silent = "seconds without a heartbeat after which a client's models are freed (default: 1800)"
    option("--session-timeout", type=above_zero, default=1800.0, metavar="SECONDS", help=silent)
    _add_ray(command)
    _add_dtype_and_device(command)
    _add_trust(command)


def _add_trace(command: argparse.ArgumentParser) -> None:
    option = command.add_argument
    _add_model(command, "; or a config.json, for random weights")
    option("--layout", default="", type=layout, metavar="dp_shard=2,ep=2", help="parallel layout (default: one rank)")
    _add_overlap(command)
    option("--plain", action="store_true", help="with --overlap: also draw a step without it")
    option("--microbatches", type=count, help="microbatches of each data-parallel rank (default: 2·pp, at least 4)")
    option("--tokens", type=int, default=512, help="tokens of a microbatch (default: 512)")
    _add_recompute(command)
    option("--dtype", choices=DTYPES, help="dtype to compute in (default: float32, on a GPU bfloat16)")
    _add_device_and_timeout(command)
    option("--seed", type=seed, default=0, help="random seed")
    option("--nproc", type=count, help="ranks to start on this machine (default: those of the layout)")
    option("--to", metavar="DIR", type=Path, required=True, help="output directory of timeline.svg and trace.json")


def _add_plan(command: argparse.ArgumentParser) -> None:
    from postlude.plan.hardware import HARDWARE

    option = command.add_argument
    _add_model(command, "; or a config.json alone")
    option("--layout", metavar="pp=2,ep=8", help="parallel layout (default: data-parallel only)")
    option(
        "--recipe",
        nargs=2,
        metavar=("RECIPE", "CONFIG"),
        help="take layout, batch, recompute, overlap, storage and reference from a recipe's config",
    )
    option("--gpus", type=count, help="number of GPUs (default: those of the layout); dp_shard takes the rest")
    option("--seq", type=count, required=True, help="tokens of a sequence")
    option("--budget", type=count, help="tokens of a microbatch (default: one sequence)")
    option("--batch-tokens", type=count, help="tokens of a step (default: 4 microbatches per pipeline rank)")
    _add_overlap(command)
    _add_lora(command, "plan training of adapters, with the model frozen")
    _add_recompute(command)
    _add_offload(command)
    _add_layers(command, "--fp8", "plan products in FP8")
    option("--mtp", type=int, default=0, metavar="DEPTHS", help="multi-token-prediction depths to train")
    option(
        "--gpu",
        default="h100",
        metavar="NAME",
        help=f"{', '.join(HARDWARE)}, or a .json file (default: h100)",
    )
    option("--search", action="store_true", help="propose the best layouts of --gpus that fit")


def _add_convert(command: argparse.ArgumentParser) -> None:
    option = command.add_argument
    option(
        "adapter",
        metavar="ADAPTER",
        nargs="?",
        help="an adapter to merge into SRC: a directory of peft, or a checkpoint of a LoRA run",
    )
    option("source", metavar="SRC", help=MODEL_HELP)
    option("target", metavar="DST", help="directory to write")
    option("--dtype", choices=DTYPES, help="dtype of the written weights (default: the source's)")
    option(
        "--pattern",
        metavar="'[*-]{4}'",
        help="another pattern; equal blocks at the same place keep their weights, "
        "and a model without a Hugging Face family is written in Postlude's own format (docs/models.md)",
    )
    option("--mtp", action="store_true", help="keep the source's multi-token-prediction depths")
    _add_trust(command)
    option("--without-value-head", action="store_true", help="leave out the value head of a reward model or a critic")
    option("--seed", type=seed, default=0, help="random seed of new weights")
    option("--overwrite", action="store_true", help="replace a model in DST")


if __name__ == "__main__":
    sys.exit(main())
