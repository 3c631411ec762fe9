"""Environments: what comes of a completion, a score or the next thing to read.

A rollout loop needs no more than this, `Encoder` and a rollout engine:

    episodes = [environment.reset(task) for task in tasks]
    transcripts = [Transcript(encoder.prompt(episode.task.prompt)) for episode in episodes]
    while some are not done:
        completions = engine.generate([transcript.tokens for transcript in those], sampling)
        turns = environment.step(those episodes, [completion.text for ...])
        for each: transcript.answer(completion.tokens, completion.logprobs, completion.routing)
            if not turn.done: transcript.observe(encoder.observation(turn.observation, completion.tokens, chat=...))

Tokens that were sampled are never decoded and encoded again, and observations are never learned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from postlude.data.chat import Prompt
from postlude.data.messages import Message
from postlude.rollout.rewards import RewardPool, Sample, Score
from postlude.rollout.tasks import Task, Tasks

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Turn:
    """What comes of a completion: what the model reads next, or the end and what it earned."""

    score: Score | None = None
    observation: str | list[Message] | None = None

    def __post_init__(self) -> None:
        if (self.score is None) == (self.observation is None):
            raise ValueError("a turn has either a score, and is the last, or an observation. Give one of them.")

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        return self.observation is None


@dataclass
class Episode:
    """One attempt at a task: what the model said and was told so far."""

    task: Task
    completions: list[str] = field(default_factory=list)
    observations: list[str | list[Message]] = field(default_factory=list)
    score: Score | None = None
    """Set when it is over."""
    state: Any = None
    """Whatever an environment keeps for it."""


class Environment(Protocol):
    """Tasks, and what comes of answers to them. Episodes take a step together, so that they are scored in parallel."""

    tasks: Tasks

    def reset(self, task: Task) -> Episode:
        """Begin an attempt at a task."""
        ...

    def step(self, episodes: Sequence[Episode], completions: Sequence[str]) -> list[Turn]:
        """Give each episode its newest completion, and say what comes of it."""
        ...

    def attempt(self, task: Task, completion: str) -> None:
        """Judge one completion on trial, before a run begins. A judge that cannot is a ValueError."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


class SingleTurn:
    """The first completion is the answer, and `pool` scores it: reward(prompt, completion, example)."""

    def __init__(self, tasks: Tasks, pool: RewardPool) -> None:
        self.tasks, self.pool = tasks, pool

    def reset(self, task: Task) -> Episode:
        """Begin an attempt at a task."""
        return Episode(task)

    def step(self, episodes: Sequence[Episode], completions: Sequence[str]) -> list[Turn]:
        """Score every completion. Each episode is then over."""
        _record(episodes, completions)
        samples = [
            Sample(episode.task.prompt, completion, episode.task.example)
            for episode, completion in zip(episodes, completions, strict=True)
        ]
        return _ended(episodes, [Turn(score) for score in self.pool.score_all(samples)])

    def attempt(self, task: Task, completion: str) -> None:
        """Score one completion on trial."""
        found = _tried(self.pool, task, (task.prompt, completion, task.example), completion)
        if not isinstance(found, Score):
            raise ValueError(
                f"the reward returned {_short(found)} for {task.name} on trial, but a reward is a number or a dict of "
                "numbers."
            )

    def close(self) -> None:
        """End the workers of the pool."""
        self.pool.close()


