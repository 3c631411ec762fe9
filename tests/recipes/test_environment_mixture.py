"""Several environments in one run: mixed by weight, each with rewards of its own, in an order that resumes exactly."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from postlude.data.datasets import RowOrder
from postlude.hf.load import byte_tokenizer
from postlude.recipes.checks.preflight import LaunchInfo, PreflightError, PreflightInputs, preflight
from postlude.recipes.config.load import ConfigError, load
from postlude.recipes.config.policy_configs import GRPOConfig, PPOConfig
from postlude.recipes.config.settings import SamplingSettings
from postlude.recipes.grpo import GRPOTrainer
from postlude.recipes.ppo import PPOTrainer
from postlude.recipes.rollouts.prompts import PromptEncoding
from postlude.recipes.rollouts.queue import RolloutQueue
from postlude.recipes.rollouts.sampler import RolloutSampler
from postlude.recipes.row_sources import MixedRows, OrderedRows, StepSizes
from postlude.recipes.run.schedule import StepTimer
from postlude.recipes.sequence_limit import SequenceLimit
from postlude.recipes.training_run import run_training
from postlude.rollout.environments import SingleTurn
from postlude.rollout.function_reward import FunctionReward
from postlude.rollout.tasks import JoinedTasks, Task
from tests.conftest import Ranks
from tests.recipes.test_asynchrony import DelayedEngine

REWARDS = """
def quarter(completion):
    return {"score": 0.25, "bonus": 0.0}

def half(completion):
    return 0.5
