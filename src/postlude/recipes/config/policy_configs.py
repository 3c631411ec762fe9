"""The whole config of the recipes that train on rewards: GRPO and PPO. They are read without torch."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from postlude.checks import NonNegative, Positive
from postlude.objectives import PolicyGradient, RewardKL
from postlude.optimizer import SGD, AdamW
from postlude.options import Common
from postlude.recipes.config.environments import (
    EpisodeRunSettings,
    ReasoningGymSettings,
    TrainingEnvironment,
    environments_of,
)
from postlude.recipes.config.rollout import LaunchedGenerators, LaunchedVLLM, NativeRollout, RolloutSettings
from postlude.recipes.config.schema import Settings, TaggedUnion
from postlude.recipes.config.settings import (
    EvaluationSettings,
    ModelSource,
    ObjectiveFile,
    OptimizerSettings,
    RolloutLimits,
    SamplingSettings,
    TrainingConfig,
    check_length,
    check_sampling,
    fit_schedule,
)
from postlude.rollout.environments import LEAST_NEEDED, needed_episodes

STEPS = 200  # of a run that gives neither steps nor epochs
PolicyObjective: TypeAlias = Common[
    Annotated[PolicyGradient | ObjectiveFile, TaggedUnion(policy=PolicyGradient, file=ObjectiveFile)]
]


class WarmStart(Settings):
    """Supervised steps on the tasks' own answers, before the first rollout."""

    steps: NonNegativeInt = 0
    """Number of steps; 0 disables the warm start."""
    batch_size: PositiveInt = 64
    """Examples a step."""
    optimizer: OptimizerSettings = AdamW(lr=2e-3)
    """Optimizer of these steps."""


class Asynchrony(Settings):
    """Sampling while the trainer trains."""

    max_staleness: NonNegativeInt = 0
    """Maximum number of steps between the start of a completion and the step that trains on it. With 0, a step starts
    its own completions and waits for them."""


