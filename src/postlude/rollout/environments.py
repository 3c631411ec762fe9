"""Environments: they take a completion and return a score, or an observation for the model to read next.

A rollout loop needs this, `Encoder` and a rollout engine (see `conversations.py`):

    episodes = [environment.reset(task) for task in tasks]
    transcripts = {id(episode): Transcript(encoder.prompt(episode.task.prompt)) for episode in episodes}
    while episodes:
        completions = engine.generate([transcripts[id(episode)].tokens for episode in episodes], sampling)
        for episode, (completion,) in zip(episodes, completions):
            transcripts[id(episode)].add_completion(completion.tokens, completion.policy_logprobs, completion.routing)
            environment.submit(episode, AssistantTurn(completion.text, completion.tokens))
        results = environment.poll(None)  # others may still wait for a tool
        for episode, result in results:
            if not result.done:
                tokens = encoder.observation(result.observation, last_tokens, chat=True)
                transcripts[id(episode)].add_observation(tokens)
        episodes = [episode for episode, result in results if not result.done]

Sampled tokens are never decoded and encoded again, and observations are never trained on.
"""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from postlude.data.chat import Prompt
from postlude.data.chat_template import Message
from postlude.pool.limits import DEFAULT_LIMITS, WorkerLimits
from postlude.pool.process_pool import function_name, open_pool
from postlude.pool.worker_pool import CallResult, PoolFactory
from postlude.rollout.episode import AssistantTurn, Episode
from postlude.rollout.reward import WAIT_SECONDS, Reward, sum_of_known, trial_failure
from postlude.rollout.rewards import NO_SCORE, FailureCounter, Score, failure_message, is_reply, read_score
from postlude.rollout.tasks import Task, Tasks

if TYPE_CHECKING:
    from torch import Tensor

    from postlude.generate.protocol import Completion
    from postlude.rollout.model_calls import ModelAccess, ModelCall


Stragglers: TypeAlias = Literal["wait", "drop", "carry"]
LEAST_NEEDED = 2  # episodes of a group: one alone has nothing to be compared with


@dataclass(frozen=True)
class TurnResult:
    """An environment's result for a completion: an observation to read next, or the end, and the score."""

    score: Score | None = None
    """At the end, the score of the whole episode; before, the score so far, if any."""
    observation: str | list[Message] | None = None
    transcripts: tuple[Transcript, ...] = ()
    """At the end of an episode that asks for completions itself, the sequences to train on."""
    completions: tuple[Completion, ...] = ()
    """All completions of such an episode."""

    def __post_init__(self) -> None:
        if self.score is None and self.observation is None:
            raise ValueError("a turn has a score, and is the last, or an observation. Give one of them.")

    @property
    def done(self) -> bool:
        return self.observation is None

    def with_score(self, score: Score | None) -> TurnResult:
        """Returns the result with another score."""
        return replace(self, score=score)


