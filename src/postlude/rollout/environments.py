"""Environments: what comes of a completion, a score or the next thing to read, whenever that is known.

A rollout loop needs no more than this, `Encoder` and a rollout engine:

    episodes = [environment.reset(task) for task in tasks]
    transcripts = [Transcript(encoder.prompt(episode.task.prompt)) for episode in episodes]
    those = all of them
    while some are not done:
        completions = engine.generate([transcript.tokens for transcript in those], sampling)
        for each: transcript.add_completion(completion.tokens, completion.logprobs, completion.routing)
            environment.submit(episode, AssistantTurn(completion.text, completion.tokens))
        those = []
        for episode, turn in environment.poll(...):     # others may still wait for a tool, and hold up nobody
            if not turn.done: transcript.add_observation(encoder.observation(turn.observation, its last tokens,
            chat=...))
                those += [its transcript]

Tokens that were sampled are never decoded and encoded again, and observations are never learned.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from postlude.data.chat import Prompt
from postlude.data.chat_template import Message, shorten
from postlude.pool.worker_pool import PoolFactory
from postlude.rollout.rewards import Reply, RewardPool, Score
from postlude.rollout.tasks import Task, Tasks

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class AssistantTurn:
    """What the model said in a turn."""

    text: str
    tokens: Sequence[int] = ()
    """As they were sampled."""
    truncated: bool = False
    """Whether it reached max_new_tokens before it had ended."""


@dataclass(frozen=True)
class TurnResult:
    """What comes of a completion: what the model reads next, or the end, and what it earned."""

    score: Score | None = None
    """At the end, what the whole episode earned; before, what it has earned so far, if anything."""
    observation: str | list[Message] | None = None

    def __post_init__(self) -> None:
        if self.score is None and self.observation is None:
            raise ValueError("a turn has a score, and is the last, or an observation. Give one of them.")

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        return self.observation is None


@dataclass(eq=False)
class Episode:
    """One attempt at a task: what the model said and was told so far."""

    task: Task
    said: list[AssistantTurn] = field(default_factory=list)
    observations: list[str | list[Message]] = field(default_factory=list)
    earned: Score | None = None
    """What its turns have earned so far, if they did."""
    score: Score | None = None
    """Set when it is over."""
    state: Any = None
    """Whatever an environment keeps for it."""

    @property
    def completions(self) -> list[str]:
        """What the model said, as text."""
        return [each.text for each in self.said]


class Environment(ABC):
    """Tasks, and what comes of answers to them. Many episodes are under way at once, and each waits for its own."""

    tasks: Tasks
    failed_reward: float | None = None
    """What an attempt earns that failed; None excludes it from training."""
    keep_reasoning: bool = False
    """Whether reasoning of earlier turns stays before the model, though its chat template would leave it out."""

    template_options: Mapping[str, Any] = MappingProxyType({})
    """What the chat template is told besides the messages, such as the tools there are."""

    def reset(self, task: Task) -> Episode:
        """Begin an attempt at a task."""
        return Episode(task)

    def submit(self, episode: Episode, said: AssistantTurn) -> None:
        """Give an episode its newest completion, and go on."""
        if episode.score is not None:
            raise ValueError(f"the episode of task {episode.task.name!r} is over. Reset the task for another attempt.")
        episode.said.append(said)
        self._submit(episode)

    def poll(self, timeout: float | None = 0.0) -> list[tuple[Episode, TurnResult]]:
        """What has come of completions: waits up to `timeout` seconds for the first, for ever if None."""
        return [(episode, _taken(episode, turn)) for episode, turn in self._poll(timeout)]

    def step(self, episodes: Sequence[Episode], said: Sequence[AssistantTurn | str]) -> list[TurnResult]:
        """Give each episode its newest completion, and wait until it is known what comes of every one."""
        if len(episodes) != len(said):
            raise ValueError(f"{len(episodes)} episodes got {len(said)} completions. Give one of each.")
        for episode, each in zip(episodes, said, strict=True):
            self.submit(episode, AssistantTurn(each) if isinstance(each, str) else each)
        turns = self.collect(len(episodes), None)
        return [turns[id(episode)][1] for episode in episodes]

    def collect(self, count: int, limit: float | None) -> dict[int, tuple[Episode, TurnResult]]:
        """`count` turns, by the ids of their episodes, or as many as come within `limit` seconds."""
        found: dict[int, tuple[Episode, TurnResult]] = {}
        until = None if limit is None else time.monotonic() + limit
        while len(found) < count:
            left = None if until is None else max(0.0, until - time.monotonic())
            found |= {id(episode): (episode, turn) for episode, turn in self.poll(left)}
            if left == 0.0:
                break
        return found

    @property
    def lost_workers(self) -> int | None:
        """How many that judge went with no fault of a judgement's, so that others did it. None where none can."""
        return None

    def release(self, episode: Episode) -> None:
        """Let go of an episode: it is over, or its caller ends it before."""
        episode.score = episode.score or episode.earned or Score(0.0)

    @abstractmethod
    def trial_call(self, task: Task, completion: str) -> None:
        """Judge one completion on trial, before a run begins. A judge that cannot is a ValueError."""

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds."""

    @abstractmethod
    def _submit(self, episode: Episode) -> None:
        """Begin to find out what comes of the last thing said."""

    @abstractmethod
    def _poll(self, timeout: float | None) -> list[tuple[Episode, TurnResult]]:
        """What was found out, each turn with what it alone has earned."""


class FunctionEnvironment(Environment):
    """One whose turns are calls of a function in a pool of processes."""

    replies: bool
    """Whether it may say something for the model to read."""

    def __init__(self, tasks: Tasks, pool: RewardPool) -> None:
        self.tasks, self.pool, self.failed_reward = tasks, pool, pool.failed_reward
        self._waiting: dict[int, Episode] = {}

    @property
    def lost_workers(self) -> int | None:
        """As the pool counts them."""
        return self.pool.lost

    def close(self) -> None:
        """End the workers of the pool."""
        self.pool.close()

    @abstractmethod
    def _call(self, episode: Episode) -> tuple[Any, ...]:
        """What the function is called with."""

    @abstractmethod
    def _turn(self, episode: Episode, reply: Reply) -> TurnResult:
        """What its reply means."""

    def _submit(self, episode: Episode) -> None:
        self._waiting[self.pool.submit(self._call(episode))] = episode

    def _poll(self, timeout: float | None) -> list[tuple[Episode, TurnResult]]:
        found = []
        for ticket, reply in self.pool.poll(timeout, replies=self.replies).items():
            episode = self._waiting.pop(ticket)
            found.append((episode, self._turn(episode, reply)))
        return found


class SingleTurn(FunctionEnvironment):
    """The first completion is the answer, and `pool` scores it: reward(prompt, completion, example)."""

    replies = False

    def trial_call(self, task: Task, completion: str) -> None:
        """Score one completion on trial."""
        found = _tried(self.pool, task, (task.prompt, completion, task.example), completion)
        if not isinstance(found, Score):
            raise ValueError(
                f"the reward returned {shorten(found)} for {task.name} on trial, but a reward is a number or a dict of "
                "numbers."
            )

    def _call(self, episode: Episode) -> tuple[Any, ...]:
        return episode.task.prompt, episode.said[-1].text, episode.task.example

    def _turn(self, episode: Episode, reply: Reply) -> TurnResult:
        assert isinstance(reply, Score)
        return TurnResult(reply)


class MultiTurn(FunctionEnvironment):
    """A conversation: `reply` hears the completions so far, and answers or judges.

    reply(prompt, completions, example) is called in the pool's processes, by the rules of a reward function. Text or
    messages that it returns are what the model reads next; a number, or a dict of numbers, ends the episode. It keeps
    nothing between calls: `completions` holds all that was said. An episode without a score after `max_turns`
    completions ends with `unfinished_reward`.
    """

    replies = True

    def __init__(
        self,
        tasks: Tasks,
        reply: str | Callable[..., Any],
        *,
        max_turns: int,
        unfinished_reward: float = 0.0,
        workers: int = 4,
        timeout: float = 30.0,
        failed_reward: float | None = None,
        pool_factory: PoolFactory | None = None,
    ) -> None:
        check_max_turns(max_turns)
        self.max_turns, self.unfinished_reward = max_turns, unfinished_reward
        pool = RewardPool(
            reply, workers=workers, timeout=timeout, failed_reward=failed_reward, pool_factory=pool_factory
        )
        super().__init__(tasks, pool)

    def trial_call(self, task: Task, completion: str) -> None:
        """Hear one completion on trial."""
        _tried(self.pool, task, (task.prompt, [completion], task.example), completion)

    def _call(self, episode: Episode) -> tuple[Any, ...]:
        return episode.task.prompt, episode.completions, episode.task.example

    def _turn(self, episode: Episode, reply: Reply) -> TurnResult:
        if isinstance(reply, Score):
            return TurnResult(reply)
        if len(episode.said) >= self.max_turns:
            return TurnResult(unfinished_score(self.unfinished_reward))
        return TurnResult(observation=reply)


def check_max_turns(max_turns: int) -> None:
    """Refuse a limit that leaves the model no turn."""
    if max_turns < 1:
        raise ValueError(f"max_turns is {max_turns}, but the model must have at least one turn.")


def unfinished_score(reward: float) -> Score:
    """What an episode earns that has no end after all its turns."""
    return Score(reward, {"unfinished": 1.0})


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

    def add_completion(self, tokens: Sequence[int], logprobs: Sequence[float], routing: Tensor | None = None) -> None:
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

    def add_observation(self, tokens: Sequence[int]) -> None:
        """Add what the model was given to read, which is not learned."""
        self.tokens += tokens
        self.mask += [0] * len(tokens)
        self.logprobs += [0.0] * len(tokens)


def is_chat(prompt: Prompt) -> bool:
    """Whether a prompt is messages, so that a chat template stands around all that follows it."""
    return not isinstance(prompt, str)


def _tried(pool: RewardPool, task: Task, call: tuple[Any, ...], completion: str) -> Reply:
    try:
        return pool.trial_call(call)
    except ValueError as error:
        raise ValueError(
            f"{str(error).rstrip('.')}. That was a trial on {task.name} with the completion "
            f"{shorten(completion)}: a judge that fails there would fail all through the run. Mend it."
        ) from error


def _taken(episode: Episode, turn: TurnResult) -> TurnResult:
    """A turn as the episode remembers it: with what all turns so far have earned."""
    earned = episode.earned
    if turn.score is not None:
        earned = turn.score if earned is None else earned.plus(turn.score)
    episode.earned = earned
    if turn.observation is None:
        episode.score = earned
    else:
        episode.observations.append(turn.observation)
    return TurnResult(earned, turn.observation)
