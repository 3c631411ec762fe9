"""Conversations samples trajectories: turns of a rollout engine and an environment, one after the other.

The rollout engine samples completions. The environment returns an observation or ends the trajectory. A `Transcript`
holds the tokens of a trajectory, an `Episode` what the environment keeps for it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from postlude.data.chat import Encoder
from postlude.data.thoughts import CHANNEL
from postlude.generate.protocol import AsyncRolloutEngine, Completion, FinishedCompletion, Request
from postlude.generate.sampling_params import SamplingParams
from postlude.rollout.environments import Environment, Transcript, TurnResult, is_chat
from postlude.rollout.episode import AssistantTurn, Episode
from postlude.rollout.model_calls import ModelAccess, PendingCalls, combine_seeds
from postlude.rollout.reward_call import NOT_TRAINING, TrainerState
from postlude.rollout.rewards import Score
from postlude.rollout.tasks import Task
from postlude.trace.recorder import NO_RECORDER, Recorder
from postlude.trace.spans import Span

POLL_SECONDS = 0.02  # how long to wait for the environment before the engine is polled again
CALL_POLL_SECONDS = 0.002  # the same while the engine works on calls of agents
START_SECONDS = 0.005  # how long groups are started before the engine is polled again
ENGINE_POLL_SECONDS = 0.1  # how long to wait for the engine while the environment has nothing to do
OVER_BUDGET = Score(0.0, {"over_budget": 1.0})  # added to the score of a trajectory that would exceed the token budget
DROPPED = Score(0.0, {"dropped": 1.0}, excluded=True)  # of an unfinished episode that no step waits for any more
OPENED_TOKENS = 16  # at the end of a context, where a chat template may have opened a thought
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
    transcripts: Sequence[Transcript]
    """The sequences to train on. A conversation has one. Each sampled token has mask 1 in at most one of them."""
    completions: list[Completion] = field(default_factory=list)
    score: Score | None = None
    """The score so far, or None before there is one. Final once `done`."""
    done: bool = False
    trained_before: Sequence[Trajectory] = ()
    """Trajectories of its task that an earlier step trained on. Its reward is compared with theirs too."""

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
    def trainable(self) -> bool:
        """Whether it has a reward to train on, and tokens that were sampled."""
        return not self.excluded and any(1 in transcript.mask for transcript in self.transcripts)

    @property
    def truncated(self) -> bool:
        """Whether one of its turns reached max_new_tokens."""
        return any(completion.finish_reason == "length" for completion in self.completions)

    @property
    def length(self) -> int:
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
    needed: int | None = None
    """How many scored trajectories are waited for; None for all. The others, of episodes that ask for completions
    themselves, are then ended and left out of training."""
    carries: bool = False
    """Whether the others go on instead, and are trained on by a later step."""

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
        starts = source.environment.starts_episodes
        trajectories = [Trajectory(task, number, () if starts else (Transcript(prompt),)) for _ in range(samples)]
        return cls(task, number, sampling, trajectories, source, trainer_state)

    @property
    def has_enough(self) -> bool:
        """Whether `needed` trajectories have a score, so that the others are not waited for."""
        scored = sum(trajectory.done and not trajectory.excluded for trajectory in self.trajectories)
        return self.needed is not None and scored >= self.needed

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
    since: float = field(default_factory=time.perf_counter)
    """When its current wait, for the engine or the environment, began."""

    @property
    def environment(self) -> Environment:
        return self.group.source.environment

    @property
    def names(self) -> dict[str, str | int]:
        """The attributes that identify it in a trace."""
        turn = len(self.trajectory.completions)
        return {"postlude.group": self.group.number, "postlude.completion": self.index, "postlude.turn": turn}

    @property
    def transcript(self) -> Transcript:
        """The tokens so far."""
        (transcript,) = self.trajectory.transcripts
        return transcript


class Conversations:
    """Runs many groups concurrently, each in the environment of its `source`.

    A slow completion, tool or reward delays no other trajectory. The exception is an engine with a `fixed_order`: all
    trajectories finish a turn before any continues. Without `background` trajectories advance inside `poll`; with it
    a thread advances them continuously. Only one thread may call `start` and `poll`. `timer` measures the times
    "rollout" and "reward"; with `background` it is called in that thread. `recorder` gets each request and reward call.
    """

    def __init__(
        self,
        engine: AsyncRolloutEngine,
        *,
        budget: int,
        background: bool = False,
        timer: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
        recorder: Recorder = NO_RECORDER,
    ) -> None:
        self.engine, self.budget, self.timer, self.recorder = engine, budget, timer, recorder
        self._to_start: deque[TrajectoryGroup] = deque()
        self._finished: list[TrajectoryGroup] = []
        self._to_drop: list[Trajectory] = []
        self._waiting_for_engine: dict[int, dict[int, _Conversation]] = {}  # by request id and index of the completion
        self._waiting_for_environment: dict[int, _Conversation] = {}  # by id of the episode
        self._environments = Counter[Environment]()  # waiting conversations of each, without those in `_turn_results`
        self._model_calls = PendingCalls(engine, lambda completion, since: self._record_request(completion, since, {}))
        self._turn_results: dict[int, TurnResult] = {}  # by id of the episode, until `_add_turn_result`
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
        """Returns the groups that are done, or have enough and carry the rest, since the last call.

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

    def drop(self, trajectories: Sequence[Trajectory]) -> None:
        """Ends episodes that ask for completions themselves, and leaves them out of training."""
        with self._condition:
            self._to_drop += trajectories

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join()
        for conversations in self._waiting_for_engine.values():  # the environment closes the episodes that it works on
            for conversation in conversations.values():
                conversation.environment.release(conversation.episode)
        self._waiting_for_engine.clear()
        for conversation in self._waiting_for_environment.values():
            if conversation.environment.starts_episodes:
                conversation.environment.release(conversation.episode)

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
                to_drop, self._to_drop = set(self._to_drop), []
            if to_drop:
                self._drop(lambda conversation: conversation.trajectory in to_drop)
            began = time.monotonic()
            while to_start and (self.engine.fixed_order or time.monotonic() - began < START_SECONDS):
                self._start(to_start.popleft())
            with self._condition:
                self._to_start.extendleft(reversed(to_start))
            began = time.monotonic()
            self._submit_model_calls()
            for finished in self.engine.poll(0.0 if self._waiting_for_environment else ENGINE_POLL_SECONDS):
                self._add_completion(finished)
            if self.engine.fixed_order and self._waiting_for_engine:
                return
            engine_worked = time.monotonic() - began > POLL_SECONDS  # so it is not kept waiting
        with self.timer("reward"):
            wait = CALL_POLL_SECONDS if self._model_calls.any else POLL_SECONDS
            for environment in list(self._environments):
                for episode, result in environment.poll(0.0 if engine_worked or to_start else wait):
                    if id(episode) in self._waiting_for_environment:
                        self._turn_results[id(episode)] = result
                        self._stop_waiting(environment)
        if self.engine.fixed_order and any(
            episode_id not in self._turn_results and not conversation.environment.starts_episodes
            for episode_id, conversation in self._waiting_for_environment.items()
        ):
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
        environment = group.source.environment
        if not environment.starts_episodes:
            self._request(conversations, group.sampling)
            return
        access = ModelAccess(group.source.encoder.tokenizer, group.sampling, self.budget)
        for conversation in conversations:
            self._wait_for_environment(conversation)
            environment.start(conversation.episode, access)

    def _submit_model_calls(self) -> None:
        """Submits the requests of episodes that ask for completions themselves."""
        for environment in self._environments:
            self._model_calls.submit(environment.model_calls())
        self._model_calls.end_cancelled()

    def _wait_for_environment(self, conversation: _Conversation) -> None:
        self._waiting_for_environment[id(conversation.episode)] = conversation
        self._environments[conversation.environment] += 1

    def _stop_waiting(self, environment: Environment) -> None:
        """Forgets an environment that no conversation waits for."""
        self._environments[environment] -= 1
        if not self._environments[environment]:
            del self._environments[environment]

    def _request(self, conversations: list[_Conversation], sampling: SamplingParams) -> None:
        """Requests the next completion of conversations that have the same tokens so far, as one request."""
        prompt = tuple(conversations[0].transcript.tokens)
        for conversation in conversations:
            conversation.since = time.perf_counter()
        request_id = self.engine.submit(Request(prompt, sampling, len(conversations)))
        self._waiting_for_engine[request_id] = dict(enumerate(conversations))

    def _add_completion(self, finished: FinishedCompletion) -> None:
        """Adds a completion to its trajectory and submits it to the environment."""
        if finished.request_id not in self._waiting_for_engine:
            self._model_calls.add(finished)
            return
        conversations = self._waiting_for_engine[finished.request_id]
        conversation = conversations.pop(finished.index)
        if not conversations:
            del self._waiting_for_engine[finished.request_id]
        completion = finished.completion
        if completion is None:
            assert finished.error is not None
            raise finished.error
        conversation.since = self._record_request(completion, conversation.since, conversation.names)
        turn = _assistant_turn(completion, conversation.transcript.tokens, conversation.group.source.encoder)
        conversation.trajectory.completions.append(completion)
        conversation.transcript.add_completion(
            completion.tokens, completion.policy_logprobs, completion.routing, completion.sampling_mask
        )
        self._wait_for_environment(conversation)
        conversation.environment.submit(conversation.episode, turn)

    def _record_request(self, completion: Completion, start: float, attributes: Mapping[str, str | int]) -> float:
        end = time.perf_counter()
        counts = {"postlude.tokens": len(completion.tokens), "postlude.finish_reason": completion.finish_reason}
        request = Span(0, "request", "request", start, end, attributes={**attributes, **counts})
        self.recorder.add(request)
        if completion.queue_seconds is not None:
            began = min(start + completion.queue_seconds, end)
            self.recorder.add(Span(0, "queue", "queue", start, began, attributes=attributes, parent=request))
            self.recorder.add(Span(0, "sample", "sample", began, end, attributes=attributes, parent=request))
        return end

    def _add_turn_result(self, conversation: _Conversation, result: TurnResult) -> None:
        """Ends a trajectory, or requests its next completion."""
        reward, since = {} if result.score is None else {"postlude.reward": result.score.reward}, conversation.since
        names = {**conversation.names, **reward}
        self.recorder.add(Span(0, "reward", "reward call", since, time.perf_counter(), attributes=names))
        trajectory, group = conversation.trajectory, conversation.group
        if not self._apply_turn_result(trajectory, group, result):
            seed = combine_seeds(group.sampling.seed, conversation.index, len(trajectory.completions))
            self._request([conversation], replace(group.sampling, seed=seed))
            return
        self._end(conversation)
        if group.has_enough and not group.done and not group.carries:
            self._drop(lambda other: other.group is group)

    def _drop(self, chosen: Callable[[_Conversation], bool]) -> None:
        """Ends the chosen ones of the conversations that wait for an environment, and leaves them out of training."""
        for episode_id, conversation in list(self._waiting_for_environment.items()):
            if chosen(conversation):
                del self._waiting_for_environment[episode_id]
                if self._turn_results.pop(episode_id, None) is None:
                    self._stop_waiting(conversation.environment)
                conversation.trajectory.score = DROPPED
                self._end(conversation)

    def _end(self, conversation: _Conversation) -> None:
        """Ends a trajectory that has its score."""
        conversation.environment.release(conversation.episode)
        with self._condition:
            conversation.trajectory.done = True
            if conversation.group.done or (conversation.group.carries and conversation.group.has_enough):
                self._finished.append(conversation.group)
                self._condition.notify_all()

    def _apply_turn_result(self, trajectory: Trajectory, group: TrajectoryGroup, result: TurnResult) -> bool:
        """Adds a turn's score and observation to a trajectory. Returns whether it is over."""
        trajectory.score = result.score
        if result.observation is None:
            if group.source.environment.starts_episodes:
                trajectory.transcripts, trajectory.completions = result.transcripts, list(result.completions)
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
        (transcript,) = trajectory.transcripts
        if len(transcript.tokens) + len(observation_tokens) + group.sampling.max_new_tokens > self.budget:
            trajectory.score = score.plus(OVER_BUDGET)
            return True
        transcript.add_observation(observation_tokens)
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
