"""The recipes by the names of their commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from postlude.recipes import distill, dpo, evaluation, grpo, sft
from postlude.recipes.preflight import Check, Subject


@dataclass(frozen=True)
class Recipe:
    """A config, what must hold before it is run, and what runs it.

    `checks` are looked at in the command's own process; `run(config, device)` on every rank returns the report's path.
    """

    config: type
    checks: Callable[[Subject], list[Check]]
    run: Callable[[Any, str], Path]
    help: str


RECIPES = {
    "sft": Recipe(sft.SFTConfig, sft.checks, sft.run, "learn the answers in a dataset"),
    "dpo": Recipe(dpo.DPOConfig, dpo.checks, dpo.run, "learn from pairs of answers, one preferred: DPO, IPO, SimPO"),
    "grpo": Recipe(
        grpo.GRPOConfig, grpo.checks, grpo.run, "train on rewards: learn from the better of sampled answers"
    ),
    "distill": Recipe(distill.DistillConfig, distill.checks, distill.run, "take on a teacher's distribution"),
    "eval": Recipe(evaluation.EvalConfig, evaluation.checks, evaluation.run, "answer tasks and score the answers"),
}
