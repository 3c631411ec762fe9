"""The parts that recipes' configs are made of: where tasks come from, how answers are drawn, how often to save."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveInt

from postlude.data.datasets import read_rows
from postlude.generate.sampling_params import SamplingParams
from postlude.head import HeadConfig
from postlude.layout import Layout
from postlude.objectives import Objective, load_objective
from postlude.optimizer import SGD, AdamW
from postlude.options import Overlap, Recompute, WeightStorage
from postlude.pool.worker_pool import PoolFactory
from postlude.recipes.config.rollout import NativeRollout, Rollout
from postlude.recipes.config.schema import InputPath, NonNegative, Positive, Settings, TaggedUnion
from postlude.recipes.run.loggers import parse_logger
from postlude.rollout.async_environment import AsyncEnvironment
from postlude.rollout.environments import Environment, MultiTurn, SingleTurn, is_chat
from postlude.rollout.openenv import OpenEnvServer, OpenEnvTasks
from postlude.rollout.rewards import RewardPool
from postlude.rollout.tasks import DatasetTasks, ReasoningGym, SplitBy, Task, Tasks
from postlude.rollout.tools import ToolReply, load_tools, tool_schema
from postlude.rollout.verifiers import MathReward
from postlude.user_code import load_callable

Code: TypeAlias = Annotated[str, InputPath("code")]
"""path/to/file.py:name of something of the user's."""
ModelSource: TypeAlias = Annotated[str, InputPath("model")]
"""A model's directory or file, or the name of a built-in one."""
FailedReward: TypeAlias = Annotated[float, Field(allow_inf_nan=False)] | None
OptimizerSettings: TypeAlias = Annotated[AdamW | SGD, TaggedUnion(adamw=AdamW, sgd=SGD)]


class ReasoningGymSettings(Settings):
    """Tasks that reasoning-gym makes."""

    task: str
    """Name of the task, such as chain_sum."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """The task's own settings."""
    size: PositiveInt = 10_000
    """How many tasks there are to draw from."""
    template: str | None = None
    """The prompt, made of an entry's fields: "{metadata[expression]} =". None asks the question as a chat message."""
    tag: str | None = "answer"
    """The tag that the answer is asked for in; none takes the whole completion. Not used with a template."""
    system: str | None = None
    """A system message before the question. Not used with a template."""
    workers: NonNegativeInt = 0
    """Processes that score answers; 0 scores them in this one."""
    timeout: Positive = 30.0
    """Seconds after which the call that scores an answer counts as failed."""
    failed_reward: FailedReward = None
    """What an answer earns whose call failed; none leaves it out of the baseline and the loss."""

    def build(self, seed: int, pool_factory: PoolFactory | None = None) -> Environment:
        """The environment of these tasks, judged by workers that `pool_factory` finds."""
        tag = None if self.template is not None else self.tag
        gym = ReasoningGym(
            self.task,
            self.settings,
            seed=seed,
            size=self.size,
            tag=tag,
            system=self.system,
            chat=self.template is None,
        )
        tasks: Tasks = gym if self.template is None else Templated(gym, self.template)
        pool = RewardPool(
            gym.reward(),
            workers=self.workers,
            timeout=self.timeout,
            failed_reward=self.failed_reward,
            pool_factory=pool_factory,
        )
        return SingleTurn(tasks, pool)


class PromptSettings(Settings):
    """Prompts of a JSONL or parquet file, and the processes that judge what is said to them."""

    path: Annotated[Path, InputPath("path")]
    """The file, or a directory of them."""
    prompt: str = "prompt"
    """The column with the prompt: text or messages."""
    chat: bool = False
    """Whether a prompt of text is a user's message."""
    system: str | None = None
    """A system message before it."""
    overlong: Literal["refuse", "drop"] = "refuse"
    """What becomes of prompts that leave no room in the budget for a whole answer: they end the run before it begins,
    or are left out."""
    timeout: Positive = 30.0
    """Seconds after which a judgement counts as failed."""
    failed_reward: FailedReward = None
    """What an answer earns whose judgement failed; none leaves it out of the baseline and the loss."""

    def tasks(self) -> Tasks:
        """Every row as a task."""
        return DatasetTasks(read_rows(self.path), prompt=self.prompt, chat=self.chat, system=self.system)


class WorkerSettings(Settings):
    """Where a function of yours is called."""

    workers: NonNegativeInt = 4
    """Processes that judge."""


