"""The whole config of SFT, DPO, reward models, distillation and evaluation; `policy_configs.py` has GRPO and PPO.

`settings.py`, `environments.py` and `rollout.py` have the parts that they share.

They are read without torch, so that a mistake is reported immediately.
"""

from __future__ import annotations

from typing import Annotated, Any, Self, TypeAlias

from pydantic import Field, PositiveInt, model_validator

from postlude.checks import Positive
from postlude.objectives import KTO, ORPO, SFT, BradleyTerry, Distill, Preference
from postlude.optimizer import AdamW
from postlude.options import Common
from postlude.recipes.config.data import (
    ExampleMixture,
    Examples,
    LabelledExamples,
    LabelledMixture,
    PairMixture,
    Pairs,
    datasets_of,
)
from postlude.recipes.config.environments import EnvironmentSettings, ReasoningGymSettings
from postlude.recipes.config.rollout import NativeRollout, RolloutSettings
from postlude.recipes.config.schema import Settings, TaggedUnion
from postlude.recipes.config.settings import (
    EvaluationSets,
    HeldOutSettings,
    ModelSource,
    ObjectiveFile,
    OptimizerSettings,
    RunConfig,
    SamplingSettings,
    TrainingConfig,
    check_length,
    check_pass_at_k,
    check_sampling,
    check_waits,
    fit_schedule,
)
from postlude.rollout.tasks import SplitBy

MASK = "response_mask"
SUPERVISED_LR = 2e-5  # a token's own target bears larger steps than a reward or a preference, whose default is 1e-6
SFTObjective: TypeAlias = Common[Annotated[SFT | ObjectiveFile, TaggedUnion(sft=SFT, file=ObjectiveFile)]]
PairObjective: TypeAlias = Common[
    Annotated[Preference | ORPO | ObjectiveFile, TaggedUnion(preference=Preference, orpo=ORPO, file=ObjectiveFile)]
]
LabelObjective: TypeAlias = Common[Annotated[KTO | ObjectiveFile, TaggedUnion(kto=KTO, file=ObjectiveFile)]]
RewardObjective: TypeAlias = Common[
    Annotated[BradleyTerry | ObjectiveFile, TaggedUnion(bradley_terry=BradleyTerry, file=ObjectiveFile)]
]
DistillObjective: TypeAlias = Common[
    Annotated[Distill | ObjectiveFile, TaggedUnion(distill=Distill, file=ObjectiveFile)]
]


class SupervisedConfig(TrainingConfig):
    """The settings of recipes that train on dataset rows."""

    batch_size: Common[PositiveInt] = 32
    """Rows a step. The last step of the epochs has the rows that are left."""
    epochs: Common[Positive | None] = None
    """Passes over the rows, each exactly once a pass; none takes 1, unless steps is set."""
    steps: Common[PositiveInt | None] = None
    """Number of steps, in place of epochs; none takes as many as the epochs need."""
    held_out: Common[HeldOutSettings] = HeldOutSettings()
    """Held-out rows."""
    data: Any
    """Rows to train on; each recipe declares which."""

    @property
    def sequences_per_step(self) -> int:
        return self.batch_size

    @property
    def no_score(self) -> str:
        """Why no step is evaluated, or ""."""
        return next((f"held_out.{name} is 0" for name in ("rows", "every") if not getattr(self.held_out, name)), "")

    @model_validator(mode="after")
    def _check_data(self) -> Self:
        datasets = datasets_of(self.data)
        if len(datasets) == 1 and datasets[0].weight is not None:
            raise ValueError("data.weight is set, but there is one dataset. Leave it out, or give a list of datasets.")
        if self.steps is None and any(dataset.streaming for dataset in datasets):
            raise ValueError("data.streaming is true, so the number of rows is unknown. Set steps.")
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        check_length(self.steps, self.epochs)
        if self.steps is not None:
            fit_schedule(self.optimizer, self.steps, "optimizer")
        return self


class SFTConfig(SupervisedConfig):
    """Config of an SFT run."""

    data: Common[Annotated[Examples | ExampleMixture, TaggedUnion(Examples, mixture=ExampleMixture)]]
    """Rows to train on: a dataset, or a list of datasets to mix."""
    optimizer: OptimizerSettings = AdamW(lr=SUPERVISED_LR)
    """Optimizer."""
    objective: SFTObjective = SFT(over="loss_mask")
    """Objective to minimise. One of yours finds the column "loss_mask": 1 for tokens to train on."""


class PairConfig(SupervisedConfig):
    """The settings of recipes that train on pairs of completions."""

    data: Common[Annotated[Pairs | PairMixture, TaggedUnion(Pairs, mixture=PairMixture)]]
    """Pairs to train on: a dataset, or a list of datasets to mix."""

    @property
    def sequences_per_step(self) -> int:
        """Both completions of each pair."""
        return 2 * self.batch_size


class DPOConfig(PairConfig):
    """Config of a run of DPO, IPO, SimPO or ORPO."""

    objective: PairObjective = Preference()
    """Objective to minimise. One of yours finds the columns "response_mask" and "reference_logprobs", "margins" with
    data.margin, and the two completions of a pair side by side."""

    @model_validator(mode="after")
    def _check_margin(self) -> Self:
        objective = self.objective
        reads_margins = isinstance(objective, ObjectiveFile) or getattr(objective, "loss_type", "") == "sigmoid"
        margin = datasets_of(self.data)[0].margin
        if margin is not None and not reads_margins:
            raise ValueError(
                f"data.margin is {margin}, but only the sigmoid loss of pairs has a margin. Leave it out, or "
                "set objective.kind to preference and objective.loss_type to sigmoid."
            )
        return self

    @property
    def has_reference(self) -> bool:
        """Whether the objective reads the log-probs of the model that the run started from."""
        return isinstance(self.objective, ObjectiveFile) or self.objective.reference

    @property
    def other_models(self) -> tuple[str, ...]:
        return (self.model,) if self.has_reference and self.lora is None else ()


