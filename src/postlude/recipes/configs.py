"""What decides a run of each recipe: its whole config. `settings.py` has the parts that several share.

They are read without torch, so that a mistake is named at once; the recipes themselves are in files of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from postlude.objectives import SFT, Distill, PolicyGradient, Preference
from postlude.optimizer import AdamW
from postlude.recipes.examples import Examples, Pairs
from postlude.recipes.schema import Kind
from postlude.recipes.settings import (
    Answers,
    EnvironmentSettings,
    Evaluation,
    Gym,
    HeldOut,
    Model,
    ObjectiveFile,
    OptimizerSettings,
    Training,
    at_least,
    room_for_prompts,
)

MASK = "response_mask"
SFTObjective: TypeAlias = Annotated[SFT, Kind("sft")] | Annotated[ObjectiveFile, Kind("file")]
PairObjective: TypeAlias = Annotated[Preference, Kind("preference")] | Annotated[ObjectiveFile, Kind("file")]
PolicyObjective: TypeAlias = Annotated[PolicyGradient, Kind("policy")] | Annotated[ObjectiveFile, Kind("file")]
DistillObjective: TypeAlias = Annotated[Distill, Kind("distill")] | Annotated[ObjectiveFile, Kind("file")]


@dataclass(frozen=True, kw_only=True)
class Supervised(Training):
    """What is common to recipes that learn from rows."""

    batch: int = 32
    """Rows a step."""
    epochs: float = 1.0
    """How often each row is learned. Not used where steps are given."""
    steps: int | None = None
    """How many steps; none takes as many as the epochs need."""
    held_out: HeldOut = field(default_factory=HeldOut)
    """Rows to measure progress on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "batch")
        if self.steps is not None:
            at_least(self, 1, "steps")
        if self.epochs <= 0:
            raise ValueError(f"epochs is {self.epochs:g}, but must be above 0.")


@dataclass(frozen=True, kw_only=True)
class SFTConfig(Supervised):
    """Everything that decides an SFT run."""

    data: Examples
    """The rows to learn from."""
    objective: SFTObjective = field(default_factory=lambda: SFT(over="loss_mask"))
    """What is minimised. One of yours finds the column "loss_mask": 1 for tokens to learn."""


