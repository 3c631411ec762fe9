"""A PPO run: advantages equal GAE, and it is the same in every layout and after an interruption."""

from __future__ import annotations

import json
import os
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from postlude.data import Batch
from postlude.data.batch import BatchSharding
from postlude.engine.batch_sharding import _select_rows
from postlude.layout import Layout
from postlude.objectives import RewardKL
from postlude.recipes.config.load import ConfigError, load
from postlude.recipes.config.policy_configs import PPOConfig
from postlude.recipes.ppo import PPOTrainer
from postlude.recipes.registry import RECIPES
from postlude.recipes.report.metrics import explain
from postlude.recipes.rollout_columns import RolloutRows
from postlude.recipes.run.outcome import read_outcome
from postlude.recipes.training_run import run_training
from postlude.world.mesh import Mesh
from tests.conftest import Ranks

ROOT = Path(__file__).parents[2]
SMALL = f"""
model: tiny-dense
budget: 256
environment:
  kind: dataset
  path: {ROOT / "examples" / "data" / "tool_sums.jsonl"}
  reward: {ROOT / "tests" / "rollout" / "functions.py"}:ascii_share
  workers: 0
steps: 3
prompts_per_step: 4
samples_per_prompt: 2
minibatches: 2
rollout_epochs: 2
sampling: {{max_new_tokens: 6}}
optimizer: {{lr: 1e-3}}
evaluation: {{every: 0}}
save_every: 1
export: false
"""
OWN_CRITIC = ("--critic.model=tiny-dense", "--critic.optimizer.lr=2e-3", "--critic.warmup=1")
SHARED = ("--critic.warmup=1", "--reward_kl.coefficient=0.1")


def config_of(directory: Path, *overrides: str) -> PPOConfig:
    file, temporary_file = directory / "small.yaml", directory / f"small.{os.getpid()}"
    temporary_file.write_text(SMALL)
    temporary_file.replace(file)  # whole at once: ranks write it at the same time
    return load(PPOConfig, file, ["--run", str(directory / "run"), *overrides])


def trained(group: Any, directory: str, *overrides: str) -> list[dict[str, Any]]:
    config = config_of(Path(directory), *overrides)
    RECIPES["ppo"].run(config)
    rows = [json.loads(line) for line in (config.run / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in row if not key.startswith(("time/", "tokens_per_second"))} for row in rows]


def interrupted(group: Any, directory: str, at: int, *overrides: str) -> None:
    """Stops as a kill would: in step `at`, after the critic trained on half of the rollout."""

    class Stopped(PPOTrainer):
        def train_minibatch(self, minibatch: Batch) -> dict[str, Any]:
            metrics = super().train_minibatch(minibatch)
            if self.step == at:
                raise KeyboardInterrupt
            return metrics

    with suppress(KeyboardInterrupt):
        run_training(Stopped(config_of(Path(directory), *overrides), "cpu"))


def trained_with_infinite_losses(group: Any, directory: str) -> str:
    """Trains on rewards whose square no float32 holds. Returns why the run ended."""
    options = (*OWN_CRITIC, f"--environment.reward={ROOT / 'tests' / 'rollout' / 'functions.py'}:huge")
    config = config_of(Path(directory), *options, "--critic.warmup=0", "--max_skipped_steps=7")
    run_training(PPOTrainer(config, "cpu"))
    outcome = read_outcome(config.run)
    return "" if outcome is None else outcome.message


def test_losses_of_a_critic_that_are_not_finite_end_the_run(ranks: Ranks, tmp_path: Path) -> None:
    (failure,) = ranks(1, trained_with_infinite_losses, str(tmp_path))
    assert "of the critic was not finite in 8 optimizer steps in a row, up to step 2" in failure


def test_skipped_steps_of_critic_and_policy_are_added_up() -> None:
    trainer: Any = PPOTrainer.__new__(PPOTrainer)
    trainer.critic, trainer.step, trainer.warm_start_steps, trainer.objective = Mock(), 0, 0, None
    trainer.config = SimpleNamespace(critic=SimpleNamespace(warmup=0))
    trainer._train_critic = lambda critic, batch: {"skipped_steps": 1.0, "critic/loss": 0.5}
    trainer.train_batch = lambda batch, objective: {"skipped_steps": 1.0, "loss": 0.25}
    metrics = trainer.train_minibatch(Batch([]))
    assert metrics == {"skipped_steps": 2.0, "critic/loss": 0.5, "loss": 0.25}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [SHARED, OWN_CRITIC], ids=["value head", "separate critic"])