class PolicyConfig(TrainingConfig):
    """The config of GRPO and PPO."""

    environment: TrainingEnvironment = ReasoningGymSettings(task="chain_sum")
    """Source of tasks and rewards: an environment, or a list of environments to mix."""
    steps: Common[PositiveInt | None] = None
    """Number of steps with rollouts, after those of the warm start; none takes as many as the epochs need, or 200."""
    epochs: Common[Positive | None] = None
    """Passes over the tasks, in place of steps. The last step has the prompts that are left."""
    prompts_per_step: Common[PositiveInt] = 32
    """Prompts per step."""
    samples_per_prompt: Common[PositiveInt] = 1
    """Completions of each prompt."""
    sampling: Common[SamplingSettings] = SamplingSettings()
    """Sampling parameters of completions."""
    rollout: RolloutSettings = NativeRollout()
    """Rollout engine: the native generator, or servers that get the new weights after every step."""
    asynchrony: Asynchrony = Asynchrony()
    """Sampling while the trainer trains."""
    objective: PolicyObjective = PolicyGradient(clip_high=0.28)
    """Objective to minimise. It, or one of yours, finds these columns: as denominators "response_mask" of sampled
    tokens, "sequence_mean" of completions and "group_mean" of prompts; "advantages", "old_logprobs",
    "rollout_logprobs"; "positive", 1 for completions with a reward of 1; and "reference_logprobs" if it needs them."""
    reference: bool = False
    """Give an objective of yours the log-probs of the model after the warm start, as "reference_logprobs"."""
    reference_model: ModelSource | None = None
    """Model of the reference, with the policy's vocabulary; none takes the policy after the warm start."""
    reference_every: NonNegativeInt = 0
    """Steps between updates of the reference to the policy's weights; 0 never updates it."""
    reward_kl: RewardKL | None = None
    """Penalty in the reward for leaving the reference policy, in place of objective.kl in the loss."""
    minibatches: PositiveInt = 1
    """Optimizer steps of a pass over a rollout; each takes an equal share of the prompts."""
    rollout_epochs: PositiveInt = 1
    """Passes over each rollout. Ratios are to the policy before the first."""
    old_logprobs: Literal["rollout", "recompute"] = "rollout"
    """Denominator of the ratio: the log-probs of the sampler, or recomputed by the trainer."""
    replay_routing: bool = False
    """Send tokens to the experts that they were sampled with (MoE models). A reference routes by itself."""
    sampling_mask: bool = True
    """With top_k, top_p or min_p compute all log-probs among the tokens that these left when a token was sampled, which
    is the distribution it was sampled from; false computes them over the vocabulary."""
    dynamic_sampling: NonNegativeInt = 0
    """Maximum number of extra rounds of prompts that replace groups with equal rewards (DAPO)."""
    overlong: Literal["learn", "mask"] = "learn"
    """Whether to train on completions that were truncated at max_new_tokens, or to mask them."""
    overlong_penalty: NonNegative = 0.0
    """Penalty subtracted from the reward of a truncated completion."""
    overlong_buffer: NonNegativeInt = 0
    """Tokens before max_new_tokens over which the penalty grows from 0 to overlong_penalty (DAPO); 0 penalises only
    truncated completions."""
    save_completions: bool = False
    """Save all completions of every step as Parquet: completions/ in the run directory. Needs pyarrow."""
    limits: RolloutLimits = RolloutLimits()
    """When a run ends, and when it warns."""
    warm_start: WarmStart = WarmStart()
    """Supervised steps before the first rollout."""
    evaluation: Common[EvaluationSettings] = EvaluationSettings()
    """Evaluation on held-out tasks."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_sampling(self.sampling, self.budget, self.rollout)
        check_sampling(self.evaluation.sampling(self.sampling), self.budget, self.rollout, "evaluation")
        check_length(self.steps, self.epochs)
        if self.epochs is None:
            self.check_steps(self.known_steps)
        if self.reward_kl is not None and isinstance(self.objective, PolicyGradient) and self.objective.kl is not None:
            raise ValueError("reward_kl and objective.kl are two penalties for the same distance. Set one of them.")
        if self.replay_routing and isinstance(self.rollout, LaunchedGenerators):
            raise ValueError(
                "replay_routing needs the experts that tokens were sent to, which postlude serve does not report. Use "
                "rollout: native or vllm."
            )
        if self.replay_routing and isinstance(self.rollout, LaunchedVLLM) and not self.rollout.gpus:
            raise ValueError(
                "replay_routing needs the experts that tokens were sent to, which vLLM on a CPU does not report."
            )
        if self.replay_routing and self.sampling.stop and not isinstance(self.rollout, NativeRollout):
            raise ValueError(
                "replay_routing needs the experts that tokens were sent to, which vLLM does not report with "
                "sampling.stop. Use stop_tokens, or rollout: native."
            )
        if self.asynchrony.max_staleness:
            self._check_asynchrony()
        self._check_stragglers()
        if self.overlong_buffer:
            self._check_overlong()
        self._check_reference()
        if both := sorted(environments_of(self.environment).keys() & self.evaluation.sets.keys()):
            raise ValueError(
                f"environment and evaluation.sets both have {both[0]}, which would be two meanings of the metrics "
                f"eval/{both[0]}/…. Rename the set."
            )
        if self.sampling.temperature <= 0:
            raise ValueError("sampling.temperature is 0, but a group of equal completions has nothing to compare.")
        if isinstance(self.objective, PolicyGradient):
            self._check_objective(self.objective)
        elif self.limits.rollout_kl is not None or self.limits.rollout_chi2 is not None:
            raise ValueError(
                "limits.rollout_kl and limits.rollout_chi2 are limits of metrics that objective: policy reports, but "
                "the objective is yours. Leave them out."
            )
        if self.prompts_per_step % self.minibatches:
            raise ValueError(
                f"minibatches is {self.minibatches}, which does not divide prompts_per_step={self.prompts_per_step}."
            )
        return self

    def _check_objective(self, objective: PolicyGradient) -> None:
        if self.reference:
            raise ValueError("reference is for an objective of yours; set objective.kl instead.")
        if objective.correction is not None and objective.ratio != "on_policy" and self.old_logprobs == "rollout":
            raise ValueError(
                "objective.correction weighs the trainer's log-probs against the sampler's, but old_logprobs takes "
                "the sampler's for both. Set old_logprobs to recompute."
            )

    def _check_stragglers(self) -> None:
        """Refuses stragglers of groups that a step needs whole, and to carry episodes into steps that may not train on
        them."""
        for part in environments_of(self.environment).values():
            if not isinstance(part, EpisodeRunSettings) or part.stragglers == "wait":
                continue
            share, count = part.needed_share, self.samples_per_prompt
            if needed_episodes(share, count) >= count:
                raise ValueError(
                    f"environment.stragglers is {part.stragglers}, but a step needs all episodes of a group: at least "
                    f"{LEAST_NEEDED}, and needed_share={share:g} of samples_per_prompt={count}. Lower needed_share, "
                    "raise samples_per_prompt, or leave stragglers out."
                )
        if all(getattr(part, "stragglers", "wait") != "carry" for part in environments_of(self.environment).values()):
            return
        if not self.asynchrony.max_staleness:
            raise ValueError(
                "environment.stragglers is carry, so later steps train on tokens of earlier weights, but "
                "asynchrony.max_staleness is 0. Set it to 1 or more, or drop stragglers."
            )
        if self.reward_kl is not None:
            raise ValueError(
                "environment.stragglers is carry, but reward_kl changes the rewards of a group, with which carried "
                "episodes are compared, in its own step alone. Set objective.kl instead, or drop stragglers."
            )

    def _check_overlong(self) -> None:
        buffer, limit = self.overlong_buffer, self.sampling.max_new_tokens
        if not self.overlong_penalty:
            raise ValueError(
                f"overlong_buffer is {buffer}, but overlong_penalty is 0. Set a penalty, or leave both out."
            )
        if buffer > limit:
            raise ValueError(
                f"overlong_buffer is {buffer}, but completions end at sampling.max_new_tokens={limit}. Lower it."
            )

    def _check_reference(self) -> None:
        if not self.has_reference and (self.reference_model is not None or self.reference_every):
            raise ValueError(
                "reference_model and reference_every are for a reference, but nothing reads one. Set objective.kl or "
                "reward_kl, or with an objective of yours reference."
            )
        if self.reference_model is not None and self.reference_every:
            raise ValueError(
                "reference_every updates the reference to the policy's weights, but reference_model names another "
                "model. Leave one of them out."
            )
        if self.reference_model is not None and self.rollout.share_gpu:
            raise ValueError(
                "rollout.share_gpu moves the policy to host memory, but reference_model stays on the GPU. Leave one of "
                "them out."
            )

    def _check_asynchrony(self) -> None:
        """Refuses settings that need equal weights in sampler and trainer."""
        staleness, objective = f"asynchrony.max_staleness is {self.asynchrony.max_staleness}", self.objective
        if self.rollout.share_gpu:
            raise ValueError(
                f"{staleness}, so servers generate while the trainer trains, but rollout.share_gpu takes the trainer's "
                "state off the GPU meanwhile. Set either to its default."
            )
        if isinstance(self.rollout, NativeRollout):
            raise ValueError(
                f"{staleness}, but rollout: native samples in the trainer's own ranks, which cannot train meanwhile. "
                "Use rollout: generators, vllm or server."
            )
        if isinstance(objective, PolicyGradient) and objective.ratio == "on_policy" and objective.correction is None:
            raise ValueError(
                f'{staleness}, but objective.ratio "on_policy" takes all completions as samples of the newest weights. '
                'Use "token" or "sequence", or set objective.correction.'
            )

    @property
    def masks_sampling(self) -> bool:
        """Whether log-probs are computed among the tokens that top-k, top-p and min-p left."""
        return self.sampling_mask and self.sampling.params.filtered

    @property
    def known_steps(self) -> int:
        """The number of steps with rollouts, unless it follows from `epochs`."""
        return STEPS if self.steps is None else self.steps

    def check_steps(self, steps: int) -> None:
        """Refuses schedules that do not fit this number of steps with rollouts."""
        self.fit_optimizers(steps)

    def fit_optimizers(self, steps: int) -> tuple[AdamW | SGD, AdamW | SGD]:
        """Returns the optimizers of the warm start and of the policy, with schedules over their optimizer steps.

        Raises ValueError for a schedule that does not fit.
        """
        warm = self.warm_start
        first = fit_schedule(warm.optimizer, warm.steps, "warm_start.optimizer") if warm.steps else warm.optimizer
        return first, fit_schedule(self.optimizer, self.policy_updates(steps), "optimizer")

    def policy_updates(self, steps: int) -> int:
        """Returns the optimizer steps of the policy in so many steps with rollouts."""
        return steps * self.rollout_epochs * self.minibatches

    @property
    def no_score(self) -> str:
        """Why no step is evaluated, or ""."""
        evaluation = self.evaluation
        return "evaluation.every is 0" * (not evaluation.every) or "evaluation.tasks is 0" * (not evaluation.held_out)

    @property
    def batch_invariant(self) -> bool:
        """Whether trainer and generator agree to the bit."""
        return isinstance(self.rollout, NativeRollout) and self.rollout.batch_invariant

    @property
    def first_ratio_is_mismatch(self) -> bool:
        """Whether the first ratios compare sampler and trainer with equal weights, and so measure their mismatch."""
        ratio = isinstance(self.objective, PolicyGradient) and self.objective.ratio != "on_policy"
        return ratio and self.old_logprobs == "rollout" and not self.asynchrony.max_staleness

    @property
    def has_reference(self) -> bool:
        """Whether log-probs of the model after the warm start are needed."""
        in_loss = self.reference if isinstance(self.objective, ObjectiveFile) else self.objective.kl is not None
        return in_loss or self.reward_kl is not None

    @property
    def other_models(self) -> tuple[str, ...]:
        """The reference. That of LoRA is the frozen model."""
        if self.reference_model is not None:
            return (self.reference_model,)
        return (self.model,) if self.has_reference and self.lora is None else ()

    @property
    def sequences_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt // self.minibatches


class GRPOConfig(PolicyConfig):
    """Config of a GRPO run."""

    samples_per_prompt: Common[Annotated[int, Field(ge=2)]] = 8
    """Completions of each prompt: the size of a group."""
    advantages: Common[
        Literal["grpo", "grpo_loo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
    ] = "grpo"
    """Advantages of a group: its rewards minus their mean ("grpo", "dr_grpo") or the mean of the others ("grpo_loo",
    "rloo"), divided by the standard deviation ("grpo", "grpo_loo") or not. Or REINFORCE++: the sum of a token's and
    later rewards, minus the mean and divided by the standard deviation of the whole rollout; its baseline subtracts the
    group's mean reward first."""


