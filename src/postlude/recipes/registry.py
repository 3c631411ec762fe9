"""The recipes by the names of their commands."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from postlude.recipes.run.outcome import RunOutcome
from postlude.recipes.run.start_mode import CHECKPOINTS, MODEL, RESUME_NEWEST, STEP, StartMode
from postlude.user_code import load_callable

if TYPE_CHECKING:
    from postlude.recipes.checks.preflight import Check, PreflightInputs
    from postlude.recipes.run.runtime import Runtime


@dataclass(frozen=True)
class Recipe:
    """A config, and the file beside this one that has `checks(inputs)` and `run(config, device, start_mode, runtime)`.

    That file is imported when it is needed, and torch with it.
    """

    command: str
    settings: str
    module: str
    help: str

    def run(
        self, config: Any, device: str, start_mode: StartMode = RESUME_NEWEST, runtime: Runtime | None = None
    ) -> RunOutcome:
        """Run it on every rank. `where` is this machine, if nothing else is said."""
        return cast(RunOutcome, self._file.run(config, device, start_mode, *([] if runtime is None else [runtime])))

    def checks(self, inputs: PreflightInputs) -> list[Check]:
        """What must hold before it is run: looked at in the command's own process."""
        return cast("list[Check]", self._file.checks(inputs))

    def read(
        self,
        file: Path | None = None,
        overrides: Sequence[str] = (),
        settings: Sequence[Mapping[str, Any]] = (),
    ) -> Any:
        """Its config, of a YAML file and what stands over it (see `load`), with the run's directory named."""
        from postlude.recipes.config.load import load

        config = load(self.config, file, overrides, settings)
        name = _name(config.model, self.command) if file is None else file.stem
        return config.model_copy(update={"run": Path(str(config.run).replace("{name}", name))})

    @property
    def config(self) -> Any:
        """The class of its config."""
        return getattr(importlib.import_module("postlude.recipes.config.recipe_configs"), self.settings)

    @property
    def _file(self) -> ModuleType:
        return importlib.import_module(f"postlude.recipes.{self.module}")


class UserRecipe(Recipe):
    """A trainer of the user, path/to/file.py:Trainer. Its attributes `Config` and `checks(inputs)` are the recipe's."""

    @classmethod
    def load(cls, command: str) -> UserRecipe:
        """Runs the file and returns the recipe."""
        recipe = cls(command, "", "", f"the recipe {command}")
        recipe.trainer.checks, recipe.trainer.Config  # noqa: B018  # each must exist before a run is started
        return recipe

    def __reduce__(self) -> tuple[Any, ...]:
        """Another rank runs the file again, before it unpickles a config of a class that the file defines."""
        return UserRecipe.load, (self.command,)

    @cached_property
    def trainer(self) -> Any:
        """The class of the trainer."""
        return load_callable(self.command, kind="trainer")

    def run(
        self, config: Any, device: str, start_mode: StartMode = RESUME_NEWEST, runtime: Runtime | None = None
    ) -> RunOutcome:
        """Runs it. Every rank calls this."""
        from postlude.recipes.trainer import run_training

        return run_training(self.trainer(config, device, *([] if runtime is None else [runtime])), start_mode)

    def checks(self, inputs: PreflightInputs) -> list[Check]:
        """Returns the checks to make before a run is started."""
        return cast("list[Check]", self.trainer.checks(inputs))

    @property
    def config(self) -> Any:
        """The class of its config."""
        return self.trainer.Config


def _name(model: str, command: str) -> str:
    """What a run without a config file is called: the recipe's name and the model's, or that of the model's run."""
    names = [part for part in Path(model).parts if part not in (MODEL, CHECKPOINTS, os.sep, "..")]
    kept = names[-2:] if names and STEP.fullmatch(names[-1]) else names[-1:]
    return "-".join([command.rpartition(":")[2], *kept])


RECIPES = {
    "sft": Recipe("sft", "SFTConfig", "sft", "learn the answers in a dataset"),
    "dpo": Recipe("dpo", "DPOConfig", "dpo", "learn from pairs of answers, one preferred: DPO, IPO, SimPO"),
    "grpo": Recipe("grpo", "GRPOConfig", "grpo", "train on rewards: learn from the better of sampled answers"),
    "distill": Recipe("distill", "DistillConfig", "distill", "take on a teacher's distribution"),
    "eval": Recipe("eval", "EvalConfig", "evaluation", "answer tasks and score the answers"),
}
