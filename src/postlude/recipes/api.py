"""Recipes called from Python: the same checks, ranks and run directory as the commands.

    from postlude.recipes import grpo
    result = grpo("my.yaml", steps=100, optimizer={"lr": 1e-5})

torch is imported when a recipe is called.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from postlude.durable_files import write_atomic
from postlude.layout import Layout
from postlude.recipes.registry import RECIPES, Recipe
from postlude.recipes.run.outcome import RunOutcome
from postlude.recipes.run.start_mode import RESUME_NEWEST, ROWS, StartMode
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

DATA, PATH = "data", "path"
"""Keys of a config that take rows: the section of a dataset, and the path in one."""


class InMemoryRows:
    """Takes the rows out of the settings of a call: lists, DataFrames, Hugging Face datasets, any iterable of rows.

    `written` writes them to the run directory as JSON Lines, in a file named by its content. So every rank reads the
    same rows, config.yaml names them, and a call with the same rows continues the run. `in_run` has the settings with
    paths in place of rows.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.files: dict[str, bytes] = {}
        self._settings = self._taken(settings, "", "")

    def in_run(self, run: Path) -> dict[str, Any]:
        """Returns the settings, with the paths that the rows have in a run directory."""

        def placed(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {name: placed(inner) for name, inner in value.items()}
            if type(value) is list:
                return [placed(inner) for inner in value]
            return run / ROWS / value.name if isinstance(value, _File) else value

        return {name: placed(value) for name, value in self._settings.items()}

    @contextmanager
    def written(self, run: Path) -> Any:
        """Writes the files. If the block raises, those that are new are removed."""
        folder = run.expanduser().absolute() / ROWS
        new = [folder / name for name in self.files if not (folder / name).is_file()]
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        try:
            for path in new:
                folder.mkdir(parents=True, exist_ok=True)
                write_atomic(path, self.files[path.name])
            yield
        except BaseException:
            for path in new:
                path.unlink(missing_ok=True)
            with suppress(OSError):  # not empty
                while new and folder != existing:
                    folder.rmdir()
                    folder = folder.parent
            raise

    def _taken(self, value: Any, key: str, path: str) -> Any:
        if isinstance(value, Mapping):
            below = f"{path}." if path else ""
            return {name: self._taken(inner, str(name), f"{below}{name}") for name, inner in value.items()}
        if key not in (DATA, PATH) and isinstance(value, list | tuple):
            return [self._taken(inner, "", f"{path}.{index}") for index, inner in enumerate(value)]
        if key not in (DATA, PATH) or not _is_iterable(value):
            return value
        of_paths = (
            key == DATA and isinstance(value, list) and all(isinstance(row, Mapping) and PATH in row for row in value)
        )
        if of_paths and value:
            return [self._taken(dataset, "", f"{path}.{index}") for index, dataset in enumerate(value)]
        content = b"".join(_line(row, number, path) for number, row in enumerate(_rows_of(value)))
        if not content:
            raise ValueError(f"{path} is given no rows. Give at least one.")
        file = _File(f"{hashlib.sha256(content).hexdigest()[:16]}.jsonl")
        self.files[file.name] = content
        return {PATH: file} if key == DATA else file


class _File:
    """Stands for the path of a file until the run directory is known."""

    def __init__(self, name: str) -> None:
        self.name = name


def _is_iterable(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | os.PathLike)


def _rows_of(value: Any) -> Iterable[Any]:
    if hasattr(value, "notna"):  # a DataFrame of pandas, whose missing cells are NaN
        return value.astype(object).where(value.notna(), None).to_dict("records")  # type: ignore[no-any-return]
    for name in ("to_dicts", "to_pylist"):  # polars, Arrow
        if hasattr(value, name):
            return getattr(value, name)()  # type: ignore[no-any-return]
    return value  # type: ignore[no-any-return]


def _line(row: Any, number: int, path: str) -> bytes:
    if not isinstance(row, Mapping):
        raise TypeError(
            f'row {number} of {path} is a {type(row).__name__}, but a row is a mapping such as {{"prompt": "..."}}.'
        )
    try:
        return json.dumps(dict(row), ensure_ascii=False, allow_nan=False, default=_number).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"row {number} of {path} cannot be written as JSON ({error}). Give text, finite numbers, lists and "
            "mappings."
        ) from error


def _number(value: Any) -> Any:
    """Returns a number or an array of numpy or torch as Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__}")


Config: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | None
"""A YAML file, or its contents as a mapping; None takes defaults and keywords only."""


OnStep: TypeAlias = Callable[[int, Mapping[str, Any]], object]
"""Gets the number and the metrics of a finished step. A true value ends the run."""


@dataclass(frozen=True, repr=False)
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

    def __repr__(self) -> str:
        """Returns the run and its end in one line."""
        end = f"{self.run}: {self.outcome.status} after {self.outcome.step} steps"
        return f"{end}: {self.outcome.message}" if self.outcome.message else end

    def _repr_svg_(self) -> str:
        """Returns the main curves of the run, which a notebook shows for a cell that ends with its result."""
        from postlude.recipes.report.charts import curves_svg
        from postlude.recipes.report.page import MAIN_CURVES

        return curves_svg(self.run, MAIN_CURVES, repr(self))


@dataclass(frozen=True)
class OnStepCall:
    """Calls `on_step`, which other processes get by cloudpickle."""

    function: CallFunction

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> bool:
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
        if on_step is not None and not callable(on_step):
            raise TypeError(f"on_step is {on_step!r}, but it is a function of a step and its metrics.")

        from postlude.recipes.report.summary import read_summary
        from postlude.recipes.run.files import read_metrics
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
