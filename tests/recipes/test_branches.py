"""Trajectories of several sequences: however a trajectory is divided into branches, it counts once."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import Mock

import pytest
import torch

from postlude.data import Batch
from postlude.generate.protocol import Completion
from postlude.objectives import RewardKL, weights
from postlude.objectives.advantages import gae, grpo
from postlude.recipes.config.policy_configs import PPOConfig
from postlude.recipes.ppo import PPOTrainer
from postlude.recipes.rollout_columns import RolloutRows, to_minibatches
from postlude.rollout.conversations import Trajectory
from postlude.rollout.environments import Transcript
from postlude.rollout.rewards import Score
from postlude.rollout.tasks import Task
from tests.recipes.test_grpo import make_trajectory, rollout_of

Parts = Sequence[tuple[str, int]]
"""A sequence: its runs of sampled tokens ("s") and others ("o"), with their lengths."""


def branched(group: int, reward: float, *branches: Parts) -> Trajectory:
    transcripts, completions = [], list[Completion]()
    for branch in branches:
        transcript = Transcript([1, 2])
        for kind, length in branch:
            if kind == "s":
                completion = Completion([3] * length, [-0.5] * length, [-0.5] * length, "stop", "x")
                transcript.add_completion(completion.tokens, completion.logprobs)
                completions.append(completion)
            else:
                transcript.add_observation([4] * length)
        transcripts.append(transcript)
    return Trajectory(Task("p", {}, "task"), group, transcripts, completions, Score(reward), done=True)


FORKED = branched(0, 1.0, [("s", 2), ("o", 3), ("s", 4)], [("o", 5), ("s", 6)])
GROUP = [FORKED, branched(0, 0.0, [("s", 3)]), branched(0, 0.25, [("s", 1)], [("o", 2), ("s", 1)], [("s", 2)])]


def test_batches_of_trajectories_with_one_sequence_are_as_before() -> None:
    rewards = [1.0, 0.0, 0.5, 3.0, 2.0, 2.0]
    sampled = [make_trajectory(row // 3, reward, *["stop"] * (1 + row % 2)) for row, reward in enumerate(rewards)]
    (batch,), metrics = rollout_of([sampled])
    masks = [trajectory.transcripts[0].mask for trajectory in sampled]
    groups = [0, 0, 0, 1, 1, 1]
    expected = {
        "response_mask": weights(masks),
        "sequence_mean": weights(masks, "sequences"),
        "group_mean": weights(masks, "groups", groups=groups),
        "positive": [1.0, 0.0, 0.0, 1.0, 1.0, 1.0],
        "rollout_logprobs": [torch.zeros(len(mask)) for mask in masks],
        "old_logprobs": [torch.zeros(len(mask)) for mask in masks],
        "advantages": grpo(rewards, groups).tolist(),
    }
    assert [list(tokens) for tokens in batch.sequences] == [trajectory.transcripts[0].tokens for trajectory in sampled]
    assert batch.columns.keys() == expected.keys()
    for name, values in expected.items():
        for value, wanted in zip(batch.columns[name], values, strict=True):
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(wanted)), name
    assert "branches_mean" not in metrics


def test_a_trajectory_counts_once_however_many_branches_it_has() -> None:
    (batch,), metrics = rollout_of([GROUP])
    assert [len(tokens) for tokens in batch.sequences] == [11, 13, 5, 3, 5, 4]
    owners = [0, 0, 1, 2, 2, 2]
    advantages = grpo([1.0, 0.0, 0.25], [0, 0, 0]).tolist()
    assert list(batch.columns["advantages"]) == [advantages[owner] for owner in owners]
    sums = [0.0, 0.0, 0.0]
    for owner, weight in zip(owners, batch.columns["sequence_mean"], strict=True):
        sums[owner] += float(weight.sum())
    assert sums == pytest.approx([1.0, 1.0, 1.0])
    forked = [weight[weight > 0].tolist() for weight in batch.columns["sequence_mean"][:2]]
    assert [len(part) for part in forked] == [6, 6]
    assert [value for part in forked for value in part] == pytest.approx([1 / 12] * 12)
    assert sum(float(mask.sum()) for mask in batch.columns["response_mask"]) == 12 + 3 + 4
    assert sum(float(weight.sum()) for weight in batch.columns["group_mean"]) == pytest.approx(1.0)
    assert list(batch.columns["positive"]) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert metrics["branches_mean"] == 2.0
    assert metrics["lengths"] == [12, 3, 4]
    assert metrics["rewards"] == [1.0, 0.0, 0.25]


def test_a_trajectory_without_sampled_tokens_is_not_in_the_baseline() -> None:
    """An agent may end without a call, which says nothing of the policy."""
    silent = Trajectory(Task("p", {}, "task"), 0, (), [], Score(100.0), done=True)
    (batch,), metrics = rollout_of([[*GROUP, silent]])
    assert next(iter(batch.columns["advantages"])) == grpo([1.0, 0.0, 0.25], [0, 0, 0]).tolist()[0]
    assert len(batch.sequences) == 6
    assert metrics["length_mean"] == 19 / 4


def rows_of(trajectories: list[Trajectory], **settings: object) -> tuple[PPOTrainer, RolloutRows]:
    """Returns a trainer with these settings, and the rows of these trajectories, with a reference's log-probs."""
    trainer, mesh = object.__new__(PPOTrainer), Mock()
    trainer.config = PPOConfig(**{"run": "nowhere", "critic": {"model": None}, **settings})  # type: ignore[arg-type]
    mesh.dp.rank = 0
    rewards = [trajectory.reward for trajectory in trajectories]
    (batch,) = to_minibatches(trajectories, rewards, trainer.config)
    reference = [logprobs - 0.25 for logprobs in batch.columns["old_logprobs"]]
    batch = Batch(batch.sequences, {**batch.columns, "reference_logprobs": reference})
    return trainer, RolloutRows([batch], mesh, None)