class TurnSettings(Settings):
    """When an attempt of several turns ends, and what the model is shown of earlier ones."""

    max_turns: PositiveInt
    """The most turns the model has."""
    unfinished_reward: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """What an attempt without an end by then earns."""
    keep_reasoning: bool = False
    """Whether reasoning of earlier turns stays before the model, though its chat template would leave it out."""


class DatasetSettings(PromptSettings, WorkerSettings):
    """Prompts of a file, judged by a function of yours or by comparing mathematics."""

    reward: Code
    """path/to/file.py:name of reward(prompt, completion, example), or "math" to compare with the row's "answer"."""

    def build(self, seed: int, pool_factory: PoolFactory | None = None) -> Environment:
        """The environment of these rows, judged by workers that `pool_factory` finds."""
        score = MathReward() if self.reward == "math" else self.reward
        pool = RewardPool(
            score,
            workers=self.workers,
            timeout=self.timeout,
            failed_reward=self.failed_reward,
            pool_factory=pool_factory,
        )
        return SingleTurn(self.tasks(), pool)


class ConversationSettings(PromptSettings, WorkerSettings, TurnSettings):
    """Prompts of a file, each the beginning of a conversation with a function of yours."""

    reply: Code
    """path/to/file.py:name of reply(prompt, completions, example). Text or messages that it returns are read next; a
    number, or a dict of numbers, is the reward and the end."""

    def build(self, seed: int, pool_factory: PoolFactory | None = None) -> Environment:
        """The environment of these rows, judged by workers that `pool_factory` finds."""
        environment = MultiTurn(
            self.tasks(),
            self.reply,
            max_turns=self.max_turns,
            unfinished_reward=self.unfinished_reward,
            workers=self.workers,
            timeout=self.timeout,
            failed_reward=self.failed_reward,
            pool_factory=pool_factory,
        )
        environment.keep_reasoning = self.keep_reasoning
        return environment


class ToolSettings(PromptSettings, WorkerSettings, TurnSettings):
    """Prompts of a file, answered after calls of tools: functions of yours, as chat models are taught to call them."""

    tools: Annotated[tuple[Code, ...], Field(min_length=1)]
    """path/to/file.py:name of each. Their names, docstrings and types are told to the model by its chat template."""
    reward: Code
    """path/to/file.py:name of reward(prompt, completion, example) for an answer without a call, or "math"."""

    def build(self, seed: int, pool_factory: PoolFactory | None = None) -> Environment:
        """The environment of these rows, judged by workers that `pool_factory` finds."""
        found, tasks = load_tools(self.tools), self.tasks()
        if not is_chat(tasks[0].prompt):
            raise ValueError(
                "tools are called in messages, but prompts are text. Set environment.chat to true, or give messages."
            )
        environment = MultiTurn(
            tasks,
            ToolReply(self.tools, MathReward() if self.reward == "math" else self.reward),
            max_turns=self.max_turns,
            unfinished_reward=self.unfinished_reward,
            workers=self.workers,
            timeout=self.timeout,
            failed_reward=self.failed_reward,
            pool_factory=pool_factory,
        )
        environment.keep_reasoning = self.keep_reasoning
        environment.template_options = {"tools": [tool_schema(name, function) for name, function in found.items()]}
        return environment


class EpisodeSettings(PromptSettings, TurnSettings):
    """Prompts of a file, each the beginning of an episode that is an object of a class of yours."""

    episode: Code
    """path/to/file.py:Class, made with a row and the settings. Its `async def step(self, said)` returns what is read
    next, the reward, or (observation, reward)."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Handed to it as keywords."""

    def build(self, seed: int, pool_factory: PoolFactory | None = None) -> Environment:
        """The environment of these rows. Its episodes are coroutines of the rank, which hires nobody for them."""
        made = functools.partial(load_callable(self.episode), **self.settings)
        return _episodes(self, self.tasks(), made, self.episode)


