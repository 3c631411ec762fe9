"""The parts that recipes' configs are made of: where tasks come from, how answers are drawn, how often to save."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import torch

from postlude.data.datasets import read_rows
from postlude.engine import SGD, AdamW
from postlude.layout import Layout
from postlude.recipes.schema import Kind
from postlude.rollout.environments import Environment, SingleTurn
from postlude.rollout.rewards import RewardPool
from postlude.rollout.tasks import DatasetTasks, ReasoningGym, Task, Tasks
from postlude.rollout.verifiers import MathReward

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OptimizerSettings: TypeAlias = Annotated[AdamW, Kind("adamw")] | Annotated[SGD, Kind("sgd")]


@dataclass(frozen=True, kw_only=True)
class Gym:
    """Tasks that reasoning-gym makes."""

    task: str
    """Name of the task, such as chain_sum."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The task's own settings."""
    size: int = 10_000
    """How many tasks there are to draw from."""
    template: str | None = None
    """The prompt, made of an entry's fields: "{metadata[expression]} =". None asks the question as a chat message."""
    tag: str | None = "answer"
    """The tag that the answer is asked for in; none takes the whole completion. Not used with a template."""
    workers: int = 0
    """Processes that score answers; 0 scores them in this one."""
    timeout: float = 30.0
    """Seconds after which an answer counts as wrong because its score does not come."""

    def build(self, seed: int) -> Environment:
        """The environment of these tasks."""
        tag = None if self.template is not None else self.tag
        gym = ReasoningGym(self.task, self.settings, seed=seed, size=self.size, tag=tag, chat=self.template is None)
        tasks: Tasks = gym if self.template is None else Templated(gym, self.template)
        return SingleTurn(tasks, RewardPool(gym.reward(), workers=self.workers, timeout=self.timeout))


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Prompts of a JSONL or parquet file, judged by a function of yours or by comparing mathematics."""

    path: Path
    """The file, or a directory of them."""
    reward: str
    """path/to/file.py:name of reward(prompt, completion, example), or "math" to compare with the row's "answer"."""
    prompt: str = "prompt"
    """The column with the prompt: text or messages."""
    chat: bool = False
    """Whether a prompt of text is a user's message."""
    system: str | None = None
    """A system message before it."""
    workers: int = 4
    """Processes that score answers."""
    timeout: float = 30.0
    """Seconds after which an answer counts as failed."""

    def build(self, seed: int) -> Environment:
        """The environment of these rows."""
        tasks = DatasetTasks(read_rows(self.path), prompt=self.prompt, chat=self.chat, system=self.system)
        score = MathReward() if self.reward == "math" else self.reward
        return SingleTurn(tasks, RewardPool(score, workers=self.workers, timeout=self.timeout))


EnvironmentSettings: TypeAlias = Annotated[Gym, Kind("reasoning_gym")] | Annotated[Dataset, Kind("dataset")]


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


@dataclass(frozen=True, kw_only=True)
class Answers:
    """How answers are drawn."""

    max_new_tokens: int = 256
    """The most tokens of an answer."""
    temperature: float = 1.0
    """Logits are divided by it."""
    top_k: int = 0
    """Choose among the likeliest k tokens; 0 leaves all."""
    top_p: float = 1.0
    """Choose among the fewest tokens of this probability together."""
    min_p: float = 0.0
    """Choose among tokens at least this share as likely as the likeliest."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """What every recipe's config begins with."""

    model: str = "tiny-dense"
    """A Hugging Face directory, a GGUF file, or a built-in model."""
    run: Path = Path("runs/run")
    """The directory of the run. If it holds one with the same config, that is continued."""
    seed: int = 0
    """Of everything random."""
    layout: Layout = field(default_factory=Layout)
    """How the model is divided, such as pp=2,tp=2."""
    budget: int = 8192
    """The most tokens of a microbatch."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What is computed again in the backward instead of kept."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """What is computed in; none takes bfloat16 on a GPU and float32 elsewhere."""
    save_every: int = 50
    """Steps between checkpoints; 0 saves the last one alone."""
    keep: int = 2
    """How many checkpoints stay."""
    wandb: str | None = None
    """A Weights & Biases project to log to as well."""
