"""What decides a run of each recipe: its whole config. `settings.py` has the parts that several share.

They are read without torch, so that a mistake is named at once; the recipes themselves are in files of their own.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from postlude.objectives import SFT, Distill, PolicyGradient, Preference
from postlude.optimizer import SGD, AdamW
from postlude.recipes.config.rollout import NativeRollout, RolloutSettings
from postlude.recipes.config.schema import NonNegative, Positive, Settings, TaggedUnion
from postlude.recipes.config.settings import (
    EnvironmentSettings,
    EvaluationSettings,
    HeldOutSettings,
    ModelSource,
    ObjectiveFile,
    OptimizerSettings,
    ReasoningGymSettings,
    RunConfig,
    SamplingSettings,
    TrainingConfig,
    check_draft_support,
    check_prompt_room,
    fit_schedule,
)
from postlude.recipes.data.rows import Examples, Pairs

MASK = "response_mask"
SFTObjective: TypeAlias = Annotated[SFT | ObjectiveFile, TaggedUnion(sft=SFT, file=ObjectiveFile)]
PairObjective: TypeAlias = Annotated[Preference | ObjectiveFile, TaggedUnion(preference=Preference, file=ObjectiveFile)]
PolicyObjective: TypeAlias = Annotated[
    PolicyGradient | ObjectiveFile, TaggedUnion(policy=PolicyGradient, file=ObjectiveFile)
]
DistillObjective: TypeAlias = Annotated[Distill | ObjectiveFile, TaggedUnion(distill=Distill, file=ObjectiveFile)]


class SupervisedConfig(TrainingConfig):
    """What is common to recipes that learn from rows."""

    batch_size: PositiveInt = 32
    """Rows a step."""
    epochs: Positive = 1.0
    """How often each row is learned. Not used where steps are given."""
    steps: PositiveInt | None = None
    """How many steps; none takes as many as the epochs need."""
    held_out: HeldOutSettings = HeldOutSettings()
    """Rows to measure progress on."""

    @model_validator(mode="after")
    def _scheduled(self) -> Self:
        if self.steps is not None:
            fit_schedule(self.optimizer, self.steps, "optimizer")
        return self


class SFTConfig(SupervisedConfig):
    """Everything that decides an SFT run."""

    data: Examples
    """The rows to learn from."""
    objective: SFTObjective = SFT(over="loss_mask")
    """What is minimised. One of yours finds the column "loss_mask": 1 for tokens to learn."""


class DPOConfig(SupervisedConfig):
    """Everything that decides a run of DPO, IPO or SimPO."""

    data: Pairs
    """The pairs to learn from."""
    objective: PairObjective = Preference()
    """What is minimised. One of yours finds the columns "response_mask" and "reference_logprobs", and the two of a pair
    side by side."""

    @property
    def has_reference(self) -> bool:
        """Whether the objective looks at the model that the run started from."""
        return isinstance(self.objective, ObjectiveFile) or self.objective.reference


class WarmStart(Settings):
    """Supervised steps on the tasks' own answers, before the first rollout."""

    steps: NonNegativeInt = 0
    """How many; 0 leaves it out."""
    batch_size: PositiveInt = 64
    """Examples a step."""
    optimizer: OptimizerSettings = AdamW(lr=2e-3)
    """How weights are moved in them."""


class Asynchrony(Settings):
    """Whether answers are drawn while earlier ones are learned from."""

    max_staleness: NonNegativeInt = 0
    """The most steps between the weights that an answer was begun with and the step that learns from it. With 0 a
    step's answers are drawn when it begins, and the trainer waits for the longest."""


