"""Conversations: attempts at tasks, each going back and forth between an engine and an environment by itself."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from postlude.data.chat import Encoder
from postlude.generate.protocol import Completion, ConversationEngine, FinishedCompletion, Request
from postlude.generate.sampling_params import SamplingParams
from postlude.rollout.environments import AssistantTurn, Environment, Episode, Transcript, TurnResult, is_chat
from postlude.rollout.rewards import Score
from postlude.rollout.tasks import Task

LINGER = 0.5  # seconds in which turns are waited for, to go on together; those that take longer go on later
GLANCE = 0.02  # seconds between looks at two things that are both waited for
MEANWHILE = 0.5  # seconds until who waits for a thread does something else for a moment
NO_ROOM = Score(0.0, {"over_budget": 1.0})  # what a conversation earns that outgrows the budget
FAILED = "failed"  # the part of a reward that could not be given


@dataclass(eq=False)
class Trajectory:
    """One answer to a task, all its turns, and what it earned."""

    task: Task
    group: int
    transcript: Transcript
    completions: list[Completion] = field(default_factory=list)
    score: Score | None = None
    """What it has earned so far, if anything, and at the end in all."""
    done: bool = False

    @property
    def reward(self) -> float:
        """What it earned in all."""
        assert self.score is not None  # it is over
        return self.score.reward

    @property
    def parts(self) -> dict[str, float]:
        """What the reward is made of, and whether it could not be given."""
        assert self.score is not None  # it is over
        return dict(self.score.parts) | ({FAILED: 1.0} if self.score.error else {})

    @property
    def excluded(self) -> bool:
        """Whether there is no reward to learn from, since the call that gives it failed."""
        return self.score is not None and self.score.excluded

    @property
    def truncated(self) -> bool:
        """Whether one of its turns reached max_new_tokens."""
        return any(each.finish_reason == "length" for each in self.completions)

    @property
    def length(self) -> int:
        """The number of tokens that were sampled."""
        return sum(len(each.tokens) for each in self.completions)


@dataclass(eq=False)
class TrajectoryGroup:
    """The attempts at one task: `number` is what they are known by, and the seed of `sampling` decides them."""

    task: Task
    number: int
    sampling: SamplingParams
    trajectories: list[Trajectory]

    @classmethod
    def of(
        cls, task: Task, number: int, prompt: Sequence[int], sampling: SamplingParams, samples: int
    ) -> TrajectoryGroup:
        """`samples` attempts, none begun."""
        return cls(task, number, sampling, [Trajectory(task, number, Transcript(prompt)) for _ in range(samples)])

    @property
    def done(self) -> bool:
        """Whether all have come to an end."""
        return all(each.done for each in self.trajectories)


@dataclass(eq=False)
class _Talk:
    """One attempt under way."""

    attempt: Trajectory
    number: int
    """Which of its group it is."""
    group: TrajectoryGroup
    episode: Episode


class Conversations:
    """Many groups of attempts under way at once. A slow answer, tool or judge holds up nobody else.

    Without `background` they go on while somebody waits for them, and with it all the time, in a thread; either way
    `begin` and `wait` are for one caller, who does `meanwhile` now and then while it waits.
    """

    def __init__(
        self,
        engine: ConversationEngine,
        environment: Environment,
        encoder: Encoder,
        *,
        budget: int,
        max_new_tokens: int,
        background: bool = False,
        meanwhile: Callable[[], None] = lambda: None,
        timed: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        self.engine, self.environment, self.encoder = engine, environment, encoder
        self.budget, self.max_new_tokens, self.timed, self.meanwhile = budget, max_new_tokens, timed, meanwhile
        self._new: deque[TrajectoryGroup] = deque()
        self._asked: dict[int, dict[int, _Talk]] = {}  # by the tickets of their requests and their numbers there
        self._judged: dict[int, _Talk] = {}  # by their episodes, whose turn is not known yet
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._go_on, name="postlude conversations", daemon=True)
            self._thread.start()

    def begin(self, group: TrajectoryGroup) -> None:
        """Begin all attempts of a group."""
        with self._changed:
            self._new.append(group)
            self._changed.notify_all()

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait until something is so of groups that were begun. Raises what ended all conversations, if that comes."""
        if self._thread is None:
            while not done():
                self.meanwhile()
                self._advance()
            return
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._error is not None or done(), timeout=MEANWHILE):
                    break
            self.meanwhile()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Let go of all that is under way."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        for talks in self._asked.values():  # those that wait for the environment are its own to end
            for talk in talks.values():
                self.environment.release(talk.episode)
        self._asked.clear()

    def _go_on(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._new or self._under_way())
                if self._closed:
                    return
                self._advance()
        except BaseException as error:  # whatever it is, nobody is to wait for ever
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _under_way(self) -> bool:
        return bool(self._asked or self._judged)

    def _advance(self) -> None:
        """Wait for something to happen, but not for long, and do what follows from it."""
        with self.timed("rollout"):
            with self._changed:
                new, self._new = self._new, deque()
            for group in new:
                self._open(group)
            for finished in self.engine.poll(0.0 if self._judged else 5 * GLANCE):
                self._hear(finished)
        if not self._judged:
            return
        with self.timed("reward"):
            if self.engine.batched_polls:
                found = list(self.environment.collect(len(self._judged), LINGER).values())
            else:
                found = self.environment.poll(GLANCE)
        with self.timed("rollout"):
            turns = [(self._judged.pop(id(episode)), turn) for episode, turn in found if id(episode) in self._judged]
            for talk, turn in sorted(turns, key=lambda each: (each[0].group.number, each[0].number)):
                self._follow(talk, turn)

    def _open(self, group: TrajectoryGroup) -> None:
        talks = [
            _Talk(attempt, number, group, self.environment.reset(attempt.task))
            for number, attempt in enumerate(group.trajectories)
        ]
        self._ask(talks, group.sampling)

    def _ask(self, talks: list[_Talk], sampling: SamplingParams) -> None:
        prompt = tuple(talks[0].attempt.transcript.tokens)
        self._asked[self.engine.submit(Request(prompt, sampling, len(talks)))] = dict(enumerate(talks))

    def _hear(self, finished: FinishedCompletion) -> None:
        """An answer has come: what comes of it is the environment's to say."""
        others = self._asked[finished.ticket]
        talk = others.pop(finished.number)
        if not others:
            del self._asked[finished.ticket]
        if finished.answer is None:
            assert finished.error is not None
            raise finished.error
        attempt, said = talk.attempt, finished.answer
        attempt.completions.append(said)
        attempt.transcript.add_completion(said.tokens, said.logprobs, said.routing)
        self._judged[id(talk.episode)] = talk
        self.environment.submit(
            talk.episode, AssistantTurn(said.text or "", said.tokens, said.finish_reason == "length")
        )

    def _follow(self, talk: _Talk, turn: TurnResult) -> None:
        """What came of an attempt's last completion: its end, or another."""
        attempt = talk.attempt
        if self._ends(attempt, turn):
            self.environment.release(talk.episode)
            with self._changed:
                attempt.done = True
                self._changed.notify_all()
            return
        seed = combine_seeds(talk.group.sampling.seed, talk.number, len(attempt.completions))
        self._ask([talk], replace(talk.group.sampling, seed=seed))

    def _ends(self, attempt: Trajectory, turn: TurnResult) -> bool:
        """Hear a turn; whether it is the attempt's last."""
        attempt.score = turn.score
        if turn.observation is None:
            return True
        chat, earned = is_chat(attempt.task.prompt), turn.score or Score(0.0)
        try:
            heard = self.encoder.observation(
                turn.observation,
                attempt.completions[-1].tokens,
                chat=chat,
                keep_reasoning=self.environment.keep_reasoning,
            )
        except ValueError as error:  # the environment's mistake, at the cost of this attempt
            failed, sentence = self.environment.failed_reward, f"the environment's answer cannot be read: {error}"
            attempt.score = earned.plus(Score(failed or 0.0, {}, sentence, excluded=failed is None))
            return True
        if len(attempt.transcript.tokens) + len(heard) + self.max_new_tokens > self.budget:
            attempt.score = earned.plus(NO_ROOM)
            return True
        attempt.transcript.add_observation(heard)
        return False


def combine_seeds(*numbers: int) -> int:
    """One seed of several numbers."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % (1 << 62)
    return seed
