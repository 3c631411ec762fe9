"""Carried episodes: a group is trained on without its last ones, which join a later step or end."""

from __future__ import annotations

import json
import threading
from array import array
from collections.abc import Iterator
from contextlib import closing
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

from postlude.data.datasets import RowOrder
from postlude.generate.protocol import Completion, VersionSpan
from postlude.hf.load import byte_tokenizer
from postlude.recipes.config.environments import AgentSettings
from postlude.recipes.config.load import ConfigError, load
from postlude.recipes.config.policy_configs import GRPOConfig
from postlude.recipes.config.recipe_configs import DistillConfig, EvalConfig
from postlude.recipes.config.settings import SamplingSettings
from postlude.recipes.report.metrics import REWARD
from postlude.recipes.rollouts.prompts import PromptEncoding
from postlude.recipes.rollouts.queue import RolloutQueue
from postlude.recipes.rollouts.sampler import RolloutSampler, trajectory_metrics
from postlude.recipes.row_sources import OrderedRows, StepSizes
from postlude.recipes.run.files import read_metrics
from postlude.recipes.run.schedule import StepTimer
from postlude.recipes.sequence_limit import SequenceLimit
from postlude.rollout.agents import AgentEnvironment
from postlude.rollout.conversations import DROPPED, Trajectory
from postlude.rollout.environments import Environment, Transcript, TurnResult, needed_episodes
from postlude.rollout.episode import AssistantTurn, Episode
from postlude.rollout.model_calls import ModelAccess
from postlude.rollout.rewards import Score
from postlude.rollout.tasks import Task
from tests.conftest import PATIENCE, Ranks
from tests.recipes.test_asynchrony import DelayedEngine
from tests.recipes.test_grpo import config_of
from tests.recipes.test_rollout_engine import SHORT, TinyVLLM

STEPS, SAMPLES = 4, 4


class ScriptedEpisodes(Environment):
    """Episodes that end when `end` is called."""

    starts_episodes, stragglers, needed_share = True, "carry", 0.5

    def __init__(self, tasks: list[Task]) -> None:
        self.tasks = tasks
        self.started: dict[tuple[str, int], Episode] = {}
        self.released: list[tuple[str, int]] = []
        self.changed, self.ended = threading.Condition(), list[tuple[Episode, float]]()

    def start(self, episode: Episode, access: ModelAccess) -> None:
        with self.changed:
            self.started[episode.task.name, episode.group.index(episode)] = episode
            self.changed.notify_all()

    def end(self, task: str, *rewards: float, first: int = 0) -> None:
        """Ends the episodes of a task from `first` on, with these rewards."""
        with self.changed:
            for index, reward in enumerate(rewards, start=first):
                name = task, index
                assert self.changed.wait_for(lambda name=name: name in self.started, PATIENCE)  # type: ignore[misc]
                self.ended.append((self.started[name], reward))

    def release(self, episode: Episode) -> None:
        super().release(episode)
        with self.changed:
            self.released.append((episode.task.name, episode.group.index(episode)))
            self.changed.notify_all()

    def wait_for_release(self, task: str, index: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: (task, index) in self.released, PATIENCE)

    def trial_call(self, task: Task, turn: AssistantTurn) -> None: ...

    def close(self) -> None: ...

    def _submit(self, episode: Episode) -> None: ...

    def _poll(self, timeout: float | None) -> list[tuple[Episode, TurnResult]]:
        with self.changed:
            ended, self.ended = self.ended, []
        return [(episode, _result(reward)) for episode, reward in ended]


def _result(reward: float) -> TurnResult:
    """Returns the end of an episode that sampled two tokens, with the experts of all, and masks as generators do."""
    versions, masks = (VersionSpan("w.1", 0, 2),), [array("i", [65]), array("i")]
    completion = Completion([65, 66], [-0.1, -inf], [0.0, -0.3], "length", "AB", sampling_mask=masks, versions=versions)
    transcript = Transcript([1])
    experts = torch.tensor([[[7, 2]], [[0, 1]], [[3, -1]]]).short()
    transcript.add_completion(completion.tokens, completion.logprobs, experts, masks)
    return TurnResult(Score(reward, {"tools": reward / 3}), transcripts=(transcript,), completions=(completion,))


