"""Asynchronous rollouts: no group is older than max_staleness, none is lost, and none is trained on twice."""

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

from postlude.data.datasets import RowOrder
from postlude.data.turn_encoding import turn_ends
from postlude.generate.distributed import ReplicatedGenerator
from postlude.generate.protocol import Completion, FinishedCompletion, Request, VersionSpan
from postlude.generate.sampling_params import SamplingParams
from postlude.hf.load import byte_tokenizer, load_model
from postlude.recipes.config.load import ConfigError
from postlude.recipes.config.settings import SamplingSettings
from postlude.recipes.grpo import GRPOTrainer
from postlude.recipes.rollouts.prompts import PromptEncoding
from postlude.recipes.rollouts.queue import RolloutQueue, policy_lag
from postlude.recipes.rollouts.sampler import RolloutSampler
from postlude.recipes.row_sources import OrderedRows, StepSizes
from postlude.recipes.run.files import read_metrics
from postlude.recipes.run.outcome import RunOutcome
from postlude.recipes.run.schedule import StepTimer
from postlude.recipes.sequence_limit import SequenceLimit
from postlude.recipes.training_run import run_training
from postlude.rollout.async_environment import AsyncEnvironment
from postlude.rollout.conversations import Trajectory
from postlude.rollout.environments import SingleTurn, Transcript
from postlude.rollout.function_reward import FunctionReward
from postlude.rollout.model_calls import combine_seeds
from postlude.rollout.tasks import Task
from postlude.world.agreement import Rank0Controller
from tests.conftest import Ranks
from tests.recipes.test_grpo import config_of
from tests.recipes.test_rollout_engine import SHORT, TinyVLLM
from tests.serving.test_server_pool import after

pytest.importorskip("reasoning_gym", reason="the tasks are reasoning-gym's")
PROMPTS, SAMPLES = 4, 2


class DelayedEngine:
    """A rollout engine that finishes each completion after its own delay, while the caller does other work."""

    fixed_order = False

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


class QueueUser:
    """Takes groups from a RolloutQueue, as a trainer does, and does not train on them."""

    def __init__(
        self, staleness: int, *, steps: int = 6, engine: Any = None, tasks: int = 12, prompts: int | None = None
    ) -> None:
        self.tasks = [Task(f"task {index}:", {}, f"task {index}") for index in range(tasks)]
        self.engine = engine or DelayedEngine()
        self.environment = SingleTurn(self.tasks, FunctionReward(fixed, workers=0))
        self.rollout_sampler = RolloutSampler(
            self.engine,
            self.environment,
            PromptEncoding(byte_tokenizer(), SamplingSettings(max_new_tokens=2), SequenceLimit(64)),
            seed=3,
            timer=StepTimer(),
            background=staleness > 0,
        )
        self.queue = RolloutQueue(
            self.rollout_sampler,
            self.tasks,
            OrderedRows(range(tasks), RowOrder(tasks, 5)),
            samples_per_prompt=SAMPLES,
            prompts_of_step=StepSizes(PROMPTS, prompts or steps * PROMPTS).of_step,
            max_staleness=staleness,
        )

    def take_names(self, step: int, count: int = PROMPTS) -> list[str]:
        trajectories = self.queue.take(count, step)
        assert [trajectory.group for trajectory in trajectories] == [
            number for number in range(count) for _ in range(SAMPLES)
        ]
        assert [trajectory.reward for trajectory in trajectories] == [1.0, 0.0] * count
        return [trajectory.task.name for trajectory in trajectories[::SAMPLES]]

    def close(self) -> None:
        for resource in (self.rollout_sampler.conversations, self.engine, self.environment):
            resource.close()