class OpenEnvSettings(TurnSettings):
    """Episodes of an OpenEnv server, one a seed. What it shows at first is the prompt."""

    address: str
    """Where the server listens, such as http://localhost:8000."""
    action: str = "message"
    """The field of an action that what the model says is put into."""
    observation: str | None = None
    """The field of an observation that the model reads; none shows all of them, as JSON."""
    size: PositiveInt = 1000
    """How many episodes there are to draw from, by their seeds."""
    chat: bool = True
    """Whether the prompt is a user's message."""
    system: str | None = None
    """A system message before it."""
    timeout: Positive = 30.0
    """Seconds after which an answer of the server counts as failed."""
    failed_reward: FailedReward = None
    """What an attempt earns that failed; none leaves it out of the baseline and the loss."""

    def build(self, seed: int, pool_factory: PoolFactory | None = None) -> Environment:
        """The environment of these episodes, which wait for their server in a thread of the rank."""
        server = OpenEnvServer(self.address, self.action, self.observation, self.timeout)
        tasks = OpenEnvTasks(server, first=seed * self.size, size=self.size, chat=self.chat, system=self.system)
        return _episodes(self, tasks, server.episode, f"the server at {self.address}")


def _episodes(
    settings: EpisodeSettings | OpenEnvSettings, tasks: Tasks, make: Callable[..., Any], name: str
) -> Environment:
    made = AsyncEnvironment(
        tasks,
        make,
        name=name,
        max_turns=settings.max_turns,
        unfinished_reward=settings.unfinished_reward,
        timeout=settings.timeout,
        failed_reward=settings.failed_reward,
    )
    made.keep_reasoning = settings.keep_reasoning
    return made


EnvironmentSettings: TypeAlias = Annotated[
    ReasoningGymSettings | DatasetSettings | ConversationSettings | ToolSettings | EpisodeSettings | OpenEnvSettings,
    TaggedUnion(
        reasoning_gym=ReasoningGymSettings,
        dataset=DatasetSettings,
        conversation=ConversationSettings,
        tools=ToolSettings,
        episodes=EpisodeSettings,
        openenv=OpenEnvSettings,
    ),
]


class ObjectiveFile(Settings):
    """An objective of yours: a function of `OutputInputs` that returns a `Loss`, or a class of such functions."""

    text_field: ClassVar[str] = "file"
    """What text alone stands for."""

    file: Code
    """path/to/file.py:name."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Handed to it as keywords."""


def build_objective(objective: Objective | ObjectiveFile) -> Objective:
    """The objective itself, from its file where it is one of the user's."""
    if isinstance(objective, ObjectiveFile):
        return load_objective(objective.file, objective.settings)
    return objective


@dataclass(frozen=True)
class Templated:
    """Tasks whose prompt is text made of their example's fields."""

    tasks: Tasks
    template: str

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: int) -> Task:
        task = self.tasks[index]
        try:
            return Task(self.template.format(**task.example), task.example, task.name)
        except (KeyError, IndexError, AttributeError) as error:
            fields = ", ".join(task.example)
            raise ValueError(
                f"the template {self.template!r} asks for {error}, but {task.name} has: {fields}."
            ) from error


def _temperature(value: float) -> float:
    return SamplingParams(temperature=value).temperature


def _top_p(value: float) -> float:
    return SamplingParams(top_p=value).top_p


Temperature: TypeAlias = Annotated[NonNegative, AfterValidator(_temperature)]


class SamplingSettings(Settings):
    """How answers are drawn."""

    max_new_tokens: PositiveInt = 256
    """The most tokens of an answer."""
    temperature: Temperature = 1.0
    """Logits are divided by it."""
    top_k: NonNegativeInt = 0
    """Choose among the likeliest k tokens; 0 leaves all."""
    top_p: Annotated[float, Field(gt=0, le=1), AfterValidator(_top_p)] = 1.0
    """Choose among the fewest tokens of this probability together."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Choose among tokens at least this share as likely as the likeliest."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end an answer."""
    stop_tokens: tuple[NonNegativeInt | Annotated[str, Field(min_length=1)], ...] = ()
    """Tokens that end an answer besides the model's own end-of-sequence tokens: ids, or as the tokenizer writes them,
    such as <end_of_turn>. A number is always an id."""
    draft: Literal["mtp"] | None = None
    """Whether tokens are guessed ahead, by the model's first multi-token-prediction depth: the same answers, and sooner
    where it guesses well."""

    @property
    def sampling(self) -> SamplingParams:
        """The same as a generator takes it."""
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            stop=self.stop,
        )

    def stop_ids(self, tokenizer: Any) -> tuple[int, ...]:
        """The ids of `stop_tokens`. Raises a sentence that names one that the tokenizer does not have."""
        # Words of the command line are texts, also those of digits.
        stated = [int(token) if str(token).isdecimal() else token for token in self.stop_tokens]
        if not any(isinstance(token, str) for token in stated):
            return tuple(token for token in stated if isinstance(token, int))
        vocabulary = tokenizer.get_vocab()
        for token in stated:
            if isinstance(token, str) and token not in vocabulary:
                raise ValueError(
                    f"sampling.stop_tokens has {token!r}, which is no token of the tokenizer. Give one of its "
                    f"tokens or "
                    "an id; a text of several tokens belongs in sampling.stop."
                )
        return tuple(vocabulary[token] if isinstance(token, str) else token for token in stated)