@dataclass(frozen=True, kw_only=True)
class DPOConfig(Supervised):
    """Everything that decides a run of DPO, IPO or SimPO."""

    data: Pairs
    """The pairs to learn from."""
    objective: PairObjective = field(default_factory=Preference)
    """What is minimised. One of yours finds the columns "response_mask" and "reference_logprobs", and the two of a pair
    side by side."""

    @property
    def has_reference(self) -> bool:
        """Whether the objective looks at the model that the run started from."""
        return isinstance(self.objective, ObjectiveFile) or self.objective.reference


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Supervised steps on the tasks' own answers, before the first rollout."""

    steps: int = 0
    """How many; 0 leaves it out."""
    examples: int = 64
    """Examples a step."""
    optimizer: OptimizerSettings = field(default_factory=lambda: AdamW(lr=2e-3))
    """How weights are moved in them."""


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(Training):
    """Everything that decides a GRPO run."""

    environment: EnvironmentSettings = field(default_factory=lambda: Gym(task="chain_sum"))
    """Where tasks and rewards come from."""
    steps: int = 200
    """Steps of GRPO, after those of the warm start."""
    prompts: int = 32
    """Prompts a step."""
    samples: int = 8
    """Answers to each prompt: a group."""
    answers: Answers = field(default_factory=Answers)
    """How answers are drawn."""
    objective: PolicyObjective = field(default_factory=lambda: PolicyGradient(clip_high=0.28))
    """What is minimised. Columns that it, or one of yours, finds: to be a mean over, "response_mask" of sampled
    tokens, "sequence_mean" of answers, "group_mean" of prompts; "advantages", "old_logprobs", "rollout_logprobs";
    "positive", 1 for answers with a reward of 1; and "reference_logprobs" where it asks for them."""
    reference: bool = False
    """Whether an objective of yours reads what the model after the warm start says; the one here knows itself."""
    advantages: Literal["grpo", "grpo_loo", "dr_grpo", "rloo"] = "grpo"
    """How rewards become advantages within a group: with the mean of all or of the others, divided by the deviation
    or not."""
    minibatches: int = 1
    """Optimizer steps a rollout; each takes an equal share of the prompts."""
    old_logprobs: Literal["rollout", "recompute"] = "rollout"
    """Whether the ratio starts from what the sampler said or from what the trainer computes."""
    dynamic_sampling: int = 0
    """How many more rounds of prompts to draw in place of groups whose rewards are all alike (DAPO)."""
    overlong: Literal["learn", "mask"] = "learn"
    """Whether answers cut off at max_new_tokens are learned from or left out."""
    overlong_penalty: float = 0.0
    """Taken from the reward of an answer that was cut off."""
    warm_start: WarmStart = field(default_factory=WarmStart)
    """Supervised steps before the first rollout."""
    evaluation: Evaluation = field(default_factory=Evaluation)
    """How progress is measured on held-out tasks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "steps", "prompts", "minibatches")
        at_least(self, 0, "dynamic_sampling", "overlong_penalty")
        room_for_prompts(self.answers, self.budget)
        if self.samples < 2:
            raise ValueError(f"samples is {self.samples}, but a group needs at least 2 answers to compare.")
        if self.answers.temperature <= 0:
            raise ValueError("answers.temperature is 0, but a group of equal answers has nothing to compare.")
        if isinstance(self.objective, PolicyGradient):
            if self.reference:
                raise ValueError("reference is for an objective of yours; set objective.kl instead.")
            if self.objective.temperature not in (1.0, self.answers.temperature):
                raise ValueError(
                    f"objective.temperature is {self.objective.temperature:g}, but answers are drawn at "
                    f"{self.answers.temperature:g}. Leave it out: it is taken from there."
                )
            if self.objective.correction is not None and self.starts_from_rollout:
                raise ValueError(
                    "objective.correction weighs the trainer's log-probs against the sampler's, but old_logprobs takes "
                    "the sampler's for both. Set old_logprobs to recompute."
                )
        if self.prompts % self.minibatches:
            raise ValueError(f"minibatches is {self.minibatches}, which does not divide prompts={self.prompts}.")

    @property
    def starts_from_rollout(self) -> bool:
        """Whether ratios are taken to what the sampler said, so that the first of them show how far it is off."""
        objective = self.objective
        own = isinstance(objective, PolicyGradient) and objective.ratio != "on_policy"
        return own and self.old_logprobs == "rollout"

    @property
    def has_reference(self) -> bool:
        """Whether the objective looks at the model that GRPO started from."""
        return self.reference if isinstance(self.objective, ObjectiveFile) else self.objective.kl is not None


@dataclass(frozen=True, kw_only=True)
class OwnAnswers:
    """The student's own answers to tasks, on which the teacher then corrects it."""

    environment: EnvironmentSettings = field(default_factory=lambda: Gym(task="chain_sum"))
    """Where tasks come from. Rewards are reported, not learned from."""
    answers: Answers = field(default_factory=Answers)
    """How answers are drawn."""
    samples: int = 1
    """Answers to each prompt."""

    def __post_init__(self) -> None:
        at_least(self, 1, "samples")


@dataclass(frozen=True, kw_only=True)
class DistillConfig(Supervised):
    """Everything that decides a run of distillation."""

    teacher: str
    """A Hugging Face directory, a GGUF file, or a built-in model, with the tokens of the student."""
    data: Annotated[Examples, Kind("examples")] | Annotated[OwnAnswers, Kind("own_answers")] = field(
        default_factory=OwnAnswers
    )
    """What is learned on: written answers, or the student's own."""
    top_k: int = 64
    """How many of the teacher's likeliest tokens are compared at every position."""
    objective: DistillObjective = field(default_factory=lambda: Distill(over=MASK))
    """What is minimised. One of yours finds the columns "response_mask", "teacher_ids" and "teacher_logprobs"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "top_k")
        if isinstance(self.data, OwnAnswers):
            room_for_prompts(self.data.answers, self.budget)


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Model):
    """Everything that decides an evaluation. Every rank has the whole model and answers its share."""

    environment: EnvironmentSettings = field(default_factory=lambda: Gym(task="chain_sum"))
    """Where tasks and rewards come from."""
    tasks: int = 256
    """How many tasks are answered: the last of the environment, as training holds them out."""
    samples: int = 1
    """Answers a task. With more than one, pass@k is reported for powers of two up to it."""
    answers: Answers = field(default_factory=lambda: Answers(temperature=0.0))
    """How answers are drawn."""

    def __post_init__(self) -> None:
        at_least(self, 1, "tasks", "samples")
        room_for_prompts(self.answers, self.budget)
