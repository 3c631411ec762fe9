"""A recipe: read its config, start its ranks, say where its report is."""

from __future__ import annotations

import argparse
import os
from typing import Any

from rich.console import Console

from postlude.layout import Layout
from postlude.recipes.commands import RECIPES
from postlude.recipes.config import load, to_yaml


def run(options: argparse.Namespace, console: Console) -> None:
    """Run a recipe, or continue it where it stopped."""
    chosen = RECIPES[options.command]
    config: Any = load(chosen.config, options.config, [part for part in options.overrides if part != "--"])
    # torch: a mistake in the config is named before that
    from postlude.launcher import on_ranks
    from postlude.recipes.preflight import Start, Subject, preflight, print_findings

    needed = getattr(config, "layout", Layout()).world_size
    size = needed if options.nproc is None else options.nproc
    if os.environ.get("LOCAL_RANK", "0") == "0":  # one rank of a machine speaks for its neighbours
        subject = Subject(config, Start(options.device, int(os.environ.get("WORLD_SIZE", size))))
        found = preflight(chosen.checks(subject))
        if options.dry_run:
            console.print(to_yaml(config), markup=False, highlight=False, soft_wrap=True)
            print_findings(subject, found, console)
    if options.dry_run:
        return
    on_ranks(chosen.run, config, options.device, nproc=size, timeout=options.timeout, device=options.device)