"""
CONFIG = """
model: tiny-dense
run: {place}/{run}
budget: 128
steps: 3
prompts_per_step: 3
save_every: 1
export: false
loggers: []
sampling: {{max_new_tokens: 3}}
environment:
- {{kind: dataset, path: {place}/sums.jsonl, reward: "{place}/rewards.py:quarter", workers: 0, weight: 2}}
- {{kind: dataset, path: {place}/words.jsonl, reward: "{place}/rewards.py:half", workers: 0, weight: 1, chat: true}}
evaluation: {{every: 3, tasks: 2}}
"""
SUMS = [f"{number}+1=" for number in range(8)]
WORDS = ["6+1=", *(f"word {number}" for number in range(5))]  # the first is held out of the others


def config_of(place: Path, run: str, *overrides: str, kind: Any = GRPOConfig) -> Any:
    for name, prompts in (("sums", SUMS), ("words", WORDS)):
        rows = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        (place / f"{name}.jsonl").write_text(rows)
    (place / "rewards.py").write_text(REWARDS)
    (place / f"{run}.yaml").write_text(CONFIG.format(place=place, run=run))
    return load(kind, place / f"{run}.yaml", ["--samples_per_prompt=2", *overrides])


def metrics_of(config: Any, trainer: type[GRPOTrainer] = GRPOTrainer) -> list[dict[str, Any]]:
    run_training(trainer(config, "cpu"))
    return [json.loads(line) for line in (config.run / "metrics.jsonl").read_text().splitlines()]


def content_of(task: Task) -> Any:
    return task.content if task.content is not None else task.prompt


def train(group: Any, directory: str) -> tuple[Any, ...]:
    place = Path(directory)
    config = config_of(place, "run")
    findings = preflight(GRPOTrainer.checks(PreflightInputs(config, LaunchInfo())))
    trainer = GRPOTrainer(config, "cpu")
    order = [
        (trainer.tasks[index].environment, content_of(trainer.tasks[index])) for index in trainer.task_sampler.take(36)
    ]
    held_out = [
        (name, content_of(evaluated.tasks[index]))
        for name, evaluated in trainer.evaluated.items()
        for index in evaluated.held_out
    ]
    trainer.close()
    whole = metrics_of(config)
    metrics_of(config_of(place, "parts", "--steps=1"))
    parts = metrics_of(config_of(place, "parts"))
    ppo = metrics_of(config_of(place, "ppo", "--steps=1", kind=PPOConfig), PPOTrainer)
    return findings, order, held_out, whole, parts, ppo


def test_environments_are_mixed_by_weight_with_their_own_rewards(ranks: Ranks, tmp_path: Path) -> None:
    ((findings, order, held_out, whole, parts, ppo),) = ranks(1, train, str(tmp_path))
    assert "8 tasks" in findings["tasks sums"]
    assert "6 tasks" in findings["tasks words"]
    for start in range(0, 36, 3):
        assert sorted(name for name, _ in order[start : start + 3]) == ["sums", "sums", "words"]
    trained = {name: [prompt for part, prompt in order if part == name] for name in ("sums", "words")}
    assert held_out == [("sums", prompt) for prompt in SUMS[-2:]] + [("words", prompt) for prompt in WORDS[-2:]]
    assert sorted(trained["sums"]) == sorted(SUMS[:-2] * 4), "each once an epoch"
    assert sorted(trained["words"]) == sorted(WORDS[1:-2] * 4), "nor what another environment holds out"
    steps = [row for row in whole if "reward_mean" in row]
    assert len(steps) == 3
    for row in [*steps, *(row for row in ppo if "reward_mean" in row)]:
        assert (row["reward/sums"], row["reward/words"]) == (0.25, 0.5)
        assert row["reward_mean"] == pytest.approx((2 * 0.25 + 0.5) / 3)
        assert (row["reward/sums/score"], row["reward/sums/bonus"]) == (0.25, 0.0)
        assert "reward/score" not in row, "a mean over those that have no such component"
    evaluated = [row for row in whole if "eval/reward_mean" in row]
    assert len(evaluated) == 2
    for row in evaluated:
        assert (row["eval/sums/reward_mean"], row["eval/words/reward_mean"]) == (0.25, 0.5)
        assert row["eval/reward_mean"] == pytest.approx(0.375)
    for row, expected in zip([row for row in parts if "reward_mean" in row], steps, strict=True):
        for name in ("loss", "grad_norm", "reward_mean", "length_mean", "lengths"):
            assert row[name] == expected[name], "a resumed run equals an uninterrupted one"


def test_asynchronous_rollouts_of_a_mixture_keep_their_environments() -> None:
    rewards = {"a": lambda completion: 1.0, "b": lambda completion: 2.0}
    environments = {
        name: SingleTurn([Task(f"{name}{index}") for index in range(4)], FunctionReward(reward, workers=0))
        for name, reward in rewards.items()
    }
    tasks = JoinedTasks({name: environment.tasks for name, environment in environments.items()})

    def order() -> MixedRows[int]:
        orders = {name: OrderedRows(range(first, first + 4), RowOrder(4, 3)) for name, first in (("a", 0), ("b", 4))}
        return MixedRows(orders, [3.0, 1.0])

    sampler = RolloutSampler(
        DelayedEngine(),  # type: ignore[arg-type]
        environments,
        PromptEncoding(byte_tokenizer(), SamplingSettings(max_new_tokens=2), SequenceLimit(64)),
        seed=3,
        timer=StepTimer(),
        background=True,
    )
    sizes: Any = {"samples_per_prompt": 2, "prompts_of_step": StepSizes(4, 24).of_step, "max_staleness": 1}
    with closing(sampler):
        queue = RolloutQueue(sampler, tasks, order(), **sizes)
        for step in range(3):
            for trajectory in queue.take(4, step):
                name = trajectory.task.environment
                assert (trajectory.task.prompt[0], trajectory.reward) == (name, {"a": 1.0, "b": 2.0}[name])
        resumed = RolloutQueue(sampler, tasks, order(), **sizes)
        resumed.restore(json.loads(json.dumps(queue.state())))
        assert resumed.task_sampler.take(8) == queue.task_sampler.take(8)
        other = RolloutQueue(sampler, tasks, OrderedRows(range(8), RowOrder(8, 3)), **sizes)
        with pytest.raises(ValueError, match="saved order"):
            other.restore(queue.state())
    for environment in environments.values():
        environment.close()


def continued(group: Any, directory: str) -> list[str]:
    """Returns what a run with changed settings of its environments says, after a step of it."""
    place, sentences = Path(directory), []
    metrics_of(config_of(place, "run", "--steps=1"))

    def resume(*overrides: str) -> None:
        try:
            metrics_of(load(GRPOConfig, place / "run.yaml", ["--samples_per_prompt=2", "--steps=2", *overrides]))
        except ValueError as error:
            sentences.append(str(error))

    file = place / "run.yaml"
    file.write_text(file.read_text().replace("workers: 0, weight: 1", "workers: 1, timeout: 40, weight: 1"))
    resume()
    file.write_text(file.read_text().replace("weight: 1", "weight: 3"))
    resume()
    file.write_text(file.read_text().replace("weight: 3", "weight: 1"))
    (place / "words.jsonl").write_text((place / "words.jsonl").read_text() + '{"prompt": "word 5"}\n')
    resume()
    resume("--file_changes=allow", "--evaluation.every=0")
    return sentences


def test_what_does_not_matter_may_change_and_what_does_is_named_as_it_was_written(ranks: Ranks, tmp_path: Path) -> None:
    ((weight, file, row),) = ranks(1, continued, str(tmp_path))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["starts"][1]["changed"]["environment.1.workers"] == [
        0,
        1,
    ]
    assert "belongs to another run: environment.1.weight is 1.0 there and 3.0 here." in weight
    assert "words.jsonl (environment.1.path) changed since" in file
    assert "--file_changes allow to resume with the new one (of a dataset to train on, only with as many rows" in file
    assert "holds out" in row or "restore the dataset" in row


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("workers: 0, weight: 1", "workers: 0"), "words has no weight, but others have. Give all or none"),
        (
            ("tasks: 2}", "tasks: 2, sets: {words: {environment: {kind: reasoning_gym, task: chain_sum}}}}"),
            "environment and evaluation.sets both have words",
        ),
    ],
)
def test_invalid_mixtures_are_refused(tmp_path: Path, change: tuple[str, str], sentence: str) -> None:
    config_of(tmp_path, "run")
    file = tmp_path / "run.yaml"
    file.write_text(file.read_text().replace(*change))
    with pytest.raises(ConfigError, match=sentence):
        load(GRPOConfig, file, ["--samples_per_prompt=2"])


def test_a_weight_outside_of_a_list_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, "run")
    alone = config.model_copy(update={"environment": config.environment.environments[0]})
    with pytest.raises(PreflightError, match="weight is 2, but the environment is not in a list"):
        preflight(GRPOTrainer.checks(PreflightInputs(alone, LaunchInfo())))
