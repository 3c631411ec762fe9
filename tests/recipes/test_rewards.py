"""Rewards and evaluation sets of a run: what is trained on, measured and refused."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from postlude.generate.sampling_params import SamplingParams
from postlude.recipes.checks.preflight import LaunchInfo, PreflightError, PreflightInputs, preflight
from postlude.recipes.config.environments import DatasetSettings, EpisodeSettings, OpenEnvSettings
from postlude.recipes.config.help import describe
from postlude.recipes.config.keys import is_covered
from postlude.recipes.config.load import ConfigError, load
from postlude.recipes.config.policy_configs import GRPOConfig
from postlude.recipes.config.recipe_configs import EvalConfig
from postlude.recipes.config.schema import options
from postlude.recipes.grpo import GRPOTrainer
from postlude.recipes.registry import RECIPES
from postlude.recipes.report.metrics import explain
from postlude.recipes.rollouts.evaluation_sets import EvaluatedTasks, EvaluationSet, evaluation_metrics
from postlude.recipes.run.config_changes import MAY_CHANGE
from postlude.recipes.run.schedule import StepSchedule
from postlude.recipes.training_run import run_training
from postlude.rollout.async_environment import AsyncEnvironment
from postlude.rollout.conversations import Trajectory
from postlude.rollout.environments import Transcript, TurnResult
from postlude.rollout.episode import AssistantTurn
from postlude.rollout.rewards import Score
from postlude.rollout.tasks import Task
from tests.conftest import Ranks
from tests.rollout.episodes import collect, step
from tests.rollout.judge_server import judge_server

FUNCTIONS = """
import asyncio

def digits(completion, length, answer, trainer_state):
    assert trainer_state.max_steps in (0, 2)  # on trial, in the run
    assert (trainer_state.epoch > 0) == (trainer_state.global_step > 0)
    share = sum(letter.isdigit() for letter in completion) / length
    return {"step": trainer_state.global_step, "reward": share, "answer": len(answer)}

def rank(completions, prompts):
    assert len(set(prompts)) == 1 and len(completions) in (1, 2, 4)  # in evaluation, on trial, in training
    return [sorted(set(map(len, completions))).index(len(text)) for text in completions]

async def slow(completions, truncated):
    await asyncio.sleep(0.01)
    return [float(cut) for cut in truncated]

def always(completion):
    return 0.5
"""
CONFIG = """
model: tiny-dense
run: {place}/run
budget: 128
steps: 2
prompts_per_step: 2
samples_per_prompt: 4
export: false
sampling: {{max_new_tokens: 4}}
environment:
  kind: dataset
  path: {place}/train.jsonl
  workers: 0
  rewards:
    digits: {{kind: function, function: "{place}/functions.py:digits", weight: 2.0}}
    rank: {{kind: function, function: "{place}/functions.py:rank", group: true, weight: 0.25}}
    slow: "{place}/functions.py:slow"
    judge: {{kind: judge, url: "{url}", model: judge, template: "{{completion}}", weight: -0.5}}
evaluation:
  every: 2
  tasks: 2
  sets:
    half:
      environment: {{kind: dataset, path: {place}/half.jsonl, reward: "{place}/functions.py:always", workers: 0}}
      tasks: 3
      samples_per_prompt: 2
      temperature: 1.0
      solved: 0.5
    exact: {{environment: {{kind: dataset, path: {place}/train.jsonl, reward: exact, workers: 0}}, tasks: 4}}
