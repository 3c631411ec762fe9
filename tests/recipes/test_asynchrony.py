"""Answers drawn while earlier ones are learned from: no older than allowed, none lost, none learned from twice."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from postlude.data.datasets import Sampler
from postlude.generate.generator import Generator
from postlude.generate.protocol import Completion, FinishedCompletion, Request, VersionSpan
from postlude.generate.sampling_params import SamplingParams
from postlude.hf.load import load_model
from postlude.hf.tokenizer import byte_tokenizer
from postlude.recipes.config.load import ConfigError
from postlude.recipes.config.settings import SamplingSettings
from postlude.recipes.grpo import GRPOTrainer
from postlude.recipes.rollouts.queue import RolloutQueue, policy_lag
from postlude.recipes.rollouts.sampler import RolloutSampler
from postlude.recipes.run.directory import read_metrics
from postlude.recipes.run.outcome import RunOutcome
from postlude.recipes.run.phase_timer import PhaseTimer
from postlude.recipes.trainer import run_training
from postlude.rollout.async_environment import AsyncEnvironment
from postlude.rollout.conversations import Trajectory, combine_seeds
from postlude.rollout.environments import SingleTurn, Transcript
from postlude.rollout.function_reward import FunctionReward
from postlude.rollout.tasks import Task
from postlude.world.agreement import Rank0Controller
from tests.conftest import Ranks
from tests.recipes.test_grpo import config_of
from tests.recipes.test_rollout_engine import SHORT, TinyVLLM
from tests.rollout.engines import Alone
from tests.serving.test_server_pool import after

pytest.importorskip("reasoning_gym", reason="the tasks are reasoning-gym's")
PROMPTS, SAMPLES = 4, 2


class Elsewhere:
    """An engine whose answers take a time of their own each, beside whatever the caller does."""

    batched_polls = False

    def __init__(self, seconds: Any = lambda: 0.0) -> None:
        self.controller: Rank0Controller[Any, Any] = Rank0Controller(lambda _: None)
        self.seconds = seconds
        self.due: list[tuple[float, FinishedCompletion]] = []
        self.request_count = 0
        self.failure: Exception | None = None
        self.lock = threading.Lock()

    def sync_weights(self) -> None: ...

    def check_health(self) -> None: ...

    def take_metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...

    def generate(self, *_: Any) -> Any:
        raise NotImplementedError

    def submit(self, request: Request) -> int:
        with self.lock:
            self.request_count += 1
            for number in range(request.n):
                completion = Completion([65 + number], [-1.0], [-1.0], "stop", chr(65 + number))
                finished_completion = FinishedCompletion(
                    self.request_count, number, None if self.failure else completion, self.failure
                )
                self.due.append((time.monotonic() + self.seconds(), finished_completion))
            return self.request_count

    def poll(self, timeout: float | None = 0.0) -> list[FinishedCompletion]:
        until = time.monotonic() + (timeout or 0.0)
        while True:
            with self.lock:
                now = time.monotonic()
                finished_now = [finished for due, finished in self.due if due <= now]
                self.due = [entry for entry in self.due if entry[0] > now]
            if finished_now or now >= until:
                return finished_now
            time.sleep(0.001)


def fixed(prompt: Any, completion: str, example: Any) -> float:
    return float(completion == "A")


class Steps:
    """A trainer that does nothing but take what it is to learn from."""

    def __init__(self, ahead: int, *, steps: int = 6, engine: Any = None, tasks: int = 12) -> None:
        self.tasks = [Task(f"task {index}:", {}, f"task {index}") for index in range(tasks)]
        self.engine = engine or Elsewhere()
        self.environment = SingleTurn(self.tasks, FunctionReward(fixed, workers=0))
        self.rollout_sampler = RolloutSampler(
            self.engine,
            self.environment,
            byte_tokenizer(),
            SamplingSettings(max_new_tokens=2),
            budget=64,
            seed=3,
            timer=PhaseTimer(),
            background=ahead > 0,
        )
        self.supply = RolloutQueue(
            self.rollout_sampler,
            self.tasks,
            Sampler(tasks, 5),
            samples_per_prompt=SAMPLES,
            prompts_per_step=PROMPTS,
            max_staleness=ahead,
            total_steps=steps,
        )

    def learned(self, step: int, count: int = PROMPTS) -> list[str]:
        outputs = self.supply.take(count, step)
        assert [trajectory.group for trajectory in outputs] == [
            number for number in range(count) for _ in range(SAMPLES)
        ]
        assert [trajectory.reward for trajectory in outputs] == [1.0, 0.0] * count
        return [trajectory.task.name for trajectory in outputs[::SAMPLES]]

    def close(self) -> None:
        for resource in (self.rollout_sampler.conversations, self.engine, self.environment):
            resource.close()


@pytest.fixture
def noise() -> random.Random:
    return random.Random(11)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_every_task_is_trained_on_once_within_max_staleness(noise: random.Random, ahead: int) -> None:
    """Answer times have a long tail: now and then one takes longer than several steps."""
    engine = Elsewhere(lambda: 0.15 if noise.random() < 0.1 else noise.random() * 0.01)
    with closing(Steps(ahead, steps=9, engine=engine)) as run:
        names, oldest, ahead_of = [], 0.0, []
        for step in range(9):
            names += run.learned(step)
            metrics = run.supply.take_metrics()
            oldest = max(oldest, metrics.get("staleness_max", 0.0))
            ahead_of.append(len(run.supply.state()["begun"]))
            time.sleep(0.01)
    assert Counter(names) == Counter({task.name: 3 for task in run.tasks}), "nine steps of four are three epochs of 12"
    assert oldest <= ahead
    assert ahead_of == [PROMPTS * min(ahead, 8 - step) for step in range(9)], "so many steps ahead, and none too many"
    if ahead:
        assert oldest == ahead


def test_what_is_under_way_is_begun_again(noise: random.Random) -> None:
    engine = Elsewhere(lambda: noise.random() * 0.02)
    with closing(Steps(2, engine=engine)) as run:
        names = run.learned(0) + run.learned(1)
        state = run.supply.state()
        repeated_names = names + run.learned(2)  # is lost
    assert len(state["begun"]) == 2 * PROMPTS
    with closing(Steps(2)) as second_run:
        second_run.supply.restore(state)
        for step in range(2, 6):
            names += second_run.learned(step)
            assert second_run.supply.take_metrics()["completions_resampled"] == (
                2 * PROMPTS * SAMPLES if step == 2 else 0
            )
        assert second_run.supply.state()["begun"] == []
    assert Counter(names) == Counter({task.name: 2 for task in run.tasks})
    assert Counter(repeated_names[2 * PROMPTS :]) <= Counter(names[2 * PROMPTS :])


def test_another_take_in_the_same_step_starts_more_groups() -> None:
    with closing(Steps(1)) as run:
        run.learned(0)
        before = run.supply.state()["begun"]
        assert len(run.supply.take(2, 0)) == 2 * SAMPLES
        after = run.supply.state()["begun"]
        assert len(before) == len(after) == PROMPTS
        assert len(set(after) - set(before)) == 2


def test_an_error_of_the_conversation_thread_is_raised_by_wait() -> None:
    engine = Elsewhere()
    with closing(Steps(1, engine=engine)) as run:
        run.learned(0)
        engine.failure = ValueError("no server is left")
        run.rollout_sampler.start(run.rollout_sampler.make_group(run.tasks[0], 0, SAMPLES, step=9))
        with pytest.raises(ValueError, match="no server is left"):
            run.rollout_sampler.wait(lambda: False)


class Held:
    """An episode that holds something from its first turn on, and never comes to an end."""

    open = 0

    def __init__(self, example: Any) -> None:
        Held.open += 1

    async def step(self, action: Any) -> str:
        return "go on"

    async def close(self) -> None:
        Held.open -= 1


@pytest.mark.parametrize("background", [False, True])
def test_close_releases_the_episodes_in_progress(background: bool) -> None:
    """While an engine answers, an episode is in nobody's hands but the conversations'."""
    tasks = [Task("a task:", {}, "the task")]
    environment = AsyncEnvironment(tasks, Held, name="Held", max_turns=9)
    engine = Elsewhere(lambda: 600.0 if engine.request_count > 1 else 0.0)  # a second turn takes its time
    rollouts = RolloutSampler(
        engine,
        environment,
        byte_tokenizer(),
        SamplingSettings(max_new_tokens=2),
        budget=64,
        seed=3,
        timer=PhaseTimer(),
        background=background,
    )
    with closing(environment), closing(rollouts.conversations):
        group = rollouts.make_group(tasks[0], 0, SAMPLES, step=0)
        rollouts.conversations.start(group)
        rollouts.wait(lambda: engine.request_count == 1 + SAMPLES)
        assert Held.open == SAMPLES
    assert Held.open == 0


def test_tokens_are_as_old_as_their_weights() -> None:
    def answered(*spans: VersionSpan) -> Trajectory:
        completion = Completion([1] * 8, [0.0] * 8, [0.0] * 8, "stop", versions=spans)
        return Trajectory(Task("", {}), 0, Transcript([1]), [completion])

    trajectories = [answered(VersionSpan("a.4", 0, 6), VersionSpan("a.5", 6, 8)), answered(VersionSpan("a.6", 0, 8))]
    assert policy_lag(trajectories, 6) == (6 * 2 + 2 * 1) / 16
    assert policy_lag([answered()], 6) is None


def test_configs_that_take_old_answers_for_new_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rollout: native samples in the trainer's own ranks"):
        config_of(tmp_path, "--asynchrony.max_staleness=1")
    with pytest.raises(ConfigError, match='"on_policy" takes all completions as samples of the newest weights'):
        config_of(tmp_path, "--asynchrony.max_staleness=1", "--rollout=http://a", "--objective.ratio=on_policy")


@pytest.fixture
def server() -> Iterator[TinyVLLM]:
    with closing(TinyVLLM()) as tiny_vllm:
        yield tiny_vllm


def plainly_and_by_supply(group: Any) -> list[Any]:
    """Three steps' answers without staleness, and those of a loop that asks for them and then scores them."""
    generator = Generator(load_model("tiny-dense"), byte_tokenizer())
    results: list[Any] = []
    with closing(Steps(0, engine=Alone(generator))) as run:
        for step in range(3):
            trajectories = run.supply.take(PROMPTS, step)
            results.append(
                [
                    (trajectory.task.name, trajectory.completions[0].tokens, trajectory.transcript.logprobs)
                    for trajectory in trajectories
                ]
            )
    sampler, plainly = Sampler(len(run.tasks), 5), []
    for step in range(3):
        tasks = [run.tasks[index] for index in sampler.take(PROMPTS)]
        prompts = [list(task.prompt.encode()) for task in tasks]
        samplings = [
            SamplingParams(max_new_tokens=2, seed=combine_seeds(3, step, 0, place)) for place in range(PROMPTS)
        ]
        plainly.append(
            [
                (task.name, trajectory.tokens, [0.0] * len(prompt) + trajectory.logprobs)
                for task, prompt, sampled in zip(
                    tasks, prompts, generator.generate(prompts, samplings, SAMPLES), strict=True
                )
                for trajectory in sampled
            ]
        )
    return [results, plainly]


