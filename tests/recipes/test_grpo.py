"""A GRPO run is the same in every layout and after an interruption."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from postlude.data import Batch
from postlude.generate.protocol import Completion
from postlude.layout import Layout
from postlude.objectives.advantages import grpo
from postlude.recipes.checks.preflight import LaunchInfo, PreflightInputs, preflight
from postlude.recipes.config.load import ConfigError, load
from postlude.recipes.grpo import GRPOConfig, GRPOTrainer
from postlude.recipes.references import prune_references, reference_name
from postlude.recipes.registry import RECIPES
from postlude.recipes.report.metrics import explain
from postlude.recipes.report.summary import read_summary
from postlude.recipes.rollout_columns import RolloutRows, routing_column
from postlude.recipes.rollouts.evaluation_sets import evaluation_metrics
from postlude.recipes.rollouts.sampler import RolloutBatch
from postlude.recipes.rollouts.selection import TrajectorySelection, overlong_fraction
from postlude.recipes.rollouts.trajectory_log import LOGGED_SAMPLES
from postlude.recipes.row_sources import StepSizes
from postlude.recipes.run.files import read_layers, read_metrics
from postlude.recipes.run.outcome import RunFailed, RunOutcome, read_outcome
from postlude.recipes.training_run import run_training
from postlude.rollout.conversations import Trajectory
from postlude.rollout.environments import Transcript
from postlude.rollout.rewards import Score
from postlude.rollout.tasks import Task
from tests.conftest import Ranks

pytest.importorskip("reasoning_gym", reason="some of the tasks are reasoning-gym's")

UNKEPT = ("--save_every=0", "--export=false")
SMALL = """
model: tiny-dense
budget: 256
environment: {kind: dataset, path: sums.jsonl, reward: exact, workers: 0}
warm_start: {steps: 2, batch_size: 8, optimizer: {lr: 1e-3}}
steps: 3
prompts_per_step: 4
samples_per_prompt: 3
sampling: {max_new_tokens: 3}
optimizer: {lr: 1e-4}
evaluation: {every: 3, tasks: 4, samples_per_prompt: 2, temperature: 1.0}
save_every: 2
"""


SUMS = [
    {"prompt": f"{first} + {second} = ", "answer": str(first + second)} for first in range(8) for second in range(8)
]
GYM = (  # a run of these starts a process that makes the tasks, which imports reasoning-gym for seconds
    "--environment=reasoning_gym",
    "--environment.task=chain_sum",
    "--environment.settings={min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}",
    "--environment.template={metadata[expression]} = ",
)


def config_of(directory: Path, *overrides: str) -> GRPOConfig:
    directory.mkdir(parents=True, exist_ok=True)
    texts = {"small.yaml": SMALL, "sums.jsonl": "".join(json.dumps(row) + "\n" for row in SUMS)}
    for name, text in texts.items():
        temporary = directory / f"{name}.{os.getpid()}"
        temporary.write_text(text)
        temporary.replace(directory / name)  # atomically: all ranks write it at the same time
    return load(GRPOConfig, directory / "small.yaml", ["--run", str(directory / "run"), *overrides])


def run_and_read_metrics(group: Any, directory: str, *overrides: str) -> list[dict[str, Any]]:
    config = config_of(Path(directory), *overrides)
    RECIPES["grpo"].run(config)
    return [json.loads(line) for line in (config.run / "metrics.jsonl").read_text().splitlines()]


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if not key.startswith(("time/", "tokens_per_second"))} for row in rows
    ]


@pytest.mark.slow
def test_run_writes_metrics_samples_checkpoints_and_a_report(ranks: Ranks, tmp_path: Path) -> None:
    (rows,) = ranks(1, run_and_read_metrics, str(tmp_path))
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["phase"] for row in rows] == ["sft", "sft", "grpo", "grpo", "grpo"]
    assert all(0.0 <= row["reward_mean"] <= 1.0 and len(row["rewards"]) == 12 for row in rows[2:])
    assert 0.0 < rows[2]["rollout_kl"] < 1e-9, "the sampler and the trainer agree to rounding"
    assert {"eval/reward_mean", "eval/pass@1", "eval/pass@2"} <= rows[-1].keys()
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-000004", "step-000005"]
    assert (tmp_path / "run" / "samples.jsonl").read_text().count("\n") == 3 * LOGGED_SAMPLES
    unexplained = {key for row in rows for key in row if explain(key) is None} - {"step", "phase"}
    assert not unexplained, "docs/metrics.md has every metric"
    summary = read_summary(tmp_path / "run")
    assert summary.score is not None
    assert (summary.score.first, summary.score.last) == (rows[1]["eval/reward_mean"], rows[-1]["eval/reward_mean"])
    assert summary.outcome == RunOutcome("finished", 5)
    assert summary.model is not None


def run_epochs(group: Any, directory: str, *words: str) -> str:
    """Returns what the preflight says of the last of these runs, which continue each other. Options begin with --."""
    options = [word for word in words if word.startswith("--")]
    for number in (word for word in words if word not in options):
        config = config_of(
            Path(directory), "--evaluation={every: 0, tasks: 56}", "--warm_start.steps=0", "--prompts_per_step=3",
            "--samples_per_prompt=2", "--export=false", "--save_completions=true", f"--epochs={number}", *options,
        )  # fmt: skip
        found = preflight(GRPOTrainer.checks(PreflightInputs(config, LaunchInfo())))
        RECIPES["grpo"].run(config)
    return found["epochs"]


@pytest.mark.slow
def test_epochs_are_passes_over_the_tasks(ranks: Ranks, tmp_path: Path) -> None:
    """Of eight tasks: the last step has the one that is left, also in a run that is continued."""
    parquet = pytest.importorskip("pyarrow.parquet")
    tables = []
    for name, epochs in (("whole", ["2"]), ("parts", ["1.5", "2"]), ("short", ["1", "2"])):
        (tmp_path / name).mkdir()
        assert ranks(1, run_epochs, str(tmp_path / name), *epochs) == ["6 steps for 2 × 8 tasks"]
        tables.append(parquet.read_table(tmp_path / name / "run" / "completions").to_pylist())
    whole, parts, short = tables
    assert whole == parts
    assert Counter(row["step"] for row in whole) == {1: 6, 2: 6, 3: 6, 4: 6, 5: 6, 6: 2}
    assert Counter(row["prompt"] for row in whole[:16]) == Counter({row["prompt"]: 2 for row in SUMS[:8]})
    for table in (whole, short):
        assert Counter(row["prompt"] for row in table) == Counter({row["prompt"]: 4 for row in SUMS[:8]})
    assert Counter(row["step"] for row in short) == {1: 6, 2: 6, 3: 4, 4: 6, 5: 6, 6: 4}


@pytest.mark.slow
@pytest.mark.parametrize("first", [(), ("1",)])
def test_replaced_prompts_are_of_the_epochs(first: tuple[str, ...], ranks: Ranks, tmp_path: Path) -> None:
    """Every reward is 0, so every group is replaced: the prompts are used up in fewer steps, each exactly twice."""
    parquet = pytest.importorskip("pyarrow.parquet")
    options = ("--dynamic_sampling=1", "--sampling.max_new_tokens=1")
    (said,) = ranks(1, run_epochs, str(tmp_path), *first, "2", *options)
    assert said == "at most 6 steps for 2 × 8 tasks"
    table = parquet.read_table(tmp_path / "run" / "completions").to_pylist()
    assert Counter(row["prompt"] for row in table) == Counter({row["prompt"]: 4 for row in SUMS[:8]})
    taken = {1: 12, 2: 12, 3: 8} if not first else {1: 12, 2: 4, 3: 12, 4: 4}
    assert Counter(row["step"] for row in table) == taken
    assert read_outcome(tmp_path / "run") == RunOutcome("finished", len(taken))
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == list(taken)


def run_that_fails_once(group: Any, directory: str) -> tuple[str, list[str], RunOutcome | None]:
    """Runs a trainer that fails in its fourth step, then the same command again."""
    config = config_of(Path(directory))

    class Failing(GRPOTrainer):
        def train_minibatches(self, batch: RolloutBatch) -> dict[str, Any]:
            if self.step == 3:
                raise ValueError("nothing can be learned.")
            return super().train_minibatches(batch)

    with suppress(RunFailed):
        run_training(Failing(config, "cpu"))
    bad, page = read_summary(config.run).failure, (config.run / "report.html").read_text()
    RECIPES["grpo"].run(config)
    return bad, page.split(bad)[:1], read_outcome(config.run)


@pytest.mark.slow
def test_report_of_a_failed_run_shows_the_failure(ranks: Ranks, tmp_path: Path) -> None:
    ((bad, before, ending),) = ranks(1, run_that_fails_once, str(tmp_path))
    assert bad == "The run failed after step 3: nothing can be learned."
    assert "<h2>" not in before[0], "it comes before everything else"
    assert ending == RunOutcome("finished", 5), "the resumed run is finished"


# The reward differs between completions of an untrained model over bytes, so that every step has a gradient.
VARIED_REWARDS = (
    "--environment=dataset",
    f"--environment.path={Path(__file__).parents[2] / 'examples' / 'data' / 'tool_sums.jsonl'}",
    f"--environment.reward={Path(__file__).parents[1] / 'rollout' / 'functions.py'}:ascii_share",
    "--environment.workers=0",
)
REPLAY = ("--model=tiny-moe", "--replay_routing=true")


MOE = ("--model=tiny-moe",)
MASKS = ("--sampling.top_k=20", "--sampling.top_p=0.9", "--objective.kl.coefficient=0.1", "--old_logprobs=recompute")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "layouts"),
    [
        pytest.param((), ("pp=2,vpp=2",), id=""),  # test_model_recipes.py has GRPO in the layouts of the recipes
        pytest.param(MOE, ("dp_shard=2,ep=2",), id="experts", marks=pytest.mark.thorough),
        pytest.param((), ("pp=2", "tp=2", "cp=2", "dp_shard=2", "pp=2,cp=2"), id="more", marks=pytest.mark.thorough),
        pytest.param(MASKS, ("tp=2",), id="sampling masks"),
        pytest.param(MASKS, ("pp=2", "cp=2", "dp_shard=2"), id="more masks", marks=pytest.mark.thorough),
        pytest.param(REPLAY, ("pp=2", "tp=2", "cp=2", "dp_shard=2"), id="replay", marks=pytest.mark.thorough),
    ],
)
def test_every_layout_gives_the_same_losses(
    ranks: Ranks, tmp_path: Path, settings: tuple[str, ...], layouts: tuple[str, ...]
) -> None:
    """Gradients are equal too: rewards and lengths differ, and a microbatch holds a few completions."""
    steps = ("--warm_start.steps=1", "--steps=2", "--minibatches=2", "--optimizer.lr=1e-3", "--evaluation.every=0")
    settings = (*UNKEPT, *VARIED_REWARDS, *steps, "--budget=64", "--sampling.max_new_tokens=6", *settings)
    (expected_rows,) = ranks(1, run_and_read_metrics, str(tmp_path / "one"), *settings)
    for layout in layouts:
        actual_rows = ranks(
            Layout.parse(layout).world_size, run_and_read_metrics, str(tmp_path / layout), *settings, "--layout", layout
        )[0]
        for expected, actual in zip(expected_rows, actual_rows, strict=True):
            assert abs(expected["loss"]) > 1e-4
            assert expected["grad_norm"] > 1e-2
            assert actual["loss"] == pytest.approx(expected["loss"], abs=1e-5, rel=1e-4), layout
            assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3), layout
            assert actual.get("rewards") == expected.get("rewards"), layout
        if settings[-len(MASKS) :] == MASKS:
            assert all(row["rollout_kl"] < 1e-9 and row["entropy"] < math.log(20) for row in actual_rows[1:])
        if settings[-1:] == MOE:  # before the first update all expert choices are equal
            first, second_layers = (read_layers(tmp_path / name / "run") for name in ("one", layout))
            assert first[0] == second_layers[0]
            assert [line["step"] for line in first] == [1, 2, 3]
            slots = 4 * 2 * expected_rows[1]["tokens"]  # layers, experts a token, both minibatches
            assert sum(sum(load) for name, load in first[1].items() if name != "step") == slots
            assert not [name for name in expected_rows[-1] if name.startswith("moe/") and explain(name) is None]
            assert actual_rows[0]["moe/entropy_worst"] == pytest.approx(expected_rows[0]["moe/entropy_worst"], rel=1e-5)


def held_out_and_trained_prompts(group: Any, directory: str) -> tuple[list[str], set[str]]:
    """Returns the held-out prompts, and those of two epochs of training, of 1,000 tasks with 200 prompts."""
    config = config_of(Path(directory), *GYM, "--environment.size=1000", "--evaluation.tasks=64")
    with closing(GRPOTrainer(config, "cpu")) as trainer:
        trained = {str(trainer.tasks[index].prompt) for index in trainer.task_sampler.take(1000)}
        return [str(trainer.tasks[index].prompt) for index in trainer.evaluated[""].held_out], trained


def test_held_out_prompts_are_not_trained_on(ranks: Ranks, tmp_path: Path) -> None:
    ((held_out, trained),) = ranks(1, held_out_and_trained_prompts, str(tmp_path))
    assert len(set(held_out)) == 64
    assert len(trained) > 100
    assert not trained & set(held_out)


def error_with_other_seed(group: Any, directory: str) -> str:
    seed = 7 * dist.get_rank()
    with pytest.raises(ValueError, match="config") as refusal:
        GRPOTrainer(config_of(Path(directory), "--layout", "pp=2", f"--seed={seed}"), "cpu")
    return str(refusal.value)


def test_ranks_with_different_configs_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks(2, error_with_other_seed, str(tmp_path)):
        assert message.startswith("rank 1 was given another config than rank 0: seed is 7, and 0 on rank 0. ")
    assert not (tmp_path / "run").exists()


def run_until_interrupt(group: Any, directory: str, at: int, *overrides: str) -> None:
    """Runs until a KeyboardInterrupt in step `at`, after its rollout."""

    class Stopped(GRPOTrainer):
        def select_trajectories(self) -> Any:
            trajectories = super().select_trajectories()
            if self.step == at:
                raise KeyboardInterrupt
            return trajectories

    with suppress(KeyboardInterrupt):
        run_training(Stopped(config_of(Path(directory), *overrides), "cpu"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param((), id=""),
        pytest.param(
            (
                *VARIED_REWARDS,
                "--objective.kl.coefficient=0.1",
                "--reference_every=2",
                "--save_every=1",
                "--optimizer.lr=1e-3",
            ),
            id="updated reference",
        ),
        pytest.param(REPLAY, id="replay", marks=pytest.mark.thorough),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_run(ranks: Ranks, tmp_path: Path, settings: tuple[str, ...]) -> None:
    (expected,) = ranks(1, run_and_read_metrics, str(tmp_path / "whole"), *settings)
    for at in (3, 4):
        ranks(1, run_until_interrupt, str(tmp_path / "parts"), at, *settings)
    (actual,) = ranks(1, run_and_read_metrics, str(tmp_path / "parts"), *settings)
    assert without_times(actual) == without_times(expected)
    if "--reference_every=2" in settings:
        distances = [row["kl"] for row in expected[2:]]
        assert distances[0] == distances[2] == pytest.approx(0.0, abs=1e-9), (
            "at steps 0 and 2, where the reference is the policy"
        )
        assert distances[1] > 1e-6
        references = sorted(path.name for path in (tmp_path / "parts" / "run").glob("reference*"))
        assert references == ["reference-000000", "reference-000002"]


def test_pruning_keeps_the_references_that_a_checkpoint_needs(tmp_path: Path) -> None:
    for step in (0, 3, 6, 9):
        (tmp_path / reference_name(step, 3)).mkdir()
    run = Mock(path=tmp_path)
    run.checkpoints.return_value = [
        tmp_path / f"step-{step:06d}" for step in (2 + 8, 2 + 10)
    ]  # after a warm start of 2
    prune_references(run, 2, 3)
    references = sorted(path.name for path in tmp_path.iterdir())
    # After a warm start of 2, the last step of the first checkpoint is step 7, which used the reference of step 6.
    assert references == ["reference-000006", "reference-000009"]


def test_invalid_configs_are_refused(tmp_path: Path) -> None:
    for override, sentence in (
        ("--optimzer.lr=1", 'did you mean "optimizer.lr"'),
        ("--sampling.temperature=0", "nothing to compare"),
        (
            "--samples_per_prompt=1",
            '"samples_per_prompt" is "1" on the command line; give a whole number of at least 2',
        ),
        ("--minibatches=3", "does not divide prompts_per_step=4"),
        ("--objective.correction.level=token", "Set old_logprobs to recompute"),
        ("--reference=true", "set objective.kl instead"),
        ("--sampling.max_new_tokens=255", "leaves no room for a prompt in a budget of 256"),
        ("--overlong_buffer=2", "Set a penalty, or leave both out"),
        ("--reference_every=2", "nothing reads one"),
        ("--environment.template=5", None),
    ):
        if sentence is None:
            assert config_of(tmp_path, *GYM, override).environment.template == "5"  # type: ignore[union-attr]
            continue
        with pytest.raises(ConfigError, match=sentence):
            config_of(tmp_path, override)


@pytest.mark.slow
def test_outputs_that_are_switched_off_are_not_written(ranks: Ranks, tmp_path: Path) -> None:
    off = ("--export=false", "--evaluation.every=0", "--save_every=0", "--keep_checkpoints=1")
    ranks(1, run_and_read_metrics, str(tmp_path), *off)
    assert not (tmp_path / "run" / "model").exists()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000005"]


@pytest.mark.thorough
def test_dtype_sets_the_compute_dtype(ranks: Ranks, tmp_path: Path) -> None:
    short = (
        "--warm_start.steps=1",
        "--warm_start.batch_size=2",
        "--steps=1",
        "--samples_per_prompt=2",
        "--evaluation.every=0",
    )
    (exact,) = ranks(1, run_and_read_metrics, str(tmp_path / "float32"), *short, "--dtype=float32")
    (rough,) = ranks(1, run_and_read_metrics, str(tmp_path / "bfloat16"), *short, "--dtype=bfloat16")
    assert exact[0]["loss"] != rough[0]["loss"]
    assert rough[0]["loss"] == pytest.approx(exact[0]["loss"], rel=1e-2)


OBJECTIVE = """
from postlude.objectives import Loss, mean

