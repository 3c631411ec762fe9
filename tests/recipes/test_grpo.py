"""A GRPO run: the same in every layout, and the same after it was interrupted."""

from __future__ import annotations

import json
import os
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
from postlude.recipes.config.load import ConfigError, load, undocumented
from postlude.recipes.grpo import GRPOConfig, GRPOTrainer, run
from postlude.recipes.references import prune_references, reference_name
from postlude.recipes.report.metrics import explain
from postlude.recipes.report.summary import read_summary
from postlude.recipes.rollout_columns import RolloutRows, overlong_fraction, routing_column
from postlude.recipes.rollouts.evaluation_sets import evaluation_metrics
from postlude.recipes.rollouts.sampler import LOGGED_SAMPLES, RolloutBatch
from postlude.recipes.run.directory import read_layers
from postlude.recipes.run.outcome import RunFailed, RunOutcome, read_outcome
from postlude.recipes.trainer import run_training
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


SUMS = [{"prompt": f"{one} + {other} = ", "answer": str(one + other)} for one in range(8) for other in range(8)]
GYM = (  # a run of these starts a process that makes the tasks, which imports reasoning-gym for seconds
    "--environment=reasoning_gym",
    "--environment.task=chain_sum",
    "--environment.settings={min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}",
    "--environment.template={metadata[expression]} = ",
)


def config_of(directory: Path, *overrides: str) -> GRPOConfig:
    texts = {"small.yaml": SMALL, "sums.jsonl": "".join(json.dumps(row) + "\n" for row in SUMS)}
    for name, text in texts.items():
        own = directory / f"{name}.{os.getpid()}"
        own.write_text(text)
        own.replace(directory / name)  # whole at once: ranks write it at the same time
    return load(GRPOConfig, directory / "small.yaml", ["--run", str(directory / "run"), *overrides])


def trained(group: Any, directory: str, *overrides: str) -> list[dict[str, Any]]:
    config = config_of(Path(directory), *overrides)
    run(config)
    return [json.loads(line) for line in (config.run / "metrics.jsonl").read_text().splitlines()]


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if not key.startswith(("time/", "tokens_per_second"))} for row in rows
    ]


@pytest.mark.slow
def test_a_run_leaves_metrics_samples_checkpoints_and_a_report(ranks: Ranks, tmp_path: Path) -> None:
    (rows,) = ranks(1, trained, str(tmp_path))
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


def fails_once(group: Any, directory: str) -> tuple[str, list[str], RunOutcome | None]:
    """A run whose reward gives out in its fourth step, and the same command again."""
    config = config_of(Path(directory))

    class Failing(GRPOTrainer):
        def train_minibatches(self, batch: RolloutBatch) -> dict[str, Any]:
            if self.step == 3:
                raise ValueError("nothing can be learned.")
            return super().train_minibatches(batch)

    with suppress(RunFailed):
        run_training(Failing(config, "cpu"))
    bad, page = read_summary(config.run).bad, (config.run / "report.html").read_text()
    run(config)
    return bad, page.split(bad)[:1], read_outcome(config.run)


@pytest.mark.slow
def test_the_report_of_a_failed_run_has_the_failure(ranks: Ranks, tmp_path: Path) -> None:
    ((bad, before, ending),) = ranks(1, fails_once, str(tmp_path))
    assert bad == "The run failed after step 3: nothing can be learned."
    assert "<h2>" not in before[0], "it comes before everything else"
    assert ending == RunOutcome("finished", 5), "going on takes it back"


# What answers of a model over bytes differ in before it has learned anything, so that every step has a gradient.
SPREAD = (
    "--environment=dataset",
    f"--environment.path={Path(__file__).parents[2] / 'examples' / 'data' / 'tool_sums.jsonl'}",
    f"--environment.reward={Path(__file__).parents[1] / 'rollout' / 'functions.py'}:ascii_share",
    "--environment.workers=0",
)
REPLAY = ("--model=tiny-moe", "--replay_routing=true")


