"""A recipe: read its config, start its ranks, say where its report is."""

from __future__ import annotations

import argparse
import os
from typing import Any

from postlude.cluster.joining import LOCAL, check_ray
from postlude.complaint import complain
from postlude.layout import Layout
from postlude.recipes.commands import RECIPES, Recipe
from postlude.recipes.config.reading import to_yaml
from postlude.recipes.run.beginning import Beginning, checkpoint_named, step_named
from postlude.recipes.run.ending import DONE
from postlude.recipes.run.lock import wait_for

LEAVING = 10.0  # seconds that ranks of an earlier driver have to let go of a run's directory


def run(options: argparse.Namespace) -> int:
    """Run a recipe, or continue it where it stopped."""
    chosen = RECIPES[options.command]
    config = _config(options, chosen)
    beginning = Beginning(None if options.resume_from is None else step_named(options.resume_from), options.again)
    if options.ray is not None:
        check_ray()
        if "RANK" in os.environ:
            raise ValueError("--ray starts ranks by itself, but this process is a rank already. Leave out torchrun.")
        wait_for(config.run, LEAVING)  # ranks of a driver that was killed end when Ray has noticed
    # Slow ones, torch above all: a mistake in the config is named before them.
    from rich.console import Console

    from postlude.recipes.preflight import Start, Subject, preflight, print_findings
    from postlude.world.devices import default_device
    from postlude.world.launcher import on_ranks

    device = options.device or default_device()
    needed = getattr(config, "layout", Layout()).world_size
    size = needed if options.nproc is None else options.nproc
    if os.environ.get("LOCAL_RANK", "0") == "0":  # one rank of a machine speaks for its neighbours
        here = options.ray in (None, LOCAL)
        start = Start(device, int(os.environ.get("WORLD_SIZE", size)), here, options.ray is not None)
        subject = Subject(config, start)
        found, console = preflight(chosen.checks(subject)), Console()
        if options.dry_run:
            console.print(to_yaml(config, masked=True), markup=False, highlight=False, soft_wrap=True)
            print_findings(subject, found, console)
        else:
            if "mtp" in found:  # what is fresh is nothing that a run should begin with unseen
                console.print(f"mtp: {found['mtp']}", markup=False, highlight=False, soft_wrap=True)
            for keep in subject.keep:
                keep()
    if options.dry_run:
        return DONE
    if options.ray is None:
        ending = on_ranks(chosen.run, config, device, beginning, nproc=size, timeout=options.timeout, device=device)
    else:
        from postlude.cluster.driving import Job, drive

        ending = drive(Job(chosen, config, device, beginning, size, options.timeout), options.ray)
    if ending.sentence:
        complain(f"postlude {options.command}: {ending.sentence}")
    return ending.code


def _config(options: argparse.Namespace, chosen: Recipe) -> Any:
    """The config of the file and the words beside it. Where all fields have defaults, no word at all is a slip."""
    overrides = [part for part in options.overrides if part != "--"]
    if options.from_checkpoint is not None:
        overrides += ["--model", str(checkpoint_named(options.from_checkpoint))]
    if options.config is None and not overrides and not options.dry_run:
        raise ValueError("give a CONFIG.yaml, or fields such as --model; --dry-run alone shows what all of them are.")
    return chosen.read(options.config, overrides)