def pulled(inputs, *, strength):
    batch = inputs.microbatch
    stats = inputs.head.logprobs(inputs.hidden, batch.targets)
    away = stats.logprob - batch.column("reference_logprobs")
    return Loss(strength * away.square(), "response_mask", {"away": mean(away.abs(), "response_mask")})
"""


@pytest.mark.slow
def test_custom_objective(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OBJECTIVE)
    options = (f"--objective={tmp_path / 'mine.py'}:pulled", "--objective.settings.strength=2.0", "--reference=true")
    (rows,) = ranks(1, run_and_read_metrics, str(tmp_path), *options)
    assert rows[2]["away"] == pytest.approx(0.0, abs=1e-5), "the reference is the model after the warm start"
    assert rows[2]["loss"] == pytest.approx(0.0, abs=1e-8)


REPLY = """
def reply(prompt, completions, example):
    if len(completions) < 2:
        return "again: "
    return {"reward": float(len(completions)), "first": float(len(completions[0]))}
"""


@pytest.mark.slow
def test_multi_turn_environment(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "reply.py").write_text(REPLY)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"ask": f"{number}+1="}) + "\n" for number in range(9)))
    options = (
        "--environment=conversation",
        f"--environment.path={tmp_path / 'rows.jsonl'}",
        f"--environment.reply={tmp_path / 'reply.py'}:reply",
        "--environment.prompt=ask",
        "--environment.workers=1",
        "--warm_start.steps=0",
        "--steps=1",
    )
    for turns, reward in ((3, 2.0), (1, -0.5)):
        short = (f"--environment.max_turns={turns}", "--environment.unfinished_reward=-0.5")
        (rows,) = ranks(1, run_and_read_metrics, str(tmp_path / str(turns)), *options, *short)
        assert rows[-1]["reward_mean"] == reward
        assert rows[-1]["turns_mean"] == min(turns, 2)
        assert rows[-1]["length_mean"] <= 3 * min(turns, 2)
        assert rows[-1]["reused_prompt_tokens"] > 0, "those of a group, at least"
    settings = (*REPLAY, "--environment.max_turns=3", "--old_logprobs=recompute", "--objective.kl.coefficient=0.1")
    (rows,) = ranks(1, run_and_read_metrics, str(tmp_path / "replayed"), *options, *settings)
    assert rows[-1]["turns_mean"] == 2
    assert rows[-1]["moe/routing_changed"] == 0, "the weights are still those that sampled"
    assert rows[-1]["rollout_kl"] < 1e-9


def test_objective_of_the_readme_is_on_policy_at_another_temperature(ranks: Ranks, tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "objective.py"  # tests/test_docs.py: it is the README's
    options = (f"--objective={example}:soft_clip", "--sampling.temperature=0.5", "--steps=1", "--evaluation.every=0")
    (rows,) = ranks(1, run_and_read_metrics, str(tmp_path), *options, *UNKEPT)
    assert rows[-1]["ratio"] == pytest.approx(1.0, abs=1e-4)


ROWS = [{"prompt": "1+1="}, {"prompt": "2+2="}, {"prompt": "3" * 300}]


@pytest.mark.parametrize(
    ("rows", "reward", "sentence"),
    [
        (
            ROWS,
            "return 1.0",
            "the prompt of line 3 of rows.jsonl has 300 tokens, but budget=256 with completions of up",
        ),
        ([{"question": "?"}], "return 1.0", 'has no column "prompt"; it has: "question"'),
        ([], "return 1.0", "rows.jsonl has no rows"),
        (ROWS[:2], "return 1.0 if prompt.startswith('2') else 1 / 0", ""),
    ],
)
def test_invalid_tasks_and_failing_rewards_give_clear_errors(
    ranks: Ranks, tmp_path: Path, rows: list[dict[str, str]], reward: str, sentence: str
) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "judge.py").write_text(f"def judge(prompt, completion, example):\n    {reward}\n")
    options = (
        "--environment=dataset",
        f"--environment.path={tmp_path / 'rows.jsonl'}",
        f"--environment.reward={tmp_path / 'judge.py'}:judge",
        "--environment.workers=1",
        "--warm_start.steps=0",
        "--evaluation={every: 0, tasks: 0}",
        "--steps=1",
    )
    if sentence:
        with pytest.raises(pytest.fail.Exception, match=sentence):
            ranks(1, run_and_read_metrics, str(tmp_path), *options)
    else:
        (metrics,) = ranks(1, run_and_read_metrics, str(tmp_path), *options)
        assert 0.0 < metrics[-1]["reward/failed"] < 1.0, "failed calls exclude completions and do not end the run"


def make_trajectory(group: int, reward: float | None, *reasons: str) -> Trajectory:
    """Returns a trajectory with one turn per finish reason. With reward=None its reward call failed."""
    score = Score(0.0, {"raised": 1.0}, "broken", excluded=True) if reward is None else Score(reward)
    turns = [Completion([2], [0.0], [0.0], reason) for reason in reasons or ("stop",)]  # type: ignore[arg-type]
    trajectory = Trajectory(Task("p", {}, "task"), group, (Transcript([1]),), turns, score, done=True)
    for turn in turns:
        trajectory.transcripts[0].add_completion(turn.tokens, turn.logprobs)
    return trajectory


def rollout_of(
    rounds: list[list[Trajectory]], carried: Sequence[Trajectory] = (), **settings: Any
) -> tuple[list[Batch], dict[str, Any]]:
    """Returns the minibatches and metrics of a trainer that samples these trajectories, one list per round."""
    trainer, remaining = object.__new__(GRPOTrainer), iter(rounds)
    trainer.config = GRPOConfig(prompts_per_step=2, samples_per_prompt=3, run=Path("nowhere"), **settings)
    trainer.step, trainer.warm_start_steps, trainer.step_sizes = 0, 0, StepSizes(2, 2)
    trainer.prompts_taken, trainer.selection = 0, TrajectorySelection(trainer.config, trainer.min_group_size)
    trainer.queue, trainer.run, trainer.health, trainer.rollout_sampler, trainer.engine, trainer.tokenizer = (
        Mock() for _ in range(6)
    )
    trainer.queue.take = lambda count, step: next(remaining)
    trainer.queue.take_carried = lambda step: list(carried)
    trainer.queue.take_metrics.return_value = trainer.rollout_sampler.take_metrics.return_value = {}
    trainer.tokenizer.decode = lambda tokens, **_: str(tokens)
    batch, mesh = trainer.sample_rollouts(), Mock()
    mesh.dp.rank = 0
    minibatches, _ = trainer.add_advantages(RolloutRows(batch.minibatches, mesh, None, batch.rewards_before))
    return minibatches, batch.metrics


def test_a_carried_completion_is_compared_with_all_of_its_group() -> None:
    """Also with those that an earlier step trained on, but not with those whose reward failed."""
    carried, alone = make_trajectory(2, 0.0), make_trajectory(3, 1.0)
    carried.trained_before = (make_trajectory(0, 1.0), make_trajectory(0, None), make_trajectory(0, 1.0))
    alone.trained_before = (make_trajectory(0, None), make_trajectory(0, None))
    sampled = [make_trajectory(0, 1.0), make_trajectory(0, 0.0), make_trajectory(1, 0.5), make_trajectory(1, 0.0)]
    (batch,), metrics_of_step = rollout_of([sampled], [carried, alone])
    expected = [*grpo([1.0, 0.0], "aa"), *grpo([0.5, 0.0], "aa"), grpo([0.0, 1.0, 1.0], "aaa")[0]]
    assert list(batch.columns["advantages"]) == pytest.approx([float(value) for value in expected])
    assert metrics_of_step["rewards"] == [1.0, 0.0, 0.5, 0.0, 0.0, 1.0]
    assert metrics_of_step["groups_trained"] == 1.0


def test_completions_whose_reward_failed_are_excluded() -> None:
    """They are excluded from baseline, loss and mean, and so is a completion left alone in its group."""
    sampled = [
        *(make_trajectory(0, 1.0), make_trajectory(0, None), make_trajectory(0, 0.0)),
        *(make_trajectory(1, None), make_trajectory(1, 1.0), make_trajectory(1, None)),
    ]
    (batch,), metrics_of_step = rollout_of([sampled])
    assert len(batch.sequences) == 2
    assert list(batch.columns["advantages"]) == pytest.approx([0.5**0.5, -(0.5**0.5)], rel=1e-3)
    assert metrics_of_step["reward_mean"] == pytest.approx(2 / 3), "not 2 / 6"
    assert metrics_of_step["rewards"] == [1.0, 0.0, 1.0]
    assert metrics_of_step["reward/failed"] == metrics_of_step["reward/raised"] == pytest.approx(0.5)
    assert metrics_of_step["groups_trained"] == 0.5
    assert len(metrics_of_step["lengths"]) == 6
    metrics = evaluation_metrics(sampled, 3)
    assert metrics["eval/reward_mean"] == pytest.approx(2 / 3)
    assert metrics["eval/pass@1"] == pytest.approx(1 / 3), "they solve nothing"
    assert metrics["eval/reward/failed"] == 0.5
    _, metrics_of_failures = rollout_of(
        [[make_trajectory(0, None), make_trajectory(0, None), make_trajectory(0, None)]]
    )
    assert "reward_mean" not in metrics_of_failures
    assert metrics_of_failures["reward/failed"] == 1.0


def test_a_completion_truncated_in_an_earlier_turn_is_overlong() -> None:
    sampled = [make_trajectory(0, 1.0, "length", "stop"), make_trajectory(0, 0.0), make_trajectory(0, 1.0)]
    batches, metrics = rollout_of([sampled], overlong="mask")
    assert metrics["truncated"] == pytest.approx(1 / 3)
    assert len(batches[0].sequences) == 2


def test_the_overlong_penalty_grows_over_the_buffer() -> None:
    """DAPO's: none up to max_new_tokens - buffer, all of it at max_new_tokens."""
    fractions = []
    for lengths in ([6], [7], [9], [10], [10, 3], [2, 8]):
        trajectory = make_trajectory(0, 1.0)
        trajectory.completions = [Completion([2] * length, [0.0] * length, [], "stop") for length in lengths]
        fractions.append(overlong_fraction(trajectory, 10, 4))
    assert fractions == [0.0, 0.25, 0.75, 1.0, 1.0, 0.5]
    assert overlong_fraction(make_trajectory(0, 1.0, "length"), 10, 0) == 1.0
    assert overlong_fraction(make_trajectory(0, 1.0), 10, 0) == 0.0