MOE = ("--model=tiny-moe",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "layouts"),
    [
        pytest.param((), ("dp_shard=2", "pp=2,vpp=2", "pp=2,cp=2"), id=""),
        pytest.param(MOE, ("dp_shard=2,ep=2",), id="experts"),
        pytest.param((), ("pp=2", "tp=2", "cp=2"), id="more", marks=pytest.mark.thorough),
        pytest.param(REPLAY, ("pp=2", "tp=2", "cp=2", "dp_shard=2"), id="replay", marks=pytest.mark.thorough),
    ],
)
def test_every_layout_gives_the_same_losses(
    ranks: Ranks, tmp_path: Path, settings: tuple[str, ...], layouts: tuple[str, ...]
) -> None:
    """And gradients: rewards differ, answers have several lengths, and a microbatch holds a few of them."""
    (tmp_path / "one").mkdir()
    steps = ("--warm_start.steps=1", "--steps=2", "--minibatches=2", "--optimizer.lr=1e-3", "--evaluation.every=0")
    settings = (*UNKEPT, *SPREAD, *steps, "--budget=64", "--sampling.max_new_tokens=6", *settings)
    (alone,) = ranks(1, trained, str(tmp_path / "one"), *settings)
    for layout in layouts:
        (tmp_path / layout).mkdir()
        spread = ranks(Layout.parse(layout).world_size, trained, str(tmp_path / layout), *settings, "--layout", layout)[
            0
        ]
        for expected, found in zip(alone, spread, strict=True):
            assert abs(expected["loss"]) > 1e-4
            assert expected["grad_norm"] > 1e-2
            assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5, rel=1e-4), layout
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3), layout
            assert found.get("rewards") == expected.get("rewards"), layout
        if settings[-1:] == MOE:  # before weights have moved, choices are the same to the last one
            first, other = (read_layers(tmp_path / name / "run") for name in ("one", layout))
            assert first[0] == other[0]
            assert [line["step"] for line in first] == [1, 2, 3]
            slots = 4 * 2 * alone[1]["tokens"]  # layers, experts a token, both minibatches
            assert sum(sum(load) for name, load in first[1].items() if name != "step") == slots
            assert not [name for name in alone[-1] if name.startswith("moe/") and explain(name) is None]
            assert spread[0]["moe/entropy_worst"] == pytest.approx(alone[0]["moe/entropy_worst"], rel=1e-5)


def prompts(group: Any, directory: str) -> tuple[list[str], set[str]]:
    """What a run asks that is held out, and in two epochs of training, of 200 prompts that 1,000 tasks share."""
    config = config_of(Path(directory), *GYM, "--environment.size=1000", "--evaluation.tasks=64")
    with closing(GRPOTrainer(config, "cpu")) as trainer:
        trained = {str(trainer.tasks[index].prompt) for index in trainer.task_sampler.take(1000)}
        return [str(task.prompt) for task in trainer.held_out], trained


def test_a_run_is_not_trained_on_prompts_that_are_held_out(ranks: Ranks, tmp_path: Path) -> None:
    ((held_out, trained),) = ranks(1, prompts, str(tmp_path))
    assert len(set(held_out)) == 64
    assert len(trained) > 100
    assert not trained & set(held_out)


def differing(group: Any, directory: str) -> str:
    seed = 7 * dist.get_rank()
    with pytest.raises(ValueError, match="config") as refusal:
        GRPOTrainer(config_of(Path(directory), "--layout", "pp=2", f"--seed={seed}"), "cpu")
    return str(refusal.value)


def test_ranks_with_different_configs_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks(2, differing, str(tmp_path)):
        assert message.startswith("rank 1 was given another config than rank 0: seed is 7, and 0 on rank 0. ")
    assert not (tmp_path / "run").exists()