class Environment(ABC):
    """Tasks, and results for completions of them. Many episodes are in progress at once; none waits for another."""

    tasks: Tasks
    failed_reward: float | None = None
    """The reward of an attempt that failed; None excludes it from training."""
    keep_reasoning: bool = False
    """Whether reasoning of earlier turns stays in the context, although the chat template would remove it."""

    template_options: Mapping[str, Any] = MappingProxyType({})
    """Options of the chat template, such as the tools there are."""

    starts_episodes: bool = False
    """Whether its episodes ask for completions themselves, after `start`, by `model_calls`. If not, they get a
    completion of the task's prompt first, and of each observation."""

    needed_share: float = 1.0
    """Share of the episodes of a group that training waits for, if they ask for completions themselves."""

    stragglers: Stragglers = "wait"
    """Whether the other episodes of a group are ended (drop), or trained on when they have ended (carry)."""

    @property
    def uses_chat(self) -> bool:
        """Whether the chat template writes what the model reads."""
        return self.starts_episodes or is_chat(self.tasks[0].prompt)

    def start(self, episode: Episode, access: ModelAccess) -> None:
        """Starts an episode that asks for completions itself. `poll` returns its end."""
        raise NotImplementedError(f"{type(self).__name__} has starts_episodes, so it must define start().")

    def model_calls(self) -> list[ModelCall]:
        """Returns what episodes ask for since the last call."""
        return []

    def reset(self, task: Task) -> Episode:
        """Starts an attempt at a task."""
        return Episode(task)

    def reset_group(self, task: Task, count: int) -> list[Episode]:
        """Starts `count` attempts at a task that are compared with each other."""
        episodes = [self.reset(task) for _ in range(count)]
        for episode in episodes:
            episode.group = episodes
        return episodes

    def submit(self, episode: Episode, turn: AssistantTurn) -> None:
        """Gives an episode its next completion. `poll` returns the result."""
        if episode.score is not None:
            raise ValueError(f"the episode of task {episode.task.name!r} is over. Reset the task for another attempt.")
        episode.turns.append(turn)
        self._submit(episode)

    def poll(self, timeout: float | None = 0.0) -> list[tuple[Episode, TurnResult]]:
        """Returns the results that are there. Waits up to `timeout` seconds for the first, or without limit if None."""
        return [(episode, _add_result(episode, result)) for episode, result in self._poll(timeout)]

    @property
    def lost_workers(self) -> int | None:
        """Reward workers lost through no fault of a call, and retried. None where that cannot happen."""
        return None

    def release(self, episode: Episode) -> None:
        """Ends an episode, whether it is over or not."""
        episode.score = episode.score or episode.score_so_far or Score(0.0)

    @abstractmethod
    def trial_call(self, task: Task, turn: AssistantTurn) -> None:
        """Scores one completion before a run starts. Raises ValueError if that fails."""

    @abstractmethod
    def close(self) -> None:
        """Releases what it holds."""

    @abstractmethod
    def _submit(self, episode: Episode) -> None:
        """Starts work on the last turn of an episode."""

    @abstractmethod
    def _poll(self, timeout: float | None) -> list[tuple[Episode, TurnResult]]:
        """Returns finished results, each with the score of its turn alone."""


class SingleTurn(Environment):
    """One completion per episode, scored by a reward."""

    def __init__(self, tasks: Tasks, reward: Reward) -> None:
        self.tasks, self.reward = tasks, reward

    @property
    def lost_workers(self) -> int | None:
        return self.reward.lost_workers

    def trial_call(self, task: Task, turn: AssistantTurn) -> None:
        self.reward.trial_call(task, turn)

    def close(self) -> None:
        self.reward.close()

    def _submit(self, episode: Episode) -> None:
        self.reward.submit(episode)

    def _poll(self, timeout: float | None) -> list[tuple[Episode, TurnResult]]:
        return [(episode, TurnResult(score)) for episode, score in self.reward.poll(timeout)]