class MultiTurn:
    """A conversation: `reply` hears the completions so far, and answers or judges.

    reply(prompt, completions, example) is called in the pool's processes, by the rules of a reward function. Text or
    messages that it returns are what the model reads next; a number, or a dict of numbers, ends the episode. It keeps
    nothing between calls: `completions` holds all that was said. An episode without a score after `max_turns`
    completions ends with `unfinished_reward`.
    """

    def __init__(
        self,
        tasks: Tasks,
        reply: str | Callable[..., Any],
        *,
        max_turns: int,
        unfinished_reward: float = 0.0,
        workers: int = 4,
        timeout: float = 30.0,
        failed_reward: float = 0.0,
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}, but the model must have at least one turn.")
        self.tasks, self.max_turns, self.unfinished_reward = tasks, max_turns, unfinished_reward
        self.pool = RewardPool(reply, workers=workers, timeout=timeout, failed_reward=failed_reward)

    def reset(self, task: Task) -> Episode:
        """Begin an attempt at a task."""
        return Episode(task)

    def step(self, episodes: Sequence[Episode], completions: Sequence[str]) -> list[Turn]:
        """Hear each completion and say what comes of it."""
        _record(episodes, completions)
        calls = [(episode.task.prompt, list(episode.completions), episode.task.example) for episode in episodes]
        turns = []
        for episode, reply in zip(episodes, self.pool.reply_all(calls), strict=True):
            if isinstance(reply, Score):
                turns.append(Turn(reply))
            elif len(episode.completions) >= self.max_turns:
                turns.append(Turn(Score(self.unfinished_reward, {"unfinished": 1.0})))
            else:
                turns.append(Turn(observation=reply))
        return _ended(episodes, turns)

    def attempt(self, task: Task, completion: str) -> None:
        """Hear one completion on trial."""
        _tried(self.pool, task, (task.prompt, [completion], task.example), completion)

    def close(self) -> None:
        """End the workers."""
        self.pool.close()


@dataclass
class Transcript:
    """The tokens of one episode: prompt, then what was sampled and what was observed in turn."""

    prompt: Sequence[int]
    tokens: list[int] = field(init=False)
    mask: list[int] = field(init=False)
    """1 for each token that was sampled, for the column "response_mask"."""
    logprobs: list[float] = field(init=False)
    """Of each sampled token as its sampler said, 0 for the others; for the column "rollout_logprobs"."""
    routing: Tensor | None = field(init=False, default=None)
    """Which experts each token up to the last sampled one was sent to, [length, routers, top_k] int16, for the column
    "routing"; None where the sampler does not tell."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.mask = [0] * len(self.tokens)
        self.logprobs = [0.0] * len(self.tokens)

    def answer(self, tokens: Sequence[int], logprobs: Sequence[float], routing: Tensor | None = None) -> None:
        """Add what the model sampled, as it sampled it.

        `routing` is a completion's, of all tokens so far. Tokens of earlier turns have passed the model again for it;
        they keep the experts that they were sampled with.
        """
        if len(tokens) != len(logprobs):
            raise ValueError(f"{len(tokens)} tokens come with {len(logprobs)} log-probs. Give one of each token.")
        self.tokens += tokens
        self.mask += [1] * len(tokens)
        self.logprobs += logprobs
        if routing is not None and len(routing) != len(self.tokens):
            raise ValueError(f"routing is of {len(routing)} tokens, but there are {len(self.tokens)}. Give it of all.")
        if routing is not None and self.routing is not None:
            routing, known = routing.clone(), len(self.routing) - 1  # its last token had not been sent anywhere
            routing[:known] = self.routing[:known]
        self.routing = routing

    def observe(self, tokens: Sequence[int]) -> None:
        """Add what the model was given to read, which is not learned."""
        self.tokens += tokens
        self.mask += [0] * len(tokens)
        self.logprobs += [0.0] * len(tokens)


def is_chat(prompt: Prompt) -> bool:
    """Whether a prompt is messages, so that a chat template stands around all that follows it."""
    return not isinstance(prompt, str)


def _record(episodes: Sequence[Episode], completions: Sequence[str]) -> None:
    if len(episodes) != len(completions):
        raise ValueError(f"{len(episodes)} episodes got {len(completions)} completions. Give one of each.")
    for episode, completion in zip(episodes, completions, strict=True):
        if episode.score is not None:
            raise ValueError(f"the episode of task {episode.task.name!r} is over. Reset the task for another attempt.")
        episode.completions.append(completion)


def _tried(pool: RewardPool, task: Task, call: tuple[Any, ...], completion: str) -> Score | str | list[Message]:
    try:
        return pool.attempt(call)
    except ValueError as error:
        raise ValueError(
            f"{str(error).rstrip('.')}. That was a trial on {task.name} with the completion "
            f"{_short(completion)}: a judge that fails there would fail all through the run. Mend it."
        ) from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _ended(episodes: Sequence[Episode], turns: list[Turn]) -> list[Turn]:
    for episode, turn in zip(episodes, turns, strict=True):
        if turn.observation is None:
            episode.score = turn.score
        else:
            episode.observations.append(turn.observation)
    return turns
