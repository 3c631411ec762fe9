"""Recipes called from Python: the same checks, ranks and run directory as the commands.

    from postlude.recipes import grpo
    result = grpo("my.yaml", steps=100, optimizer={"lr": 1e-5})

torch is imported when a recipe is called.
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
"""A YAML file, or its contents as a mapping; None takes defaults and keywords only."""


@dataclass(frozen=True)
class RunResult:
    """The result of a recipe that was called from Python."""

    run: Path
    """The run directory."""
    outcome: RunOutcome
    """The end of the run: `status` is "finished", "interrupted" or "failed", and `message` says why."""
    summary: RunSummary
    """The printed summary: scores before and after, failures, time by phase."""
    metrics: list[dict[str, Any]]
    """The lines of metrics.jsonl, one per step."""
    model: Path | None
    """The exported model, or None."""


def sft(config: Config = None, /, *, device: str | None = None, nproc: int | None = None, **settings: Any) -> RunResult:
    """Trains on the completions of a dataset, as `postlude sft` does; see `start`."""
    return start("sft", config, settings, device=device, nproc=nproc)


def dpo(config: Config = None, /, *, device: str | None = None, nproc: int | None = None, **settings: Any) -> RunResult:
    """Trains on pairs of completions, as `postlude dpo` does; see `start`."""
    return start("dpo", config, settings, device=device, nproc=nproc)


def kto(config: Config = None, /, *, device: str | None = None, nproc: int | None = None, **settings: Any) -> RunResult:
    """Trains on completions with labels, as `postlude kto` does; see `start`."""
    return start("kto", config, settings, device=device, nproc=nproc)


def rm(config: Config = None, /, *, device: str | None = None, nproc: int | None = None, **settings: Any) -> RunResult:
    """Trains a reward model on pairs of completions, as `postlude rm` does; see `start`."""
    return start("rm", config, settings, device=device, nproc=nproc)


def grpo(
    config: Config = None, /, *, device: str | None = None, nproc: int | None = None, **settings: Any
) -> RunResult:
    """Trains on rewards, as `postlude grpo` does; see `start`."""
    return start("grpo", config, settings, device=device, nproc=nproc)


def ppo(config: Config = None, /, *, device: str | None = None, nproc: int | None = None, **settings: Any) -> RunResult:
    """Trains on rewards with a critic, as `postlude ppo` does; see `start`."""
    return start("ppo", config, settings, device=device, nproc=nproc)


def distill(
    config: Config = None, /, *, device: str | None = None, nproc: int | None = None, **settings: Any
) -> RunResult:
    """Trains on a teacher's distribution, as `postlude distill` does; see `start`."""
    return start("distill", config, settings, device=device, nproc=nproc)


def evaluate(
    config: Config = None, /, *, device: str | None = None, nproc: int | None = None, **settings: Any
) -> RunResult:
    """Samples completions of tasks and scores them, as `postlude eval` does; see `start`."""
    return start("eval", config, settings, device=device, nproc=nproc)


def start(
    recipe: str,
    config: Config,
    settings: Mapping[str, Any],
    *,
    device: str | None = None,
    nproc: int | None = None,
) -> RunResult:
    """Checks a config, runs or resumes it, and returns the result.

    `settings` are fields of the config, with sections as mappings: `optimizer={"lr": 1e-5}` sets only that key. They
    override `config`. A mistake raises ValueError, TypeError or OSError before anything is touched. A run that started
    and failed is returned, with its reason. Several ranks are new processes: as for multiprocessing, the calling
    script then needs `if __name__ == "__main__":`.
    """
    chosen = RECIPES[recipe]
    file = None if config is None or isinstance(config, Mapping) else Path(config)
    layers = [config, settings] if isinstance(config, Mapping) else [settings]
    run_config = chosen.read(file, settings=layers)

    from postlude.recipes.checks.preflight import LaunchInfo, PreflightInputs, preflight
    from postlude.recipes.report.summary import read_summary
    from postlude.recipes.run.directory import read_metrics
    from postlude.world.devices import default_device
    from postlude.world.launcher import run_on_ranks

    device = device or default_device()
    size = getattr(run_config, "layout", Layout()).world_size if nproc is None else nproc
    if os.environ.get("LOCAL_RANK", "0") == "0":
        inputs = PreflightInputs(run_config, LaunchInfo(device, int(os.environ.get("WORLD_SIZE", size))))
        preflight(chosen.checks(inputs))
        for write in inputs.on_success:
            write()
    outcome = run_on_ranks(chosen.run, run_config, device, nproc=size, device=device)
    summary = read_summary(run_config.run)
    return RunResult(run_config.run, outcome, summary, read_metrics(run_config.run), summary.model)