class GRPOConfig(TrainingConfig):
    """Everything that decides a GRPO run."""

    environment: EnvironmentSettings = ReasoningGymSettings(task="chain_sum")
    """Where tasks and rewards come from."""
    steps: PositiveInt = 200
    """Steps of GRPO, after those of the warm start."""
    prompts_per_step: PositiveInt = 32
    """Prompts a step."""
    samples_per_prompt: Annotated[int, Field(ge=2)] = 8
    """Answers to each prompt: a group."""
    sampling: SamplingSettings = SamplingSettings()
    """How answers are drawn."""
    rollout: RolloutSettings = NativeRollout()
    """Who draws them: the generator here, or servers, which are given the weights after every step."""
    asynchrony: Asynchrony = Asynchrony()
    """Whether they are drawn while the trainer learns from earlier ones."""
    objective: PolicyObjective = PolicyGradient(clip_high=0.28)
    """What is minimised. Columns that it, or one of yours, finds: to be a mean over, "response_mask" of sampled
    tokens, "sequence_mean" of answers, "group_mean" of prompts; "advantages", "old_logprobs", "rollout_logprobs";
    "positive", 1 for answers with a reward of 1; and "reference_logprobs" where it asks for them."""
    reference: bool = False
    """Whether an objective of yours reads what the model after the warm start says; the one here knows itself."""
    advantages: Literal["grpo", "grpo_loo", "dr_grpo", "rloo"] = "grpo"
    """How rewards become advantages within a group: with the mean of all or of the others, divided by the deviation
    or not."""
    minibatches: PositiveInt = 1
    """Optimizer steps a rollout; each takes an equal share of the prompts."""
    old_logprobs: Literal["rollout", "recompute"] = "rollout"
    """Whether the ratio starts from what the sampler said or from what the trainer computes."""
    replay_routing: bool = False
    """Whether training sends tokens to the experts that they were sent to when they were sampled, in models that have
    experts. A reference still chooses for itself."""
    dynamic_sampling: NonNegativeInt = 0
    """How many more rounds of prompts to draw in place of groups whose rewards are all alike (DAPO)."""
    overlong: Literal["learn", "mask"] = "learn"
    """Whether answers cut off at max_new_tokens are learned from or left out."""
    overlong_penalty: NonNegative = 0.0
    """Taken from the reward of an answer that was cut off."""
    warm_start: WarmStart = WarmStart()
    """Supervised steps before the first rollout."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """How progress is measured on held-out tasks."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        check_prompt_room(self.sampling, self.budget)
        check_draft_support(self.rollout, self.sampling)
        self.optimizers  # noqa: B018 - a schedule that does not fit is refused
        if self.replay_routing and not isinstance(self.rollout, NativeRollout):
            raise ValueError("replay_routing needs the experts that tokens were sent to, and servers do not tell.")
        if self.asynchrony.max_staleness:
            self._may_be_stale()
        if self.sampling.temperature <= 0:
            raise ValueError("sampling.temperature is 0, but a group of equal answers has nothing to compare.")
        if isinstance(self.objective, PolicyGradient):
            if self.reference:
                raise ValueError("reference is for an objective of yours; set objective.kl instead.")
            if self.objective.temperature not in (1.0, self.sampling.temperature):
                raise ValueError(
                    f"objective.temperature is {self.objective.temperature:g}, but answers are drawn at "
                    f"{self.sampling.temperature:g}. Leave it out: it is taken from there."
                )
            if (
                self.objective.correction is not None
                and self.objective.ratio != "on_policy"
                and self.old_logprobs == "rollout"
            ):
                raise ValueError(
                    "objective.correction weighs the trainer's log-probs against the sampler's, but old_logprobs takes "
                    "the sampler's for both. Set old_logprobs to recompute."
                )
        if self.prompts_per_step % self.minibatches:
            raise ValueError(
                f"minibatches is {self.minibatches}, which does not divide prompts_per_step={self.prompts_per_step}."
            )
        return self

    def _may_be_stale(self) -> None:
        """Refuse what takes the weights that sample for those that learn."""
        asked = f"asynchrony.max_staleness is {self.asynchrony.max_staleness}"
        if isinstance(self.rollout, NativeRollout):
            raise ValueError(
                f"{asked}, but rollout: native draws answers in the trainer's own ranks, which cannot train meanwhile. "
                "Use rollout: generators, vllm or server."
            )
        objective = self.objective
        if isinstance(objective, PolicyGradient) and objective.ratio == "on_policy" and objective.correction is None:
            raise ValueError(
                f'{asked}, but objective.ratio "on_policy" takes all answers for those of the newest weights. Use '
                '"token" or "sequence", or set objective.correction.'
            )

    @property
    def optimizers(self) -> tuple[AdamW | SGD, AdamW | SGD]:
        """That of the warm start and that of GRPO, each with its schedule over all of its optimizer steps."""
        warm = self.warm_start
        first = fit_schedule(warm.optimizer, warm.steps, "warm_start.optimizer") if warm.steps else warm.optimizer
        return first, fit_schedule(self.optimizer, self.steps * self.minibatches, "optimizer")

    @property
    def ratio_to_rollout(self) -> bool:
        """Whether ratios are taken to what the sampler said."""
        objective = self.objective
        own = isinstance(objective, PolicyGradient) and objective.ratio != "on_policy"
        return own and self.old_logprobs == "rollout"

    @property
    def starts_from_rollout(self) -> bool:
        """Whether the first of these ratios are of equal weights, so that they show how far the sampler is off."""
        return self.ratio_to_rollout and not self.asynchrony.max_staleness

    @property
    def has_reference(self) -> bool:
        """Whether the objective looks at the model that GRPO started from."""
        return self.reference if isinstance(self.objective, ObjectiveFile) else self.objective.kl is not None


