"""PPO: the rollouts of GRPO, with the advantages of a critic that estimates the value of every token."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from postlude.data import Batch
from postlude.engine import Engine
from postlude.engine.checkpoint import checkpoint_problem
from postlude.objectives import ActorCritic, ValueLoss
from postlude.objectives.advantages import gae, whiten
from postlude.recipes.checks.preflight import Check, PreflightInputs
from postlude.recipes.checks.second_model import second_model_check
from postlude.recipes.config.policy_configs import PPOConfig
from postlude.recipes.grpo import GRPOTrainer
from postlude.recipes.report.metrics import LOSS, REWARD_KL, SHARED, SKIPPED
from postlude.recipes.rollout_columns import MASK, REWARD, RolloutRows, penalty_mean, reward_penalties
from postlude.recipes.run.health import CRITIC  # also the directory of the critic's checkpoints
from postlude.recipes.run.runtime import LOCAL_RUNTIME, Runtime
from postlude.recipes.trainer import StepMetrics
from postlude.world.agreement import on_rank0


class PPOTrainer(GRPOTrainer):
    """A PPO run. Its critic is a value head on the policy, or an engine of its own in the same layout."""

    name = "ppo"
    config: PPOConfig
    min_group_size = 1
    trial_columns = ("returns", "old_values")

    def __init__(self, config: PPOConfig, device: str, runtime: Runtime = LOCAL_RUNTIME) -> None:
        self.critic: Engine | None = None
        self.value_loss = ValueLoss(clip=config.critic.clip)
        super().__init__(config, device, runtime)
        if config.critic.model is not None:
            with self.close_on_error():
                other = self.engine.options.for_other_model()
                options = replace(other, critic=True, optimizer=config.fit_critic_optimizer(self.step_sizes.steps))
                self.critic = Engine(config.critic.model, **vars(options))

    @property
    def is_critic_warmup(self) -> bool:
        return self.step - self.warm_start_steps < self.config.critic.warmup

    def add_advantages(self, rows: RolloutRows) -> tuple[list[Batch], StepMetrics]:
        """Returns the minibatches of this rank with advantages, returns and values, and metrics."""
        config, masks = self.config, rows.column(MASK)
        critic = self.engine if self.critic is None else self.critic
        with self.timer("values"):
            values = [
                value for minibatch in rows.minibatches for value in critic.values(replace(minibatch, columns={}))
            ]
        rewards = [torch.zeros(len(mask), dtype=torch.float64) for mask in masks]
        for row, reward in enumerate(rows.column(REWARD)):
            rewards[row][int(masks[row].nonzero()[-1])] = reward
        metrics: StepMetrics = {}
        if config.reward_kl is not None:
            penalties = reward_penalties(rows, config.reward_kl)
            rewards = [reward - penalty for reward, penalty in zip(rewards, penalties, strict=True)]
            metrics[REWARD_KL] = penalty_mean(rows, penalties)
        advantages, returns = gae(rewards, values, masks=masks, gamma=config.gamma, lam=config.gae_lambda)
        metrics |= _value_metrics(rows, values, returns)
        if config.whiten_advantages:
            advantages = whiten(advantages, masks, all_sum=rows.sum)
        return rows.with_columns({"advantages": advantages, "returns": returns, "old_values": values}), metrics

    def train_minibatch(self, minibatch: Batch) -> StepMetrics:
        """Runs an optimizer step of policy and critic; in the critic's warm-up, of the critic alone."""
        if self.critic is not None:
            metrics = self._train_critic(self.critic, minibatch)
            if self.is_critic_warmup:
                return metrics
            skipped = metrics[SKIPPED]
            metrics |= super().train_minibatch(minibatch)
            return metrics | {SKIPPED: metrics[SKIPPED] + skipped}
        if self.is_critic_warmup:
            return self.train_batch(minibatch, ValueLoss(clip=self.config.critic.clip, stop_trunk=True))
        objective = ActorCritic(
            policy=self.objective, value=self.value_loss, coefficient=self.config.critic.coefficient
        )
        return self.train_batch(minibatch, objective)

    def _train_critic(self, critic: Engine, minibatch: Batch) -> StepMetrics:
        with self.timer("critic"):
            result = critic.forward_backward(minibatch, self.value_loss)
            update = critic.optimizer_step()
        self.reductions.update(result.reductions)
        self.health.check_update(result.loss, update.skipped, self.step + 1, CRITIC)
        metrics = {LOSS: result.loss, "critic/loss": result.loss, **result.metrics}
        metrics |= {"critic/grad_norm": update.grad_norm, "critic/lr": update.lr}
        return metrics | {SKIPPED: float(update.skipped), "tokens": result.tokens, SHARED: result.shared_tokens}

    def save_models(self, checkpoint: Path, extra: Mapping[str, Any]) -> None:
        """Writes a checkpoint. A critic with a model of its own is saved completely before the policy."""
        if self.critic is not None:
            name = f"{CRITIC}/{checkpoint.name}"
            self.run.discard(name)  # left by an earlier start of the run
            self.critic.save(self.run.path / name)
        super().save_models(checkpoint, extra)

    def checkpoint_problem(self, checkpoint: Path) -> str:
        problem = super().checkpoint_problem(checkpoint)
        if self.critic is not None and not problem:
            return checkpoint_problem(self.run.path / CRITIC / checkpoint.name)
        return problem

    def prune_checkpoints(self, best: int | None) -> None:
        super().prune_checkpoints(best)
        if self.critic is not None:
            on_rank0(self._prune_critics)

    def restore(self, checkpoint: Path) -> Mapping[str, Any]:
        """Loads a checkpoint, and the critic's of the same step."""
        extra = super().restore(checkpoint)
        if self.critic is not None:
            self.critic.set_optimizer(self.config.fit_critic_optimizer(self.step_sizes.steps))
            self.critic.load(self.run.path / CRITIC / checkpoint.name)
        return extra

    def _prune_critics(self) -> None:
        checkpoints = {checkpoint.name for checkpoint in self.run.checkpoints()}
        for critic in sorted((self.run.path / CRITIC).iterdir()):
            if critic.name not in checkpoints:
                shutil.rmtree(critic)

    @classmethod
    def checks(cls, inputs: PreflightInputs) -> list[Check]:
        return [*super().checks(inputs), *second_model_check(inputs, "critic.model", inputs.config.critic.model)]


def _value_metrics(rows: RolloutRows, values: list[torch.Tensor], returns: list[torch.Tensor]) -> StepMetrics:
    """Returns the mean return and the share of its variance that the values explain, over all sampled tokens."""
    masks = [mask != 0 for mask in rows.column(MASK)]

    def sampled(by_sequence: list[torch.Tensor]) -> torch.Tensor:
        tokens = [row[mask] for row, mask in zip(by_sequence, masks, strict=True)]
        return torch.cat(tokens or [torch.zeros(0)]).double()

    token_returns = sampled(returns)
    errors = token_returns - sampled(values)
    count = rows.sum(torch.tensor([float(len(errors))], dtype=torch.float64)).clamp_min(1.0)
    means = rows.sum(torch.stack([token_returns.sum(), errors.sum()])) / count
    squares = [(token_returns - means[0]).square().sum(), (errors - means[1]).square().sum()]
    total, unexplained = rows.sum(torch.stack(squares)).tolist()
    metrics: dict[str, Any] = {"return_mean": float(means[0])}
    if total:
        metrics["explained_variance"] = 1.0 - unexplained / total
    return metrics