"""
WEIGHTS = {"digits": 2.0, "rank": 0.25, "slow": 1.0, "judge": -0.5}


def write_files(place: Path, url: str = "http://127.0.0.1:9/v1") -> Path:
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(10)]
    (place / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "half.jsonl").write_text("".join(json.dumps({"prompt": f"half {number}"}) + "\n" for number in range(5)))
    (place / "functions.py").write_text(FUNCTIONS)
    (place / "config.yaml").write_text(CONFIG.format(place=place, url=url))
    return place / "config.yaml"


def run(group: Any, directory: str) -> tuple[list[dict[str, Any]], set[str], list[list[str]]]:
    """Returns a run's metrics, its training prompts, and those of its evaluation sets."""
    place = Path(directory)
    with judge_server(lambda body, number: f"Score: {len(body['messages'][0]['content'])}") as server:
        config = load(GRPOConfig, write_files(place, server.url))
        lines = preflight(GRPOTrainer.checks(PreflightInputs(config, LaunchInfo())))
        assert lines["evaluation.sets"] == "4 of 10 tasks are evaluated, and not trained on"
        assert {"tasks", "evaluation.sets.half", "evaluation.sets.exact"} <= lines.keys()
        trainer = GRPOTrainer(config, "cpu")
        sets = [[str(task.prompt) for task in evaluation_set.tasks] for evaluation_set in trainer.evaluation_sets]
        indices = trainer.task_sampler.take(200)
        trainer.task_sampler.restore({"size": 10, "seed": 0, "epoch": 0, "position": 0})
        run_training(trainer)
    rows = [json.loads(line) for line in (config.run / "metrics.jsonl").read_text().splitlines()]
    return rows, {str(trainer.tasks[index].prompt) for index in indices}, sets


def test_evaluation_sets_have_their_own_tasks_rewards_and_metrics(ranks: Ranks, tmp_path: Path) -> None:
    """The reward is a sum: of one completion, of a group, of a coroutine and of a judge."""
    ((rows, trained, sets),) = ranks(1, run, str(tmp_path))
    for row in rows[1:]:
        parts = {name: row[f"reward/{name}"] for name in WEIGHTS}
        assert row["reward_mean"] == pytest.approx(sum(WEIGHTS[name] * value for name, value in parts.items()))
        assert row["reward/digits/answer"] >= 1.0, "its own part"
        assert row["reward/digits/step"] == row["step"] - 1, "finished steps"
        assert 0.0 <= parts["rank"] <= 3.0
        assert parts["slow"] == pytest.approx(row["truncated"])
    assert sets == [["half 2", "half 3", "half 4"], ["6+1=", "7+1=", "8+1=", "9+1="]]
    assert trained == {f"{number}+1=" for number in range(6)}, "neither held-out tasks nor those of a set"
    evaluated = [row for row in rows if "eval/reward_mean" in row]
    assert len(evaluated) == 2
    for row in evaluated:
        assert row["eval/half/reward_mean"] == 0.5
        assert row["eval/half/pass@1"] == row["eval/half/pass@2"] == 1.0, "from 0.5 on a task is solved"
        assert row["eval/exact/pass@1"] == row["eval/exact/reward_mean"]
        assert "eval/exact/pass@2" not in row
        assert "eval/pass@2" not in row


def test_evaluation_command_supports_sets(ranks: Ranks, tmp_path: Path) -> None:
    write_files(tmp_path)
    reward = f"{tmp_path}/functions.py:always"
    config = f"""
model: tiny-dense
run: {tmp_path}/eval
budget: 128
tasks: 2
sampling: {{max_new_tokens: 2}}
environment: {{kind: dataset, path: {tmp_path}/train.jsonl, reward: exact, workers: 0}}
sets:
  half: {{environment: {{kind: dataset, path: {tmp_path}/half.jsonl, reward: "{reward}", workers: 0}}}}
"""
    (tmp_path / "eval.yaml").write_text(config)
    ranks(1, evaluated, str(tmp_path))
    (row,) = [json.loads(line) for line in (tmp_path / "eval" / "metrics.jsonl").read_text().splitlines()]
    assert (row["eval/half/reward_mean"], row["eval/half/pass@1"]) == (0.5, 0.0), "a task is solved from 1 on"
    assert row["eval/pass@1"] == row["reward_mean"], "of its environment alone"