def interrupted(group: Any, directory: str, at: int, *overrides: str) -> None:
    """Stop as a kill would: in the middle of step `at`, after its rollout."""

    class Stopped(GRPOTrainer):
        def select_trajectories(self) -> Any:
            found = super().select_trajectories()
            if self.step == at:
                raise KeyboardInterrupt
            return found

    with suppress(KeyboardInterrupt):
        run_training(Stopped(config_of(Path(directory), *overrides), "cpu"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param((), id=""),
        pytest.param(
            ("--objective.kl.coefficient=0.1", "--warm_start.optimizer=sgd", "--save_every=1"),
            id="kl",
            marks=pytest.mark.thorough,  # test_killed.py goes on with a reference, too
        ),
        pytest.param(
            (*SPREAD, "--objective.kl.coefficient=0.1", "--reference_every=2", "--save_every=1", "--optimizer.lr=1e-3"),
            id="updated reference",
        ),
        pytest.param(REPLAY, id="replay", marks=pytest.mark.thorough),
    ],
)
def test_a_continued_run_is_the_run_that_was_not_interrupted(
    ranks: Ranks, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    (expected,) = ranks(1, trained, str(tmp_path / "whole"), *settings)
    for at in (3, 4):
        ranks(1, interrupted, str(tmp_path / "parts"), at, *settings)
    (found,) = ranks(1, trained, str(tmp_path / "parts"), *settings)
    assert without_times(found) == without_times(expected)
    if "--reference_every=2" in settings:
        distances = [row["kl"] for row in expected[2:]]
        assert distances[0] == distances[2] == pytest.approx(0.0, abs=1e-9), "of steps 0 and 2, when it is the policy"
        assert distances[1] > 1e-6
        kept = sorted(path.name for path in (tmp_path / "parts" / "run").glob("reference*"))
        assert kept == ["reference-000000", "reference-000002"]


def test_pruning_keeps_the_references_that_a_checkpoint_needs(tmp_path: Path) -> None:
    for step in (0, 3, 6, 9):
        (tmp_path / reference_name(step, 3)).mkdir()
    run = Mock(path=tmp_path)
    run.checkpoints.return_value = [
        tmp_path / f"step-{step:06d}" for step in (2 + 8, 2 + 10)
    ]  # after a warm start of 2
    prune_references(run, 2, 3)
    kept = sorted(path.name for path in tmp_path.iterdir())
    # After a warm start of 2, the last step of the first checkpoint is step 7, which used the reference of step 6.
    assert kept == ["reference-000006", "reference-000009"]


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    for override, sentence in (
        ("--optimzer.lr=1", 'did you mean "optimizer.lr"'),
        ("--sampling.temperature=0", "nothing to compare"),
        ("--objective.temperature=0.5", "completions are sampled at 1"),
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


def test_every_field_is_documented() -> None:
    assert not undocumented(GRPOConfig)


@pytest.mark.slow
def test_what_is_left_out(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1, trained, str(tmp_path), "--export=false", "--evaluation.every=0", "--save_every=0", "--keep_checkpoints=1")
    assert not (tmp_path / "run" / "model").exists()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000005"]


@pytest.mark.thorough
def test_what_is_computed_in(ranks: Ranks, tmp_path: Path) -> None:
    for name in ("float32", "bfloat16"):
        (tmp_path / name).mkdir()
    short = (
        "--warm_start.steps=1",
        "--warm_start.batch_size=2",
        "--steps=1",
        "--samples_per_prompt=2",
        "--evaluation.every=0",
    )
    (exact,) = ranks(1, trained, str(tmp_path / "float32"), *short, "--dtype=float32")
    (rough,) = ranks(1, trained, str(tmp_path / "bfloat16"), *short, "--dtype=bfloat16")
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
def test_an_objective_of_your_own(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OBJECTIVE)
    own = (f"--objective={tmp_path / 'mine.py'}:pulled", "--objective.settings.strength=2.0", "--reference=true")
    (rows,) = ranks(1, trained, str(tmp_path), *own)
    assert rows[2]["away"] == pytest.approx(0.0, abs=1e-5), "the reference is the model after the warm start"
    assert rows[2]["loss"] == pytest.approx(0.0, abs=1e-8)


REPLY = """
def reply(prompt, completions, example):
    if len(completions) < 2:
        return "again: "
    return {"reward": float(len(completions)), "first": float(len(completions[0]))}
"""


@pytest.mark.slow
def test_a_conversation(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "reply.py").write_text(REPLY)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"ask": f"{each}+1="}) + "\n" for each in range(9)))
    talk = (
        "--environment=conversation",
        f"--environment.path={tmp_path / 'rows.jsonl'}",
        f"--environment.reply={tmp_path / 'reply.py'}:reply",
        "--environment.prompt=ask",
        "--environment.workers=1",
        "--warm_start.steps=0",
        "--steps=1",
    )
    for turns, reward in ((3, 2.0), (1, -0.5)):
        directory = tmp_path / str(turns)
        directory.mkdir()
        short = (f"--environment.max_turns={turns}", "--environment.unfinished_reward=-0.5")
        (rows,) = ranks(1, trained, str(directory), *talk, *short)
        assert rows[-1]["reward_mean"] == reward
        assert rows[-1]["turns_mean"] == min(turns, 2)
        assert rows[-1]["length_mean"] <= 3 * min(turns, 2)
    (tmp_path / "replayed").mkdir()
    settings = (*REPLAY, "--environment.max_turns=3", "--old_logprobs=recompute", "--objective.kl.coefficient=0.1")
    (rows,) = ranks(1, trained, str(tmp_path / "replayed"), *talk, *settings)
    assert rows[-1]["turns_mean"] == 2
    assert rows[-1]["moe/routing_changed"] == 0, "the weights are still those that sampled"
    assert rows[-1]["rollout_kl"] < 1e-9