class TurnEnvironment(Environment):
    """Episodes of several turns. A call for each completion returns an observation, a score, or both: see `read_turn`.

    An episode whose call fails or returns an invalid value ends. It is counted in `failures`, and is excluded from
    training or earns `failed_reward` if that is a number. An episode that is not over after `max_turns` completions
    earns `unfinished_reward` besides its score so far. `reward` scores an episode that a call ended. Its score is added
    to what the calls returned, and the last may then return None.
    """

    def __init__(
        self,
        tasks: Tasks,
        name: str,
        *,
        max_turns: int,
        unfinished_reward: float = 0.0,
        keep_reasoning: bool = False,
        failed_reward: float | None = None,
        reward: Reward | None = None,
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}, but the model must have at least one turn.")
        if reward is not None and reward.needs_group:
            raise ValueError(
                f"the reward {reward.name} has group: true, but an episode of several turns may end without a reward, "
                "such as over the budget, and its group would never be complete. Set group to false."
            )
        self.reward = reward
        self._ended: dict[Episode, Score] = {}  # the turn's own score of episodes that the reward scores
        self.tasks, self.name, self.keep_reasoning = tasks, name, keep_reasoning
        self.max_turns, self.unfinished_reward = max_turns, unfinished_reward
        self.failures, self.failed_reward = FailureCounter(name, failed_reward), failed_reward
        self._waiting: dict[int, Episode] = {}  # by call id

    @property
    def lost_workers(self) -> int | None:
        return None if self.reward is None else self.reward.lost_workers

    def trial_call(self, task: Task, turn: AssistantTurn) -> None:
        """Takes a turn, and scores an episode that ends with it, before a run starts."""
        self._trial_turn(task, turn)
        if self.reward is not None:
            self.reward.trial_call(task, turn)

    def close(self) -> None:
        if self.reward is not None:
            self.reward.close()

    @abstractmethod
    def _trial_turn(self, task: Task, turn: AssistantTurn) -> None:
        """Makes one call before a run starts. Raises ValueError if it fails or returns an invalid value."""

    @abstractmethod
    def _poll_calls(self, timeout: float | None) -> Mapping[int, CallResult]:
        """Returns the results of calls that ended, by call id."""

    def _poll(self, timeout: float | None) -> list[tuple[Episode, TurnResult]]:
        if self.reward is None:
            return self._turn_results(self._poll_calls(timeout))
        deadline = time.monotonic() + (WAIT_SECONDS if timeout is None else timeout)
        while True:
            results = self._turn_results(self._poll_calls(0.0))
            for episode, score in self.reward.poll(0.0):
                results.append((episode, TurnResult(self._ended.pop(episode).plus(score))))
            remaining = deadline - time.monotonic()
            if results or remaining <= 0:
                return results
            time.sleep(min(WAIT_SECONDS, remaining))

    def _turn_results(self, results: Mapping[int, CallResult]) -> list[tuple[Episode, TurnResult]]:
        """Returns the results of turns, without those of episodes that the reward scores first."""
        episodes = {call_id: self._waiting.pop(call_id) for call_id in results if call_id in self._waiting}
        turns = [(episode, self._turn_result(episode, results[call_id])) for call_id, episode in episodes.items()]
        return [(episode, turn) for episode, turn in turns if episode not in self._ended]

    def _turn_result(self, episode: Episode, result: CallResult) -> TurnResult:
        if result.failure is not None:
            return TurnResult(self.failures.failed(result))
        try:
            turn = read_turn(result.value, scored=self.reward is not None)
        except ValueError as error:
            return TurnResult(self.failures.invalid(error))
        if not turn.done and len(episode.turns) >= self.max_turns:
            unfinished = Score(self.unfinished_reward, {"unfinished": 1.0})
            return TurnResult(unfinished if turn.score is None else turn.score.plus(unfinished))
        if turn.done and self.reward is not None:
            assert turn.score is not None
            self._ended[episode] = turn.score
            self.reward.submit(episode)
        return turn


class MultiTurn(TurnEnvironment):
    """A conversation with `reply`, which gets all completions so far and returns an observation or a score.

    reply(prompt, completions, example) is called in worker processes, by the rules of a reward function. Text or
    messages that it returns are what the model reads next. A number, or a dict of numbers, ends the episode; with a
    `reward` so does None. It keeps no state between calls. Without `thoughts` it gets the completions without theirs.
    """

    def __init__(
        self,
        tasks: Tasks,
        reply: str | Callable[..., Any],
        *,
        workers: int = 4,
        timeout: float = 30.0,
        pool_factory: PoolFactory | None = None,
        worker_limits: WorkerLimits = DEFAULT_LIMITS,
        thoughts: bool = True,
        **turns: Any,
    ) -> None:
        """Opens the pool. `turns` are the settings of a `TurnEnvironment`."""
        super().__init__(tasks, function_name(reply), **turns)
        self.thoughts = thoughts
        self.pool = open_pool(reply, count=workers, timeout=timeout, pool_factory=pool_factory, limits=worker_limits)
        self._finalizer = weakref.finalize(self, self.pool.close)

    @property
    def lost_workers(self) -> int | None:
        return sum_of_known((self.pool.lost, super().lost_workers))

    def close(self) -> None:
        self.pool.close()
        super().close()

    def _trial_turn(self, task: Task, turn: AssistantTurn) -> None:
        (result,) = self.pool.call_all([self._arguments(Episode(task, [turn]))])
        if result.failure is not None:
            raise trial_failure(failure_message(self.name, result), task, turn)
        try:
            read_turn(result.value, scored=self.reward is not None)
        except ValueError as error:
            raise trial_failure(f"{self.name} {error}", task, turn) from error

    def _submit(self, episode: Episode) -> None:
        self._waiting[self.pool.submit(self._arguments(episode))] = episode

    def _arguments(self, episode: Episode) -> tuple[Any, ...]:
        completions = [turn.text if self.thoughts else turn.answer_text for turn in episode.turns]
        return episode.task.prompt, completions, episode.task.example

    def _poll_calls(self, timeout: float | None) -> Mapping[int, CallResult]:
        return self.pool.poll(timeout)