@pytest.fixture
def noise() -> random.Random:
    return random.Random(11)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_every_task_is_trained_on_once_within_max_staleness(noise: random.Random, staleness: int) -> None:
    """Delays have a long tail: some completions take longer than several steps."""
    engine = DelayedEngine(lambda: 0.15 if noise.random() < 0.1 else noise.random() * 0.01)
    with closing(QueueUser(staleness, steps=9, engine=engine)) as run:
        names, oldest, pending_counts = [], 0.0, []
        for step in range(9):
            names += run.take_names(step)
            metrics = run.queue.take_metrics()
            oldest = max(oldest, metrics.get("staleness_max", 0.0))
            pending_counts.append(len(run.queue.state()["pending_tasks"]))
            time.sleep(0.01)
    assert Counter(names) == Counter({task.name: 3 for task in run.tasks}), "nine steps of four are three epochs of 12"
    assert oldest <= staleness
    assert pending_counts == [PROMPTS * min(staleness, 8 - step) for step in range(9)], (
        "groups of so many later steps are pending, and no more"
    )
    if staleness:
        assert oldest == staleness


def test_pending_groups_are_sampled_again_after_a_resume(noise: random.Random) -> None:
    engine = DelayedEngine(lambda: noise.random() * 0.02)
    with closing(QueueUser(2, engine=engine)) as run:
        names = run.take_names(0) + run.take_names(1)
        state = run.queue.state()
        repeated_names = names + run.take_names(2)  # not in the checkpoint
    assert len(state["pending_tasks"]) == 2 * PROMPTS
    with closing(QueueUser(2)) as second_run:
        second_run.queue.restore(state)
        for step in range(2, 6):
            names += second_run.take_names(step)
            assert second_run.queue.take_metrics()["completions_resampled"] == (
                2 * PROMPTS * SAMPLES if step == 2 else 0
            )
        assert second_run.queue.state()["pending_tasks"] == []
    assert Counter(names) == Counter({task.name: 2 for task in run.tasks})
    assert Counter(repeated_names[2 * PROMPTS :]) <= Counter(names[2 * PROMPTS :])


def test_no_group_is_started_that_no_step_trains_on() -> None:
    with closing(QueueUser(2, prompts=2 * PROMPTS + 1)) as run:
        names = [name for step, count in enumerate((PROMPTS, PROMPTS, 1)) for name in run.take_names(step, count)]
        assert run.queue.state()["pending_tasks"] == []
        assert len(names) == len(set(names)) == 2 * PROMPTS + 1


def test_another_take_in_the_same_step_starts_more_groups() -> None:
    with closing(QueueUser(1)) as run:
        run.take_names(0)
        before = run.queue.state()["pending_tasks"]
        assert len(run.queue.take(2, 0)) == 2 * SAMPLES
        after = run.queue.state()["pending_tasks"]
        assert len(before) == len(after) == PROMPTS
        assert len(set(after) - set(before)) == 2


def test_an_error_of_the_conversation_thread_is_raised_by_wait() -> None:
    engine = DelayedEngine()
    with closing(QueueUser(1, engine=engine)) as run:
        run.take_names(0)
        engine.failure = ValueError("no server is left")
        run.rollout_sampler.start(run.rollout_sampler.make_group(run.tasks[0], 0, SAMPLES, step=9))
        with pytest.raises(ValueError, match="no server is left"):
            run.rollout_sampler.wait(lambda: False)


class EndlessEpisode:
    """An episode that has to be closed, and that no turn ends. `open` counts those that are not closed."""

    open = 0

    def __init__(self, example: Any) -> None:
        EndlessEpisode.open += 1

    async def step(self, action: Any) -> str:
        return "go on"

    async def close(self) -> None:
        EndlessEpisode.open -= 1


