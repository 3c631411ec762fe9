"""A recipe: read its config, start its ranks, say where its report is."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from postlude.layout import Layout
from postlude.recipes.commands import RECIPES
from postlude.recipes.config import load, to_yaml


def run(options: argparse.Namespace, console: Console) -> None:
    """Run a recipe, or continue it where it stopped."""
    chosen = RECIPES[options.command]
    config: Any = load(chosen.config, options.config, [part for part in options.overrides if part != "--"])
    if options.dry_run:
        console.print(to_yaml(config), markup=False, highlight=False, soft_wrap=True)
        return
    from postlude.launcher import on_ranks  # torch: a mistake in the config is named before that

    needed = getattr(config, "layout", Layout()).world_size
    size = needed if options.nproc is None else options.nproc
    on_ranks(chosen.run, config, options.device, nproc=size, timeout=options.timeout, device=options.device)
