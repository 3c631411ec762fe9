"""Whether a run can still learn anything: ends one that cannot, and warns of one that hardly does."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from postlude.recipes.config.settings import Limits
from postlude.rollout.conversations import Trajectory

LOG = logging.getLogger("postlude")


class UnhealthyRun(Exception):
    """A run that learns nothing any more. Every rank finds the same."""


class Health:
    """Watches what comes of steps. Counts begin anew when a run goes on."""

    def __init__(self, limits: Limits, max_skipped_steps: int, *, speaks: bool) -> None:
        self.limits, self.max_skipped_steps, self._speaks = limits, max_skipped_steps, speaks
        self.skipped = 0  # optimizer steps in a row
        self._scored = False  # whether any reward could be given yet
        self._failing = 0  # steps in a row
        self._warned: dict[str, int] = {}

    def rewards(self, answers: Sequence[Trajectory], step: int) -> None:
        """Hear what a step's answers earned."""
        errors = [each.score.error for each in answers if each.score is not None and each.score.error]
        share, limit = len(errors) / len(answers), self.limits.failed_rewards
        if share == 1.0 and not self._scored:
            raise UnhealthyRun(
                f"all {len(answers)} rewards of step {step} failed, as none before was given; the last error: "
                f"{errors[-1].rstrip('.')}. Mend the reward function"
            )
        self._scored = True
        self._failing = self._failing + 1 if share > limit else 0
        if self._failing >= self.limits.patience:
            raise UnhealthyRun(
                f"{share:.0%} of the rewards of step {step} failed, and more than limits.failed_rewards={limit:g} in "
                f"{self._failing} steps in a row; the last error: {errors[-1].rstrip('.')}. Mend the reward function, "
                "or raise that limit"
            )
        groups: dict[int, set[float]] = {}
        for each in (each for each in answers if not each.excluded):
            groups.setdefault(each.group, set()).add(each.reward)
        self._lasting(
            "alike",
            all(len(rewards) == 1 for rewards in groups.values()),
            f"for {self.limits.patience} steps, up to {step}, all answers to a prompt earned the same, and nothing was "
            "learned: the tasks are too hard or too easy, or the reward does not tell answers apart.",
        )

    def learned(self, loss: float, skipped: bool, step: int) -> None:
        """Hear of an optimizer step."""
        self.skipped = self.skipped + 1 if skipped or not math.isfinite(loss) else 0
        if self.skipped > self.max_skipped_steps:
            raise UnhealthyRun(
                f"loss or gradient was not finite in {self.skipped} optimizer steps in a row, up to step {step}; "
                f"max_skipped_steps is {self.max_skipped_steps}. Lower optimizer.lr, or look at the samples of the "
                f"last steps"
            )

    def weights(self, norm: float, first: float, step: int) -> None:
        """Hear how large the weights are, and how large they were when the run began."""
        if not math.isfinite(norm):
            raise UnhealthyRun(f"the weights are not finite any more after step {step}. Lower optimizer.lr")
        growth = norm / first if first else 1.0
        if growth > self.limits.weight_growth:
            raise UnhealthyRun(
                f"after step {step} the weights are {growth:.3g} times as large as at the start; "
                f"limits.weight_growth is {self.limits.weight_growth:g}. Lower optimizer.lr"
            )

    def step(self, metrics: Mapping[str, Any], step: int) -> None:
        """Hear a step's metrics."""
        entropy = metrics.get("entropy")
        self._lasting(
            "entropy",
            entropy is not None and entropy < self.limits.entropy,
            f"the policy's entropy is {entropy if entropy is None else format(entropy, '.2g')} at step {step}, below "
            f"limits.entropy={self.limits.entropy:g}: its answers hardly differ, and it can explore no more. Lower "
            "optimizer.lr, or add objective.entropy or objective.kl.",
        )

    def _lasting(self, name: str, so: bool, words: str) -> None:
        """Warn of what has been so for as many steps as there is patience: once, until it is not so."""
        self._warned[name] = self._warned.get(name, 0) + 1 if so else 0
        if self._warned[name] == self.limits.patience and self._speaks:
            LOG.warning("%s", words)