@pytest.mark.parametrize("background", [False, True])
def test_close_releases_the_episodes_in_progress(background: bool) -> None:
    """While the engine samples, only the conversations refer to an episode."""
    tasks = [Task("a task:", {}, "the task")]
    environment = AsyncEnvironment(tasks, EndlessEpisode, name="EndlessEpisode", max_turns=9)
    engine = DelayedEngine(lambda: 600.0 if engine.request_count > 1 else 0.0)  # the second turn does not finish
    rollouts = RolloutSampler(
        engine,
        environment,
        PromptEncoding(byte_tokenizer(), SamplingSettings(max_new_tokens=2), SequenceLimit(64)),
        seed=3,
        timer=StepTimer(),
        background=background,
    )
    with closing(environment), closing(rollouts.conversations):
        group = rollouts.make_group(tasks[0], 0, SAMPLES, step=0)
        rollouts.conversations.start(group)
        rollouts.wait(lambda: engine.request_count == 1 + SAMPLES)
        assert EndlessEpisode.open == SAMPLES
    assert EndlessEpisode.open == 0


def test_requests_name_the_tokens_that_end_a_turn() -> None:
    """A server does not know them if its model's files name the end-of-sequence token alone."""
    tasks, tokenizer = [Task("a task:", {}, "the task")], byte_tokenizer()
    environment = AsyncEnvironment(tasks, EndlessEpisode, name="EndlessEpisode", max_turns=9)
    settings = SamplingSettings(max_new_tokens=2, stop_tokens=(65, "<|im_end|>"))
    with closing(environment):
        rollouts = RolloutSampler(
            DelayedEngine(lambda: 0.0),
            environment,
            PromptEncoding(tokenizer, settings, SequenceLimit(64)),
            seed=3,
            timer=StepTimer(),
        )
        assert rollouts.make_group(tasks[0], 0, 1, step=0).sampling.stop_tokens == (65, *turn_ends(tokenizer))


def test_policy_lag_is_the_mean_age_of_the_weights_that_sampled() -> None:
    def trajectory_of(*spans: VersionSpan) -> Trajectory:
        completion = Completion([1] * 8, [0.0] * 8, [0.0] * 8, "stop", versions=spans)
        return Trajectory(Task("", {}), 0, (Transcript([1]),), [completion])

    trajectories = [
        trajectory_of(VersionSpan("a.4", 0, 6), VersionSpan("a.5", 6, 8)),
        trajectory_of(VersionSpan("a.6", 0, 8)),
    ]
    assert policy_lag(trajectories, 6) == (6 * 2 + 2 * 1) / 16
    assert policy_lag([trajectory_of()], 6) is None


def test_asynchrony_is_refused_where_completions_must_be_on_policy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rollout: native samples in the trainer's own ranks"):
        config_of(tmp_path, "--asynchrony.max_staleness=1")
    with pytest.raises(ConfigError, match='"on_policy" takes all completions as samples of the newest weights'):
        config_of(tmp_path, "--asynchrony.max_staleness=1", "--rollout=http://a", "--objective.ratio=on_policy")


@pytest.fixture
def server() -> Iterator[TinyVLLM]:
    with closing(TinyVLLM()) as tiny_vllm:
        yield tiny_vllm


def queue_and_plain_loop(group: Any) -> list[Any]:
    """Returns the completions of three steps without staleness, and those of a loop that calls the generator."""
    engine = ReplicatedGenerator(load_model("tiny-dense"), byte_tokenizer())
    results: list[Any] = []
    with closing(QueueUser(0, engine=engine)) as run:
        for step in range(3):
            trajectories = run.queue.take(PROMPTS, step)
            results.append(
                [
                    (trajectory.task.name, trajectory.completions[0].tokens, trajectory.transcripts[0].logprobs)
                    for trajectory in trajectories
                ]
            )
    sampler, expected = RowOrder(len(run.tasks), 5), []
    for step in range(3):
        tasks = [run.tasks[index] for index in sampler.take(PROMPTS)]
        prompts = [list(task.prompt.encode()) for task in tasks]
        samplings = [
            SamplingParams(max_new_tokens=2, seed=combine_seeds(3, step, 0, place)) for place in range(PROMPTS)
        ]
        expected.append(
            [
                (task.name, trajectory.tokens, [0.0] * len(prompt) + trajectory.logprobs)
                for task, prompt, sampled in zip(
                    tasks, prompts, engine.generator.generate(prompts, samplings, SAMPLES), strict=True
                )
                for trajectory in sampled
            ]
        )
    return [results, expected]


