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
from postlude.recipes.registry import RECIPES
from postlude.recipes.run.in_memory_rows import InMemoryRows
from postlude.recipes.run.outcome import RunOutcome
from postlude.recipes.run.start_mode import RESUME_NEWEST
from postlude.user_code import CallFunction

if TYPE_CHECKING:
    from postlude.recipes.report.summary import RunSummary

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

        from postlude.recipes.checks.preflight import LaunchInfo, PreflightInputs, preflight
        from postlude.recipes.report.summary import read_summary
        from postlude.recipes.run.directory import read_metrics
        from postlude.recipes.run.runtime import Runtime
        from postlude.world.devices import default_device
        from postlude.world.launcher import run_on_ranks

        device = device or default_device()
        size = getattr(run_config, "layout", Layout()).world_size if nproc is None else nproc
        if os.environ.get("LOCAL_RANK", "0") == "0":
            inputs = PreflightInputs(
                run_config, LaunchInfo(device, int(os.environ.get("WORLD_SIZE", size)), overwrite=overwrite)
            )
            with ExitStack() as written:
                for layer in rows:
                    written.enter_context(layer.written(run))
                preflight(chosen.checks(inputs))
            for write in inputs.on_success:
                write()
        runtime = Runtime(on_step=None if on_step is None else OnStepCall(CallFunction(on_step)))
        outcome = run_on_ranks(chosen.run, run_config, device, RESUME_NEWEST, runtime, nproc=size, device=device)
        summary = read_summary(run_config.run)
        return RunResult(run_config.run, outcome, summary, read_metrics(run_config.run), summary.model)


sft = RecipeFunction("sft")
"""Trains on the completions of a dataset."""
dpo = RecipeFunction("dpo")
"""Trains on pairs of completions."""
kto = RecipeFunction("kto")
"""Trains on completions with labels."""
rm = RecipeFunction("rm")
"""Trains a reward model on pairs of completions."""
grpo = RecipeFunction("grpo")
"""Trains on rewards."""
ppo = RecipeFunction("ppo")
"""Trains on rewards with a critic."""
distill = RecipeFunction("distill")
"""Trains on a teacher's distribution."""
evaluate = RecipeFunction("eval")
"""Samples completions of tasks and scores them."""