@pytest.mark.thorough
def test_the_example_objective_is_the_same_in_a_pipeline(ranks: Ranks, tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "objective.py"
    own = (f"--objective={example}:soft_clip", "--objective.settings.bonus=0.1")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (alone,) = ranks(1, trained, str(tmp_path / "one"), *own)
    spread, _ = ranks(2, trained, str(tmp_path / "two"), *own, "--layout=pp=2")
    for expected, found in zip(alone[2:], spread[2:], strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-4)
        assert found["entropy"] == pytest.approx(expected["entropy"], abs=1e-4)


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
def test_tasks_that_cannot_be(
    ranks: Ranks, tmp_path: Path, rows: list[dict[str, str]], reward: str, sentence: str
) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "judge.py").write_text(f"def judge(prompt, completion, example):\n    {reward}\n")
    given = (
        "--environment=dataset",
        f"--environment.path={tmp_path / 'rows.jsonl'}",
        f"--environment.reward={tmp_path / 'judge.py'}:judge",
        "--environment.workers=1",
        "--warm_start.steps=0",
        "--evaluation.every=0",
        "--steps=1",
    )
    if sentence:
        with pytest.raises(pytest.fail.Exception, match=sentence):
            ranks(1, trained, str(tmp_path), *given)
    else:
        (found,) = ranks(1, trained, str(tmp_path), *given)
        assert 0.0 < found[-1]["reward/failed"] < 1.0, "it costs its samples, not the run"


def answered(group: int, reward: float | None, *reasons: str) -> Trajectory:
    """One answer of a group, with turns that ended so; without a reward, the call for it failed."""
    score = Score(0.0, {"raised": 1.0}, "broken", excluded=True) if reward is None else Score(reward)
    turns = [Completion([2], [0.0], [0.0], reason) for reason in reasons or ("stop",)]  # type: ignore[arg-type]
    found = Trajectory(Task("p", {}, "task"), group, Transcript([1]), turns, score, done=True)
    for turn in turns:
        found.transcript.add_completion(turn.tokens, turn.logprobs)
    return found


