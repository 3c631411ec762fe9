"""The arguments of each command. The keys of a recipe's config are not among them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, get_args

from postlude.hf.builtin import BUILTIN, PACKAGED
from postlude.json_log import LOG_FORMAT, LOG_FORMATS
from postlude.option_types import above_zero, count, count_from_zero, from_zero, layer_choice, layout, lora, port, seed
from postlude.options import ZERO_BUBBLE, Dtype, Recompute
from postlude.recipes.registry import RECIPES

DTYPES = get_args(Dtype)
SHELLS = ("bash", "zsh", "fish")
MODEL_HELP = (
    "a model directory (Hugging Face's or Postlude's own), ORG/NAME on the Hugging Face Hub, a .gguf file, or a "
    f"built-in model: {', '.join([*BUILTIN, *PACKAGED])}"
)
LAUNCH = "launch"  # like a recipe, it takes the keys of one
SCHEDULERS = ("slurm", "skypilot", "kubernetes")
DEVICE_HELP = "default: cuda where there is a GPU, else cpu"

# Options that several commands have.


def add_model(command: argparse.ArgumentParser, also: str = "") -> None:
    command.add_argument("model", metavar="MODEL", help=MODEL_HELP + also)


def _add_address(command: argparse.ArgumentParser) -> None:
    command.add_argument("--host", default="127.0.0.1", help="address to listen at (default: this machine only)")
    command.add_argument("--port", type=port, default=0, help="port (default: a free one)")


def _add_log_format(command: argparse.ArgumentParser) -> None:
    formats = f"json prints and logs one JSON object a line (default: {LOG_FORMAT}, else text)"
    command.add_argument("--log-format", choices=LOG_FORMATS, help=formats)


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


def add_recipe(command: argparse.ArgumentParser, help_action: type[argparse.Action]) -> None:
    option = command.add_argument
    short = "show the keys that most runs set and these options, or all that is known of KEY or its section"
    option("-h", "--help", action=help_action, nargs="?", metavar="KEY", help=short)
    option("--help-all", action=help_action, nargs=0, help="show all keys")
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
    _add_log_format(command)
    _add_ray(command)


def _add_ray(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--ray",
        nargs="?",
        const="local",
        metavar="ADDRESS",
        help="run the ranks on Ray: started for this command, or the cluster at ADDRESS (auto: the running one)",
    )


def add_launch(command: argparse.ArgumentParser) -> None:
    option = command.add_argument
    option("scheduler", metavar="SCHEDULER", choices=SCHEDULERS, help=", ".join(SCHEDULERS))
    option("recipe", metavar="RECIPE", choices=RECIPES, help=f"{', '.join(RECIPES)}; then CONFIG and --key value")
    option("--submit", action="store_true", help="submit the job, instead of printing it")
    option("--name", help="name of the job (default: the run directory's)")
    option("--nodes", type=count, default=1, help="number of nodes (default: 1)")
    option("--gpus-per-node", type=count_from_zero, metavar="N", help="default: what layout and servers need")
    option("--gpu", metavar="TYPE", help="type of the GPUs, such as H100")
    option("--cpus-per-node", type=count, metavar="N", help="default: Slurm: the whole node; else the scheduler's")
    option("--time", metavar="HH:MM:SS", help="time that the job may take (default: the scheduler's)")
    grace = "seconds to finish a step and save before the job is killed (default: 600)"
    option("--grace", type=count, default=600, metavar="SECONDS", help=grace)
    option("--partition", "--queue", metavar="NAME", help="Slurm's partition; Kubernetes: a LocalQueue of Kueue")
    option("--account", metavar="NAME", help="Slurm's account")
    option("--image", help="container image; Slurm needs pyxis for it")
    variables = "environment variable; without =VALUE, a secret that the scheduler passes on; may be repeated"
    option("--env", action="append", default=[], metavar="NAME[=VALUE]", help=variables)
    storage = (
        "storage: a directory (Slurm), a bucket (SkyPilot) or a PersistentVolumeClaim (Kubernetes); may be repeated"
    )
    option("--mount", action="append", default=[], metavar="SOURCE:DIR", help=storage)
    option("--workdir", metavar="DIR", help="working directory on the nodes (Slurm: this one; else the first --mount)")
    option("--setup", action="append", default=[], metavar="COMMAND", help="shell command that each node runs first")
    option("--python", metavar="FILE", help="interpreter (default: this one; with --image, and elsewhere, python)")
    option("--no-requeue", dest="requeue", action="store_false", help="do not continue after time limit or preemption")
    option("--ray", action="store_true", help="let Ray place ranks and servers, instead of torchrun")
    _add_device_and_timeout(command)


def add_schema(command: argparse.ArgumentParser) -> None:
    command.add_argument("recipe", metavar="RECIPE", choices=RECIPES, help=", ".join(RECIPES))
    command.add_argument("--to", metavar="FILE", type=Path, help="output file (default: standard output)")


def add_completion(command: argparse.ArgumentParser) -> None:
    command.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    command.add_argument("--line", help=argparse.SUPPRESS)  # of the script: print the candidates of its last word


def add_env(command: argparse.ArgumentParser) -> None:
    command.add_argument("--gpu", metavar="NAME", help="list the kernels of this GPU, such as A100, instead")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def add_run(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", metavar="RUN", type=Path, help="run directory")


def add_status(command: argparse.ArgumentParser) -> None:
    add_run(command)
    command.add_argument("--json", action="store_true", help="print one JSON object")


def add_report(command: argparse.ArgumentParser) -> None:
    command.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="run directories")
    command.add_argument(
        "--to", metavar="FILE", type=Path, help="output file (default: report.html in the first run directory)"
    )


def add_verify(command: argparse.ArgumentParser) -> None:
    from postlude.verify.choices import OBJECTIVES, TOLERANCES

    option = command.add_argument
    add_model(command, "; or a config.json, for random weights")
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


def add_logprobs(command: argparse.ArgumentParser) -> None:
    add_model(command)
    command.add_argument("--text", required=True, help="text to score; - reads standard input")
    _add_context_length(command)
    _add_dtype_and_device(command)
    _add_trust(command)


def add_generate(command: argparse.ArgumentParser) -> None:
    option = command.add_argument
    add_sampling(command)
    option("--prompt", action="append", help="prompt; may be repeated (default, and -: standard input)")
    option("--n", type=count, default=1, help="completions of each prompt (default: 1)")
    option("--plain", action="store_true", help="send the prompt as it is, without the chat template")
    option("--json", action="store_true", help="print one JSON object per completion, with its tokens")


def add_sampling(command: argparse.ArgumentParser) -> None:
    option = command.add_argument
    add_model(command)
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


def add_serve(command: argparse.ArgumentParser) -> None:
    option = command.add_argument
    add_model(command)
    _add_address(command)
    _add_log_format(command)
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


def add_tinker(command: argparse.ArgumentParser) -> None:
    option = command.add_argument
    option("models", metavar="MODEL", nargs="+", help=f"NAME=MODEL, or MODEL alone: {MODEL_HELP}")
    option("--layout", default="", type=layout, metavar="dp_shard=2", help="layout (default: one rank)")
    _add_address(command)
    _add_log_format(command)
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


def add_trace(command: argparse.ArgumentParser) -> None:
    option = command.add_argument
    add_model(command, "; or a config.json, for random weights")
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


def add_plan(command: argparse.ArgumentParser) -> None:
    from postlude.plan.hardware import HARDWARE

    option = command.add_argument
    add_model(command, "; or a config.json alone")
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


def add_convert(command: argparse.ArgumentParser) -> None:
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


# The commands that are no recipes.


class CommandArguments(NamedTuple):
    """A command in a phrase, and what adds its arguments."""

    summary: str
    add: Callable[[argparse.ArgumentParser], None]


MODEL_COMMANDS = {
    "info": CommandArguments(
        "show a model's pattern, parameters by block, and memory by dtype",
        lambda command: add_model(command, "; or an adapter of peft"),
    ),
    "convert": CommandArguments("convert any model source to a model directory", add_convert),
    "logprobs": CommandArguments("print the log-prob of every token of a text", add_logprobs),
    "verify": CommandArguments("check that a parallel layout gives the results of one rank", add_verify),
    "generate": CommandArguments("sample completions of prompts", add_generate),
    "chat": CommandArguments("chat with a model in the terminal", add_sampling),
    "serve": CommandArguments("serve a model over HTTP, with OpenAI's and Anthropic's APIs", add_serve),
    "tinker": CommandArguments("serve models for training over HTTP, with the Tinker API", add_tinker),
    "trace": CommandArguments("run a training step and draw a timeline of all ranks", add_trace),
    "plan": CommandArguments("estimate time and memory of a training step in a layout", add_plan),
}
OTHER_COMMANDS = {
    LAUNCH: CommandArguments("print the job of a recipe on a cluster, or submit it", add_launch),
    "schema": CommandArguments("print a recipe's config as JSON Schema, for editors", add_schema),
    "env": CommandArguments("print versions, devices and kernels, for a bug report", add_env),
    "status": CommandArguments("show where a run is, from its directory alone", add_status),
    "watch": CommandArguments("show the live view of a run that was started elsewhere", add_run),
    "report": CommandArguments("write the report of a run, or compare several", add_report),
    "completion": CommandArguments("print the script that completes commands and config keys", add_completion),
}
