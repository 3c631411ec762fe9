"""Parts that several recipes' configs share: sampling, evaluation, training. The strings under fields are `--help`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from postlude.checks import NonNegative, Positive
from postlude.generate.sampling_params import SamplingParams
from postlude.layout import Layout
from postlude.lora import LoRA
from postlude.objectives import Objective, load_objective
from postlude.optimizer import SGD, AdamW
from postlude.options import Common, Draft
from postlude.recipes.config.environments import EnvironmentSettings, EpisodeRunSettings
from postlude.recipes.config.rewards import Code
from postlude.recipes.config.rollout import LaunchedVLLM, NativeRollout, Rollout, SyncSettings
from postlude.recipes.config.schema import InputPath, Settings, TaggedUnion
from postlude.recipes.report.metrics import COMPONENTS
from postlude.recipes.run.loggers import parse_logger
from postlude.rollout.tasks import SplitBy
from postlude.training_options import ForwardOptions, TrainingOptions


class ObserveSettings(Settings):
    """How other programs watch a run while it goes on. The run directory has its status and metrics in any case."""

    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port at which rank 0 serves /metrics in Prometheus's format; 0 takes a free one, which is printed. None serves
    nothing."""
    metrics_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address of metrics_port. Without a key: whoever reaches it reads the metrics."""
    traces: bool = False
    """Whether rank 0 sends OpenTelemetry traces of the steps, with requests and rewards. The variables OTEL_… say where
    to. It needs postlude[traces]."""


HELD_OUT_TASKS = 64  # of an evaluation that does not say how many
ModelSource: TypeAlias = Annotated[str, InputPath("model")]
"""A model's directory or file, or the name of a built-in model or of one on the Hugging Face Hub."""
OptimizerSettings: TypeAlias = Common[Annotated[AdamW | SGD, TaggedUnion(adamw=AdamW, sgd=SGD)]]
RUN_NAME = "{name}"


class ObjectiveFile(Settings):
    """An objective of yours: a function of `OutputInputs` that returns a `Loss`, or a class of such functions."""

    text_field: ClassVar[str] = "file"
    """The field that plain text sets."""

    file: Code
    """path/to/file.py:name."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the objective."""


def build_objective(objective: Objective | ObjectiveFile) -> Objective:
    """Returns the objective, loaded from its file if it is a user's."""
    if isinstance(objective, ObjectiveFile):
        return load_objective(objective.file, objective.settings)
    return objective


Temperature: TypeAlias = Annotated[
    NonNegative, AfterValidator(lambda value: SamplingParams(temperature=value).temperature)
]

TopP: TypeAlias = Annotated[float, Field(gt=0, le=1), AfterValidator(lambda value: SamplingParams(top_p=value).top_p)]
MinP: TypeAlias = Annotated[float, Field(ge=0, le=1)]
StopTexts: TypeAlias = tuple[Annotated[str, Field(min_length=1)], ...]


class SamplingSettings(Settings):
    """Sampling parameters of completions."""

    max_new_tokens: Common[PositiveInt] = 256
    """Maximum number of tokens of a completion."""
    temperature: Common[Temperature] = 1.0
    """Sampling temperature."""
    top_k: NonNegativeInt = 0
    """Sample from the k most likely tokens; 0 samples from all."""
    top_p: TopP = 1.0
    """Sample from the smallest set of tokens with this total probability."""
    min_p: MinP = 0.0
    """Sample from tokens with at least this fraction of the highest probability."""
    stop: StopTexts = ()
    """Strings that end a completion."""
    stop_tokens: tuple[NonNegativeInt | Annotated[str, Field(min_length=1)], ...] = ()
    """Tokens that end a completion, besides the model's end-of-sequence tokens: ids, or tokens as the tokenizer writes
    them, such as <end_of_turn>. A number is always an id."""
    draft: Draft | None = None
    """Speculative decoding with the model's first multi-token-prediction depth. The completions do not change."""

    @property
    def params(self) -> SamplingParams:
        """The parameters of a request, without stop tokens and seed."""
        names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "stop")
        return SamplingParams(**{name: getattr(self, name) for name in names})

    def stop_ids(self, tokenizer: Any) -> tuple[int, ...]:
        """Returns the ids of `stop_tokens`. Raises if the tokenizer does not have one of them."""
        # Values of the command line are text, numbers included.
        tokens = [int(token) if str(token).isdecimal() else token for token in self.stop_tokens]
        vocabulary = tokenizer.get_vocab() if any(isinstance(token, str) for token in tokens) else {}
        for token in tokens:
            if isinstance(token, str) and token not in vocabulary:
                raise ValueError(
                    f"sampling.stop_tokens has {token!r}, which is not a token of the tokenizer. Give one of its "
                    "tokens or an id; a text of several tokens belongs in sampling.stop."
                )
        return tuple(vocabulary[token] if isinstance(token, str) else token for token in tokens)