def test_every_layout_and_a_resumed_run_give_the_same_steps(
    ranks: Ranks, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    for name in ("one", "two", "parts"):
        (tmp_path / name).mkdir()
    (alone,) = ranks(1, trained, str(tmp_path / "one"), *settings)
    assert [row["phase"] for row in alone] == ["ppo"] * 3
    assert not {key for row in alone for key in row if explain(key) is None} - {"step", "phase"}
    assert "ratio" not in alone[0], "in the warm-up the policy is not trained"
    assert alone[1]["ratio"] == pytest.approx(1.0, abs=0.1)
    assert all(row["value_error"] > 1e-3 for row in alone)
    assert alone[0]["value"] != 0.0, "the second pass over a rollout finds a critic that has learned"
    layout = "pp=2" if settings is OWN_CRITIC else "dp_shard=2"
    (actual, _) = ranks(2, trained, str(tmp_path / "two"), *settings, "--layout", layout)
    for row, expected in zip(actual, alone, strict=True):
        assert row.keys() == expected.keys()
        for key, value in expected.items():
            assert row[key] == (value if isinstance(value, str) else pytest.approx(value, rel=2e-3, abs=1e-5)), key
    for at in (1, 2) if settings is OWN_CRITIC else (2,):
        ranks(1, interrupted, str(tmp_path / "parts"), at, *settings)
    assert ranks(1, trained, str(tmp_path / "parts"), *settings) == [alone], "to the bit"
    if settings is OWN_CRITIC:
        critics = sorted(path.name for path in (tmp_path / "parts" / "run" / "critic").iterdir())
        assert critics == ["step-000002", "step-000003"], "one beside each checkpoint"


def test_a_damaged_critic_is_a_damaged_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """The checkpoint before it is loaded, and the later steps are repeated."""
    (expected,) = ranks(1, trained, str(tmp_path), *OWN_CRITIC)
    (part,) = (tmp_path / "run" / "critic" / "step-000003").glob("*.safetensors")
    part.write_bytes(part.read_bytes()[:-1])
    (resumed,) = ranks(1, trained, str(tmp_path), *OWN_CRITIC)
    assert resumed == expected
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-000002", "step-000003", "step-000003.damaged"]


def rollout_with_inputs(group: Any, directory: str, *overrides: str) -> dict[str, Any]:
    """Returns one rollout with its columns, and the values and log-probs they were computed from."""
    recorded: dict[str, Any] = {}

    class Watched(PPOTrainer):
        def add_advantages(self, rows: RolloutRows) -> Any:
            minibatches, metrics = super().add_advantages(rows)
            recorded.update(
                before=[dict(minibatch.columns) for minibatch in rows.minibatches],
                after=[minibatch.columns for minibatch in minibatches],
            )
            return minibatches, metrics

    with closing(Watched(config_of(Path(directory), "--steps=1", *overrides), "cpu")) as trainer:
        for parameter in trainer.engine.parameters.values():
            if parameter.ndim == 1 and parameter.shape[0] == trainer.engine.config.hidden_size:
                parameter.data.add_(0.1)  # the value head expects something
        if trainer.config.has_reference:
            trainer._begin_step(0)
            assert trainer.reference is not None
            for weight in trainer.reference.weights.values():
                weight.mul_(0.9)
        trainer.train_minibatches(trainer.collect_rollouts())
    return recorded


def test_advantages_equal_gae_with_the_kl_penalty_in_the_reward(ranks: Ranks, tmp_path: Path) -> None:
    overrides = ("--reward_kl.coefficient=0.2", "--gamma=0.9", "--gae_lambda=0.8", "--whiten_advantages=false")
    (recorded,) = ranks(1, rollout_with_inputs, str(tmp_path), *overrides)
    checked = 0
    for before, after in zip(recorded["before"], recorded["after"], strict=True):
        assert not {"reward", "group", "trajectory"} & after.keys()
        for row, mask in enumerate(before["response_mask"]):
            steps = mask.nonzero()[:, 0].tolist()
            values = after["old_values"][row].double()
            distance = (before["old_logprobs"][row] - before["reference_logprobs"][row]).double()
            assert distance[steps].abs().max() > 1e-3
            rewards = [-0.2 * float(distance[step]) for step in steps]
            rewards[-1] += before["reward"][row]
            later, advantage = 0.0, 0.0
            for step, reward in zip(reversed(steps), reversed(rewards), strict=True):
                advantage = reward + 0.9 * later - float(values[step]) + 0.9 * 0.8 * advantage
                later = float(values[step])
                assert float(after["advantages"][row][step]) == pytest.approx(advantage, rel=1e-5, abs=1e-6)
                assert float(after["returns"][row][step]) == pytest.approx(advantage + later, rel=1e-5, abs=1e-6)
                checked += 1
    assert checked > 20


def test_whitened_advantages_have_mean_0_and_deviation_1(ranks: Ranks, tmp_path: Path) -> None:
    (recorded,) = ranks(1, rollout_with_inputs, str(tmp_path))
    rows = [
        advantages[mask != 0]
        for columns in recorded["after"]
        for advantages, mask in zip(columns["advantages"], columns["response_mask"], strict=True)
    ]
    all_advantages = torch.cat(rows)
    assert float(all_advantages.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(all_advantages.std(correction=0)) == pytest.approx(1.0, rel=1e-5)


def rows_of_two(group: Any) -> tuple[list[int], list[int], list[float]]:
    mesh = Mesh(Layout.parse("dp_shard=2"), "cpu")
    full_batch = Batch([[1, 2]] * 5, {"row": [10, 11, 12, 13, 14]})
    sharding = BatchSharding([2] * 5, [1, 0, 1, 1, 0])
    rows = RolloutRows([_select_rows(full_batch, sharding, mesh.dp.rank)], mesh, None)
    everyone = rows.gather(rows.column("row"))
    return everyone, rows.local(everyone), rows.sum(torch.tensor([1.0, float(mesh.dp.rank)])).tolist()


def test_rows_are_gathered_in_the_same_order_in_every_layout(ranks: Ranks) -> None:
    all_rows = [10, 11, 12, 13, 14]
    assert ranks(2, rows_of_two) == [(all_rows, [11, 14], [2.0, 1.0]), (all_rows, [10, 12, 13], [2.0, 1.0])]


def test_kl_penalty_in_the_reward_uses_the_configured_estimator() -> None:
    policy, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    ahead = reference - policy
    for estimator, expected in (("k1", -ahead), ("k2", ahead**2 / 2), ("k3", ahead.exp() - 1 - ahead)):
        actual = RewardKL(coefficient=0.3, estimator=estimator)(policy, reference)  # type: ignore[arg-type]
        torch.testing.assert_close(actual, 0.3 * expected)
    with pytest.raises(ValueError, match="coefficient is 0"):
        RewardKL(coefficient=0)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("--critic.optimizer.lr=1e-4", "Set critic.model, or leave it out"),
        ("--critic.warmup=3", "the policy would never be trained"),
        ("--dynamic_sampling=1 --samples_per_prompt=1", "but samples_per_prompt is 1"),
        ("--critic.model=tiny-dense --critic.coefficient=1", "Set critic.optimizer.lr instead"),
        ("--critic.model=tiny-dense --rollout.share_gpu=true", "stays on the GPU"),
        ("--reward_kl.coefficient=0.1 --objective.kl.coefficient=0.1", "Set one of them"),
        ("--gamma=1.5", "at most 1"),
        ("--critic.model=tiny-dense --critic.optimizer.schedule={shape: linear, steps: 5}", "makes 12 optimizer steps"),
    ],
)
def test_invalid_configs_are_refused(tmp_path: Path, override: str, sentence: str) -> None:
    words = override.replace(" --", "\n--").split("\n")
    with pytest.raises(ConfigError, match=sentence):
        config_of(tmp_path, *words)