class EvaluationSettings(Settings):
    """Answers to tasks that are never trained on: before the first step, every so many steps, and after the last."""

    every: NonNegativeInt = 50
    """Steps between evaluations; 0 leaves them out."""
    tasks: PositiveInt = 64
    """How many tasks are held out: the last ones with different prompts. Others with one of these prompts are not
    trained on either."""
    split_by: SplitBy = "prompt"
    """What tells a held-out task from one trained on: its prompt; or "row", the whole row, for prompts that are alike
    and rows that decide what follows, such as games."""
    samples_per_prompt: PositiveInt = 1
    """Answers a task. With more than one, pass@k is reported for powers of two up to it."""
    temperature: Temperature = 0.0
    """Of these answers; 0 takes the likeliest token."""


class HeldOutSettings(Settings):
    """Rows that are never trained on, measured before the first step, every so many steps, and after the last."""

    every: NonNegativeInt = 50
    """Steps between evaluations; 0 leaves them out."""
    rows: NonNegativeInt = 0
    """How many rows are held out: the dataset's last ones with different prompts. Other rows with one of these prompts
    are not trained on either; a row without a prompt is compared whole. 0 holds out none, and leaves evaluations
    out."""


def _known(loggers: tuple[str, ...]) -> tuple[str, ...]:
    names = [parse_logger(logger)[0] for logger in loggers]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"loggers has {name} more than once; a run is shown there in one place. Leave one.")
    return loggers


class ClusterSettings(Settings):
    """What a run takes of a Ray cluster, where it is run on one (--ray)."""

    cpus_per_rank: PositiveInt | None = None
    """CPUs of each rank, which are the threads it computes with; none takes 1, or of a local Ray without GPUs an equal
    share of the machine's."""
    gpus_per_rank: Annotated[float, Field(gt=0.5, le=1)] = 1.0
    """GPUs of each rank on cuda. With less than 1, the rest of its GPU is for servers of a share (rollout.gpus); more
    than a half, so that no two ranks have the same one."""
    cpus_per_worker: NonNegative = 1.0
    """CPUs of each worker that judges."""
    max_restarts: NonNegativeInt = 3
    """How often in a row ranks are started again after one was lost, if no checkpoint was saved in between."""


NAME = "{name}"


def _not_empty(run: Any) -> Any:
    if run == "":
        raise ValueError("run is empty, which would be the working directory itself; name a directory.")
    return run


class RunConfig(Settings):
    """What every recipe's config begins with."""

    model: ModelSource = "tiny-dense"
    """A Hugging Face directory, a GGUF file, or a built-in model."""
    run: Annotated[Path, BeforeValidator(_not_empty)] = Path(f"runs/{NAME}")
    """The directory of the run, from the working directory. If it holds one with the same config, that is continued.
    {name} is the config file's name without its ending or, where there is no file, the recipe's and the model's."""
    seed: NonNegativeInt = 0
    """Of everything random."""
    budget: PositiveInt = 8192
    """The most tokens of a microbatch, and so of a sequence."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """What is computed in; none takes bfloat16 on a GPU and float32 elsewhere."""
    loggers: Annotated[tuple[str, ...], AfterValidator(_known)] = ("tensorboard",)
    """Where metrics go besides metrics.jsonl: tensorboard, wandb, mlflow or trackio. A project's name may follow a
    colon: wandb:sums."""
    cluster: ClusterSettings = ClusterSettings()
    """What the run takes of a Ray cluster."""


class Limits(Settings):
    """When a run is given up, as one that learns nothing any more, and when it is warned of."""

    failed_rewards: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The largest share of a step's reward calls that may fail; more in `patience` steps in a row ends the run, which
    can be continued. So does a first step in which all fail."""
    weight_growth: Annotated[float, Field(gt=1)] = 100.0
    """How many times as large as at the start the norm of all weights may become, when a checkpoint is due."""
    entropy: NonNegative = 0.01
    """The policy's mean entropy, in nats a token, below which it is warned of."""
    patience: PositiveInt = 5
    """Steps in a row that failing rewards, low entropy, or groups without a difference are borne."""


