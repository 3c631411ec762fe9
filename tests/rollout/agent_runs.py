"""Runs of agents in tests: a sampler that records what it saw, and clients."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from postlude.data.chat import Encoder
from postlude.generate.protocol import Completion, FinishedCompletion, Request
from postlude.generate.sampling_params import SamplingParams
from postlude.hf.load import byte_tokenizer
from postlude.rollout.agent_programs import Agent, AgentLimits
from postlude.rollout.agents import AgentEnvironment, AgentOptions
from postlude.rollout.conversations import Conversations, PromptSource, Trajectory, TrajectoryGroup
from postlude.rollout.environments import Environment
from postlude.rollout.tasks import Task
from tests.rollout.test_agent_transcripts import TEMPLATE

BUDGET = 2048
SAMPLING = SamplingParams(max_new_tokens=64, temperature=0.5, seed=11)
Reply = Callable[[str, Request], str]
Part = tuple[tuple[int, ...], list[int], list[float]]


@dataclass(frozen=True)
class Sampled:
    """What the sampler saw."""

    request: Request
    completion: Completion


class RecordingEngine:
    """Completes every prompt with the text that `reply` returns for its text, in tokens of its own choice."""

    fixed_order = False

    def __init__(self, reply: Reply) -> None:
        self.reply, self.tokenizer = reply, byte_tokenizer()
        self.sampled: list[Sampled] = []
        self.held: set[int] = set()
        self.ids, self.finished = itertools.count(), list[FinishedCompletion]()

    def submit(self, request: Request) -> int:
        request_id = next(self.ids)
        for index in range(request.n):
            text = self.reply(self.tokenizer.decode(list(request.prompt)), request)
            tokens = self.tokenizer.encode(text, add_special_tokens=False)
            numbers = random.Random(f"{request.seed} {index}")
            logprobs = [-numbers.random() for _ in tokens]
            completion = Completion(tokens, logprobs, logprobs, "stop", text)
            self.sampled.append(Sampled(request, completion))
            self.finished.append(FinishedCompletion(request_id, index, completion))
        return request_id

    def poll(self, timeout: float | None = 0.0) -> list[FinishedCompletion]:
        finished, self.finished = self.finished, []
        return finished


def tokenizer() -> Any:
    made = byte_tokenizer()
    made.chat_template = TEMPLATE
    return made


def tasks(count: int = 1) -> list[Task]:
    rows = [{"prompt": f"{index}+1?", "answer": str(index + 1)} for index in range(count)]
    return [Task(str(row["prompt"]), row, f"row {index}") for index, row in enumerate(rows)]


def run_agents(
    agent: Agent,
    engine: Any,
    *,
    groups: int = 1,
    samples: int = 1,
    limits: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    seconds: float = 60.0,
    needed: int | None = None,
    sampling: SamplingParams = SAMPLING,
    **settings: Any,
) -> list[Trajectory]:
    """Returns the trajectories of some groups, one after the other."""
    agent_options = AgentOptions(AgentLimits(**{"seconds": 20.0, **(limits or {})}), **(options or {}))
    environment = AgentEnvironment(tasks(groups), agent, agent_options, **settings)
    return run_environment(
        environment, engine, groups=groups, samples=samples, seconds=seconds, needed=needed, sampling=sampling
    )


def run_environment(
    environment: Environment,
    engine: Any,
    *,
    groups: int = 1,
    samples: int = 1,
    seconds: float = 60.0,
    needed: int | None = None,
    sampling: SamplingParams = SAMPLING,
) -> list[Trajectory]:
    """Returns the trajectories of an environment's first tasks, and closes it."""
    source = PromptSource(environment, Encoder(tokenizer=tokenizer()))
    started = [
        TrajectoryGroup.of(environment.tasks[index], index, (), replace(sampling, seed=index), samples, source)
        for index in range(groups)
    ]
    with closing(environment), closing(Conversations(engine, budget=BUDGET)) as conversations:
        for group in started:
            group.needed = needed
            conversations.start(group)
        end = time.monotonic() + seconds
        while not all(group.done for group in started) and time.monotonic() < end:
            conversations.poll(0.0)
    return [trajectory for group in started for trajectory in group.trajectories]


def check_tokens(trajectories: Sequence[Trajectory], engine: RecordingEngine) -> None:
    """Checks that the trained tokens are those that were sampled, each once, after what the sampler read."""
    assert trained_parts(trajectories) == sampled_parts(engine)


def sampled_parts(engine: RecordingEngine) -> list[Part]:
    """Returns the tokens before each completion, its tokens and their log-probs, sorted."""
    entries = [(entry.request.prompt, entry.completion) for entry in engine.sampled]
    return sorted((prompt, list(completion.tokens), list(completion.logprobs)) for prompt, completion in entries)


def trained_parts(trajectories: Sequence[Trajectory]) -> list[Part]:
    """Returns the same of the tokens that are trained on."""
    trained = []
    for transcript in (transcript for trajectory in trajectories for transcript in trajectory.transcripts):
        assert len(transcript.tokens) == len(transcript.mask) == len(transcript.logprobs)
        assert not any(map(float, itertools.compress(transcript.logprobs, [not mask for mask in transcript.mask])))
        place = 0
        for mask, run in itertools.groupby(transcript.mask):
            end = place + len(list(run))
            if mask:
                entry = (tuple(transcript.tokens[:place]), transcript.tokens[place:end], transcript.logprobs[place:end])
                trained.append(entry)
            place = end
    return sorted(trained)
