"""A trainer whose constructor fails closes what it opened; held-out tasks use other seeds than training."""

from __future__ import annotations

import json
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from postlude.generate.distributed import SyncedGenerator
from postlude.recipes.config.load import load
from postlude.recipes.config.policy_configs import GRPOConfig
from postlude.recipes.config.recipe_configs import DistillConfig
from postlude.recipes.distill import DistillTrainer
from postlude.recipes.grpo import GRPOTrainer
from postlude.rollout.conversations import Conversations
from postlude.rollout.environments import SingleTurn
from tests.conftest import Ranks

ALL = ["Conversations", "SyncedGenerator", "SingleTurn"]


def trainer_of(recipe: str, directory: str, budget: int = 64) -> GRPOTrainer | DistillTrainer:
    place = Path(directory)
    rows = [json.dumps({"prompt": f"{number}+1="}) + "\n" for number in range(12)]
    (place / "tasks.jsonl").write_text("".join(rows))
    (place / "judge.py").write_text("def score(prompt, completion, example):\n    return 0.0\n")
    under = "data." if recipe == "distill" else ""
    words = [f"--run={place}/run", f"--budget={budget}", f"--context_length={budget}", f"--{under}environment=dataset"]
    words += [f"--{under}environment.path={place}/tasks.jsonl", f"--{under}environment.reward={place}/judge.py:score"]
    words += [f"--{under}environment.workers=0", f"--{under}sampling.max_new_tokens=2"]
    if recipe == "grpo":
        return GRPOTrainer(load(GRPOConfig, None, [*words, "--evaluation.tasks=2"]), "cpu")
    settings = ("--data=on_policy", "--teacher=tiny-dense", "--batch_size=2", "--held_out.rows=2", "--top_k=8")
    return DistillTrainer(load(DistillConfig, None, [*settings, *words]), "cpu")


def open_failing_trainer(group: Any, directory: str, recipe: str, part: str) -> tuple[list[str], int]:
    """Returns what is closed of a trainer that cannot be constructed, and the number of remaining groups of ranks."""
    closed: list[str] = []

    def noted(kind: Any) -> Any:
        known = kind.close

        def close(self: Any) -> None:
            closed.append(kind.__name__)
            known(self)

        return patch.object(kind, "close", close)

    module, _, name = part.rpartition(".")
    before = len(dist.distributed_c10d._world.pg_map)
    with (
        noted(Conversations),
        noted(SyncedGenerator),
        noted(SingleTurn),
        patch.object(import_module(module), name, side_effect=ValueError("no such part")),
        pytest.raises(ValueError, match="no such part"),
    ):
        trainer_of(recipe, directory)
    return closed, len(dist.distributed_c10d._world.pg_map) - before


@pytest.mark.parametrize(
    ("part", "closed"),
    [
        ("postlude.recipes.grpo.RolloutQueue", ALL),
        ("postlude.recipes.grpo.evaluated_tasks", ["SingleTurn"]),
        ("postlude.recipes.distill.ShuffledRows", ALL),
        ("postlude.recipes.distill.check_teacher", ALL),
    ],
)
def test_failed_constructor_closes_what_it_opened(ranks: Ranks, tmp_path: Path, part: str, closed: list[str]) -> None:
    recipe = "grpo" if "grpo" in part else "distill"
    assert ranks(1, open_failing_trainer, str(tmp_path), recipe, part) == [(closed, 0)]


def max_batch_tokens_of_budgets(group: Any, directory: str) -> list[int]:
    results = []
    for budget in (64, 70_000):
        with closing(trainer_of("grpo", directory, budget)) as trainer:
            assert isinstance(trainer.rollout_sampler.rollout_engine, SyncedGenerator)  # type: ignore[union-attr]
            results.append(trainer.rollout_sampler.rollout_engine.generator.max_batch_tokens)  # type: ignore[union-attr]
    return results


def test_generator_max_batch_tokens_covers_the_budget(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(1, max_batch_tokens_of_budgets, str(tmp_path)) == [[65_536, 70_000]]


def seeds(group: Any, directory: str) -> list[set[int]]:
    """Returns the seeds of a distillation's training and held-out completions in one step."""
    trainer = trainer_of("distill", directory)
    assert isinstance(trainer, DistillTrainer)
    sampler = trainer.rollout_sampler
    assert sampler is not None
    drawn: list[set[int]] = []
    module = import_module("postlude.recipes.distill")
    tasks = trainer.rows.held_out
    with (
        patch.object(sampler, "sample_groups", side_effect=lambda groups: drawn.append({*map(seed, groups)}) or []),
        patch.object(trainer.health, "check_sampled"),  # nothing is
    ):
        for held_out in (False, True):
            with patch.object(module, "_batch"), patch.object(module, "trajectory_metrics", return_value={}):
                trainer.sample_rollouts(tasks, held_out=held_out)
    trainer.close()
    return drawn


def seed(group: Any) -> int:
    return int(group.sampling.seed)


def test_held_out_tasks_use_other_seeds_than_training(ranks: Ranks, tmp_path: Path) -> None:
    ((learned, held_out),) = ranks(1, seeds, str(tmp_path))
    assert len(learned) == len(held_out) == 2
    assert not learned & held_out