class Run:
    """Takes groups as a trainer does, one task a step."""

    def __init__(self, staleness: int) -> None:
        tasks = [Task("?", {}, name) for name in "abcd"]
        self.environment = ScriptedEpisodes(tasks)
        self.sampler = RolloutSampler(
            DelayedEngine(),
            self.environment,
            PromptEncoding(byte_tokenizer(), SamplingSettings(max_new_tokens=2), SequenceLimit(64)),
            seed=3,
            timer=StepTimer(),
            background=True,
        )
        self.queue = RolloutQueue(
            self.sampler,
            tasks,
            OrderedRows(range(len(tasks)), RowOrder(len(tasks), shuffle=False)),
            samples_per_prompt=SAMPLES,
            prompts_of_step=StepSizes(1, STEPS).of_step,
            max_staleness=staleness,
        )

    def close(self) -> None:
        self.sampler.close()


@pytest.fixture
def run() -> Iterator[Run]:
    with closing(Run(2)) as made:
        yield made


def described(trajectories: list[Trajectory]) -> list[tuple[str, float, int]]:
    return [(trajectory.task.name, trajectory.reward, trajectory.group) for trajectory in trajectories]


def test_carried_episodes_join_a_later_step_or_end(run: Run) -> None:
    environment, queue = run.environment, run.queue
    threading.Timer(0.05, environment.end, ("a", 1.0, 0.0)).start()
    first = queue.take(1, 0)
    assert (described(first), queue.take_carried(0)) == ([("a", 1.0, 0), ("a", 0.0, 0)], [])
    assert (queue.state()["carried"], len(queue.state()["pending_tasks"])) == (2, 1)  # a step ahead, and one to carry
    assert queue.take_metrics()["episodes_carried"] == 2

    environment.end("a", 0.5, first=2)
    environment.end("b", 0.0, 0.0, 0.0, 0.0)
    environment.wait_for_release("a", 2)
    environment.wait_for_release("b", 3)
    assert described(queue.take(1, 1)) == [("b", 0.0, 0)] * 4
    (joined,) = queue.take_carried(1)
    assert described([joined]) == [("a", 0.5, 1)]
    assert list(joined.trained_before) == first
    metrics = queue.take_metrics()
    assert [metrics[f"episodes_{name}"] for name in ("carried", "joined", "expired", "lost")] == [0, 1, 0, 0]
    assert metrics["staleness_max"] == 1

    environment.end("c", 1.0, 1.0, 1.0, 1.0)
    environment.wait_for_release("c", 3)
    assert len(queue.take(1, 2)) == 4
    assert not [trajectory for trajectory in queue.take_carried(2) if trajectory.task.name == "a"]
    environment.wait_for_release("a", 3)  # step 3 may not train on tokens of step 0
    assert queue.take_metrics()["episodes_expired"] == 1


def test_a_later_episode_is_compared_with_those_that_joined_before(run: Run) -> None:
    environment, queue = run.environment, run.queue
    threading.Timer(0.05, environment.end, ("a", 1.0, 0.0)).start()
    known = queue.take(1, 0)
    for step, task in ((1, "b"), (2, "c")):
        environment.end("a", 0.5, first=step + 1)
        environment.end(task, 0.0, 0.0, 0.0, 0.0)
        environment.wait_for_release("a", step + 1)
        environment.wait_for_release(task, 3)
        queue.take(1, step)
        (joined,) = queue.take_carried(step)
        assert list(joined.trained_before) == known
        known.append(joined)


def parts(trajectory: Trajectory) -> Any:
    """Returns all of a trajectory that training uses."""
    transcripts, completions = (
        json.dumps([vars(entry) for entry in entries], default=lambda values: values.tolist())
        for entries in (trajectory.transcripts, trajectory.completions)
    )
    before = [parts(other) for other in trajectory.trained_before]
    return trajectory.task, trajectory.group, completions, trajectory.score, transcripts, before


