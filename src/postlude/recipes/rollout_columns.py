"""Columns of rollouts: rank 0 makes some from trajectories, and all ranks add others for their own sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from postlude.data import Batch
from postlude.data.microbatch import ROUTING, SAMPLING_MASK
from postlude.objectives import RewardKL, weights
from postlude.objectives.advantages import grpo
from postlude.recipes.config.policy_configs import PolicyConfig
from postlude.rollout.conversations import Trajectory
from postlude.rollout.environments import Transcript
from postlude.world.agreement import gather_and_decide
from postlude.world.mesh import Mesh

Value = TypeVar("Value")
MASK, REWARD, GROUP, TRAJECTORY = "response_mask", "reward", "group", "trajectory"
"""Columns that advantages are computed from: which tokens were sampled, and the reward, the prompt's number and the
number of each sequence's trajectory."""
BY_TRAJECTORY = (REWARD, GROUP, TRAJECTORY)


def policy_columns(
    masks: Sequence[Any],
    groups: Sequence[int],
    trajectories: Sequence[int],
    positive: Sequence[float],
    logprobs: Sequence[Tensor],
) -> dict[str, Any]:
    """Returns the columns that a policy objective reads besides "advantages", one entry per sequence.

    `groups` and `trajectories` are the numbers of each sequence's prompt and trajectory. In "sequence_mean" every
    trajectory has the same weight, however many sequences it has.
    """
    return {
        MASK: weights(masks),
        "sequence_mean": weights(masks, "groups", groups=trajectories),
        "group_mean": weights(masks, "groups", groups=groups),
        "positive": positive,
        "rollout_logprobs": logprobs,
        "old_logprobs": logprobs,  # replaced if the trainer recomputes them
    }


def routing_column(transcripts: Sequence[Transcript]) -> list[Tensor]:
    """Returns the expert ids that routers chose for each transcript when it was sampled, [length, routers, top_k]."""
    routing = [transcript.routing for transcript in transcripts if transcript.routing is not None]
    if len(routing) < len(transcripts):
        raise ValueError(
            f"replay_routing needs the experts that sampled tokens were sent to, but "
            f"{len(transcripts) - len(routing)} of {len(transcripts)} completions have none. Of servers only vLLM with "
            "--enable-return-routed-experts reports them, and not with stop strings: sample with rollout: native or "
            "vllm, or set replay_routing to false."
        )
    return routing


def sampling_mask_column(transcripts: Sequence[Transcript]) -> list[Tensor]:
    """Returns the tokens that each token was sampled from, ids plus 1, [length, k] int32 padded with 0.

    k is the size of the largest mask of all transcripts.
    """
    size = max((len(mask) for transcript in transcripts for mask in transcript.sampling_mask), default=1) or 1
    return [_padded_masks(transcript.sampling_mask, size) for transcript in transcripts]


def _padded_masks(masks: Sequence[Sequence[int]], size: int) -> Tensor:
    column = np.zeros((len(masks), size), dtype=np.int32)
    for row, mask in enumerate(masks):
        column[row, : len(mask)] = np.asarray(mask, dtype=np.int32) + 1
    return torch.from_numpy(column)


def to_minibatches(trajectories: Sequence[Trajectory], rewards: Sequence[float], config: PolicyConfig) -> list[Batch]:
    """Returns the minibatches, with the columns that need no forward pass. Groups are assigned round-robin."""
    owners = [number for number, trajectory in enumerate(trajectories) for _ in trajectory.transcripts]
    transcripts = [transcript for trajectory in trajectories for transcript in trajectory.transcripts]
    groups = [trajectories[owner].group for owner in owners]
    positive = [float(trajectories[owner].reward >= 1.0) for owner in owners]
    logprobs = [torch.tensor(transcript.logprobs) for transcript in transcripts]
    columns = policy_columns([transcript.mask for transcript in transcripts], groups, owners, positive, logprobs)
    columns |= {REWARD: [rewards[owner] for owner in owners], GROUP: groups, TRAJECTORY: owners}
    if config.replay_routing:
        columns[ROUTING] = routing_column(transcripts)
    if config.masks_sampling:
        columns[SAMPLING_MASK] = sampling_mask_column(transcripts)
    group_indices = {group: index for index, group in enumerate(dict.fromkeys(groups))}
    minibatches = []
    for number in range(config.minibatches):
        rows = [row for row, group in enumerate(groups) if group_indices[group] % config.minibatches == number]
        if rows:
            minibatch_columns = {name: [values[row] for row in rows] for name, values in columns.items()}
            sequences = [transcripts[row].tokens for row in rows]
            minibatches.append(Batch(sequences, minibatch_columns, temperature=config.sampling.temperature))
    return minibatches


