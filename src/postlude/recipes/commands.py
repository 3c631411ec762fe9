"""The recipes by the names of their commands."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from postlude.recipes.configs import DistillConfig, DPOConfig, EvalConfig, GRPOConfig, SFTConfig


@dataclass(frozen=True)
class Recipe:
    """A config, the file beside this one that has `run(config, device)`, and what it does."""

    config: type
    module: str
    help: str

    def run(self, config: Any, device: str) -> Path:
        """Run it on every rank. Returns the report's path. What that needs is imported here, torch with it."""
        return cast(Path, importlib.import_module(f"postlude.recipes.{self.module}").run(config, device))


RECIPES = {
    "sft": Recipe(SFTConfig, "sft", "learn the answers in a dataset"),
    "dpo": Recipe(DPOConfig, "dpo", "learn from pairs of answers, one preferred: DPO, IPO, SimPO"),
    "grpo": Recipe(GRPOConfig, "grpo", "train on rewards: sample groups of answers, learn from the better ones"),
    "distill": Recipe(DistillConfig, "distill", "take on a teacher's distribution"),
    "eval": Recipe(EvalConfig, "evaluation", "answer tasks and score the answers"),
}
