"""Conversations samples trajectories: turns of a rollout engine and an environment, one after the other.

The rollout engine samples completions. The environment returns an observation or ends the trajectory. A `Transcript`
holds the tokens of a trajectory, an `Episode` what the environment keeps for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from postlude.data.chat import Encoder
from postlude.data.thoughts import CHANNEL
from postlude.generate.protocol import AsyncRolloutEngine, Completion, FinishedCompletion, Request
from postlude.generate.sampling_params import SamplingParams
from postlude.rollout.environments import Environment, Transcript, TurnResult, is_chat
from postlude.rollout.episode import AssistantTurn, Episode
from postlude.rollout.reward_call import NOT_TRAINING, TrainerState
from postlude.rollout.rewards import Score
from postlude.rollout.tasks import Task

POLL_SECONDS = 0.02  # how long to wait for the environment before the engine is polled again
ENGINE_POLL_SECONDS = 0.1  # how long to wait for the engine while the environment has nothing to do
OVER_BUDGET = Score(0.0, {"over_budget": 1.0})  # added to the score of a trajectory that would exceed the token budget
OPENED_TOKENS = 16  # the end of a context, in which a template may open a thought
REWARD_FAILED = "failed"  # key in `Trajectory.components`: the reward call failed


@dataclass(frozen=True)
class PromptSource:
    """An environment, and the encoder of its prompts and observations."""

    environment: Environment
    encoder: Encoder


@dataclass(eq=False)
class Trajectory:
    """One sampled attempt at a task: the completions of all its turns, and its score."""

    task: Task
    group: int
    transcript: Transcript
    completions: list[Completion] = field(default_factory=list)
    score: Score | None = None
    """The score so far, or None before there is one. Final once `done`."""
    done: bool = False

    @property
    def reward(self) -> float:
        """The reward of a trajectory that is done."""
        assert self.score is not None
        return self.score.reward

    @property
    def components(self) -> dict[str, float]:
        """The components of the reward, and "failed" if the call for it failed, or an observation was invalid."""
        assert self.score is not None
        return dict(self.score.components) | ({REWARD_FAILED: 1.0} if self.score.error else {})

    @property
    def excluded(self) -> bool:
        """Whether it is left out of training: its reward or an observation failed, and no `failed_reward` is set."""
        return self.score is not None and self.score.excluded

    @property
    def truncated(self) -> bool:
        """Whether one of its turns reached max_new_tokens."""
        return any(completion.finish_reason == "length" for completion in self.completions)

    @property
    def length(self) -> int:
        """The number of sampled tokens."""
        return sum(len(completion.tokens) for completion in self.completions)


@dataclass(eq=False)
class TrajectoryGroup:
    """The trajectories of one task. `number` is the group's in its step; `sampling.seed` is the group's seed."""

    task: Task
    number: int
    sampling: SamplingParams
    trajectories: list[Trajectory]
    source: PromptSource
    trainer_state: TrainerState = NOT_TRAINING

    @classmethod
    def of(
        cls,
        task: Task,
        number: int,
        prompt: Sequence[int],
        sampling: SamplingParams,
        samples: int,
        source: PromptSource,
        trainer_state: TrainerState = NOT_TRAINING,
    ) -> TrajectoryGroup:
        """Returns a group of `samples` trajectories that are not started."""
        trajectories = [Trajectory(task, number, Transcript(prompt)) for _ in range(samples)]
        return cls(task, number, sampling, trajectories, source, trainer_state)

    @property
    def done(self) -> bool:
        return all(trajectory.done for trajectory in self.trajectories)


@dataclass(eq=False)
class _Conversation:
    """A trajectory in progress."""

    trajectory: Trajectory
    index: int
    """Its index in the group."""
    group: TrajectoryGroup
    episode: Episode

    @property
    def environment(self) -> Environment:
        """The environment of its group."""
        return self.group.source.environment


class Conversations:
    """Runs many groups concurrently, each in the environment of its `source`.

    A slow completion, tool or reward delays no other trajectory. The exception is an engine with a `fixed_order`: all
    trajectories finish a turn before any continues. Without `background` trajectories advance inside `poll`; with it
    a thread advances them continuously. Only one thread may call `start` and `poll`. `timer` measures the times
    "rollout" and "reward"; with `background` it is called in that thread.
    """

    def __init__(
        self,
        engine: AsyncRolloutEngine,
        *,
        budget: int,
        background: bool = False,
        timer: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        self.engine, self.budget, self.timer = engine, budget, timer
        self._to_start: deque[TrajectoryGroup] = deque()
        self._finished: list[TrajectoryGroup] = []
        self._waiting_for_engine: dict[int, dict[int, _Conversation]] = {}  # by request id and index of the completion
        self._waiting_for_environment: dict[int, _Conversation] = {}  # by id of the episode
        self._turn_results: dict[int, TurnResult] = {}  # of those that have one but do not continue yet
        self._error: BaseException | None = None
        self._closed = False
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._run, name="postlude conversations", daemon=True)
            self._thread.start()

    def start(self, group: TrajectoryGroup) -> None:
        with self._condition:
            self._to_start.append(group)
            self._condition.notify_all()

    def poll(self, timeout: float) -> list[TrajectoryGroup]:
        """Returns the groups that are done since the last call.

        With `background` it waits up to `timeout` seconds for the first one, and raises an error that ended the thread.
        Without, it advances the conversations once, which may finish none.
        """
        if self._thread is None:
            self._advance()
        with self._condition:
            self._condition.wait_for(lambda: self._error or self._finished, timeout if self._thread else 0.0)
            if self._error is not None:
                raise self._error
            finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        """Stops the thread and releases the episodes in progress."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join()
        for conversations in self._waiting_for_engine.values():  # the environment closes the episodes that it works on
            for conversation in conversations.values():
                conversation.environment.release(conversation.episode)
        self._waiting_for_engine.clear()

    def _run(self) -> None:
        try:
            while True:
                with self._condition:
                    self._condition.wait_for(
                        lambda: (
                            self._closed or self._to_start or self._waiting_for_engine or self._waiting_for_environment
                        )
                    )
                if self._closed:
                    return
                self._advance()
        except BaseException as error:  # `poll` raises it
            with self._condition:
                self._error = error
                self._condition.notify_all()

    def _advance(self) -> None:
        """Waits briefly for completions and turn results, and continues the conversations that got one."""
        with self.timer("rollout"):
            with self._condition:
                to_start, self._to_start = self._to_start, deque()
            for group in to_start:
                self._start(group)
            began = time.monotonic()
            for finished in self.engine.poll(0.0 if self._waiting_for_environment else ENGINE_POLL_SECONDS):
                self._add_completion(finished)
            if self.engine.fixed_order and self._waiting_for_engine:
                return
            engine_worked = time.monotonic() - began > POLL_SECONDS  # so it is not kept waiting
        with self.timer("reward"):
            waiting = [
                conversation
                for episode_id, conversation in self._waiting_for_environment.items()
                if episode_id not in self._turn_results
            ]
            for environment in dict.fromkeys(conversation.environment for conversation in waiting):
                for episode, result in environment.poll(0.0 if engine_worked else POLL_SECONDS):
                    if id(episode) in self._waiting_for_environment:
                        self._turn_results[id(episode)] = result
        if self.engine.fixed_order and len(self._turn_results) < len(self._waiting_for_environment):
            return
        with self.timer("rollout"):
            results, self._turn_results = self._turn_results, {}
            turns = [(self._waiting_for_environment.pop(episode_id), result) for episode_id, result in results.items()]
            # Sorted, so that batches of requests do not depend on the order of arrival.
            for conversation, result in sorted(turns, key=lambda turn: (turn[0].group.number, turn[0].index)):
                self._add_turn_result(conversation, result)

    def _start(self, group: TrajectoryGroup) -> None:
        episodes = group.source.environment.reset_group(group.task, len(group.trajectories))
        for episode in episodes:
            episode.trainer_state = group.trainer_state
        conversations = [
            _Conversation(trajectory, index, group, episode)
            for index, (trajectory, episode) in enumerate(zip(group.trajectories, episodes, strict=True))
        ]
        self._request(conversations, group.sampling)

    def _request(self, conversations: list[_Conversation], sampling: SamplingParams) -> None:
        """Requests the next completion of conversations that have the same tokens so far, as one request."""
        prompt = tuple(conversations[0].trajectory.transcript.tokens)
        request_id = self.engine.submit(Request(prompt, sampling, len(conversations)))
        self._waiting_for_engine[request_id] = dict(enumerate(conversations))

    def _add_completion(self, finished: FinishedCompletion) -> None:
        """Adds a completion to its trajectory and submits it to the environment."""
        conversations = self._waiting_for_engine[finished.request_id]
        conversation = conversations.pop(finished.index)
        if not conversations:
            del self._waiting_for_engine[finished.request_id]
        completion = finished.completion
        if completion is None:
            assert finished.error is not None
            raise finished.error
        turn = _assistant_turn(completion, conversation.trajectory.transcript.tokens, conversation.group.source.encoder)
        conversation.trajectory.completions.append(completion)
        conversation.trajectory.transcript.add_completion(completion.tokens, completion.logprobs, completion.routing)
        self._waiting_for_environment[id(conversation.episode)] = conversation
        conversation.environment.submit(conversation.episode, turn)

    def _add_turn_result(self, conversation: _Conversation, result: TurnResult) -> None:
        """Ends a trajectory, or requests its next completion."""
        trajectory, group = conversation.trajectory, conversation.group
        if not self._apply_turn_result(trajectory, group, result):
            seed = combine_seeds(group.sampling.seed, conversation.index, len(trajectory.completions))
            self._request([conversation], replace(group.sampling, seed=seed))
            return
        conversation.environment.release(conversation.episode)
        with self._condition:
            trajectory.done = True
            if group.done:
                self._finished.append(group)
                self._condition.notify_all()

    def _apply_turn_result(self, trajectory: Trajectory, group: TrajectoryGroup, result: TurnResult) -> bool:
        """Adds a turn's score and observation to a trajectory. Returns whether it is over."""
        trajectory.score = result.score
        if result.observation is None:
            return True
        score, environment = result.score or Score(0.0), group.source.environment
        try:
            observation_tokens = group.source.encoder.observation(
                result.observation,
                trajectory.completions[-1].tokens,
                chat=is_chat(trajectory.task.prompt),
                keep_reasoning=environment.keep_reasoning,
            )
        except ValueError as error:  # an invalid observation fails only this trajectory
            failed_reward, message = environment.failed_reward, f"the environment's observation cannot be read: {error}"
            trajectory.score = score.plus(Score(failed_reward or 0.0, {}, message, excluded=failed_reward is None))
            return True
        if len(trajectory.transcript.tokens) + len(observation_tokens) + group.sampling.max_new_tokens > self.budget:
            trajectory.score = score.plus(OVER_BUDGET)
            return True
        trajectory.transcript.add_observation(observation_tokens)
        return False