class OnPolicyData(Settings):
    """The student's own answers to tasks, on which the teacher then corrects it."""

    environment: EnvironmentSettings = ReasoningGymSettings(task="chain_sum")
    """Where tasks come from. Rewards are reported, not learned from."""
    sampling: SamplingSettings = SamplingSettings()
    """How answers are drawn."""
    rollout: RolloutSettings = NativeRollout()
    """Who draws them: the generator here, or servers, which are given the student's weights after every step."""
    samples_per_prompt: PositiveInt = 1
    """Answers to each prompt."""


class DistillConfig(SupervisedConfig):
    """Everything that decides a run of distillation."""

    teacher: ModelSource
    """A Hugging Face directory, a GGUF file, or a built-in model, with the tokens of the student."""
    data: Annotated[Examples | OnPolicyData, TaggedUnion(examples=Examples, on_policy=OnPolicyData)] = OnPolicyData()
    """What is learned on: written answers, or the student's own."""
    top_k: PositiveInt = 64
    """How many of the teacher's likeliest tokens are compared at every position."""
    objective: DistillObjective = Distill(over=MASK)
    """What is minimised. One of yours finds the columns "response_mask", "teacher_ids" and "teacher_logprobs"."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if isinstance(self.data, OnPolicyData):
            check_prompt_room(self.data.sampling, self.budget)
            check_draft_support(self.data.rollout, self.data.sampling)
        return self


class EvalConfig(RunConfig):
    """Everything that decides an evaluation. Every rank has the whole model and answers its share."""

    environment: EnvironmentSettings = ReasoningGymSettings(task="chain_sum")
    """Where tasks and rewards come from."""
    tasks: PositiveInt = 256
    """How many tasks are answered: those that training holds out with evaluation.tasks of this number."""
    samples_per_prompt: PositiveInt = 1
    """Answers a task. With more than one, pass@k is reported for powers of two up to it."""
    sampling: SamplingSettings = SamplingSettings(temperature=0.0)
    """How answers are drawn."""
    rollout: RolloutSettings = NativeRollout()
    """Who draws them: the generator here, or servers, which are asked as they are; then no weights are loaded here."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        check_prompt_room(self.sampling, self.budget)
        check_draft_support(self.rollout, self.sampling)
        return self