def test_a_penalty_counts_the_tokens_of_all_branches_once() -> None:
    _, rows = rows_of(GROUP)
    penalty = RewardKL(coefficient=0.1, estimator="k1")
    penalties = [
        float((penalty(old, reference) * (mask != 0)).sum())
        for old, reference, mask in zip(
            *(rows.column(name) for name in ("old_logprobs", "reference_logprobs", "response_mask")), strict=True
        )
    ]
    advantages = rows.group_advantages(penalties, leave_one_out=True, scale_by_std=False)
    lengths, owners = [12, 3, 4], [0, 0, 1, 2, 2, 2]
    rewards = [reward - 0.025 * length for reward, length in zip([1.0, 0.0, 0.25], lengths, strict=True)]
    wanted = grpo(rewards, [0, 0, 0], leave_one_out=True, scale_by_std=False).tolist()
    assert advantages == pytest.approx([wanted[owner] for owner in owners])


def test_ppo_rewards_the_last_sampled_token_of_each_branch() -> None:
    trainer, rows = rows_of(GROUP, whiten_advantages=False, gamma=0.9, gae_lambda=0.8)
    values = [torch.linspace(0.0, 1.0, len(tokens)) for tokens in rows.minibatches[0].sequences]
    trainer.critic, trainer.engine, trainer.timer = None, Mock(), Mock()
    trainer.timer.return_value = Mock(__enter__=Mock(), __exit__=Mock(return_value=False))
    trainer.engine.values.return_value = values
    (batch,), _ = trainer.add_advantages(rows)
    masks = rows.column("response_mask")
    rewards = [torch.zeros(len(mask)) for mask in masks]
    for row, reward in enumerate([1.0, 1.0, 0.0, 0.25, 0.25, 0.25]):
        rewards[row][-1] = reward
    advantages, returns = gae(rewards, values, masks=masks, gamma=0.9, lam=0.8)
    for name, wanted in (("advantages", advantages), ("returns", returns)):
        for value, expected in zip(batch.columns[name], wanted, strict=True):
            assert torch.allclose(value, expected), name