class MTPSettings(Settings):
    """Multi-token prediction beside the objective, by the depths that the model comes with, else by fresh ones."""

    weight: NonNegative = 0.1
    """Of the mean loss of the depths, beside the objective."""
    depths: PositiveInt = 1
    """How many tokens further ahead than the next are predicted; a model that has depths has as many already."""
    layers: str | None = None
    """What each fresh depth is made of, as a pattern; none takes what the family's have, or the model's last layer."""
    stop_trunk: bool = False
    """Whether the trunk and the embedding are left alone by it."""
    stop_head: bool = False
    """Whether the output head is left alone by it."""


class TrainingConfig(RunConfig):
    """What is common to recipes that train."""

    layout: Annotated[Layout, TaggedUnion(Layout)] = Layout()
    """How the model is divided, such as pp=2,tp=2."""
    optimizer: OptimizerSettings = AdamW()
    """How weights are moved."""
    weights: WeightStorage = "fp32"
    """How weights are stored, where no ranks share them: in fp32; "split", in bf16, with the sixteen bits that fp32
    has beyond in the optimizer's state; "rounded", in bf16 alone, each step rounded at random, right on average."""
    selection_bias_rate: NonNegative | None = None
    """How far each step moves the selection biases of routers that have them (DeepSeek-V3, GLM, Nemotron-H) towards
    even load, whatever the learning rate is; none leaves what the model's config says, 0 for a Hugging Face model."""
    mtp: MTPSettings | None = None
    """Multi-token prediction of the tokens that are learned, beside the objective; none leaves it out."""
    head: Annotated[HeadConfig, TaggedUnion(HeadConfig)] = HeadConfig()
    """How the output head is computed."""
    recompute: Recompute = "none"
    """What is computed again in the backward instead of kept."""
    overlap: Overlap = False
    """What a rank does where it would wait. True: one microbatch's forward and another's backward take turns, so that
    exchanges with experts hide behind compute; it keeps one more microbatch and whole weights. "zero_bubble": a
    pipeline's backwards put off the gradients of weights, which are made in its bubble."""
    gather_once: bool = False
    """Whether weights are gathered and gradients summed once a step instead of once a microbatch, where ranks share
    them. Each then needs room for all of its stage's weights and gradients."""
    save_every: NonNegativeInt = 50
    """Steps between checkpoints; 0 saves the last one alone."""
    keep_checkpoints: PositiveInt = 2
    """How many checkpoints stay."""
    max_skipped_steps: NonNegativeInt = 10
    """How many optimizer steps in a row may have a loss or gradient that is not finite before the run ends."""
    code_changes: Literal["refuse", "allow"] = "refuse"
    """Whether a run goes on after a file of yours that it calls (a reward, an objective) was changed."""
    limits: Limits = Limits()
    """When the run is given up."""
    export: bool = True
    """Whether the trained model is written at the end, as a Hugging Face directory: model/ in the run's."""


def fit_schedule(optimizer: AdamW | SGD, steps: int, key: str) -> AdamW | SGD:
    """The optimizer of a run of so many optimizer steps. A schedule that is over before, at a rate of 0, is refused."""
    schedule = optimizer.schedule
    early = schedule.shape != "constant" and schedule.steps is not None and schedule.steps < steps
    if early and not schedule.floor:
        raise ValueError(
            f"{key}.schedule.steps is {schedule.steps}, but the run makes {steps} optimizer steps: the learning rate "
            f"would be 0 in the last {steps - (schedule.steps or 0)}. Leave it out, and it is {steps}; or set "
            f"{key}.schedule.floor."
        )
    return replace(optimizer, schedule=schedule.with_steps(steps))


def check_prompt_room(answers: SamplingSettings, budget: int) -> None:
    """Refuse answers so long that no prompt has a place before them."""
    if answers.max_new_tokens > budget - 2:
        raise ValueError(
            f"sampling.max_new_tokens is {answers.max_new_tokens}, which leaves no room for a prompt in a budget of "
            f"{budget} tokens. Raise budget."
        )


def check_draft_support(rollout: Rollout, answers: SamplingSettings) -> None:
    """Refuse what only the generator here can do."""
    if answers.draft is not None and not isinstance(rollout, NativeRollout):
        raise ValueError("sampling.draft is for the generator here; a server drafts as it was started to.")
