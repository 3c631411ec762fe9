"""The recipes by the names of their commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from postlude.recipes import distill, dpo, evaluation, grpo, sft


@dataclass(frozen=True)
class Recipe:
    """A config, and what runs it: `run(config, device)` on every rank returns the report's path."""

    config: type
    run: Callable[[Any, str], Path]
    help: str


RECIPES = {
    "sft": Recipe(sft.SFTConfig, sft.run, "learn the answers in a dataset"),
    "dpo": Recipe(dpo.DPOConfig, dpo.run, "learn from pairs of answers, one preferred: DPO, IPO, SimPO"),
    "grpo": Recipe(grpo.GRPOConfig, grpo.run, "train on rewards: sample groups of answers, learn from the better ones"),
    "distill": Recipe(distill.DistillConfig, distill.run, "take on a teacher's distribution"),
    "eval": Recipe(evaluation.EvalConfig, evaluation.run, "answer tasks and score the answers"),
}
