"""AgentEnvironment: episodes of an agent that asks for completions itself, through a URL, and returns its reward.

The agent is any program, function or service that uses OpenAI's or Anthropic's client. What it was sent and what it
got are trained on as tokens, exactly as they were sampled.
"""

from __future__ import annotations

import itertools
import logging
import shutil
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from postlude.pool.worker_pool import CallResult
from postlude.rollout.agent_programs import LOOPBACK, Agent, AgentClient, AgentLimits
from postlude.rollout.agent_transcripts import Branches, ChatEncoders
from postlude.rollout.coroutine_pool import CoroutinePool
from postlude.rollout.environments import Environment, Stragglers, TurnResult
from postlude.rollout.episode import AssistantTurn, Episode
from postlude.rollout.model_calls import ModelAccess, ModelCall
from postlude.rollout.reward import WAIT_SECONDS, Reward, sum_of_known, trial_failure
from postlude.rollout.rewards import NO_SCORE, FailureCounter, Score, read_score
from postlude.rollout.tasks import Task, Tasks
from postlude.world.work_directories import WorkDirectories

if TYPE_CHECKING:
    from postlude.rollout.agent_proxy import AgentProxy
    from postlude.rollout.agent_session import AgentSampling, AgentSession
    from postlude.serving.server.served_model import ServedModel

END_SECONDS = 180.0  # after the limit of time, in which an agent and all that it started end
MODEL_NAME = "policy"  # of the trained model; agents may use any other name too
LOG = logging.getLogger("postlude")


@dataclass(frozen=True)
class AgentOptions:
    """How the episodes of an agent are run and trained on."""

    limits: AgentLimits
    concurrency: int = 256
    """Episodes at a time. The others wait."""
    sampling: AgentSampling = "config"
    branches: Branches = "all"
    keep_reasoning: bool = False
    stragglers: Stragglers = "wait"
    needed_share: float = 1.0
    """Both as in `Environment`."""
    task_columns: tuple[str, ...] | None = None
    """Columns of a task that the agent gets; None gives all but `answer`."""
    answer: str | None = None
    """The column with what the reward knows and the agent should not."""
    unfinished_reward: float = 0.0
    """The reward of an episode that reached a limit of its calls or tokens and ended without one."""


