"""Recipes called from Python: the same checks, ranks and run directory as the commands.

    from postlude.recipes import grpo
    result = grpo("my.yaml", steps=100, optimizer={"lr": 1e-5})

torch is imported when a recipe is called.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from postlude.layout import Layout
from postlude.recipes.registry import RECIPES, Recipe
from postlude.recipes.run.in_memory_rows import InMemoryRows
from postlude.recipes.run.outcome import RunOutcome
from postlude.recipes.run.start_mode import RESUME_NEWEST, StartMode
from postlude.user_code import CallFunction

if TYPE_CHECKING:
    from postlude.recipes.checks.preflight import PreflightInputs
    from postlude.recipes.keywords import (
        DistillFunction,
        DPOFunction,
        EvalFunction,
        GRPOFunction,
        KTOFunction,
        PPOFunction,
        RMFunction,
        SFTFunction,
    )
    from postlude.recipes.report.summary import RunSummary
    from postlude.recipes.run.runtime import Runtime

Config: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | None
"""A YAML file, or its contents as a mapping; None takes defaults and keywords only."""


OnStep: TypeAlias = Callable[[int, Mapping[str, Any]], object]
"""Gets the number and the metrics of a finished step. A true value ends the run."""


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


@dataclass(frozen=True)
class OnStepCall:
    """Calls `on_step`, which other processes get by cloudpickle."""

    function: CallFunction

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Returns whether the run ends."""
        return bool(self.function.function(step, metrics))


@dataclass
class RecipeStart:
    """The start of a recipe, by a command or a call: checks, then ranks."""

    recipe: Recipe
    config: Any
    device: str | None = None
    """None takes the GPU if there is one."""
    nproc: int | None = None
    """Ranks of this machine; None takes those of the layout."""

    def __post_init__(self) -> None:
        from postlude.world.devices import default_device  # imports torch

        self.device_name: str = self.device or default_device()
        self.ranks: int = getattr(self.config, "layout", Layout()).world_size if self.nproc is None else self.nproc
        self.checks_here = os.environ.get("LOCAL_RANK", "0") == "0"  # one rank of a machine checks for all

    def check(self, **launch: bool) -> tuple[PreflightInputs, dict[str, str]]:
        """Runs the preflight, where this process has to. `launch` are fields of `LaunchInfo`. Returns its findings."""
        from postlude.recipes.checks.preflight import LaunchInfo, PreflightInputs, preflight

        info = LaunchInfo(self.device_name, int(os.environ.get("WORLD_SIZE", self.ranks)), **launch)
        inputs = PreflightInputs(self.config, info)
        return inputs, preflight(self.recipe.checks(inputs)) if self.checks_here else {}

    def run(
        self, start_mode: StartMode = RESUME_NEWEST, runtime: Runtime | None = None, *, timeout: float = 600.0
    ) -> RunOutcome:
        """Runs the recipe on ranks of this machine. A rank that does not respond for `timeout` seconds ends it."""
        from postlude.world.launcher import run_on_ranks

        arguments: Any = (self.config, self.device_name, start_mode, runtime)
        return run_on_ranks(self.recipe.run, *arguments, nproc=self.ranks, timeout=timeout, device=self.device_name)


@dataclass(frozen=True)
class RecipeFunction:
    """A recipe as a function, such as `grpo("my.yaml", steps=100)`."""

    command: str

    def __call__(
        self,
        config: Config = None,
        /,
        *,
        device: str | None = None,
        nproc: int | None = None,
        overwrite: bool = False,
        on_step: OnStep | None = None,
        **settings: Any,
    ) -> RunResult:
        """Checks a config, runs or resumes it as the command does, and returns the result.

        `settings` are fields of the config, with sections as mappings: `optimizer={"lr": 1e-5}` sets only that key.
        They override `config`. `overwrite` deletes the run in the run directory first. A mistake raises ValueError,
        TypeError or OSError before anything is touched. A run that started and failed is returned, with its reason.
        Several ranks are new processes: as for multiprocessing, the calling script then needs
        `if __name__ == "__main__":`.

        Functions and rows may be given themselves: a function for every path/to/file.py:name, also one of a notebook or
        a closure, and for every path of a dataset a list, an iterable of mappings, a `datasets.Dataset` or a DataFrame.
        `on_step(step, metrics)` is called after each step in the process of rank 0, which is this one unless there are
        several ranks. If it returns a true value, the run ends after that step, saved and exported; the same call then
        continues it.
        """
        chosen = RECIPES[self.command]
        file = None if config is None or isinstance(config, Mapping) else Path(config)
        rows = [InMemoryRows(layer) for layer in (config, settings) if isinstance(layer, Mapping)]
        run: Path = chosen.read(file, settings=[layer.in_run(Path()) for layer in rows]).run
        run_config = chosen.read(file, settings=[layer.in_run(run) for layer in rows])
        if on_step is not None and self.command == "eval":
            raise ValueError("on_step is called after training steps, but an evaluation has none. Leave it out.")

        from postlude.recipes.report.summary import read_summary
        from postlude.recipes.run.directory import read_metrics
        from postlude.recipes.run.runtime import Runtime

        start = RecipeStart(chosen, run_config, device, nproc)
        with ExitStack() as written:
            for layer in rows if start.checks_here else ():
                written.enter_context(layer.written(run))
            inputs, _ = start.check(overwrite=overwrite)
        inputs.succeed()
        runtime = Runtime(on_step=None if on_step is None else OnStepCall(CallFunction(on_step)))
        outcome = start.run(runtime=runtime)
        summary = read_summary(run_config.run)
        return RunResult(run_config.run, outcome, summary, read_metrics(run_config.run), summary.model)


sft: SFTFunction = RecipeFunction("sft")
"""Trains on the completions of a dataset."""
dpo: DPOFunction = RecipeFunction("dpo")
"""Trains on pairs of completions."""
kto: KTOFunction = RecipeFunction("kto")
"""Trains on completions with labels."""
rm: RMFunction = RecipeFunction("rm")
"""Trains a reward model on pairs of completions."""
grpo: GRPOFunction = RecipeFunction("grpo")
"""Trains on rewards."""
ppo: PPOFunction = RecipeFunction("ppo")
"""Trains on rewards with a critic."""
distill: DistillFunction = RecipeFunction("distill")
"""Trains on a teacher's distribution."""
evaluate: EvalFunction = RecipeFunction("eval")
"""Samples completions of tasks and scores them."""
