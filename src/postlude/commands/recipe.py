"""`postlude grpo` and the other recipes: read the config, run the preflight, start the ranks. Also `schema`."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from rich.console import Console

from postlude.checks import check_writable
from postlude.cluster.ray_cluster import LOCAL, check_ray
from postlude.error_output import print_error
from postlude.json_log import print_line
from postlude.recipes.api import RecipeStart
from postlude.recipes.config.load import to_yaml
from postlude.recipes.config.schema import file_schema
from postlude.recipes.registry import RECIPES, Recipe
from postlude.recipes.run.lock import wait_for
from postlude.recipes.run.outcome import EXIT_DONE
from postlude.recipes.run.start_mode import StartMode, find_checkpoint, parse_step

RELEASE_SECONDS = 10.0  # for ranks of an earlier Ray driver to release the run directory


def run(options: argparse.Namespace) -> int:
    recipe: Recipe = options.parser.recipe
    config = _config(options, recipe)
    start_mode = StartMode(
        None if options.resume_from is None else parse_step(options.resume_from), options.resume_command
    )
    if options.overwrite and options.resume_from is not None:
        raise ValueError("--overwrite deletes the run that --resume-from continues. Give one of them.")
    if options.ray is not None:
        check_ray()
        if "RANK" in os.environ:
            raise ValueError("--ray starts ranks by itself, but this process is a rank already. Leave out torchrun.")
        wait_for(config.run, RELEASE_SECONDS)  # ranks of a killed driver end when Ray notices
    from rich.console import Console

    # Imports torch, which is slow: mistakes in the config are reported before it.
    start = RecipeStart(recipe, config, options.device, options.nproc)
    on_this_machine, ray = options.ray in (None, LOCAL), options.ray is not None
    inputs, findings = start.check(on_this_machine=on_this_machine, ray=ray, overwrite=options.overwrite)
    console = Console(markup=False, highlight=False, soft_wrap=True)
    if options.dry_run:
        if start.checks_here:
            from postlude.recipes.checks.preflight import print_findings

            console.print(to_yaml(config, masked=True))
            print_findings(inputs, findings, Console())
        return EXIT_DONE
    if "mtp" in findings:  # a run should not add new layers silently
        print_line(f"mtp: {findings['mtp']}")
    inputs.succeed()
    if not ray:
        outcome = start.run(start_mode, timeout=options.timeout)
    else:
        from postlude.cluster.driver import RayJob, run_on_ray

        job = RayJob(recipe, config, start.device_name, start_mode, start.ranks, options.timeout)
        outcome = run_on_ray(job, options.ray)
    if outcome.message:
        print_error(f"postlude {options.command}: {outcome.message}")
    return outcome.exit_code


def _config(options: argparse.Namespace, recipe: Recipe) -> Any:
    """Returns the config. All fields may have defaults, but a command without any argument is a mistake."""
    overrides = [part for part in options.overrides if part != "--"]
    if options.from_checkpoint is not None:
        overrides += ["--model", str(find_checkpoint(options.from_checkpoint))]
    if options.config is None and not overrides and not options.dry_run:
        raise ValueError("give a CONFIG, or fields such as --model; --dry-run alone shows what all of them are.")
    return recipe.read(options.config, overrides)


def run_schema(options: argparse.Namespace) -> None:
    console = Console()
    text = json.dumps(file_schema(RECIPES[options.recipe].config), indent=1, ensure_ascii=False) + "\n"
    if options.to is None:
        print(text, end="")
    else:
        check_writable("--to", options.to.parent, "the file")
        options.to.parent.mkdir(parents=True, exist_ok=True)
        options.to.write_text(text, encoding="utf-8")
        console.print(f"schema: {options.to}", markup=False, highlight=False, soft_wrap=True)
