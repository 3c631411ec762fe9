"""A recipe started from Python: the same checks, ranks and run directory as the command of that name.

    from postlude.recipes import grpo
    result = grpo("my.yaml", steps=100, optimizer={"lr": 1e-5})

Nothing here needs torch before a recipe is called.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from postlude.layout import Layout
from postlude.recipes.registry import RECIPES
from postlude.recipes.run.outcome import RunOutcome

if TYPE_CHECKING:
    from postlude.recipes.report.summary import RunSummary

Config: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | None
"""A YAML file, or what stands in one; None takes defaults and keywords alone."""


@dataclass(frozen=True)
class RunResult:
    """What a recipe that was started from Python gives back."""

    run: Path
    """The run's directory."""
    outcome: RunOutcome
    """How it ended: `outcome` is "finished", "interrupted" or "failed", and then `sentence` says why."""
    summary: RunSummary
    """What is told at the end of a run: scores before and after, failures, time by phase."""
    metrics: list[dict[str, Any]]
    """The lines of metrics.jsonl, one a step."""
    model: Path | None
    """The exported model; None where none was exported."""


def sft(config: Config = None, /, *, device: str | None = None, nproc: int | None = None, **settings: Any) -> RunResult:
    """Learn the answers in a dataset, as `postlude sft` does; see `start`."""
    return start("sft", config, settings, device=device, nproc=nproc)


def dpo(config: Config = None, /, *, device: str | None = None, nproc: int | None = None, **settings: Any) -> RunResult:
    """Learn from pairs of answers, as `postlude dpo` does; see `start`."""
    return start("dpo", config, settings, device=device, nproc=nproc)


def grpo(
    config: Config = None, /, *, device: str | None = None, nproc: int | None = None, **settings: Any
) -> RunResult:
    """Train on rewards, as `postlude grpo` does; see `start`."""
    return start("grpo", config, settings, device=device, nproc=nproc)


def distill(
    config: Config = None, /, *, device: str | None = None, nproc: int | None = None, **settings: Any
) -> RunResult:
    """Take on a teacher's distribution, as `postlude distill` does; see `start`."""
    return start("distill", config, settings, device=device, nproc=nproc)


def evaluate(
    config: Config = None, /, *, device: str | None = None, nproc: int | None = None, **settings: Any
) -> RunResult:
    """Answer tasks and score the answers, as `postlude eval` does; see `start`."""
    return start("eval", config, settings, device=device, nproc=nproc)


def start(
    recipe: str,
    config: Config,
    settings: Mapping[str, Any],
    *,
    device: str | None = None,
    nproc: int | None = None,
) -> RunResult:
    """Check a config, run or continue it, and return what came of it.

    `settings` are the config's fields, sections as mappings: `optimizer={"lr": 1e-5}` sets that key alone. They stand
    over `config`. A mistake is raised as a ValueError, TypeError or OSError before anything is touched; a run that
    began and ended badly is returned, with its reason. With several ranks, which are new processes, the calling script
    needs `if __name__ == "__main__":`, as for multiprocessing.
    """
    chosen = RECIPES[recipe]
    file = None if config is None or isinstance(config, Mapping) else Path(config)
    layers = [config, settings] if isinstance(config, Mapping) else [settings]
    made = chosen.read(file, settings=layers)

    from postlude.recipes.checks.preflight import LaunchInfo, PreflightInputs, preflight
    from postlude.recipes.report.summary import read_summary
    from postlude.recipes.run.directory import read_metrics
    from postlude.world.devices import default_device
    from postlude.world.launcher import run_on_ranks

    device = device or default_device()
    size = getattr(made, "layout", Layout()).world_size if nproc is None else nproc
    if os.environ.get("LOCAL_RANK", "0") == "0":
        inputs = PreflightInputs(made, LaunchInfo(device, int(os.environ.get("WORLD_SIZE", size))))
        preflight(chosen.checks(inputs))
        for write in inputs.on_success:
            write()
    outcome = run_on_ranks(chosen.run, made, device, nproc=size, device=device)
    summary = read_summary(made.run)
    return RunResult(made.run, outcome, summary, read_metrics(made.run), summary.model)