class PassSettings(Settings):
    """Completions of each task of an evaluation, how they are sampled, and which of them solve it."""

    samples_per_prompt: PositiveInt = 1
    """Completions of each task. With more than one, pass@k is reported for powers of two up to it."""
    temperature: Temperature = 0.0
    """Sampling temperature of evaluation; 0 is greedy."""
    max_new_tokens: PositiveInt | None = None
    """Maximum number of tokens of a completion of evaluation; none takes that of sampling, as do the next four."""
    top_k: NonNegativeInt | None = None
    """Sample from the k most likely tokens in evaluation; 0 samples from all."""
    top_p: TopP | None = None
    """Sample from the smallest set of tokens with this total probability in evaluation."""
    min_p: MinP | None = None
    """Sample from tokens with at least this fraction of the highest probability in evaluation."""
    stop: StopTexts | None = None
    """Strings that end a completion of evaluation."""
    solved: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Reward from which on a completion solves its task, for pass@k."""

    @model_validator(mode="after")
    def _check_samples(self) -> Self:
        check_pass_at_k(self.samples_per_prompt, self.temperature)
        unused = [name for name in ("top_k", "top_p", "min_p") if getattr(self, name) is not None]
        if unused and not self.temperature:
            raise ValueError(
                f"{unused[0]} is {getattr(self, unused[0])}, but temperature is 0, which always takes the likeliest "
                f"token. Raise temperature, or leave {unused[0]} out."
            )
        return self

    def sampling(self, training: SamplingSettings) -> SamplingSettings:
        """Returns the sampling parameters of the evaluation, given those of training for what it does not set."""
        names = ("temperature", "max_new_tokens", "top_k", "top_p", "min_p", "stop")
        changed = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return training.model_copy(update=changed)


def check_pass_at_k(samples_per_prompt: int, temperature: float, key: str = "temperature") -> None:
    """Refuses several completions of a task at temperature 0."""
    if samples_per_prompt > 1 and not temperature:
        raise ValueError(
            f"samples_per_prompt is {samples_per_prompt}, but {key} is 0, which gives the same completion each time: "
            f"pass@k would be pass@1. Raise {key}, or set samples_per_prompt to 1."
        )


def check_waits(settings: EnvironmentSettings) -> None:
    """Refuses stragglers where all episodes are waited for."""
    if isinstance(settings, EpisodeRunSettings) and settings.stragglers != "wait":
        raise ValueError(
            f"environment.stragglers is {settings.stragglers}, but only steps of grpo and ppo go on without an "
            "episode; here all are waited for. Leave stragglers and needed_share out."
        )


class EvaluationSetSettings(PassSettings):
    """A set of tasks beside the held-out ones, with its own reward."""

    environment: EnvironmentSettings
    """Source of its tasks and rewards."""
    tasks: PositiveInt = 256
    """Maximum number of tasks: the last ones with different prompts."""

    @model_validator(mode="after")
    def _check_waits(self) -> Self:
        check_waits(self.environment)
        return self


def _check_sets(sets: dict[str, EvaluationSetSettings]) -> dict[str, EvaluationSetSettings]:
    for name in sets:
        if not re.fullmatch(r"\w[\w.-]*", name) or name == COMPONENTS.rstrip("/"):
            raise ValueError(
                f"a set is called {name!r}, but its name is part of its metrics, eval/NAME/reward_mean: give it "
                'letters, digits, "_", "-" and ".", and another name than "reward".'
            )
    return sets


EvaluationSets: TypeAlias = Annotated[dict[str, EvaluationSetSettings], AfterValidator(_check_sets)]


class EvaluationSettings(PassSettings):
    """Evaluation on held-out tasks: before the first step, every so many steps, and after the last."""

    every: Common[NonNegativeInt] = 50
    """Steps between evaluations; 0 disables evaluation."""
    at_start: bool = True
    """Evaluate before the first step too."""
    tasks: Common[NonNegativeInt | None] = None
    """Number of held-out tasks, of each environment: the last ones with different prompts. Other tasks with one of
    these prompts are not trained on either. They are held out also if `every` is 0, to be evaluated later; none takes
    64, or 0 if it is 0."""
    split_by: SplitBy = "prompt"
    """What distinguishes held-out tasks from trained ones: the "prompt", or the whole "row" where prompts are equal and
    rows differ, such as in games."""
    sets: EvaluationSets = Field(default_factory=dict)
    """Other sets by name, evaluated with the held-out tasks; their metrics are eval/NAME/…. Their prompts are not
    trained on."""

    @model_validator(mode="after")
    def _check_every(self) -> Self:
        if self.sets and not self.every:
            raise ValueError(f"sets has {', '.join(self.sets)}, but every is 0, which evaluates nothing. Raise it.")
        if self.every and not (self.held_out or self.sets):
            raise ValueError("tasks is 0 and there are no sets, so there is nothing to evaluate. Set every to 0.")
        return self

    @property
    def held_out(self) -> int:
        return self.tasks if self.tasks is not None else HELD_OUT_TASKS if self.every else 0


class HeldOutSettings(Settings):
    """Evaluation on held-out rows: before the first step, every so many steps, and after the last."""

    every: Common[NonNegativeInt] = 50
    """Steps between evaluations; 0 disables evaluation."""
    at_start: bool = True
    """Evaluate before the first step too."""
    rows: Common[NonNegativeInt] = 0
    """Number of held-out rows: the dataset's last ones with different prompts. Other rows with one of these prompts are
    not trained on either. A row without a prompt is compared as a whole. 0 disables evaluation."""


def _check_loggers(loggers: tuple[str, ...]) -> tuple[str, ...]:
    names = [parse_logger(logger)[0] for logger in loggers]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"loggers has {name} more than once. Leave one.")
    return loggers


class ClusterSettings(Settings):
    """Resources of a run on a Ray cluster (--ray)."""

    cpus_per_rank: PositiveInt | None = None
    """CPUs of each rank, which are also its threads; none takes 1, or an equal share of the machine on a local Ray
    without GPUs."""
    gpus_per_rank: Annotated[float, Field(gt=0.5, le=1)] = 1.0
    """GPUs of each rank on cuda. With less than 1, servers can use the rest of the GPU (rollout.gpus). It is more than
    0.5, so that two ranks never share a GPU."""
    cpus_per_worker: NonNegative = 1.0
    """CPUs of each reward worker."""
    max_restarts: NonNegativeInt = 3
    """Maximum number of restarts in a row after a lost rank, without a new checkpoint in between."""


def _check_run(run: Any) -> Any:
    if run == "":
        raise ValueError("run is empty, which would be the working directory itself; name a directory.")
    return run


class RunConfig(Settings, ForwardOptions):
    """The settings of every recipe."""

    model: Common[ModelSource] = "tiny-dense"
    """Hugging Face directory, GGUF file, built-in model, or ORG/NAME or ORG/NAME@REVISION on the Hugging Face Hub."""
    chat_template: Annotated[Path, InputPath("path")] | None = None
    """File of a chat template (Jinja) in place of the tokenizer's. It is exported with the model."""
    trust_remote_code: bool = False
    """Whether Python files of the model's directory may run as its tokenizer, with your rights."""
    run: Common[Annotated[Path, BeforeValidator(_check_run)]] = Path(f"runs/{RUN_NAME}")
    """Run directory, relative to the working directory. A run with the same config is resumed. {name} is the name of
    the config file without its extension or, without a file, of the recipe and the model."""
    context_length: Annotated[int, Field(ge=2)] | None = None
    """Maximum number of tokens of a sequence, prompt and completion together; none takes what the config of the model
    states. A larger number lets the model read more than that."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Compute dtype; none takes bfloat16 on a GPU and float32 elsewhere."""
    loggers: Common[Annotated[tuple[str, ...], AfterValidator(_check_loggers)]] = ("tensorboard",)
    """Loggers besides metrics.jsonl: tensorboard, wandb, mlflow, trackio. A project may follow a colon: wandb:sums."""
    observe: ObserveSettings = ObserveSettings()
    """How other programs watch the run."""
    cluster: ClusterSettings = ClusterSettings()
    """Resources on a Ray cluster."""

    def load_tokenizer(self) -> Any:
        """Returns the tokenizer of `model`, with `chat_template`."""
        from postlude.hf.load import load_tokenizer  # imports torch

        return load_tokenizer(self.model, self.chat_template, trust_remote_code=self.trust_remote_code)

    @property
    def batch_invariant(self) -> bool:
        """Whether the bits of a token's results must not depend on its batch (`NativeRollout.batch_invariant`)."""
        return False