def _assistant_turn(completion: Completion, context: Sequence[int], encoder: Encoder) -> AssistantTurn:
    """Returns a completion of `context` as an environment sees it."""
    tokenizer, tokens, text = encoder.tokenizer, completion.tokens, completion.text or ""
    raw_text = tokenizer.decode(tokens, skip_special_tokens=False)
    end = tokenizer.decode(context[-OPENED_TOKENS:], skip_special_tokens=False)
    answer = _answer(encoder, text, tokens, raw_text, in_thought=encoder.thoughts.opened(end) is not None)
    return AssistantTurn(text, tokens, completion.finish_reason == "length", raw_text, answer)


def _answer(encoder: Encoder, text: str, tokens: Sequence[int], raw_text: str, *, in_thought: bool) -> str:
    """Returns the text of a completion without its thoughts, whose markers may be special tokens."""
    tokenizer, thoughts = encoder.tokenizer, encoder.thoughts
    if CHANNEL not in raw_text and (thoughts.is_in(text) or not thoughts.is_in(raw_text)):
        return thoughts.answer(text, in_thought=in_thought)
    answer = thoughts.answer(raw_text, in_thought=in_thought)
    for token in set(tokens):
        if not tokenizer.decode([token], skip_special_tokens=True):
            answer = answer.replace(tokenizer.decode([token], skip_special_tokens=False), "")
    after_stop = len(tokenizer.decode(tokens, skip_special_tokens=True)) - len(text)
    return answer[: max(0, len(answer) - after_stop)]


def combine_seeds(*numbers: int) -> int:
    """Returns one seed that depends on all numbers and their order."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % (1 << 62)
    return seed