@pytest.mark.slow
def test_without_staleness_answers_are_those_of_a_plain_loop(ranks: Ranks) -> None:
    ((actual, plainly),) = ranks(1, plainly_and_by_supply)
    assert actual == plainly, "to the bit"


def recorded(group: Any, directory: str, at: int, *overrides: str) -> list[list[str]]:
    """The tasks that each step learned from, of a run that is left in step `at`."""
    learned: list[list[str]] = []

    class Recorded(GRPOTrainer):
        def select_trajectories(self) -> Any:
            selected = super().select_trajectories()
            if self.step == at:
                raise KeyboardInterrupt
            learned.append(list(dict.fromkeys(trajectory.task.name for trajectory in selected[0])))
            return selected

    with suppress(KeyboardInterrupt):
        run_training(Recorded(config_of(Path(directory), *overrides), "cpu"))
    return learned


ASYNCHRONOUS = (
    *SHORT[:-1],
    "--prompts_per_step=2",
    "--steps=6",
    "--asynchrony.max_staleness=2",
    "--keep_checkpoints=9",
)


@pytest.mark.slow
def test_a_run_that_was_left_learns_every_task_once(ranks: Ranks, tmp_path: Path, server: TinyVLLM) -> None:
    """Left in the middle of its fourth step, two steps after the last checkpoint, with answers under way."""
    settings = (*ASYNCHRONOUS, "--save_every=2", f"--rollout={server.url}")
    (before,) = ranks(1, recorded, str(tmp_path), 4, *settings)
    (after,) = ranks(1, recorded, str(tmp_path), -1, *settings)
    kept_names = before[:4] + after
    assert [len(names) for names in kept_names] == [2] * 6
    assert len({name for names in kept_names for name in names}) == 12, "of 64 tasks none has its second turn"
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert max(row["staleness_max"] for row in rows) == 2
    assert [row["completions_resampled"] for row in rows] == [0.0] * 4 + [2 * 2 * 3, 0.0]
    assert all(row["policy_lag"] <= 2 for row in rows)