class RunLimits(Settings):
    """When a run ends because it cannot learn any more, and when it warns."""

    failed_rewards: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Maximum fraction of failed reward calls in a step. The run ends after `patience` steps in a row above it, or if
    all calls of the first step fail; it can be resumed."""
    weight_growth: Annotated[float, Field(gt=1)] = 100.0
    """Maximum growth of the norm of all weights since the start, checked at every checkpoint."""
    entropy: NonNegative = 0.01
    """Mean entropy of the policy, in nats per token, below which the run warns."""
    patience: PositiveInt = 5
    """Steps in a row before the run ends for failed rewards, or warns of low entropy or equal rewards."""


class RolloutLimits(RunLimits):
    """The limits of recipes that train on rewards."""

    rollout_kl: Positive | None = None
    """Maximum KL of generator and trainer in a step (metric rollout_kl), above which the run saves its state and ends;
    none is no limit."""
    rollout_chi2: Positive | None = None
    """The same for χ² (metric rollout_chi2), which large importance ratios raise more than the KL."""


class MTPSettings(Settings):
    """Multi-token prediction besides the objective, with the model's own depths or with new ones."""

    weight: NonNegative = 0.1
    """Weight of the mean loss of the depths."""
    depths: PositiveInt = 1
    """Number of depths: how many tokens beyond the next are predicted. A model with depths keeps their number."""
    layers: str | None = None
    """Pattern of each new depth; none takes that of the model's family, or the model's last layer."""
    stop_trunk: bool = False
    """Stop the gradient of this loss before the trunk and the embedding."""
    stop_head: bool = False
    """Stop the gradient of this loss before the output head."""
    processor: Code | None = None
    """A loss of yours in place of the negative log-likelihood: path/to/file.py:name, a function of depth, inputs and
    context that returns a loss for each token."""
    context: dict[str, Any] = Field(default_factory=dict)
    """The context that the processor gets."""