def rollout_of(rounds: list[list[Trajectory]], **settings: Any) -> tuple[list[Batch], dict[str, Any]]:
    """The minibatches and metrics of a trainer that has sampled these completions, round after round."""
    trainer, left = object.__new__(GRPOTrainer), iter(rounds)
    trainer.config = GRPOConfig(prompts_per_step=2, samples_per_prompt=3, run=Path("nowhere"), **settings)
    trainer.step = 0
    trainer.queue, trainer.run, trainer.health, trainer.rollout_sampler, trainer.engine, trainer.tokenizer = (
        Mock() for _ in range(6)
    )
    trainer.queue.take = lambda count, step: next(left)
    trainer.queue.take_metrics.return_value = trainer.rollout_sampler.take_metrics.return_value = {}
    trainer.tokenizer.decode = str
    batch, mesh = trainer.sample_rollouts(), Mock()
    mesh.dp.rank = 0
    minibatches, _ = trainer.add_advantages(RolloutRows(batch.minibatches, mesh, None))
    return minibatches, batch.metrics


def test_completions_whose_reward_failed_are_excluded() -> None:
    """Of the baseline, the loss and the mean; what has no other left in its group has nothing to be compared with."""
    drawn = [
        *(answered(0, 1.0), answered(0, None), answered(0, 0.0)),
        *(answered(1, None), answered(1, 1.0), answered(1, None)),
    ]
    (batch,), metrics_of_step = rollout_of([drawn])
    assert len(batch.sequences) == 2
    assert list(batch.columns["advantages"]) == pytest.approx([0.5**0.5, -(0.5**0.5)], rel=1e-3)
    assert metrics_of_step["reward_mean"] == pytest.approx(2 / 3), "not 2 / 6"
    assert metrics_of_step["rewards"] == [1.0, 0.0, 1.0]
    assert metrics_of_step["reward/failed"] == metrics_of_step["reward/raised"] == pytest.approx(0.5)
    assert metrics_of_step["groups_trained"] == 0.5
    assert len(metrics_of_step["lengths"]) == 6
    metrics = evaluation_metrics(drawn, 3)
    assert metrics["eval/reward_mean"] == pytest.approx(2 / 3)
    assert metrics["eval/pass@1"] == pytest.approx(1 / 3), "they solve nothing"
    assert metrics["eval/reward/failed"] == 0.5
    _, nothing = rollout_of([[answered(0, None), answered(0, None), answered(0, None)]])
    assert "reward_mean" not in nothing
    assert nothing["reward/failed"] == 1.0


def test_groups_with_equal_rewards_are_not_trained_on() -> None:
    alike = [answered(group, 1.0) for group in (0, 0, 0, 1, 1, 1)]
    _, found = rollout_of([alike])
    assert found["groups_trained"] == 0.0


def test_an_answer_cut_off_in_the_middle_of_a_conversation_is_overlong() -> None:
    drawn = [answered(0, 1.0, "length", "stop"), answered(0, 0.0), answered(0, 1.0)]
    batches, found = rollout_of([drawn], overlong="mask")
    assert found["truncated"] == pytest.approx(1 / 3)
    assert len(batches[0].sequences) == 2


def test_the_penalty_of_long_answers_grows_over_the_buffer() -> None:
    """DAPO's: none up to max_new_tokens - buffer, all of it at max_new_tokens."""
    shares = []
    for lengths in ([6], [7], [9], [10], [10, 3], [2, 8]):
        found = answered(0, 1.0)
        found.completions = [Completion([2] * length, [0.0] * length, [], "stop") for length in lengths]
        shares.append(overlong_fraction(found, 10, 4))
    assert shares == [0.0, 0.25, 0.75, 1.0, 1.0, 0.5]
    assert overlong_fraction(answered(0, 1.0, "length"), 10, 0) == 1.0
    assert overlong_fraction(answered(0, 1.0), 10, 0) == 0.0


