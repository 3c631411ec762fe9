"""`postlude grpo` and the other recipes: read the config, run the preflight, start the ranks."""

from __future__ import annotations

import argparse
import os
from typing import Any

from postlude.cluster.ray_cluster import LOCAL, check_ray
from postlude.error_output import print_error
from postlude.layout import Layout
from postlude.recipes.config.load import to_yaml
from postlude.recipes.registry import Recipe
from postlude.recipes.run.lock import wait_for
from postlude.recipes.run.outcome import EXIT_DONE
from postlude.recipes.run.start_mode import StartMode, find_checkpoint, parse_step

RELEASE_SECONDS = 10.0  # for ranks of an earlier Ray driver to release the run directory


def run(options: argparse.Namespace) -> int:
    """Runs or resumes a recipe."""
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
    # torch is slow to import: mistakes in the config are reported before it.
    from rich.console import Console

    from postlude.recipes.checks.preflight import LaunchInfo, PreflightInputs, preflight, print_findings
    from postlude.world.devices import default_device
    from postlude.world.launcher import run_on_ranks

    device = options.device or default_device()
    layout_size = getattr(config, "layout", Layout()).world_size
    world_size = layout_size if options.nproc is None else options.nproc
    if os.environ.get("LOCAL_RANK", "0") == "0":  # one rank of a machine checks for all
        on_this_machine = options.ray in (None, LOCAL)
        launch = LaunchInfo(
            device,
            int(os.environ.get("WORLD_SIZE", world_size)),
            on_this_machine,
            options.ray is not None,
            options.overwrite,
        )
        inputs = PreflightInputs(config, launch)
        findings, console = preflight(recipe.checks(inputs)), Console()
        if options.dry_run:
            console.print(to_yaml(config, masked=True), markup=False, highlight=False, soft_wrap=True)
            print_findings(inputs, findings, console)
        else:
            if "mtp" in findings:  # a run should not add new layers silently
                console.print(f"mtp: {findings['mtp']}", markup=False, highlight=False, soft_wrap=True)
            for action in inputs.on_success:
                action()
    if options.dry_run:
        return EXIT_DONE
    if options.ray is None:
        outcome = run_on_ranks(
            recipe.run, config, device, start_mode, nproc=world_size, timeout=options.timeout, device=device
        )
    else:
        from postlude.cluster.driver import RayJob, run_on_ray

        outcome = run_on_ray(RayJob(recipe, config, device, start_mode, world_size, options.timeout), options.ray)
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