class RolloutRows:
    """The sequences of a rollout, of which every data-parallel rank holds some. All ranks call its methods.

    `rewards_before` are, by group, rewards of trajectories that an earlier step trained on.
    """

    def __init__(
        self,
        minibatches: Sequence[Batch],
        mesh: Mesh,
        group: dist.ProcessGroup | None,
        rewards_before: Mapping[int, Sequence[float]] = MappingProxyType({}),
    ) -> None:
        self.rewards_before = rewards_before
        self.minibatches, self.dp_rank, self.group = minibatches, mesh.dp.rank, group
        self._owners = [
            [0] * len(minibatch) if minibatch.sharding is None else minibatch.sharding.owners
            for minibatch in minibatches
        ]

    def column(self, name: str) -> list[Any]:
        """Returns a column of this rank's sequences, those of the first minibatch first."""
        return [value for minibatch in self.minibatches for value in minibatch.columns[name]]

    def gather(self, values: Sequence[Value]) -> list[Value]:
        """Returns the value of every sequence of the rollout, in one order for all layouts, given this rank's."""
        by_rank = self._by_rank(list(values))
        positions = dict.fromkeys(by_rank, 0)
        gathered = []
        for owners in self._owners:
            for owner in owners:
                gathered.append(by_rank[owner][positions[owner]])
                positions[owner] += 1
        return gathered

    def local(self, values: Sequence[Value]) -> list[Value]:
        """Selects the values of this rank's sequences from those of all sequences, in the order of `gather`."""
        owners = [owner for minibatch in self._owners for owner in minibatch]
        return [value for owner, value in zip(owners, values, strict=True) if owner == self.dp_rank]

    def sum(self, numbers: Tensor) -> Tensor:
        """Returns the sum of a tensor over the data-parallel ranks, on the CPU."""
        by_rank = self._by_rank(numbers.cpu())
        return torch.stack(list(by_rank.values())).sum(0)

    def with_columns(self, columns: Mapping[str, Sequence[Any]]) -> list[Batch]:
        """Returns the minibatches with these columns of this rank's sequences, and without those of trajectories."""
        minibatches, start = [], 0
        for minibatch in self.minibatches:
            end = start + len(minibatch.sequences)
            other_columns = {name: values for name, values in minibatch.columns.items() if name not in BY_TRAJECTORY}
            new_columns = {name: values[start:end] for name, values in columns.items()}
            minibatches.append(replace(minibatch, columns=other_columns | new_columns))
            start = end
        return minibatches

    def group_advantages(self, penalties: Sequence[float] | None = None, **options: bool) -> list[float]:
        """Returns the group-relative advantage of the trajectory of each of this rank's sequences.

        Every trajectory counts once in its group, also those that an earlier step trained on. `penalties`, one for each
        of this rank's sequences, are subtracted from the reward of its trajectory. `options` are those of `grpo`.
        """
        numbers, groups, rewards = (self.gather(self.column(name)) for name in (TRAJECTORY, GROUP, REWARD))
        reward_of, group_of = dict(zip(numbers, rewards, strict=True)), dict(zip(numbers, groups, strict=True))
        if penalties is not None:
            for number, penalty in zip(numbers, self.gather(penalties), strict=True):
                reward_of[number] -= penalty
        before = [(group, reward) for group, rewards in self.rewards_before.items() for reward in rewards]
        all_rewards = [*reward_of.values(), *(reward for _, reward in before)]
        advantages = grpo(all_rewards, [*group_of.values(), *(group for group, _ in before)], **options).tolist()
        advantage_of = dict(zip(reward_of, advantages[: len(reward_of)], strict=True))
        return self.local([advantage_of[number] for number in numbers])

    def _by_rank(self, value: Value) -> dict[int, Value]:
        """Returns the value of each data-parallel rank. Ranks that hold the same sequences have the same value."""
        by_rank: dict[int, Value] = gather_and_decide(lambda: (self.dp_rank, value), dict, self.group)
        return dict(sorted(by_rank.items()))


def reward_penalties(rows: RolloutRows, penalty: RewardKL) -> list[Tensor]:
    """Returns the penalty of each token of this rank's sequences, [length] each; 0 outside of completions."""
    names = (MASK, "old_logprobs", "reference_logprobs")
    columns = zip(*(rows.column(name) for name in names), strict=True)
    return [penalty(old, reference).where(mask != 0, 0.0) for mask, old, reference in columns]


def penalty_mean(rows: RolloutRows, penalties: Sequence[Tensor]) -> float:
    """Returns the mean of the penalties over all sampled tokens of the rollout."""
    tokens = sum(float((mask != 0).sum()) for mask in rows.column(MASK))
    total = sum(float(penalty.sum(dtype=torch.float64)) for penalty in penalties)
    summed, count = rows.sum(torch.tensor([total, tokens], dtype=torch.float64))
    return float(summed / count.clamp_min(1.0))