class AgentEnvironment(Environment):
    """Every episode is a run of `agent`, which returns its reward. With a `reward`, which is added, it may return none.

    An episode that crashes, takes too long or returns no valid reward is counted in `failures`, and is excluded from
    training or earns `failed_reward` if that is a number.
    """

    starts_episodes = True

    def __init__(
        self,
        tasks: Tasks,
        agent: Agent,
        options: AgentOptions,
        *,
        reward: Reward | None = None,
        failed_reward: float | None = None,
    ) -> None:
        if reward is not None and reward.needs_group:
            raise ValueError(
                f"the reward {reward.name} has group: true, but an agent's episode may fail without a reward, and its "
                "group would never be complete. Set group to false."
            )
        self.tasks, self.agent, self.options, self.reward = tasks, agent, options, reward
        self.failures, self.failed_reward = FailureCounter(agent.name, failed_reward), failed_reward
        self.needed_share, self.stragglers = options.needed_share, options.stragglers
        self.keep_reasoning = options.keep_reasoning
        self._workdirs: WorkDirectories | None = None
        self._warned_of_sampling = False
        seconds = agent.start_seconds + options.limits.seconds + END_SECONDS
        self._coroutines = CoroutinePool(agent.name, seconds, options.concurrency)
        self._proxy: AgentProxy | None = None
        self._model: ServedModel | None = None
        self._encoders: ChatEncoders | None = None
        self._call_ids = itertools.count()
        self._running: dict[int, Episode] = {}  # by id of the coroutine
        self._ended: dict[Episode, TurnResult] = {}  # episodes that the reward scores
        self._reward_error: str | None = None  # of the last episode
        self._model_calls: deque[ModelCall] = deque()
        self._lock = threading.Lock()

    @property
    def lost_workers(self) -> int | None:
        return sum_of_known((self.agent.lost_workers, None if self.reward is None else self.reward.lost_workers))

    def start(self, episode: Episode, access: ModelAccess) -> None:
        proxy, call_id = self._open_proxy(access), next(self._call_ids)
        session = self._open_session(episode, access, call_id)
        episode.state = _Running(call_id, session)
        proxy.add(session)
        self._running[call_id] = episode
        self._coroutines.submit(call_id, self._run(episode.task, episode.state, proxy.url))

    async def _run(self, task: Task, running: _Running, url: str) -> CallResult:
        """Runs the agent in a new work directory, which stays until the episode is released."""
        if self.agent.host is not None:
            client = AgentClient(url, running.session.key, Path())
            return await self.agent.run(self._shown(task), client, self.options.limits)
        assert self._workdirs is not None
        running.workdir = self._workdirs.make()
        try:
            client = AgentClient(url, running.session.key, running.workdir)
            return await self.agent.run(self._shown(task), client, self.options.limits)
        finally:
            running.ended = True
            running.remove_files()

    def _shown(self, task: Task) -> dict[str, Any]:
        """Returns what the agent gets of a task."""
        columns, example = self.options.task_columns, dict(task.example)
        if columns is None:
            return {name: value for name, value in example.items() if name != self.options.answer}
        return {name: example[name] for name in columns if name in example}

    def model_calls(self) -> list[ModelCall]:
        with self._lock:
            calls = list(self._model_calls)
            self._model_calls.clear()
        return calls

    def trial_call(self, task: Task, turn: AssistantTurn) -> None:
        """Raises ValueError if the reward failed on an episode that was played before a run starts."""
        if self._reward_error is not None:
            raise trial_failure(self._reward_error, task, turn)

    def release(self, episode: Episode) -> None:
        super().release(episode)
        running, episode.state = episode.state, None
        self._ended.pop(episode, None)
        if running is not None:
            self._end(running)
            running.released = True
            running.remove_files()

    def close(self) -> None:
        """Ends all agents and the server of their calls, and closes the reward."""
        episodes = [*self._running.values(), *self._ended]
        for episode in episodes:
            self.release(episode)
        self._coroutines.close()
        if self._proxy is not None:
            self._proxy.close()
            self._proxy = None
        if self._workdirs is not None:
            self._workdirs.close()
            self._workdirs = None
        self.agent.close()
        if self.reward is not None:
            self.reward.close()

    def _submit(self, episode: Episode) -> None:
        raise AssertionError("an agent asks for completions itself")

    def _poll(self, timeout: float | None) -> list[tuple[Episode, TurnResult]]:
        """Returns finished episodes. Returns early if there are new model calls."""
        if self._proxy is not None:
            self._proxy.check()
        deadline = time.monotonic() + (WAIT_SECONDS if timeout is None else timeout)
        while True:
            wait = max(0.0, deadline - time.monotonic())
            results = self._finished(min(wait, WAIT_SECONDS) if self._ended else wait)
            if self.reward is not None:
                for episode, score in self.reward.poll(0.0):
                    self._reward_error = score.error
                    if (result := self._ended.pop(episode, None)) is not None:
                        assert result.score is not None
                        results.append((episode, result.with_score(result.score.plus(score))))
            if results or self._model_calls or time.monotonic() >= deadline:
                return results

    def _finished(self, timeout: float) -> list[tuple[Episode, TurnResult]]:
        """Returns the results of episodes that ended, without those that the reward scores first."""
        results = []
        for call_id, result in self._coroutines.poll(0.0 if self._model_calls else timeout).items():
            episode = self._running.pop(call_id, None)
            if episode is None or episode.state is None:  # it was released
                continue
            self._end(episode.state)
            agent_result = result.value if isinstance(result.value, CallResult) else result
            score, is_scored = self._score(episode, agent_result)
            session: AgentSession = episode.state.session
            replies = session.transcripts.replies
            turn = TurnResult(
                score,
                transcripts=session.transcripts.transcripts(self.options.branches),
                completions=tuple(reply.completion for reply in replies),
            )
            if is_scored and self.reward is not None:
                self._ended[episode] = turn
                episode.turns = session.turns() or [AssistantTurn("")]
                episode.messages = session.transcripts.turns[-1].messages() if session.transcripts.turns else []
                episode.workdir = episode.state.workdir
                self.reward.submit(episode)
            else:
                results.append((episode, turn))
        return results

    def _score(self, episode: Episode, result: CallResult) -> tuple[Score, bool]:
        """Returns the score of an agent's episode, and whether the environment's reward is added."""
        session: AgentSession = episode.state.session
        untrained = {"untrained_calls": float(session.untrained)} if session.untrained else {}
        parts = replace(NO_SCORE, components=untrained)
        if session.untrained_because and not self._warned_of_sampling:
            self._warned_of_sampling = True
            LOG.warning(
                "%s asked for %s, so those completions are not trained on: their log-probs would not be those of the "
                "trained policy. Set sampling.* to what it asks for, or environment.sampling to config.",
                self.agent.name,
                session.untrained_because,
            )
        for name in session.refused:
            parts = parts.plus(replace(NO_SCORE, components={f"{name}_limit": 1.0}))
        missing = result.value is None and self.reward is None
        if session.refused and (result.failure is not None or missing):
            return parts.plus(Score(self.options.unfinished_reward, {"unfinished": 1.0})), False
        if result.failure is not None:
            return parts.plus(self.failures.failed(result, episode.task.name)), False
        try:
            if missing:
                raise ValueError("returned no reward, and the environment has none. Return one, or set reward.")
            value = NO_SCORE if result.value is None else read_score(result.value, episode.task.name)
        except ValueError as error:
            return parts.plus(self.failures.invalid(error)), False
        return parts.plus(value), True

    def _end(self, running: _Running) -> None:
        """Ends an agent and its calls, if they have not ended."""
        running.session.end()
        if self._proxy is not None:
            self._proxy.remove(running.session)
        self._coroutines.cancel(running.call_id)

    def _open_proxy(self, access: ModelAccess) -> AgentProxy:
        if self._proxy is None:
            from postlude.rollout.agent_proxy import AgentProxy, copy_tokenizer  # noqa: PLC0415 - only for a run
            from postlude.serving.server.served_model import ServedModel  # noqa: PLC0415

            tokenizer = copy_tokenizer(access.tokenizer)
            self._model = ServedModel(MODEL_NAME, tokenizer, access.max_length)
            self._encoders = ChatEncoders(tokenizer, self.template_options)
            self._workdirs = WorkDirectories()
            self._proxy = AgentProxy(self.agent.host or LOOPBACK)
        return self._proxy

    def _open_session(self, episode: Episode, access: ModelAccess, call_id: int) -> AgentSession:
        from postlude.rollout.agent_session import AgentSession  # noqa: PLC0415 - only for a run

        assert self._model is not None
        assert self._encoders is not None
        return AgentSession(
            episode,
            access,
            self._model,
            self._encoders,
            self.options.limits,
            sampling=self.options.sampling,
            keep_reasoning=self.options.keep_reasoning,
            submit=self._add_model_call,
            stop=lambda: self._coroutines.cancel(call_id),
        )

    def _add_model_call(self, call: ModelCall) -> None:
        with self._lock:
            self._model_calls.append(call)
        self._coroutines.wake()


@dataclass(eq=False)
class _Running:
    """An episode in progress."""

    call_id: int
    session: AgentSession
    workdir: Path | None = None
    ended: bool = False
    """Whether the agent has ended."""
    released: bool = False
    """Whether nobody needs its files any more."""

    def remove_files(self) -> None:
        """Removes the work directory, once neither the agent nor its reward needs it."""
        if self.ended and self.released and self.workdir is not None:
            shutil.rmtree(self.workdir, ignore_errors=True)