def evaluated(group: Any, directory: str) -> None:
    config = load(EvalConfig, Path(directory) / "eval.yaml")
    preflight(RECIPES["eval"].checks(PreflightInputs(config, LaunchInfo())))
    RECIPES["eval"].run(config, "cpu")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--evaluation.samples_per_prompt=2"],
            "samples_per_prompt is 2, but temperature is 0, .* pass@k would be pass@1",
        ),
        (
            ["--evaluation.sets.half.temperature=0"],
            r'"evaluation\.sets\.half" .*samples_per_prompt is 2, but temperature',
        ),
        (["--evaluation.top_p=0.5"], "top_p is 0.5, but temperature is 0, which always takes the likeliest token"),
        (["--evaluation.max_new_tokens=127"], r"evaluation\.max_new_tokens is 127, which leaves no room for a prompt"),
        (["--evaluation.every=0"], "sets has half, exact, but every is 0, which evaluates nothing"),
        (
            ["--evaluation.sets.reward.environment.kind=reasoning_gym", "--evaluation.sets.reward.environment.task=x"],
            "a set is called 'reward', but its name is part of its metrics",
        ),
        (["--environment.reward=exact"], "it has both reward and rewards. Give a function as reward, or several"),
        (["--environment.rewards={}"], "it has neither reward nor rewards"),
        (
            ["--environment.rewards.judge.pattern=score"],
            r"\"environment\.rewards\.judge\" .*pattern 'score' has no group",
        ),
        (["--environment.rewards.judge.lowest=0", "--environment.rewards.judge.scores={yes: 1}"], "scores lists every"),
    ],
)
def test_invalid_reward_settings_are_refused(tmp_path: Path, words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(GRPOConfig, write_files(tmp_path), words)


@pytest.mark.parametrize("recipe", ["eval", "grpo", "ppo", "distill"])
def test_prompts_that_have_the_answer_are_refused_before_the_run(recipe: str, tmp_path: Path) -> None:
    """A prompt of text may begin the answer."""
    talk = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
    for name, prompts in {"chats": [talk[:1], talk], "texts": ["User: 1+2=\n\nAssistant: The sum is", "2+2="]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    section = "data.environment" if recipe == "distill" else "environment"
    words = ["--data=on_policy", "--teacher=tiny-dense"] if recipe == "distill" else []
    words += [f"--{section}=dataset", f"--{section}.reward={tmp_path}/functions.py:always", f"--{section}.workers=0"]
    (tmp_path / "config.yaml").write_text("model: tiny-dense\n")
    words += ["--evaluation.every=0", "--evaluation.tasks=0"] if recipe in ("grpo", "ppo") else []

    def check(name: str) -> None:
        path = [f"--{section}.path={tmp_path}/{name}.jsonl", f"--run={tmp_path}/run"]
        config = load(RECIPES[recipe].config, tmp_path / "config.yaml", [*words, *path])
        preflight(RECIPES[recipe].checks(PreflightInputs(config, LaunchInfo())))

    check("texts")
    with pytest.raises(PreflightError, match=r'line 2 of .* \(column "prompt"\) ends with a message of the assistant'):
        check("chats")


EPISODE = """
class Game:
    def __init__(self, example): ...

    async def step(self, turn):
        return ("Again.", 0.5) if turn.text == "?" else None

def turns(transcript):
    return len(transcript)
"""


def test_episodes_take_weighted_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the other kinds do. They are added to the episode's own."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "2+2=", "answer": "4"}) + "\n")
    (tmp_path / "game.py").write_text(EPISODE)
    file = tmp_path / "config.yaml"
    rewards = "{right: {kind: function, function: exact, weight: 2}, turns: game.py:turns}"
    settings = f"kind: episodes, path: rows.jsonl, episode: game.py:Game, max_turns: 2, workers: 0, rewards: {rewards}"
    file.write_text(f"environment: {{{settings}}}\n")
    environment = load(GRPOConfig, file).environment
    assert isinstance(environment, EpisodeSettings)
    with closing(environment.build(seed=0)) as built:
        built.trial_call(built.tasks[0], AssistantTurn("4"))
        episode = built.reset(built.tasks[0])
        step(built, [episode], ["?"])
        assert step(built, [episode], ["4"]) == [TurnResult(Score(0.5 + 2.0 + 3.0, {"right": 1.0, "turns": 3.0}))]
    monkeypatch.setattr("postlude.rollout.openenv.find_spec", lambda name: True)  # no episode is started
    server = ["--environment.kind=openenv", "--environment.address=http://127.0.0.1:9", "--environment.max_turns=2"]
    file.write_text("environment: {rewards: {turns: game.py:turns}}\n")
    openenv = load(GRPOConfig, file, server).environment
    assert isinstance(openenv, OpenEnvSettings)
    with closing(openenv.build(seed=0)) as built:
        assert isinstance(built, AsyncEnvironment)
        assert built.reward is not None
        assert built.reward.name == "turns"


@pytest.mark.parametrize("reward", ["reward: exact", "rewards: {right: exact}"])
def test_answers_may_be_in_another_column(tmp_path: Path, reward: str) -> None:
    """The reward, also of an evaluation set, and the warm start read it; a column that is not there is refused."""
    file = tmp_path / "config.yaml"
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "2+2=", "answer": "four", "solution": "4"}) + "\n")
    environment = f"{{kind: dataset, path: rows.jsonl, answer: solution, workers: 0, {reward}}}"
    file.write_text(f"environment: {environment}\nevaluation: {{sets: {{held: {{environment: {environment}}}}}}}\n")
    config = load(GRPOConfig, file)
    for settings in (config.environment, config.evaluation.sets["held"].environment):
        assert isinstance(settings, DatasetSettings)
        with closing(settings.build(seed=0)) as built:
            task = built.tasks[0]
            for episode, text in zip(episodes := built.reset_group(task, 2), ("4", "four"), strict=True):
                built.submit(episode, AssistantTurn(text))
            collect(built, 2)
            assert [episode.score and episode.score.reward for episode in episodes] == [1.0, 0.0]
            assert task.answer == "4", "what a warm start trains on"
    absent = load(GRPOConfig, file, ["--environment.answer=solutions"]).environment
    assert isinstance(absent, DatasetSettings)
    with pytest.raises(ValueError, match='has no column "solutions"'):
        absent.build(seed=0)