@pytest.mark.thorough  # that rows reach ranks: tests/engine/test_batch_scatter.py, and test_grpo.py in layouts
@pytest.mark.slow
def test_all_ranks_train_on_the_rollouts_of_rank_0(ranks: Ranks, tmp_path: Path, server: TinyVLLM) -> None:
    actual = ranks(2, recorded, str(tmp_path), -1, *ASYNCHRONOUS, f"--rollout={server.url}", "--layout=dp_shard=2")
    assert [len(names) for names in actual[0]] == [2] * 6
    assert actual[1] == [], "the first rank alone asks for answers"
    assert len(read_metrics(tmp_path / "run")) == 6


def asked_to_end(group: Any, directory: str, *overrides: str) -> RunOutcome:
    """SIGTERM comes when the third step waits for answers that do not come."""

    class Asked(GRPOTrainer):
        def select_trajectories(self) -> Any:
            def hear() -> None:
                self.signals.received = signal.SIGTERM

            if self.step == 2:
                threading.Timer(0.3, hear).start()
            return super().select_trajectories()

    return run_training(Asked(config_of(Path(directory), *overrides), "cpu"))


@pytest.mark.slow
def test_a_signal_is_handled_while_completions_are_awaited(ranks: Ranks, tmp_path: Path) -> None:
    settings = (*ASYNCHRONOUS, "--save_every=0", "--asynchrony.max_staleness=0", "--steps=3")
    with closing(TinyVLLM()) as server:
        over = threading.Event()

        def hang() -> None:
            over.wait(600)  # no answer comes before the run has ended

        server.before = after(2 * 2 * 3, hang)
        actual = ranks(1, asked_to_end, str(tmp_path), *settings, f"--rollout={server.url}")
        over.set()
    for ending in actual:
        assert (ending.status, ending.step, ending.exit_code) == ("interrupted", 2, 128 + signal.SIGTERM)
        assert "SIGTERM ended the run after step 2, which is saved" in ending.message
    with closing(TinyVLLM()) as server:
        ranks(1, recorded, str(tmp_path), -1, *settings, f"--rollout={server.url}")
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3]