@pytest.mark.slow
def test_without_staleness_completions_equal_those_of_a_plain_loop(ranks: Ranks) -> None:
    ((actual, expected),) = ranks(1, queue_and_plain_loop)
    assert actual == expected, "to the bit"


def trained_tasks(group: Any, directory: str, at: int, *overrides: str) -> list[list[str]]:
    """Returns the tasks that each step trained on, of a run that is interrupted in step `at`."""
    trained: list[list[str]] = []

    class RecordingTrainer(GRPOTrainer):
        def select_trajectories(self) -> Any:
            selected = super().select_trajectories()
            if self.step == at:
                raise KeyboardInterrupt
            trained.append(list(dict.fromkeys(trajectory.task.name for trajectory in selected[0])))
            return selected

    with suppress(KeyboardInterrupt):
        run_training(RecordingTrainer(config_of(Path(directory), *overrides), "cpu"))
    return trained


ASYNCHRONOUS = (
    *SHORT[:-1],
    "--prompts_per_step=2",
    "--steps=6",
    "--asynchrony.max_staleness=2",
    "--keep_checkpoints=9",
)


@pytest.mark.slow
def test_an_interrupted_run_trains_on_every_task_once(ranks: Ranks, tmp_path: Path, server: TinyVLLM) -> None:
    """Interrupted in its fifth step, with pending groups; the last checkpoint is of step 4."""
    settings = (*ASYNCHRONOUS, "--save_every=2", f"--rollout={server.url}")
    (before,) = ranks(1, trained_tasks, str(tmp_path), 4, *settings)
    (after,) = ranks(1, trained_tasks, str(tmp_path), -1, *settings)
    kept_names = before[:4] + after
    assert [len(names) for names in kept_names] == [2] * 6
    assert len({name for names in kept_names for name in names}) == 12, "of 64 tasks none is trained on twice"
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert max(row["staleness_max"] for row in rows) == 2
    assert [row["completions_resampled"] for row in rows] == [0.0] * 4 + [2 * 2 * 3, 0.0]
    assert all(row["policy_lag"] <= 2 for row in rows)


def run_until_sigterm(group: Any, directory: str, *overrides: str) -> RunOutcome:
    """SIGTERM arrives while the third step waits for completions that do not finish."""

    class SignalledTrainer(GRPOTrainer):
        def select_trajectories(self) -> Any:
            def receive_signal() -> None:
                self.signals.received = signal.SIGTERM

            if self.step == 2:
                threading.Timer(0.3, receive_signal).start()
            return super().select_trajectories()

    return run_training(SignalledTrainer(config_of(Path(directory), *overrides), "cpu"))


@pytest.mark.slow
def test_a_signal_is_handled_while_completions_are_awaited(ranks: Ranks, tmp_path: Path) -> None:
    settings = (*ASYNCHRONOUS, "--save_every=0", "--asynchrony.max_staleness=0", "--steps=3")
    with closing(TinyVLLM()) as server:
        run_ended = threading.Event()

        def hang() -> None:
            run_ended.wait(600)  # no reply before the run has ended

        server.before = after(2 * 2 * 3, hang)
        actual = ranks(1, run_until_sigterm, str(tmp_path), *settings, f"--rollout={server.url}")
        run_ended.set()
    for outcome in actual:
        assert (outcome.status, outcome.step, outcome.exit_code) == ("interrupted", 2, 128 + signal.SIGTERM)
        assert "SIGTERM ended the run after step 2, which is saved" in outcome.message
    with closing(TinyVLLM()) as server:
        ranks(1, trained_tasks, str(tmp_path), -1, *settings, f"--rollout={server.url}")
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3]