class KTOConfig(SupervisedConfig):
    """Config of a KTO run."""

    data: Common[Annotated[LabelledExamples | LabelledMixture, TaggedUnion(LabelledExamples, mixture=LabelledMixture)]]
    """Completions to train on, each with a label: a dataset, or a list of datasets to mix."""
    batch_size: Common[Annotated[int, Field(ge=2)]] = 32
    """Rows a step. The KL is estimated from completions after the prompts of other rows."""
    objective: LabelObjective = KTO()
    """Objective to minimise. One of yours finds the columns "response_mask", "reference_logprobs", "desirable" and
    "batch_kl"."""

    @property
    def other_models(self) -> tuple[str, ...]:
        return (self.model,) if self.lora is None else ()


class RMConfig(PairConfig):
    """Config of a run that trains a reward model."""

    optimizer: OptimizerSettings = AdamW(lr=1e-5)
    """Optimizer."""
    objective: RewardObjective = BradleyTerry()
    """Objective to minimise. One of yours finds the column "response_mask", "margins" with data.margin, the two
    completions of a pair side by side, and the value head as inputs.head.values."""

    @property
    def has_value_head(self) -> bool:
        return True


class OnPolicyData(Settings):
    """The student's own completions of tasks."""

    environment: EnvironmentSettings = ReasoningGymSettings(task="chain_sum")
    """Source of tasks. Rewards are reported but not trained on."""
    sampling: Common[SamplingSettings] = SamplingSettings()
    """Sampling parameters of completions."""
    rollout: RolloutSettings = NativeRollout()
    """Rollout engine: the native generator, or servers that get the student's weights after every step."""
    samples_per_prompt: Common[PositiveInt] = 1
    """Completions of each prompt."""
    save_completions: bool = False
    """Save all completions of every step as Parquet: completions/ in the run directory. Needs pyarrow."""


class DistillConfig(SupervisedConfig):
    """Config of a distillation run."""

    teacher: Common[ModelSource]
    """Hugging Face directory, GGUF file, or built-in model, with the student's vocabulary."""
    data: Common[
        Annotated[
            Examples | OnPolicyData | ExampleMixture,
            TaggedUnion(examples=Examples, on_policy=OnPolicyData, mixture=ExampleMixture),
        ]
    ] = OnPolicyData()
    """Completions to train on: those of a dataset or of a list of datasets to mix, or the student's own."""
    top_k: Common[PositiveInt] = 64
    """Number of the teacher's most likely tokens to compare at every position."""
    optimizer: OptimizerSettings = AdamW(lr=SUPERVISED_LR)
    """Optimizer."""
    objective: DistillObjective = Distill(over=MASK)
    """Objective to minimise. One of yours finds the columns "response_mask", "teacher_ids" and "teacher_logprobs"."""

    @property
    def teacher_is_base(self) -> bool:
        return self.lora is not None and self.teacher == self.model

    @property
    def other_models(self) -> tuple[str, ...]:
        """The teacher, unless it is the frozen model of LoRA."""
        return () if self.teacher_is_base else (self.teacher,)

    @property
    def batch_invariant(self) -> bool:
        """Whether student and generator agree to the bit."""
        rollout = self.data.rollout if isinstance(self.data, OnPolicyData) else None
        return isinstance(rollout, NativeRollout) and rollout.batch_invariant

    @property
    def sequences_per_step(self) -> int:
        return self.batch_size * (self.data.samples_per_prompt if isinstance(self.data, OnPolicyData) else 1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if isinstance(self.data, OnPolicyData):
            check_waits(self.data.environment)
            check_sampling(self.data.sampling, self.budget, self.data.rollout)
        return self


class EvalConfig(RunConfig):
    """Config of an evaluation. Every rank has the whole model and samples its share."""

    environment: EnvironmentSettings = ReasoningGymSettings(task="chain_sum")
    """Source of tasks and rewards."""
    tasks: Common[PositiveInt] = 256
    """Number of tasks: those that training holds out with evaluation.tasks of this number. Tasks that the run of the
    model was trained on are left out."""
    split_by: SplitBy = "prompt"
    """What distinguishes tasks, as evaluation.split_by in training: the "prompt", or the whole "row"."""
    samples_per_prompt: Common[PositiveInt] = 1
    """Completions of each task. With more than one, pass@k is reported for powers of two up to it."""
    solved: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Reward from which on a completion solves its task, for pass@k."""
    sets: EvaluationSets = Field(default_factory=dict)
    """Other sets by name, evaluated too; their metrics are eval/NAME/…."""
    save_completions: bool = False
    """Save all completions of the tasks, not of the sets, as Parquet in completions/ of the run. Needs pyarrow."""
    sampling: Common[SamplingSettings] = SamplingSettings(temperature=0.0)
    """Sampling parameters of completions."""
    rollout: RolloutSettings = NativeRollout()
    """Rollout engine: the native generator, or servers. With servers, no weights are loaded here."""

    @property
    def batch_invariant(self) -> bool:
        """Whether completions do not depend on what is generated beside them, to the bit."""
        return isinstance(self.rollout, NativeRollout) and self.rollout.batch_invariant

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_waits(self.environment)
        check_sampling(self.sampling, self.budget, self.rollout)
        check_pass_at_k(self.samples_per_prompt, self.sampling.temperature, "sampling.temperature")
        if self.rollout.share_gpu:
            raise ValueError("rollout.share_gpu is true, but an evaluation trains nothing to move. Leave it out.")
        return self