class CriticSettings(Settings):
    """The critic of PPO: a value head on the policy's own trunk, or a model of its own."""

    model: Common[ModelSource | None] = None
    """Hugging Face directory, GGUF file or built-in model that the critic starts from; none adds a value head to the
    policy. It has the policy's vocabulary and layout, and all its weights are trained."""
    optimizer: OptimizerSettings = AdamW(lr=1e-5)
    """Optimizer of a critic with a model of its own."""
    coefficient: Positive = 0.5
    """Weight of the value loss relative to the policy's, with a value head on the policy."""
    clip: Positive | None = 0.2
    """Maximum change of a value in a step; none for no bound."""
    warmup: NonNegativeInt = 0
    """First steps that train the critic alone. With a value head on the policy only that head is trained."""


class PPOConfig(PolicyConfig):
    """Config of a PPO run: a critic estimates the value of every token."""

    critic: Common[CriticSettings] = CriticSettings()
    """The critic."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount of later rewards, per token."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """λ of generalised advantage estimation: 0 trusts the critic, 1 the rewards."""
    whiten_advantages: bool = True
    """Give the advantages of a rollout mean 0 and standard deviation 1."""

    @model_validator(mode="after")
    def _check_critic(self) -> Self:
        critic = self.critic
        if critic.model is None and critic.optimizer != CriticSettings().optimizer:
            raise ValueError(
                "critic.optimizer is for a critic with a model of its own; a value head on the policy is stepped with "
                "it. Set critic.model, or leave it out."
            )
        if critic.model is not None and critic.coefficient != CriticSettings().coefficient:
            raise ValueError(
                f"critic.coefficient is {critic.coefficient:g}, but a critic with a model of its own is trained alone. "
                "Set critic.optimizer.lr instead."
            )
        if critic.model is not None and self.rollout.share_gpu:
            raise ValueError(
                "rollout.share_gpu moves the policy to host memory, but a critic with a model of its own stays on the "
                "GPU. Leave out critic.model or rollout.share_gpu."
            )
        if self.dynamic_sampling and self.samples_per_prompt < 2:
            raise ValueError(
                "dynamic_sampling replaces groups whose rewards are equal, but samples_per_prompt is 1. Raise that, or "
                "set dynamic_sampling to 0."
            )
        return self

    def check_steps(self, steps: int) -> None:
        super().check_steps(steps)
        if self.critic.warmup >= steps:
            raise ValueError(
                f"critic.warmup is {self.critic.warmup}, but the run has {steps} steps: the policy would never be "
                "trained. Lower it, or raise steps."
            )
        self.fit_critic_optimizer(steps)

    @property
    def has_value_head(self) -> bool:
        return self.critic.model is None

    def policy_updates(self, steps: int) -> int:
        """Returns the optimizer steps of the policy. A warm-up of a value head is made with the policy's optimizer."""
        return super().policy_updates(steps if self.has_value_head else steps - self.critic.warmup)

    def fit_critic_optimizer(self, steps: int) -> AdamW | SGD:
        """Returns the optimizer of a critic with a model of its own, with a schedule over its optimizer steps."""
        return fit_schedule(self.critic.optimizer, super().policy_updates(steps), "critic.optimizer")

    @property
    def other_models(self) -> tuple[str, ...]:
        """The reference, and the critic: with gradients and moments it needs four times the memory of its weights."""
        return (*super().other_models, *([] if self.critic.model is None else [self.critic.model] * 4))