def test_a_resumed_run_has_the_carried_episodes_that_had_ended(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """The group of task a has an episode that ended before the checkpoint, and one that did not."""
    threading.Timer(0.05, run.environment.end, ("a", 1.0, 0.0)).start()
    run.queue.take(1, 0)
    run.environment.end("a", 0.5, first=2)
    run.environment.wait_for_release("a", 2)
    state = json.loads(json.dumps(run.queue.state()))
    with closing(Run(2)) as resumed:
        resumed.queue.restore(state)
        assert "1 carried episodes were unfinished" in caplog.text
        joined = []
        for each in (run, resumed):
            threading.Timer(0.05, each.environment.end, ("b", 0.0, 0.0, 0.0, 0.0)).start()
            each.queue.take(1, 1)
            joined.append([parts(trajectory) for trajectory in each.queue.take_carried(1)])
        assert len(joined[0]) == 1
        assert joined[0] == joined[1]
        metrics = resumed.queue.take_metrics()
        assert [metrics[f"episodes_{name}"] for name in ("carried", "joined", "expired", "lost")] == [0, 1, 0, 1]
        assert resumed.queue.state()["carried_and_ended"] == []


def test_dropped_episodes_are_a_share_of_all_and_have_no_length() -> None:
    completion = Completion([1, 2, 3], [0.0] * 3, [0.0] * 3, "stop")
    ended = Trajectory(Task("?"), 0, (Transcript([5]),), [completion], Score(1.0), done=True)
    dropped = Trajectory(Task("?"), 0, (), score=DROPPED, done=True)
    metrics = trajectory_metrics([ended, ended, dropped, ended])
    assert metrics.pop("reward/dropped") == 0.25
    assert metrics == trajectory_metrics([ended] * 3)


AGENT = """
import asyncio
from pathlib import Path
from openai import AsyncOpenAI

STARTED, SLOW_MAY_END, SLOW_ENDED, REWARDS = {}, {}, {}, (1.0, 0.0, 1.0, 0.5)

async def talk(task, client):
    prompt = task["prompt"]
    if prompt not in STARTED:
        STARTED[prompt], SLOW_MAY_END[prompt], SLOW_ENDED[prompt] = 0, asyncio.Event(), asyncio.Event()
    number, index = list(STARTED).index(prompt), STARTED[prompt]
    STARTED[prompt] += 1
    try:
        if index == 3:
            await SLOW_MAY_END[prompt].wait()
        elif number % 2:
            before = list(STARTED)[number - 1]
            SLOW_MAY_END[before].set()
            await SLOW_ENDED[before].wait()
        async with AsyncOpenAI(**client.openai) as model:
            await model.chat.completions.create(model="any", messages=[{"role": "user", "content": prompt}])
        return REWARDS[index]
    finally:
        if index == 3:
            SLOW_ENDED[prompt].set()
        with Path(__file__).with_name("ended").open("a") as file:
            print(number, index, file=file)
"""


def run_of_agents(group: Any, directory: str, server: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the metrics of a run, and the threads that it left."""
    from postlude.recipes.registry import RECIPES

    before = set(threading.enumerate())
    agent = {"kind": "agent", "path": f"{directory}/rows.jsonl", "function": f"{directory}/agent.py:talk"}
    settings = (
        f"--environment={json.dumps(agent | {'stragglers': 'carry', 'needed_share': 0.75})}",
        f"--rollout={server}",
        "--asynchrony.max_staleness=1",
        "--steps=4",
        "--prompts_per_step=1",
        f"--samples_per_prompt={SAMPLES}",
    )
    config = config_of(Path(directory), *SHORT[:-1], *settings)
    RECIPES["grpo"].run(config)
    new = set(threading.enumerate()) - before
    for thread in new:
        thread.join(10)
    return read_metrics(config.run), [thread.name for thread in new if thread.is_alive()]


@pytest.mark.slow  # the client of OpenAI is imported for seconds
def test_a_run_trains_on_carried_episodes_a_step_later(ranks: Ranks, tmp_path: Path) -> None:
    """The last episode of a group waits for the next step, of every second group until it is ended."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(8)))
    (tmp_path / "agent.py").write_text(AGENT)
    with closing(TinyVLLM()) as server:
        ((rows, threads),) = ranks(1, run_of_agents, str(tmp_path), server.url)
    counts = {name: [row[f"episodes_{name}"] for row in rows] for name in ("carried", "joined", "expired", "lost")}
    assert counts == {"carried": [1] * 4, "joined": [0, 1, 0, 1], "expired": [0, 0, 1, 0], "lost": [0] * 4}
    assert [row[REWARD] for row in rows] == pytest.approx([2 / 3, 2.5 / 4, 2 / 3, 2.5 / 4])
    assert [row["staleness_max"] for row in rows] == [0, 1, 0, 1]
    assert threads == []
    ended = (tmp_path / "ended").read_text().splitlines()
    assert sorted(ended) == [f"{number} {index}" for number in range(4) for index in range(SAMPLES)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stragglers": "carry"}, "stragglers is carry and needed_share 1, but"),
        ({"needed_share": 0.5}, r"stragglers is wait and needed_share 0\.5, but"),
    ],
)
def test_stragglers_and_their_share_go_together(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AgentSettings(path="tasks.jsonl", url="http://a/", **settings)


def test_a_share_that_needs_every_episode_is_refused(tmp_path: Path) -> None:
    def read(share: float, samples: int) -> Any:
        agent = {"kind": "agent", "path": "t.jsonl", "url": "http://a/", "stragglers": "drop", "needed_share": share}
        return config_of(tmp_path, f"--environment={json.dumps(agent)}", f"--samples_per_prompt={samples}")

    assert read(0.75, 4).environment.needed_share == 0.75
    for share, samples in ((0.9, 8), (0.5, 2)):
        with pytest.raises(ConfigError, match=f"needed_share={share} of samples_per_prompt={samples}. Lower"):
            read(share, samples)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (EvalConfig, "environment"),
        (EvalConfig, "sets.a.environment"),
        (GRPOConfig, "evaluation.sets.a.environment"),
        (DistillConfig, "teacher=a --data.environment"),
    ],
)
def test_stragglers_are_refused_where_every_episode_is_waited_for(config: type, key: str) -> None:
    agent = {"kind": "agent", "path": "t.jsonl", "url": "http://a/", "stragglers": "drop", "needed_share": 0.5}
    with pytest.raises(ConfigError, match="stragglers is drop, but only steps of grpo and ppo go on without"):
        load(config, None, f"--{key}={json.dumps(agent, separators=(',', ':'))}".split())