def read_turn(value: Any, *, scored: bool = False) -> TurnResult:
    """Returns the result that an episode meant by its value, or raises ValueError.

    `scored`: a reward scores it, so that None, or (None, None), ends it.
    """
    if scored and (value is None or (isinstance(value, tuple) and value == (None, None))):
        return TurnResult(NO_SCORE)
    if not isinstance(value, tuple):
        return TurnResult(observation=value) if is_reply(value) else TurnResult(read_score(value))
    if len(value) != 2 or not (value[0] is None or is_reply(value[0])):
        raise ValueError(f"returned {str(value)[:60]}, but of two things the first is text, messages or None.")
    observation, reward = value
    return TurnResult(None if reward is None and observation is not None else read_score(reward), observation)


@dataclass
class Transcript:
    """The tokens of one trajectory: the prompt, then completions and observations in turn."""

    prompt: Sequence[int]
    tokens: list[int] = field(init=False)
    mask: list[int] = field(init=False)
    """1 for each sampled token, for the column "response_mask"."""
    logprobs: list[float] = field(init=False)
    """The rollout engine's log-prob of each sampled token, 0 for the others, for the column "rollout_logprobs"."""
    sampling_mask: list[Sequence[int]] = field(init=False)
    """The tokens that each token was sampled from, for the column "sampling_mask"; none where that is all of them."""
    routing: Tensor | None = field(init=False, default=None)
    """The experts of each token up to the last sampled one, [length, routers, top_k] int16, for the column "routing";
    None if the rollout engine does not return them."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.mask = [0] * len(self.tokens)
        self.logprobs = [0.0] * len(self.tokens)
        self.sampling_mask = [()] * len(self.tokens)

    def add_completion(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        routing: Tensor | None = None,
        sampling_mask: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Adds a completion as it was sampled. With a `sampling_mask` its log-probs are among the tokens of the mask.

        `routing` covers all tokens so far. Tokens of earlier turns went through the model again for it; they keep the
        experts that they were sampled with.
        """
        if len(tokens) != len(logprobs):
            raise ValueError(f"{len(tokens)} tokens come with {len(logprobs)} log-probs. Give one of each token.")
        self.tokens += tokens
        self.mask += [1] * len(tokens)
        self.logprobs += logprobs
        if sampling_mask is not None and len(sampling_mask) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens come with {len(sampling_mask)} sampling masks. Give one of each.")
        self.sampling_mask += [()] * len(tokens) if sampling_mask is None else sampling_mask
        if routing is not None and len(routing) != len(self.tokens):
            raise ValueError(f"routing is of {len(routing)} tokens, but there are {len(self.tokens)}. Give it of all.")
        if routing is not None and self.routing is not None:
            routing, known = routing.clone(), len(self.routing) - 1  # the last token was not routed yet
            routing[:known] = self.routing[:known]
        self.routing = routing

    def add_observation(self, tokens: Sequence[int]) -> None:
        """Adds an observation, which is not trained on."""
        self.tokens += tokens
        self.mask += [0] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.sampling_mask += [()] * len(tokens)


def is_chat(prompt: Prompt) -> bool:
    """Whether a prompt is messages, so that the chat template formats all that follows it."""
    return not isinstance(prompt, str)


def _add_result(episode: Episode, result: TurnResult) -> TurnResult:
    """Adds a turn's result to its episode. Returns it with the sum of all scores so far."""
    total = episode.score_so_far
    if result.score is not None:
        total = result.score if total is None else total.plus(result.score)
    episode.score_so_far = total
    if result.observation is None:
        episode.score = total
    else:
        episode.observations.append(result.observation)
    return result.with_score(total)


def needed_episodes(share: float, count: int) -> int:
    """Returns how many of the `count` episodes of a group a step waits for, if it needs this share of them."""
    return max(LEAST_NEEDED, ceil(Fraction(str(share)) * count))  # 0.55 * 20 is more than 11
