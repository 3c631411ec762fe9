"""Columns of rollouts: rank 0 makes some from trajectories, and all ranks add others for their own sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.data import Batch
from postlude.objectives import RewardKL, weights
from postlude.rollout.conversations import Trajectory
from postlude.world.agreement import gather_and_decide
from postlude.world.mesh import Mesh

Value = TypeVar("Value")
MASK, REWARD, GROUP = "response_mask", "reward", "group"
"""Columns of a rollout before it has advantages: the sampled tokens, the reward of each completion and its prompt."""


def policy_columns(
    masks: Sequence[Any],
    groups: Sequence[int],
    positive: Sequence[float],
    logprobs: Sequence[Tensor],
) -> dict[str, Any]:
    """Returns the columns that a policy objective reads besides "advantages", one entry per sequence."""
    return {
        MASK: weights(masks),
        "sequence_mean": weights(masks, "sequences"),
        "group_mean": weights(masks, "groups", groups=groups),
        "positive": positive,
        "rollout_logprobs": logprobs,
        "old_logprobs": logprobs,  # replaced if the trainer recomputes them
    }


def routing_column(trajectories: Sequence[Trajectory]) -> list[Tensor]:
    """Returns the expert ids that routers chose for each trajectory when it was sampled, [length, routers, top_k]."""
    transcripts = [trajectory.transcript for trajectory in trajectories]
    routing = [transcript.routing for transcript in transcripts if transcript.routing is not None]
    if len(routing) < len(trajectories):
        raise ValueError(
            f"replay_routing needs the experts that sampled tokens were sent to, but "
            f"{len(trajectories) - len(routing)} of {len(trajectories)} completions have none. Servers do not report "
            "them: sample with Generator(record_routing=True), or set replay_routing to false."
        )
    return routing


def overlong_fraction(trajectory: Trajectory, max_new_tokens: int, buffer: int) -> float:
    """Returns the fraction of the overlong penalty that a trajectory gets for its longest turn, from 0 to 1.

    It grows linearly over the last `buffer` tokens; without a buffer it is 1 if a turn was truncated.
    """
    if not buffer:
        return float(trajectory.truncated)
    longest = max(len(completion.tokens) for completion in trajectory.completions)
    return min(max((longest - max_new_tokens + buffer) / buffer, 0.0), 1.0)


class RolloutRows:
    """The sequences of a rollout, of which every data-parallel rank holds some. All ranks call its methods."""

    def __init__(self, minibatches: Sequence[Batch], mesh: Mesh, group: dist.ProcessGroup | None) -> None:
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
        """Returns the minibatches with these columns of this rank's sequences, and without reward and group."""
        minibatches, start = [], 0
        for minibatch in self.minibatches:
            end = start + len(minibatch.sequences)
            other_columns = {name: values for name, values in minibatch.columns.items() if name not in (REWARD, GROUP)}
            new_columns = {name: values[start:end] for name, values in columns.items()}
            minibatches.append(replace(minibatch, columns=other_columns | new_columns))
            start = end
        return minibatches

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
