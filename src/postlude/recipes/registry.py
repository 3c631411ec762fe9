"""The recipes by the names of their commands."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from postlude.recipes.run.outcome import RunOutcome
from postlude.recipes.run.start_mode import CHECKPOINTS, EXPORTED_MODEL, RESUME_NEWEST, STEP, StartMode
from postlude.user_code import load_callable

if TYPE_CHECKING:
    from postlude.recipes.checks.preflight import Check, PreflightInputs
    from postlude.recipes.run.runtime import Runtime


@dataclass(frozen=True)
class Recipe:
    """A recipe: a class of trainers with `checks`. Its file is imported, and torch with it, when it checks or runs."""

    command: str
    help: str

    @property
    def trainer(self) -> Any:
        Trainer: Any
        match self.command:
            case "sft":
                from postlude.recipes.supervised import SFTTrainer as Trainer
            case "dpo":
                from postlude.recipes.pairs import DPOTrainer as Trainer
            case "kto":
                from postlude.recipes.kto import KTOTrainer as Trainer
            case "rm":
                from postlude.recipes.pairs import RMTrainer as Trainer
            case "grpo":
                from postlude.recipes.grpo import GRPOTrainer as Trainer
            case "ppo":
                from postlude.recipes.ppo import PPOTrainer as Trainer
            case _:
                from postlude.recipes.distill import DistillTrainer as Trainer
        return Trainer

    def checks(self, inputs: PreflightInputs) -> list[Check]:
        """Returns the preflight checks, which run in the process of the command."""
        checks: list[Check] = self.trainer.checks(inputs)
        return checks

    def run(
        self, config: Any, device: str = "cpu", start_mode: StartMode = RESUME_NEWEST, runtime: Runtime | None = None
    ) -> RunOutcome:
        from postlude.recipes.training_run import run_training

        return run_training(self.trainer(config, device, *([] if runtime is None else [runtime])), start_mode)

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


class EvalRecipe(Recipe):
    """The recipe that trains nothing."""

    def checks(self, inputs: PreflightInputs) -> list[Check]:
        from postlude.recipes.evaluation import checks

        return checks(inputs)

    def run(
        self, config: Any, device: str = "cpu", start_mode: StartMode = RESUME_NEWEST, runtime: Runtime | None = None
    ) -> RunOutcome:
        from postlude.recipes.evaluation import run

        return run(config, device, start_mode, *([] if runtime is None else [runtime]))


class UserRecipe(Recipe):
    """A trainer of the user, path/to/file.py:Trainer. Its attributes `Config` and `checks(inputs)` are the recipe's."""

    @classmethod
    def load(cls, command: str) -> UserRecipe:
        """Runs the file and returns the recipe."""
        recipe = cls(command, f"the recipe {command}")
        for name in ("checks", "Config"):
            if not hasattr(recipe.trainer, name):
                raise AttributeError(f"{command} has no {name}; a trainer has the class Config and checks(inputs).")
        return recipe

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes another rank run the file before it unpickles a config of a class that the file defines."""
        return UserRecipe.load, (self.command,)

    @cached_property
    def trainer(self) -> Any:
        return load_callable(self.command, kind="trainer")

    @property
    def config(self) -> Any:
        return self.trainer.Config


def _run_name(model: str, command: str) -> str:
    """Returns the name of a run without a config file: the recipe's name and the model's, or its run's."""
    names = [part for part in Path(model).parts if part not in (EXPORTED_MODEL, CHECKPOINTS, os.sep, "..")]
    model_names = names[-2:] if names and STEP.fullmatch(names[-1]) else names[-1:]
    return "-".join([command.rpartition(":")[2], *model_names])


RECIPES = {
    command: (EvalRecipe if command == "eval" else Recipe)(command, summary)
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