class TrainingConfig(RunConfig, TrainingOptions):
    """The settings of every recipe that trains."""

    # Fields of `TrainingOptions` whose text form, or type, is a config's own.
    layout: Common[Annotated[Layout, TaggedUnion(Layout)]] = Layout()
    optimizer: OptimizerSettings = AdamW()
    lora: Common[LoRA | None] = None
    mtp: MTPSettings | None = None
    """Multi-token prediction besides the objective; none disables it."""
    save_every: Common[NonNegativeInt] = 50
    """Steps between checkpoints; 0 saves only the last one."""
    keep_checkpoints: PositiveInt = 2
    """Number of checkpoints to keep."""
    max_skipped_steps: NonNegativeInt = 10
    """Maximum number of optimizer steps in a row with a loss or gradient that is not finite. Then the run ends."""
    file_changes: Literal["refuse", "allow"] = "refuse"
    """Whether to resume a run after a file that its config names was changed: a dataset, a model, a chat template, or
    code of yours."""
    limits: RunLimits = RunLimits()
    """Limits at which the run ends or warns, because it learns nothing more."""
    export: Common[bool | Literal["best"]] = True
    """Export the trained model at the end, as a Hugging Face directory: model/ in the run directory. With LoRA it is
    the merged model, and adapter/ has the adapters as peft reads them. "best" keeps the checkpoint with the best score
    on held-out data besides the newest ones, and exports that one instead of the last."""

    push_to_hub: Annotated[str, Field(pattern=r"^[\w-][\w.-]*/[\w.-]+$")] | None = None
    """Repository of the Hugging Face Hub, ORG/NAME, to upload the exported model to; a new one is private. It needs a
    token that can write: `hf auth login`, or HF_TOKEN."""

    @model_validator(mode="after")
    def _check_push(self) -> Self:
        if self.push_to_hub is not None and not self.export:
            raise ValueError(f"push_to_hub is {self.push_to_hub}, but export is false. Leave either out.")
        return self

    @model_validator(mode="after")
    def _check_best(self) -> Self:
        if self.export == "best" and self.no_score:
            raise ValueError(f"export is best, but {self.no_score}, so no step has a score. Raise it, or export true.")
        return self

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        TrainingOptions.of(self)
        return self

    @property
    def no_score(self) -> str:
        """Why no step is evaluated on held-out data, or ""."""
        return ""

    @property
    def other_models(self) -> tuple[str, ...]:
        """Models in memory besides the trained one: a reference, a teacher."""
        return ()

    @property
    def has_value_head(self) -> bool:
        return False


