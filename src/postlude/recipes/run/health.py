"""Health: ends a run that cannot learn any more, and warns of one that hardly learns."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from postlude.recipes.config.settings import RunLimits
from postlude.rollout.conversations import Trajectory

LOG = logging.getLogger("postlude")
MODEL, CRITIC = "model", "critic"


class UnhealthyRun(Exception):
    """The run cannot learn any more. Every rank raises it in the same step."""


class Health:
    """Checks the results of steps. Its counts start at zero when a run resumes, except those of `state`."""

    def __init__(self, limits: RunLimits, max_skipped_steps: int, *, verbose: bool) -> None:
        self.limits, self.max_skipped_steps, self._verbose = limits, max_skipped_steps, verbose
        self.skipped: dict[str, int] = {}  # optimizer steps in a row, by model
        self.initial_weight_norm = 0.0
        self._any_scored = False
        self._failing = 0  # steps in a row
        self._persisting: dict[str, int] = {}  # steps in a row, by warning
        self._warned_of_truncation = False

    def state(self) -> dict[str, Any]:
        skipped = dict(self.skipped)
        return {"initial_weight_norm": self.initial_weight_norm, "skipped": skipped, "any_scored": self._any_scored}

    def restore(self, extra: Mapping[str, Any]) -> None:
        self.initial_weight_norm, self.skipped = extra["initial_weight_norm"], dict(extra["skipped"])
        self._any_scored = extra.get("any_scored", False)  # older checkpoints do not say

    def check_rewards(self, trajectories: Sequence[Trajectory], step: int) -> None:
        errors = [score.error for trajectory in trajectories if (score := trajectory.score) is not None and score.error]
        failed, limit = len(errors) / len(trajectories), self.limits.failed_rewards
        if failed == 1.0 and not self._any_scored:
            raise UnhealthyRun(
                f"all {len(trajectories)} rewards of step {step} failed, and none before succeeded; the last error: "
                f"{errors[-1].rstrip('.')}. Fix the reward function"
            )
        self._any_scored = True
        self._failing = self._failing + 1 if failed > limit else 0
        if self._failing >= self.limits.patience:
            raise UnhealthyRun(
                f"{failed:.0%} of the rewards of step {step} failed, and more than limits.failed_rewards={limit:g} in "
                f"{self._failing} steps in a row; the last error: {errors[-1].rstrip('.')}. Fix the reward function, "
                "or raise that limit"
            )
        groups: dict[int, set[float]] = {}
        one_each = len({trajectory.group for trajectory in trajectories}) == len(trajectories)
        for trajectory in trajectories:
            if trajectory.excluded:
                continue
            groups.setdefault(0 if one_each else trajectory.group, set()).add(trajectory.reward)
        self._warn_if_persistent(
            "equal rewards",
            all(len(rewards) == 1 for rewards in groups.values()),
            f"for {self.limits.patience} steps, up to {step}, all completions of a prompt had the same reward, and "
            "nothing was learned: the tasks are too hard or too easy, or the reward does not distinguish completions.",
        )

    def check_sampled(self, trajectories: Sequence[Trajectory], of: str) -> None:
        """Checks that a token was sampled in the trajectories, `of` which step or tasks."""
        if any(1 in transcript.mask for trajectory in trajectories for transcript in trajectory.transcripts):
            return
        errors = [score.error for trajectory in trajectories if (score := trajectory.score) is not None and score.error]
        last_error = f"; the last error: {errors[-1].rstrip('.')}. Fix the environment" if errors else ""
        raise UnhealthyRun(f"no token was sampled in any of the {len(trajectories)} completions of {of}{last_error}")

    def check_update(self, loss: float, skipped: bool, step: int, model: str = MODEL) -> None:
        count = self.skipped.get(model, 0) + 1 if skipped or not math.isfinite(loss) else 0
        self.skipped[model] = count
        if count > self.max_skipped_steps:
            raise UnhealthyRun(
                f"loss or gradient of the {model} was not finite in {count} optimizer steps in a row, up to step "
                f"{step}; max_skipped_steps is {self.max_skipped_steps}. Lower optimizer.lr, or look at the samples of "
                "the last steps"
            )

    def check_last_update(self, step: int) -> None:
        """Checks at the end of a run that its last optimizer step was not skipped."""
        for model, count in self.skipped.items():
            if not count:
                continue
            last = "the last optimizer step" if count == 1 else f"the last {count} optimizer steps"
            raise UnhealthyRun(
                f"loss or gradient of the {model} was not finite in {last} of the run, which ends at step {step}. "
                "Raise steps to train on, or export the weights before that with `postlude convert CHECKPOINT DST`"
            )

    def set_initial_weights(self, norm: float, model: str) -> None:
        """Takes the norm of the weights that a run starts with. Raises ValueError if it is not finite."""
        if not math.isfinite(norm):
            raise ValueError(
                f"the weights of {model} are not finite: their norm is {norm:g}. Fetch or export the model again."
            )
        self.initial_weight_norm = norm

    def check_weights(self, norm: float, step: int) -> None:
        """Checks the norm of the weights against that of the initial weights."""
        if not math.isfinite(norm):
            raise UnhealthyRun(f"the weights are not finite after step {step}. Lower optimizer.lr")
        growth = norm / self.initial_weight_norm if self.initial_weight_norm else 1.0
        if growth > self.limits.weight_growth:
            raise UnhealthyRun(
                f"after step {step} the weights are {growth:.3g} times as large as at the start; "
                f"limits.weight_growth is {self.limits.weight_growth:g}. Lower optimizer.lr"
            )

    def check_step(self, metrics: Mapping[str, Any], step: int, save: Callable[[], None] = lambda: None) -> None:
        """Checks the metrics of a step. Where they end the run and its weights are good, calls `save` first."""
        if mismatch := self.mismatch(metrics, step):
            save()
            raise UnhealthyRun(mismatch)
        if self._verbose and not self._warned_of_truncation:
            self._warned_of_truncation = warn_of_truncation(metrics, f"of step {step}")
        entropy = metrics.get("entropy")
        self._warn_if_persistent(
            "entropy",
            entropy is not None and entropy < self.limits.entropy,
            f"the policy's entropy is {entropy if entropy is None else format(entropy, '.2g')} at step {step}, below "
            f"limits.entropy={self.limits.entropy:g}: its completions hardly differ, so it explores no more. Lower "
            "optimizer.lr, or add objective.entropy or objective.kl.",
        )

    def mismatch(self, metrics: Mapping[str, Any], step: int) -> str:
        """Returns why the run ends: the generator samples from another policy than is trained; "" if it may go on."""
        for name in ("rollout_kl", "rollout_chi2"):
            limit, value = getattr(self.limits, name, None), metrics.get(name)
            if limit is not None and value is not None and not value <= limit:
                return (
                    f"{name} is {value:.3g} at step {step}, and limits.{name} is {limit:g}: the generator samples from "
                    "another policy than is trained. Leave out rollout.quantization or rollout.kv_cache_dtype, or "
                    "bound the ratios with objective.correction and raise the limit"
                )
        return ""

    def _warn_if_persistent(self, name: str, present: bool, message: str) -> None:
        """Warns once when a condition has held for `patience` steps in a row."""
        self._persisting[name] = self._persisting.get(name, 0) + 1 if present else 0
        if self._persisting[name] == self.limits.patience and self._verbose:
            LOG.warning("%s", message)


def warn_of_truncation(metrics: Mapping[str, Any], of: str) -> bool:
    """Warns if most completions were truncated, `of` which step or evaluation. Returns whether it did."""
    truncated: float = metrics.get("truncated", 0.0)
    if truncated > 0.5:
        LOG.warning(
            "%.0f%% of the completions %s were cut off at sampling.max_new_tokens: raise it, or train the model to end "
            "its turns, such as with SFT on this chat template.",
            100 * truncated,
            of,
        )
    return truncated > 0.5