@pytest.mark.parametrize("baseline", [False, True])
def test_reinforce_plus_plus_normalises_over_the_rollout(baseline: bool) -> None:
    rewards = [1.0, 0.0, 0.5, 3.0, 2.0, 2.0]
    drawn = [answered(row // 3, reward, *["stop"] * (1 + row % 2)) for row, reward in enumerate(rewards)]
    kind = "reinforce_plus_plus_baseline" if baseline else "reinforce_plus_plus"
    (batch,), _ = rollout_of([drawn], advantages=kind)
    kept = [rewards[row] - (mean(rewards[row // 3 * 3 :][:3]) if baseline else 0.0) for row in range(6)]
    by_token = [reward for row, reward in enumerate(kept) for _ in range(1 + row % 2)]
    average, deviation = mean(by_token), (mean([(each - mean(by_token)) ** 2 for each in by_token])) ** 0.5
    for row, advantages in enumerate(batch.columns["advantages"]):
        wanted = (kept[row] - average) / deviation
        assert advantages.tolist() == pytest.approx([0.0, *[wanted] * (1 + row % 2)], rel=1e-5, abs=1e-6)


def test_dynamic_sampling_sees_the_penalty_of_answers_that_are_cut_off() -> None:
    """Groups differ by what is learned from: with the penalty, and without what is masked."""
    drawn = [
        answered(0, 1.0, "length"),
        answered(0, 1.0),
        answered(0, 1.0),
        answered(1, 0.0, "length"),
        answered(1, 1.0),
    ]
    more = [answered(2, 1.0), answered(2, 1.0)]
    batches, found = rollout_of([drawn, more], dynamic_sampling=1, overlong_penalty=0.5)
    assert found["groups_trained"] == 1.0
    assert len(batches[0].sequences) == 5
    batches, found = rollout_of([drawn, more], dynamic_sampling=1, overlong="mask")
    assert found["groups_trained"] == 0.0, "what is left of each is alike, or alone"
    assert not batches


def largest_ratios(group: Any, directory: str) -> tuple[list[float], float, float]:
    """Of each minibatch, and as the step tells it, with a mean beside it."""
    seen: list[dict[str, Any]] = []

    class Noted(GRPOTrainer):
        def train_batch(self, batch: Any, objective: Any) -> Any:
            seen.append(super().train_batch(batch, objective))
            return seen[-1]

    run_training(
        Noted(
            config_of(Path(directory), *UNKEPT, "--warm_start.steps=0", "--steps=1", *SPREAD, "--minibatches=4"), "cpu"
        )
    )
    row = json.loads((Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    return [each["ratio_max"] for each in seen], row["ratio_max"], row["ratio"] - mean(each["ratio"] for each in seen)


@pytest.mark.slow
def test_the_largest_ratio_is_that_of_all_minibatches(ranks: Ranks, tmp_path: Path) -> None:
    ((each, reported, off),) = ranks(1, largest_ratios, str(tmp_path))
    assert len(set(each)) > 1
    assert reported == max(each)
    assert off == pytest.approx(0.0, abs=1e-9)


def test_answers_without_their_routing_cannot_be_replayed() -> None:
    """As of a server, which does not tell it."""
    answers = [Trajectory(Task("p", {}, "task"), 0, Transcript([1, 2])) for _ in range(2)]
    answers[0].transcript.add_completion([3], [0.0], torch.zeros(3, 1, 1).short())
    answers[1].transcript.add_completion([3], [0.0])
    assert len(routing_column(answers[:1])) == 1
    with pytest.raises(ValueError, match=r"1 of 2 completions have none\. .* sample with Generator\(routing=True\)"):
        routing_column(answers)
