"""The whole config of each recipe. `settings.py`, `environments.py` and `rollout.py` have the parts that they share.

They are read without torch, so that a mistake is reported at once.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from postlude.objectives import SFT, Distill, PolicyGradient, Preference
from postlude.optimizer import SGD, AdamW
from postlude.recipes.config.data import Examples, Pairs
from postlude.recipes.config.environments import EnvironmentSettings, ReasoningGymSettings
from postlude.recipes.config.rollout import NativeRollout, RolloutSettings
from postlude.recipes.config.schema import NonNegative, Positive, Settings, TaggedUnion
from postlude.recipes.config.settings import (
    EvaluationSettings,
    HeldOutSettings,
    ModelSource,
    ObjectiveFile,
    OptimizerSettings,
    RunConfig,
    SamplingSettings,
    TrainingConfig,
    check_sampling,
    fit_schedule,
)

MASK = "response_mask"
SFTObjective: TypeAlias = Annotated[SFT | ObjectiveFile, TaggedUnion(sft=SFT, file=ObjectiveFile)]
PairObjective: TypeAlias = Annotated[Preference | ObjectiveFile, TaggedUnion(preference=Preference, file=ObjectiveFile)]
PolicyObjective: TypeAlias = Annotated[
    PolicyGradient | ObjectiveFile, TaggedUnion(policy=PolicyGradient, file=ObjectiveFile)
]
DistillObjective: TypeAlias = Annotated[Distill | ObjectiveFile, TaggedUnion(distill=Distill, file=ObjectiveFile)]


class SupervisedConfig(TrainingConfig):
    """What the configs of recipes that train on dataset rows share."""

    batch_size: PositiveInt = 32
    """Rows a step."""
    epochs: Positive = 1.0
    """Passes over the rows. Not used if steps is set."""
    steps: PositiveInt | None = None
    """Number of steps; none takes as many as the epochs need."""
    held_out: HeldOutSettings = HeldOutSettings()
    """Held-out rows."""

    @property
    def sequences_per_step(self) -> int:
        """Sequences of an optimizer step."""
        return self.batch_size

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.steps is not None:
            fit_schedule(self.optimizer, self.steps, "optimizer")
        return self


class SFTConfig(SupervisedConfig):
    """Config of an SFT run."""

    data: Examples
    """Rows to train on."""
    objective: SFTObjective = SFT(over="loss_mask")
    """Objective to minimise. One of yours finds the column "loss_mask": 1 for tokens to train on."""


class DPOConfig(SupervisedConfig):
    """Config of a run of DPO, IPO or SimPO."""

    data: Pairs
    """Pairs to train on."""
    objective: PairObjective = Preference()
    """Objective to minimise. One of yours finds the columns "response_mask" and "reference_logprobs", and the two
    completions of a pair side by side."""

    @property
    def has_reference(self) -> bool:
        """Whether the objective reads the log-probs of the model that the run started from."""
        return isinstance(self.objective, ObjectiveFile) or self.objective.reference

    @property
    def other_models(self) -> tuple[str, ...]:
        """The reference. That of LoRA is the frozen model."""
        return (self.model,) if self.has_reference and self.lora is None else ()

    @property
    def sequences_per_step(self) -> int:
        """Both completions of each pair."""
        return 2 * self.batch_size


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


class GRPOConfig(TrainingConfig):
    """Config of a GRPO run."""

    environment: EnvironmentSettings = ReasoningGymSettings(task="chain_sum")
    """Source of tasks and rewards."""
    steps: PositiveInt = 200
    """Number of GRPO steps, after those of the warm start."""
    prompts_per_step: PositiveInt = 32
    """Prompts per step."""
    samples_per_prompt: Annotated[int, Field(ge=2)] = 8
    """Completions of each prompt: the size of a group."""
    sampling: SamplingSettings = SamplingSettings()
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
    advantages: Literal["grpo", "grpo_loo", "dr_grpo", "rloo"] = "grpo"
    """Advantages of a group: its rewards minus their mean ("grpo", "dr_grpo") or the mean of the others ("grpo_loo",
    "rloo"), divided by the standard deviation ("grpo", "grpo_loo") or not."""
    minibatches: PositiveInt = 1
    """Optimizer steps on each rollout; each takes an equal share of the prompts."""
    old_logprobs: Literal["rollout", "recompute"] = "rollout"
    """Denominator of the ratio: the log-probs of the sampler, or recomputed by the trainer."""
    replay_routing: bool = False
    """Send tokens to the experts that they were sampled with (MoE models). A reference routes by itself."""
    dynamic_sampling: NonNegativeInt = 0
    """Maximum number of extra rounds of prompts that replace groups with equal rewards (DAPO)."""
    overlong: Literal["learn", "mask"] = "learn"
    """Whether to train on completions that were truncated at max_new_tokens, or to mask them."""
    overlong_penalty: NonNegative = 0.0
    """Penalty subtracted from the reward of a truncated completion."""
    warm_start: WarmStart = WarmStart()
    """Supervised steps before the first rollout."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """Evaluation on held-out tasks."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_sampling(self.sampling, self.budget, self.rollout)
        self.optimizers  # noqa: B018 - refuses a schedule that does not fit
        if self.replay_routing and not isinstance(self.rollout, NativeRollout):
            raise ValueError("replay_routing needs the experts that tokens were sent to, which servers do not report.")
        if self.asynchrony.max_staleness:
            self._check_asynchrony()
        if self.sampling.temperature <= 0:
            raise ValueError("sampling.temperature is 0, but a group of equal completions has nothing to compare.")
        if isinstance(self.objective, PolicyGradient):
            self._check_objective(self.objective)
        if self.prompts_per_step % self.minibatches:
            raise ValueError(
                f"minibatches is {self.minibatches}, which does not divide prompts_per_step={self.prompts_per_step}."
            )
        return self

    def _check_objective(self, objective: PolicyGradient) -> None:
        if self.reference:
            raise ValueError("reference is for an objective of yours; set objective.kl instead.")
        if objective.temperature not in (1.0, self.sampling.temperature):
            raise ValueError(
                f"objective.temperature is {objective.temperature:g}, but completions are sampled at "
                f"{self.sampling.temperature:g}. Leave it out: it is taken from there."
            )
        if objective.correction is not None and objective.ratio != "on_policy" and self.old_logprobs == "rollout":
            raise ValueError(
                "objective.correction weighs the trainer's log-probs against the sampler's, but old_logprobs takes "
                "the sampler's for both. Set old_logprobs to recompute."
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
    def optimizers(self) -> tuple[AdamW | SGD, AdamW | SGD]:
        """The optimizers of the warm start and of GRPO, with schedules over their optimizer steps."""
        warm = self.warm_start
        first = fit_schedule(warm.optimizer, warm.steps, "warm_start.optimizer") if warm.steps else warm.optimizer
        return first, fit_schedule(self.optimizer, self.steps * self.minibatches, "optimizer")

    @property
    def starts_from_rollout(self) -> bool:
        """Whether the first ratios compare sampler and trainer with equal weights, and so measure their mismatch."""
        ratio = isinstance(self.objective, PolicyGradient) and self.objective.ratio != "on_policy"
        return ratio and self.old_logprobs == "rollout" and not self.asynchrony.max_staleness

    @property
    def has_reference(self) -> bool:
        """Whether the objective reads the log-probs of the model that GRPO started from."""
        return self.reference if isinstance(self.objective, ObjectiveFile) else self.objective.kl is not None

    @property
    def other_models(self) -> tuple[str, ...]:
        """The reference. That of LoRA is the frozen model."""
        return (self.model,) if self.has_reference and self.lora is None else ()

    @property
    def sequences_per_step(self) -> int:
        """Completions of an optimizer step."""
        return self.prompts_per_step * self.samples_per_prompt // self.minibatches


class OnPolicyData(Settings):
    """The student's own completions of tasks."""

    environment: EnvironmentSettings = ReasoningGymSettings(task="chain_sum")
    """Source of tasks. Rewards are reported but not trained on."""
    sampling: SamplingSettings = SamplingSettings()
    """Sampling parameters of completions."""
    rollout: RolloutSettings = NativeRollout()
    """Rollout engine: the native generator, or servers that get the student's weights after every step."""
    samples_per_prompt: PositiveInt = 1
    """Completions of each prompt."""


class DistillConfig(SupervisedConfig):
    """Config of a distillation run."""

    teacher: ModelSource
    """Hugging Face directory, GGUF file, or built-in model, with the student's vocabulary."""
    data: Annotated[Examples | OnPolicyData, TaggedUnion(examples=Examples, on_policy=OnPolicyData)] = OnPolicyData()
    """Completions to train on: those of a dataset, or the student's own."""
    top_k: PositiveInt = 64
    """Number of the teacher's most likely tokens to compare at every position."""
    objective: DistillObjective = Distill(over=MASK)
    """Objective to minimise. One of yours finds the columns "response_mask", "teacher_ids" and "teacher_logprobs"."""

    @property
    def other_models(self) -> tuple[str, ...]:
        """The teacher."""
        return (self.teacher,)

    @property
    def sequences_per_step(self) -> int:
        """Sequences of an optimizer step."""
        return self.batch_size * (self.data.samples_per_prompt if isinstance(self.data, OnPolicyData) else 1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if isinstance(self.data, OnPolicyData):
            check_sampling(self.data.sampling, self.budget, self.data.rollout)
        return self


class EvalConfig(RunConfig):
    """Config of an evaluation. Every rank has the whole model and samples its share."""

    environment: EnvironmentSettings = ReasoningGymSettings(task="chain_sum")
    """Source of tasks and rewards."""
    tasks: PositiveInt = 256
    """Number of tasks: those that training holds out with evaluation.tasks of this number."""
    samples_per_prompt: PositiveInt = 1
    """Completions of each task. With more than one, pass@k is reported for powers of two up to it."""
    sampling: SamplingSettings = SamplingSettings(temperature=0.0)
    """Sampling parameters of completions."""
    rollout: RolloutSettings = NativeRollout()
    """Rollout engine: the native generator, or servers. With servers, no weights are loaded here."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_sampling(self.sampling, self.budget, self.rollout)
        if self.rollout.share_gpu:
            raise ValueError("rollout.share_gpu is true, but an evaluation trains nothing to move. Leave it out.")
        return self