def check_length(steps: int | None, epochs: float | None) -> None:
    """Refuses a run whose length is given twice."""
    if steps is not None and epochs is not None:
        raise ValueError(f"steps is {steps} and epochs is {epochs:g}, but each is the length of the run. Give one.")


def fit_schedule(optimizer: AdamW | SGD, steps: int, key: str) -> AdamW | SGD:
    """Returns the optimizer of a run of `steps` optimizer steps. Refuses a schedule that reaches 0 before the end."""
    schedule = optimizer.schedule
    early = schedule.shape != "constant" and schedule.steps is not None and schedule.steps < steps
    if early and not schedule.floor:
        raise ValueError(
            f"{key}.schedule.steps is {schedule.steps}, but the run makes {steps} optimizer steps: the learning rate "
            f"would be 0 in the last {steps - (schedule.steps or 0)}. Leave it out, and it is {steps}; or set "
            f"{key}.schedule.floor."
        )
    return replace(optimizer, schedule=schedule.with_steps(steps))


def check_sampling(sampling: SamplingSettings, budget: int, rollout: Rollout, key: str = "sampling") -> None:
    """Refuses completions that leave no room for a prompt, drafting on servers, and NCCL on a shared GPU."""
    if sampling.max_new_tokens > budget - 2:
        raise ValueError(
            f"{key}.max_new_tokens is {sampling.max_new_tokens}, which leaves no room for a prompt in a budget of "
            f"{budget} tokens. Raise budget."
        )
    if sampling.draft is not None and not isinstance(rollout, NativeRollout):
        raise ValueError("sampling.draft works with rollout: native only; a server drafts as it was started to.")
    if rollout.share_gpu and isinstance(rollout, SyncSettings) and rollout.sync == "network":
        raise ValueError(
            "rollout.share_gpu is for servers on the trainer's GPU, but rollout.sync is network, which needs a GPU for "
            "each process. Leave rollout.sync out."
        )
    if isinstance(rollout, SyncSettings) and rollout.sync == "ipc" and not isinstance(rollout, LaunchedVLLM):
        raise ValueError(
            "rollout.sync is ipc, but only vLLM that the run starts (rollout: vllm) has our part that reads shared "
            "memory. Leave it out."
        )
    if isinstance(rollout, LaunchedVLLM) and rollout.sync == "ipc" and rollout.gpus and not rollout.share_gpu:
        raise ValueError(
            "rollout.sync is ipc, which shares memory of one device, but vLLM has GPUs of its own. Set "
            "rollout.share_gpu, or rollout.sync to disk or network."
        )
