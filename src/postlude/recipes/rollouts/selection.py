"""TrajectorySelection: which sampled trajectories a step trains on, and the rewards that it trains them with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from postlude.recipes.config.policy_configs import PolicyConfig
from postlude.rollout.conversations import Trajectory


class TrajectorySelection:
    """`selection(trajectories)` returns those of complete groups that can be trained on.

    It leaves out trajectories that are not `trainable`, truncated ones if `overlong` masks them, and groups of fewer
    than `min_group_size`, counting those that an earlier step trained on. With dynamic sampling it also leaves out
    groups whose rewards are all equal.
    """

    def __init__(self, config: PolicyConfig, min_group_size: int) -> None:
        self.config, self.min_group_size = config, min_group_size

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        usable = self._usable(trajectories)
        before = {entry.group: self._usable(entry.trained_before) for entry in usable}
        sizes = Counter(trajectory.group for trajectory in usable)
        groups = self.groups_with_different_rewards(usable) if self.config.dynamic_sampling else sizes.keys()
        complete = {group for group in groups if sizes[group] + len(before[group]) >= self.min_group_size}
        return [trajectory for trajectory in usable if trajectory.group in complete]

    def reward(self, trajectory: Trajectory) -> float:
        """Returns the reward of a trajectory without the penalty of one that is too long."""
        fraction = overlong_fraction(trajectory, self.config.sampling.max_new_tokens, self.config.overlong_buffer)
        return trajectory.reward - self.config.overlong_penalty * fraction

    def rewards_before(self, trajectories: Sequence[Trajectory]) -> dict[int, list[float]]:
        """Returns by group the rewards of the trajectories that an earlier step trained on."""
        before = {entry.group: entry.trained_before for entry in trajectories if entry.trained_before}
        return {group: [*map(self.reward, self._usable(others))] for group, others in before.items()}

    def groups_with_different_rewards(self, trajectories: Sequence[Trajectory]) -> set[int]:
        """Returns the groups of which not all trajectories have one reward."""
        rewards: dict[int, set[float]] = {}
        for trajectory in trajectories:
            compared = [trajectory, *self._usable(trajectory.trained_before)]
            rewards.setdefault(trajectory.group, set()).update(map(self.reward, compared))
        return {group for group, values in rewards.items() if len(values) > 1}

    def _usable(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        masks = self.config.overlong == "mask"
        return [entry for entry in trajectories if entry.trainable and not (masks and entry.truncated)]


def overlong_fraction(trajectory: Trajectory, max_new_tokens: int, buffer: int) -> float:
    """Returns the fraction of the overlong penalty that a trajectory gets for its longest turn, from 0 to 1.

    It grows linearly over the last `buffer` tokens; without a buffer it is 1 if a turn was truncated.
    """
    if not buffer:
        return float(trajectory.truncated)
    longest = max((len(completion.tokens) for completion in trajectory.completions), default=0)
    return min(max((longest - max_new_tokens + buffer) / buffer, 0.0), 1.0)
