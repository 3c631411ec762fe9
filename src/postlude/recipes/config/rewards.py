"""The kinds of rewards: their settings, and how each is built. A new kind is a class here and a file in `rollout`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, TypeAlias

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from postlude.checks import Finite, NonNegative, Positive
from postlude.options import DeviceKind
from postlude.pool.limits import DEFAULT_LIMITS, WorkerLimits
from postlude.pool.worker_pool import PoolFactory
from postlude.recipes.config.schema import InputPath, Settings, TaggedUnion
from postlude.rollout.function_reward import FunctionReward
from postlude.rollout.reward import Reward
from postlude.rollout.tasks import ANSWER
from postlude.rollout.verdict import SCORE, Verdict
from postlude.rollout.verifiers import ExactReward, MathReward

Code: TypeAlias = Annotated[str, InputPath("code")]
"""path/to/file.py:name of a user's function or class."""

BUILT_IN = {"exact": ExactReward, "math": MathReward}
"""Rewards that compare with the answers of rows, by name."""


@dataclass(frozen=True)
class RewardCalls:
    """What the rewards of an environment share: where and how long functions are called, and how a call fails."""

    workers: int
    timeout: float
    failed_reward: float | None
    pool_factory: PoolFactory | None = None
    answer: str = ANSWER
    """The column that built-in rewards compare with."""
    worker_limits: WorkerLimits = DEFAULT_LIMITS

    def function(self, reward: str | Callable[..., Any], **options: Any) -> Reward:
        """Returns the reward of a function, of path/to/file.py:name, or of the name of a built-in one."""
        return FunctionReward(
            built_in(reward, self.answer) if isinstance(reward, str) else reward,
            workers=self.workers,
            timeout=options.pop("timeout", None) or self.timeout,
            failed_reward=self.failed_reward,
            pool_factory=self.pool_factory,
            worker_limits=self.worker_limits,
            **options,
        )


def built_in(reward: str, answer: str) -> str | Callable[..., Any]:
    """Returns the reward that a name stands for, or the name if it is that of a user's function."""
    return BUILT_IN[reward](answer) if reward in BUILT_IN else reward


class WeightSettings(Settings):
    """What every reward of several has."""

    weight: Finite = 1.0
    """Weight in the sum. 0 reports the value without training on it."""


class FunctionRewardSettings(WeightSettings):
    """A function of yours."""

    text_field: ClassVar[str] = "function"
    """The field that plain text sets."""

    function: Code
    """path/to/file.py:name, as environment.reward; or "exact" or "math"."""
    group: bool = False
    """Call it with all completions of one prompt at once, as lists."""
    batch_size: PositiveInt = 64
    """Completions of a call of a function that takes `completions`, without group."""
    concurrency: PositiveInt = 64
    """Maximum number of concurrent calls of an async function."""
    timeout: Positive | None = None
    """Seconds after which a call counts as failed; none takes environment.timeout."""

    def build(self, calls: RewardCalls) -> Reward:
        options = {"group": self.group, "batch_size": self.batch_size, "concurrency": self.concurrency}
        return calls.function(self.function, timeout=self.timeout, **options)


class RewardModelFields(Settings):
    """Which reward model scores completions, and where."""

    model: Annotated[str, InputPath("model")]
    """Directory of a reward model: model/ of a run of `postlude rm`, or one for AutoModelForSequenceClassification."""
    device: DeviceKind | None = None
    """Device of the reward model; none takes the GPU if there is one."""
    budget: PositiveInt = 8192
    """Maximum number of tokens that the reward model scores together, and so of a prompt with its completion."""
    trust_remote_code: bool = False
    """Whether Python files of the reward model's directory may run as its tokenizer, with your rights."""


class ModelRewardSettings(WeightSettings, RewardModelFields):
    """A reward model, in rank 0."""

    def build(self, calls: RewardCalls) -> Reward:
        """Returns the reward. The model is loaded when it first scores a completion."""
        from postlude.rollout.reward_model import ModelReward  # imports torch

        return ModelReward(
            self.model,
            device=self.device,
            budget=self.budget,
            trust_remote_code=self.trust_remote_code,
            failed_reward=calls.failed_reward,
        )


class JudgeSettings(WeightSettings):
    """A judge: a chat model behind an OpenAI-compatible server, which writes a score."""

    url: str
    """Address of the server, such as http://localhost:8000/v1."""
    model: str
    """Name of the model at the server."""
    template: str
    """The question. {prompt}, {completion} without its thoughts, {raw_completion} with thoughts and special tokens,
    {transcript}, all turns and observations after the prompt, and the columns of the row are filled in; other braces
    are written twice."""
    system: str | None = None
    """System message before the question."""
    pattern: str = SCORE
    """Regular expression whose first group is the score; the last match in the answer counts."""
    scores: dict[str, Finite] = Field(default_factory=dict)
    """Scores of words, where the pattern finds words: {yes: 1, no: 0}, in lower case. Empty reads a number."""
    lowest: Finite | None = None
    """Lowest score; a lower one cannot be parsed."""
    highest: Finite | None = None
    """Highest score."""
    unparsable_reward: Finite | None = None
    """Reward of a completion whose score cannot be read from the answer; none counts it as a failed call."""
    temperature: NonNegative = 0.0
    """Sampling temperature of the judge."""
    max_new_tokens: PositiveInt = 512
    """Maximum number of tokens of an answer."""
    timeout: Positive = 60.0
    """Seconds after which a request counts as failed."""
    retries: NonNegativeInt = 2
    """Times that a failed request is made again, if the server cannot be reached, is busy or gives no reply."""
    concurrency: PositiveInt = 32
    """Maximum number of concurrent requests."""
    key_variable: str | None = None
    """Name of the environment variable that holds the API key; none sends no key."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Fields added to every request, such as {chat_template_kwargs: {enable_thinking: false}}."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.scores and (self.lowest is not None or self.highest is not None):
            raise ValueError("scores lists every score, so that lowest and highest bound nothing. Leave them out.")
        self.build_verdict()
        return self

    def build_verdict(self) -> Verdict:
        """Returns how the score is read. Raises ValueError for a pattern without a group."""
        return Verdict(self.pattern, self.scores, self.lowest, self.highest)

    def build(self, calls: RewardCalls) -> Reward:
        from postlude.rollout.judge import JudgeReward  # imports asyncio

        settings = self.model_dump(exclude={"weight", "pattern", "scores", "lowest", "highest"})
        return JudgeReward(**settings, verdict=self.build_verdict(), failed_reward=calls.failed_reward)


RewardKinds: TypeAlias = Annotated[
    FunctionRewardSettings | ModelRewardSettings | JudgeSettings,
    TaggedUnion(function=FunctionRewardSettings, reward_model=ModelRewardSettings, judge=JudgeSettings),
]


def compares_answers(environment: Settings) -> bool:
    """Whether a reward of an environment that counts, if it has any, compares completions with the answers of rows."""
    rewards: Mapping[str, Any] = getattr(environment, "rewards", {})
    parts = [part for part in rewards.values() if isinstance(part, FunctionRewardSettings) and part.weight]
    functions = [getattr(environment, "reward", None), *(part.function for part in parts)]
    return any(function in BUILT_IN for function in functions)