@pytest.mark.parametrize("baseline", [False, True])
def test_reinforce_plus_plus_normalises_over_the_rollout(baseline: bool) -> None:
    rewards = [1.0, 0.0, 0.5, 3.0, 2.0, 2.0]
    sampled = [make_trajectory(row // 3, reward, *["stop"] * (1 + row % 2)) for row, reward in enumerate(rewards)]
    estimator = "reinforce_plus_plus_baseline" if baseline else "reinforce_plus_plus"
    (batch,), _ = rollout_of([sampled], advantages=estimator)
    returns = [rewards[row] - (mean(rewards[row // 3 * 3 :][:3]) if baseline else 0.0) for row in range(6)]
    by_token = [reward for row, reward in enumerate(returns) for _ in range(1 + row % 2)]
    average, deviation = mean(by_token), (mean([(value - mean(by_token)) ** 2 for value in by_token])) ** 0.5
    for row, advantages in enumerate(batch.columns["advantages"]):
        advantage = (returns[row] - average) / deviation
        assert advantages.tolist() == pytest.approx([0.0, *[advantage] * (1 + row % 2)], rel=1e-5, abs=1e-6)


def test_dynamic_sampling_compares_rewards_with_the_overlong_penalty() -> None:
    """Rewards are compared with the penalty, and without masked completions."""
    sampled = [
        make_trajectory(0, 1.0, "length"),
        make_trajectory(0, 1.0),
        make_trajectory(0, 1.0),
        make_trajectory(1, 0.0, "length"),
        make_trajectory(1, 1.0),
    ]
    equal_rewards = [make_trajectory(2, 1.0), make_trajectory(2, 1.0)]
    batches, metrics = rollout_of([sampled, equal_rewards], dynamic_sampling=1, overlong_penalty=0.5)
    assert metrics["groups_trained"] == 1.0
    assert len(batches[0].sequences) == 5
    batches, metrics = rollout_of([sampled, equal_rewards], dynamic_sampling=1, overlong="mask")
    assert metrics["groups_trained"] == 0.0, "the rewards of one group are equal, and the other has one completion left"
    assert not batches


def ratios_of_minibatches(group: Any, directory: str) -> tuple[list[float], float, float]:
    """Returns ratio_max of each minibatch and of the step, and the difference of the mean ratios."""
    results: list[dict[str, Any]] = []

    class Noted(GRPOTrainer):
        def train_batch(self, batch: Any, objective: Any) -> Any:
            results.append(super().train_batch(batch, objective))
            return results[-1]

    short = (*UNKEPT, "--warm_start.steps=0", "--steps=1", *VARIED_REWARDS, "--minibatches=4")
    run_training(Noted(config_of(Path(directory), *short), "cpu"))
    row = json.loads((Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    difference = row["ratio"] - mean(result["ratio"] for result in results)
    return [result["ratio_max"] for result in results], row["ratio_max"], difference


@pytest.mark.slow
def test_ratio_max_is_the_maximum_over_minibatches(ranks: Ranks, tmp_path: Path) -> None:
    ((ratios, reported, difference),) = ranks(1, ratios_of_minibatches, str(tmp_path))
    assert len(set(ratios)) > 1
    assert reported == max(ratios)
    assert difference == pytest.approx(0.0, abs=1e-9)


def test_completions_without_routing_cannot_be_replayed() -> None:
    """Most servers do not report the routing."""
    transcripts = [Transcript([1, 2]) for _ in range(2)]
    transcripts[0].add_completion([3], [0.0], torch.zeros(3, 1, 1).short())
    transcripts[1].add_completion([3], [0.0])
    assert len(routing_column(transcripts[:1])) == 1
    with pytest.raises(ValueError, match=r"1 of 2 completions have none\. .* sample with rollout: native or vllm"):
        routing_column(transcripts)