def test_a_share_is_rounded_up_exactly() -> None:
    assert [needed_episodes(share, 20) for share in (0.05, 0.55, 0.56, 1.0)] == [2, 11, 12, 20]


def test_carrying_needs_steps_that_may_train_on_older_tokens(tmp_path: Path) -> None:
    agent = '{"kind": "agent", "path": "t.jsonl", "url": "http://a/", "stragglers": "carry", "needed_share": 0.5}'
    with pytest.raises(ConfigError, match=r"asynchrony\.max_staleness is 0"):
        config_of(tmp_path, f"--environment={agent}")
    asynchronous = ("--asynchrony.max_staleness=1", "--rollout=http://a", '--reward_kl={"coefficient": 0.1}')
    with pytest.raises(ConfigError, match="reward_kl changes the rewards"):
        config_of(tmp_path, f"--environment={agent}", *asynchronous)


def test_the_answer_is_hidden_where_a_reward_judges(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"prompt": "?", "answer": "1", "tests": "2"}\n')
    agent = {"path": tmp_path / "t.jsonl", "url": "http://a/"}
    for settings, shown in (
        ({}, {"prompt", "answer", "tests"}),
        ({"reward": "exact"}, {"prompt", "tests"}),
        ({"reward": "exact", "task_columns": ("prompt",)}, {"prompt"}),
    ):
        environment = AgentSettings(**agent, **settings).build(0)
        with closing(environment):
            assert isinstance(environment, AgentEnvironment)
            options, row = environment.options, dict(environment.tasks[0].example)
            columns = options.task_columns or [name for name in row if name != options.answer]
            assert set(columns) == shown
    with pytest.raises(ValueError, match="task_columns names 'test', but the first row has prompt, answer, tests"):
        AgentSettings(**agent, task_columns=("test",)).build(0)
