"""The recipes by the names of their commands."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from postlude.recipes.run.outcome import RunOutcome
from postlude.recipes.run.start_mode import CHECKPOINTS, EXPORTED_MODEL, RESUME_NEWEST, STEP, StartMode
from postlude.user_code import load_callable

if TYPE_CHECKING:
    from postlude.recipes.checks.preflight import Check, PreflightInputs
    from postlude.recipes.run.runtime import Runtime


class RecipeCode(NamedTuple):
    """The functions of a recipe's file."""

    checks: Callable[[PreflightInputs], list[Check]]
    run: Callable[..., RunOutcome]
    """run(config, device, start_mode, runtime)"""


@dataclass(frozen=True)
class Recipe:
    """A recipe. Its file is imported, and torch with it, when `checks` or `run` is called."""

    command: str
    help: str

    def checks(self, inputs: PreflightInputs) -> list[Check]:
        """Returns the preflight checks, which run in the process of the command."""
        return self.load_code().checks(inputs)

    def run(
        self, config: Any, device: str, start_mode: StartMode = RESUME_NEWEST, runtime: Runtime | None = None
    ) -> RunOutcome:
        """Runs the recipe. Every rank calls it."""
        return self.load_code().run(config, device, start_mode, *([] if runtime is None else [runtime]))

    def load_code(self) -> RecipeCode:
        """Imports the recipe's file."""
        run: Callable[..., RunOutcome]
        match self.command:
            case "sft":
                from postlude.recipes.sft import checks, run
            case "dpo":
                from postlude.recipes.dpo import checks, run
            case "kto":
                from postlude.recipes.kto import checks, run
            case "rm":
                from postlude.recipes.rm import checks, run
            case "grpo":
                from postlude.recipes.grpo import checks, run
            case "ppo":
                from postlude.recipes.ppo import checks, run
            case "distill":
                from postlude.recipes.distill import checks, run
            case _:
                from postlude.recipes.evaluation import checks, run
        return RecipeCode(checks, run)

    def read(
        self,
        file: Path | None = None,
        overrides: Sequence[str] = (),
        settings: Sequence[Mapping[str, Any]] = (),
    ) -> Any:
        """Returns the config of a YAML file and its overrides (see `load`), with {name} in `run` replaced."""
        from postlude.recipes.config.load import load

        config = load(self.config, file, overrides, settings)
        name = _run_name(config.model, self.command) if file is None else file.stem
        return config.model_copy(update={"run": Path(str(config.run).replace("{name}", name))})

    @property
    def config(self) -> Any:
        """The class of the config."""
        from postlude.recipes.config import policy_configs, recipe_configs

        return {
            "sft": recipe_configs.SFTConfig,
            "dpo": recipe_configs.DPOConfig,
            "kto": recipe_configs.KTOConfig,
            "rm": recipe_configs.RMConfig,
            "grpo": policy_configs.GRPOConfig,
            "ppo": policy_configs.PPOConfig,
            "distill": recipe_configs.DistillConfig,
            "eval": recipe_configs.EvalConfig,
        }[self.command]


class UserRecipe(Recipe):
    """A trainer of the user, path/to/file.py:Trainer. Its attributes `Config` and `checks(inputs)` are the recipe's."""

    @classmethod
    def load(cls, command: str) -> UserRecipe:
        """Runs the file and returns the recipe."""
        recipe = cls(command, f"the recipe {command}")
        recipe.trainer.checks, recipe.trainer.Config  # noqa: B018  # each must exist before a run is started
        return recipe

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes another rank run the file before it unpickles a config of a class that the file defines."""
        return UserRecipe.load, (self.command,)

    @cached_property
    def trainer(self) -> Any:
        """The class of the trainer."""
        return load_callable(self.command, kind="trainer")

    def load_code(self) -> RecipeCode:
        """Returns the checks of the trainer, and what runs it."""
        from postlude.recipes.training_run import run_training

        def run(config: Any, device: str, start_mode: StartMode, *runtime: Runtime) -> RunOutcome:
            return run_training(self.trainer(config, device, *runtime), start_mode)

        return RecipeCode(self.trainer.checks, run)

    @property
    def config(self) -> Any:
        """The class of its config."""
        return self.trainer.Config


def _run_name(model: str, command: str) -> str:
    """Returns the name of a run without a config file: the recipe's name and the model's, or its run's."""
    names = [part for part in Path(model).parts if part not in (EXPORTED_MODEL, CHECKPOINTS, os.sep, "..")]
    model_names = names[-2:] if names and STEP.fullmatch(names[-1]) else names[-1:]
    return "-".join([command.rpartition(":")[2], *model_names])


RECIPES = {
    command: Recipe(command, summary)
    for command, summary in (
        ("sft", "train on the completions of a dataset"),
        ("dpo", "train on pairs of completions, one preferred: DPO, IPO, SimPO, ORPO"),
        ("kto", "train on single completions, each desirable or not"),
        ("rm", "train a reward model on pairs of completions, one preferred"),
        ("grpo", "train on rewards of sampled completions"),
        ("ppo", "train on rewards of sampled completions, with a critic"),
        ("distill", "train on a teacher's distribution"),
        ("eval", "sample completions of tasks and score them"),
    )
}