@pytest.mark.parametrize("kind", ["kind: dataset", "kind: agent, url: 'http://localhost:1/'"])
def test_rows_without_the_answer_that_a_reward_compares_with_are_refused(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "config.yaml"
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n{"prompt": "?", "answer": null}\n')
    (tmp_path / "mine.py").write_text("def score(completion): return 1.0\n")

    def build(rewards: str) -> None:
        file.write_text(f"environment: {{{kind}, path: rows.jsonl, workers: 0, {rewards}}}\n")
        load(GRPOConfig, file).environment.build(seed=0).close()

    for compared in ("reward: exact", "rewards: {right: math}"):
        with pytest.raises(ValueError, match=r'line 2 of rows\.jsonl has no value in column "answer"'):
            build(compared)
    build("rewards: {own: mine.py:score, right: {kind: function, function: exact, weight: 0}}")  # which only measures


OWN_SAMPLING = {"temperature": 0.5, "max_new_tokens": 100, "top_k": 7, "top_p": 0.5, "min_p": 0.25, "stop": ("!",)}


def sample_for_evaluation(group: Any, directory: str) -> list[SamplingParams]:
    """Returns the sampling parameters of the held-out tasks, of a set, and of training."""
    words = [f"--{path}.{name}={value}" for path in ("evaluation", SET) for name, value in OWN_SAMPLING.items()]
    words = [word.replace("('!',)", "['!']") for word in words]
    config = load(GRPOConfig, write_files(Path(directory)), ["--sampling.stop_tokens=[9]", *words])
    with closing(GRPOTrainer(config, "cpu")) as trainer:
        sampler, tasks = trainer.rollout_sampler, trainer.environments[""].tasks
        held_out = EvaluationSet("", None, [tasks[0]], config.evaluation)
        groups = [*held_out.groups(sampler, 0), trainer.evaluation_sets[0].groups(sampler, 0)[0]]
        assert [group.source.encoder.max_length for group in groups] == [28, 28]
        return [group.sampling for group in (*groups, sampler.make_group(tasks[0], 0, 1, step=0))]


SET = "evaluation.sets.half"


def test_evaluation_has_its_own_sampling_parameters(ranks: Ranks, tmp_path: Path) -> None:
    ((*evaluated_params, trained),) = ranks(1, sample_for_evaluation, str(tmp_path))
    for params in evaluated_params:
        assert {name: getattr(params, name) for name in OWN_SAMPLING} == OWN_SAMPLING
        assert params.stop_tokens == trained.stop_tokens != (), "what ends a turn is the same"
    assert (trained.max_new_tokens, trained.temperature, trained.top_k, trained.stop) == (4, 1.0, 0, ())


def test_requests_of_an_evaluation_are_checked_with_its_length(tmp_path: Path) -> None:
    config = load(GRPOConfig, write_files(tmp_path), ["--evaluation.max_new_tokens=120"])
    inputs = PreflightInputs(config, LaunchInfo())
    with pytest.raises(ValueError, match="cannot be reached"):  # the judge
        preflight(GRPOTrainer.checks(inputs))
    assert inputs.max_request(config.sampling)[0] == inputs.longest_prompt + 120
    config = load(GRPOConfig, write_files(tmp_path), ["--evaluation.max_new_tokens=125"])
    with pytest.raises(ValueError, match="leaves 3"):
        preflight(GRPOTrainer.checks(PreflightInputs(config, LaunchInfo())))


def test_evaluation_at_the_start_may_be_left_out() -> None:
    for at_start, expected in ((True, [3, 7, 11, 13]), (False, [7, 11, 13])):
        schedule = StepSchedule(13, 3, 4, at_start, save_every=0, exports=False)
        assert [step for step in range(14) if schedule.evaluates_after(step)] == expected


def test_several_samples_at_temperature_0_are_refused_in_an_evaluation() -> None:
    with pytest.raises(ConfigError, match=r"samples_per_prompt is 4, but sampling\.temperature is 0"):
        load(EvalConfig, None, ["--samples_per_prompt=4"])


def test_preflight_calls_every_reward_and_every_set(tmp_path: Path) -> None:
    """The judge is unreachable and a set's function fails: both are reported before the run."""
    file = write_files(tmp_path)
    (tmp_path / "functions.py").write_text(FUNCTIONS.replace("return 0.5", "return 'half'"))
    config = load(GRPOConfig, file, ["--environment.rewards.judge.retries=0"])
    with pytest.raises(ValueError, match="cannot be reached") as error:
        preflight(GRPOTrainer.checks(PreflightInputs(config, LaunchInfo())))
    assert "always returned 'half' for line 1 of half.jsonl, but a reward is a number" in str(error.value)
    assert "That was a trial on line 1 of half.jsonl" in str(error.value)


def test_resumed_run_may_change_the_judges_address_but_not_its_weight() -> None:
    assert is_covered("environment.rewards.judge.url", MAY_CHANGE)
    assert is_covered("evaluation.sets.math.environment.workers", MAY_CHANGE)
    for path in ("environment.rewards.judge.weight", "environment.rewards.judge", "evaluation.sets.math.solved"):
        assert not is_covered(path, MAY_CHANGE)


def test_help_describes_the_environment_of_a_set_once() -> None:
    text = describe(options(GRPOConfig))
    assert "--evaluation.sets.*.environment: the keys of --environment\n" in text
    assert "--evaluation.sets.*.environment.path" not in text
    assert "--environment.rewards.*.template (judge): text, required" in text


def sampled(group: int, reward: float) -> Trajectory:
    return Trajectory(Task("p", {}, "task"), group, (Transcript([1]),), score=Score(reward), done=True)


def test_task_is_solved_at_or_above_the_threshold() -> None:
    trajectories = [sampled(0, 0.4), sampled(0, 0.7), sampled(1, 0.39), sampled(1, 0.1)]
    for solved, passes in ((0.4, (0.5, 0.5)), (0.5, (0.25, 0.5)), (1.0, (0.0, 0.0)), (0.0, (1.0, 1.0))):
        metrics = evaluation_metrics(trajectories, 2, solved)
        assert (metrics["eval/pass@1"], metrics["eval/pass@2"]) == passes


def test_evaluation_sets_that_use_all_tasks_are_refused() -> None:
    tasks = [Task(f"{number}", {}, f"line {number}") for number in range(4)]
    with pytest.raises(
        ValueError, match=r"every one of the 4 tasks is held out or has a prompt of evaluation\.sets \(same"
    ):
        EvaluatedTasks(tasks, 1, "prompt", {"same": tasks[:3]})
    evaluated = EvaluatedTasks(tasks, 1, "prompt", {"one": tasks[:1]})
    assert [index in evaluated for index in range(4)] == [True, False, False, True]


def test_metrics_of_a_set_are_documented() -> None:
    info = explain("eval/math/pass@4")
    assert info is not None
    assert info.title.startswith("math: ")
    assert info.meaning.endswith("; of the set math")
    assert explain("eval/math/no_such_metric") is None
