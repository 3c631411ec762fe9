"""`postlude launch`: prints the job of a recipe for a cluster's scheduler, or submits it."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from postlude.jobs import kubernetes, skypilot, slurm
from postlude.jobs.job import Job, Mount, job_ranks, parse_time
from postlude.recipes.config.keys import written_key
from postlude.recipes.config.load import to_yaml
from postlude.recipes.config.schema import input_values
from postlude.recipes.config.secrets import mask_arguments
from postlude.recipes.registry import RECIPES

WRITERS = {"slurm": slurm, "skypilot": skypilot, "kubernetes": kubernetes}


def run(options: argparse.Namespace) -> None:
    writer, job = WRITERS[options.scheduler], read_job(options)
    text = writer.write_job(job)
    if job.unmounted:
        print(f"postlude launch: {job.unmounted}", file=sys.stderr)
    if options.submit:
        _submit(writer.submit_command(job), text)
    else:
        print(text, end="")


def _submit(command: list[str], text: str) -> None:
    """Runs a command on a file with the text. Raises OSError if it fails."""
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(f"--submit runs {command[0]}, which is not installed here.")
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        code = subprocess.run([*command, file.name], check=False).returncode
    if code:
        raise OSError(f"{shlex.join(command)} did not submit the job: exit code {code}.")


def read_job(options: argparse.Namespace) -> Job:
    """Returns the job of a command's options. Raises ValueError for a mistake in them or in the config."""
    overrides = [word for word in options.overrides if word != "--"]
    if options.config is None and not overrides:
        raise ValueError("give a CONFIG after the recipe, or keys such as --model.")
    config = RECIPES[options.recipe].read(options.config, overrides)
    cpu = options.device == "cpu"
    ranks, gpus_per_node = job_ranks(config, options.nodes, options.gpus_per_node, ray=options.ray, cpu=cpu)
    of_run = re.sub(r"[^a-z0-9]+", "-", f"{options.recipe}-{config.run.name}".lower())[:40].strip("-")
    variables = (variable.partition("=") for variable in options.env)
    inputs = {written_key(key): _path(value, kind) for key, value, kind, _ in input_values(config)}
    return Job(
        name=options.name or of_run,
        recipe=options.recipe,
        arguments=_arguments(options, overrides),
        rank_options=_rank_options(options),
        inputs={} if options.scheduler == "slurm" else inputs,
        config="" if options.scheduler == "slurm" else _config_text(config),
        run=config.run,
        ranks=ranks,
        nodes=options.nodes,
        gpus_per_node=gpus_per_node,
        gpu=options.gpu,
        cpus_per_node=options.cpus_per_node,
        time=None if options.time is None else parse_time(options.time),
        grace=options.grace,
        partition=options.partition,
        account=options.account,
        image=options.image,
        workdir=options.workdir,
        environment={name: value if equals else None for name, equals, value in variables},
        mounts=tuple(map(Mount.parse, options.mount)),
        setup=tuple(options.setup),
        python=options.python or (sys.executable if options.scheduler == "slurm" and not options.image else "python"),
        requeue=options.requeue,
        ray=options.ray,
    )


def _path(value: str, kind: str) -> str:
    """Returns the path of an input, of code without the function's name."""
    return os.path.normpath(Path(value.rpartition(":")[0] if kind == "code" else value).expanduser())


def _arguments(options: argparse.Namespace, overrides: list[str]) -> tuple[str, ...]:
    """Returns what follows the recipe's name on the command line of a rank."""
    if mask_arguments(overrides) != overrides:
        shown = shlex.join(mask_arguments(overrides))
        raise ValueError(f"{shown} would write a secret into the job's file. Pass it with --env NAME.")
    file = options.config
    words = [] if file is None else [str(file.absolute() if file.exists() else file)]  # else it is a packaged name
    return (*words, *overrides)


def _rank_options(options: argparse.Namespace) -> tuple[str, ...]:
    device = () if options.device is None else ("--device", options.device)
    is_default = options.timeout == options.parser.get_default("timeout")
    return (*device, *(() if is_default else ("--timeout", f"{options.timeout:g}")))


def _config_text(config: Any) -> str:
    text = to_yaml(config)
    if to_yaml(config, masked=True) != text:
        raise ValueError("the config has a secret, which the job's file would show. Pass it with --env NAME.")
    return text
