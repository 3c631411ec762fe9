"""The recipes by the names of their commands."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from postlude.recipes.run.beginning import NEWEST, Beginning
from postlude.recipes.run.ending import Ending

if TYPE_CHECKING:
    from postlude.recipes.preflight import Check, Subject
    from postlude.recipes.where import Where


@dataclass(frozen=True)
class Recipe:
    """A config, and the file beside this one that has `checks(subject)` and `run(config, device, beginning, where)`.

    That file is imported when it is needed, and torch with it.
    """

    settings: str
    module: str
    help: str

    def run(self, config: Any, device: str, beginning: Beginning = NEWEST, where: Where | None = None) -> Ending:
        """Run it on every rank. `where` is this machine, if nothing else is said."""
        return cast(Ending, self._file.run(config, device, beginning, *([] if where is None else [where])))

    def checks(self, subject: Subject) -> list[Check]:
        """What must hold before it is run: looked at in the command's own process."""
        return cast("list[Check]", self._file.checks(subject))

    @property
    def config(self) -> Any:
        """The class of its config."""
        return getattr(importlib.import_module("postlude.recipes.config.configs"), self.settings)

    @property
    def _file(self) -> ModuleType:
        return importlib.import_module(f"postlude.recipes.{self.module}")


RECIPES = {
    "sft": Recipe("SFTConfig", "sft", "learn the answers in a dataset"),
    "dpo": Recipe("DPOConfig", "dpo", "learn from pairs of answers, one preferred: DPO, IPO, SimPO"),
    "grpo": Recipe("GRPOConfig", "grpo", "train on rewards: learn from the better of sampled answers"),
    "distill": Recipe("DistillConfig", "distill", "take on a teacher's distribution"),
    "eval": Recipe("EvalConfig", "evaluation", "answer tasks and score the answers"),
}
