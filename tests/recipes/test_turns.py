"""Multi-turn rollouts: sampled tokens are trained on, and a failing environment loses only its own episodes."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from postlude import Batch, Engine, Layout
from postlude.generate.distributed import SyncedGenerator
from postlude.generate.protocol import Completion, FinishedCompletion, Request
from postlude.generate.sampling_params import SamplingParams
from postlude.hf.builtin import BUILTIN
from postlude.hf.load import byte_tokenizer
from postlude.recipes.config.load import load
from postlude.recipes.config.recipe_configs import EvalConfig
from postlude.recipes.config.settings import SamplingSettings
from postlude.recipes.rollouts.prompts import PromptEncoding
from postlude.recipes.rollouts.sampler import HELD_OUT_SEEDS, TRAINING_SEEDS, RolloutSampler, trajectory_metrics
from postlude.recipes.run.files import read_metrics
from postlude.recipes.run.schedule import StepTimer
from postlude.recipes.sequence_limit import SequenceLimit
from postlude.rollout.conversations import Trajectory
from postlude.rollout.environments import MultiTurn, TurnResult
from postlude.rollout.rewards import Score
from postlude.rollout.tasks import Task
from postlude.user_code import load_callable
from tests.conftest import Ranks
from tests.meshes import mesh
from tests.rollout.engines import SingleRankEngine
from tests.rollout.episodes import step
from tests.rollout.functions import scripted_conversation

SAMPLES = 2


class RecordingEngine:
    """Records its requests and completions."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.requests: dict[int, Request] = {}
        self.calls: list[list[tuple[list[int], Completion]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def submit(self, request: Request) -> int:
        request_id: int = self.engine.submit(request)
        self.requests[request_id] = request
        return request_id

    def poll(self, timeout: float | None = 0.0) -> list[FinishedCompletion]:
        finished: list[FinishedCompletion] = self.engine.poll(timeout)
        completions = [
            (list(self.requests[entry.request_id].prompt), entry.completion)
            for entry in finished
            if entry.completion is not None
        ]
        if completions:
            self.calls.append(completions)
        return finished


class OneLetterEngine:
    """An engine without a model, whose completions are one letter."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        n: int = 1,
        *,
        first_index: int = 0,
    ) -> list[list[Completion]]:
        return [
            [Completion([65 + place], [-1.0], [-1.0], "stop", chr(65 + place)) for place in range(n)] for _ in prompts
        ]


def make_task(**example: Any) -> Task:
    return Task("ask:", example, str(example))


def run_rollout(
    engine: Any, tasks: list[Task], *, budget: int = 96, workers: int = 2, **settings: Any
) -> list[Trajectory]:
    environment = MultiTurn(
        tasks, scripted_conversation, workers=workers, **{"max_turns": 6, "timeout": 60.0, **settings}
    )
    outputs = SamplingSettings(max_new_tokens=5)
    try:
        sampler = RolloutSampler(
            engine,
            environment,
            PromptEncoding(byte_tokenizer(), outputs, SequenceLimit(budget)),
            seed=3,
            timer=StepTimer(),
        )
        return sampler.sync_and_run_on_rank0(lambda: sampler.sample(tasks, SAMPLES, step=0))
    finally:
        environment.close()


def sampled_and_learned(group: Any, layout: Layout) -> list[Any]:
    """Returns conversations with a model, and all differences between sampled and trained tokens."""
    config = BUILTIN["tiny-dense"]()
    config.initializer_range = 0.1
    engine = Engine(config, mesh=mesh(layout), budget=160)
    recorded = RecordingEngine(SyncedGenerator(engine, byte_tokenizer()))
    talks = [make_task(turns=turns, length=length) for turns, length in ((1, 3), (2, 1), (4, 9), (3, 2))]
    chats = [
        Task([{"role": "user", "content": "Hi"}], {"turns": 3, "length": 4, "role": role}) for role in ("tool", "")
    ]
    trajectories = run_rollout(recorded, [*talks, *chats], budget=160)
    seeds = [request.sampling.seed for request in recorded.requests.values()]
    assert len(set(seeds)) == len(seeds), "every turn of every conversation has a seed of its own"
    scored = engine.logprobs(Batch([trajectory.transcripts[0].tokens for trajectory in trajectories])).logprob
    results = []
    for trajectory, trained in zip(trajectories, scored, strict=True):
        (transcript,) = trajectory.transcripts
        own_turns = [
            (prompt, completion)
            for call in recorded.calls
            for prompt, completion in call
            if any(completion is sampled for sampled in trajectory.completions)
        ]
        off = max(
            abs(float(trained_logprob) - sampled_logprob)
            for trained_logprob, sampled_logprob, mask in zip(
                trained, transcript.logprobs, transcript.mask, strict=True
            )
            if mask
        )
        results.append(
            (
                transcript.tokens,
                transcript.mask,
                own_turns,
                [completion.tokens for completion in trajectory.completions],
                off,
                trajectory.score,
            )
        )
    return results


@pytest.mark.parametrize(
    "layout", [Layout(), pytest.param(Layout(dp_shard=2), marks=pytest.mark.thorough)], ids=["one", "two"]
)
def test_trained_tokens_equal_sampled_tokens_in_every_turn(ranks: Ranks, layout: Layout) -> None:
    results = ranks(layout.world_size, sampled_and_learned, layout)[0]
    turns = []
    for tokens, mask, own_turns, completions, off, score in results:
        turns.append(len(completions))
        assert [completion.tokens for _, completion in own_turns] == completions
        place = len(own_turns[0][0])
        expected = [0] * place
        for (
            prompt,
            completion,
        ) in own_turns:  # what a turn was sampled from is how the trained sequence begins, to the token
            assert tokens[: len(prompt)] == prompt
            expected += [0] * (len(prompt) - len(expected)) + [1] * len(completion.tokens)
            assert tokens[len(prompt) : len(expected)] == completion.tokens
        assert mask == expected
        assert len(tokens) == len(expected)
        assert off < 1e-4
        assert score.components["turns"] == len(completions)
    assert turns == [turns for turns in (1, 2, 4, 3, 3, 3) for _ in range(SAMPLES)]


def group_seeds(group: Any) -> list[int]:
    environment = MultiTurn([make_task(turns=1)], scripted_conversation, workers=1, max_turns=1, timeout=60.0)
    with closing(environment):
        samplers = [
            RolloutSampler(
                SingleRankEngine(OneLetterEngine()),
                environment,
                PromptEncoding(byte_tokenizer(), SamplingSettings(max_new_tokens=5), SequenceLimit(96)),
                seed=seed,
                timer=StepTimer(),
            )
            for seed in (0, 1)
        ]
        return [
            sampler.make_group(environment.tasks[0], number, 1, step=step, seed_stream=stream).sampling.seed
            for sampler, number, step, stream in itertools.product(
                samplers, (0, 1), (0, 1), (TRAINING_SEEDS, HELD_OUT_SEEDS)
            )
        ]


def test_every_group_of_every_step_has_a_seed_of_its_own_also_in_evaluations(ranks: Ranks) -> None:
    (seeds,) = ranks(1, group_seeds)
    assert len(set(seeds)) == len(seeds) == 16


def faulty(group: Any) -> tuple[list[Any], dict[str, Any]]:
    kinds = ["raise", "none", "object", "no content", "part", "bad role", "die", "hang", "fine"]
    tasks = [make_task(turns=2, length=1, fault=kind) for kind in kinds]
    trajectories = run_rollout(SingleRankEngine(OneLetterEngine()), tasks, timeout=4.0)
    return [
        (trajectory.task.example["fault"], trajectory.score) for trajectory in trajectories[::SAMPLES]
    ], trajectory_metrics(trajectories)


@pytest.mark.slow
def test_failing_environment_loses_only_its_own_episodes(ranks: Ranks) -> None:
    ((scores, metrics),) = ranks(1, faulty)
    sentences = {
        "raise": "scripted_conversation failed: RuntimeError: no such tool",
        "none": "scripted_conversation returned None, but a reward is a number",
        "object": "scripted_conversation failed: TypeError: it returned a object",
        "no content": "the environment's observation cannot be read: ",
        "part": "the environment's observation cannot be read: ",
        "bad role": "the environment's observation cannot be read: ",
        "die": "scripted_conversation ended its process with exit code 7",
        "hang": "scripted_conversation took more than 4 s and was ended",
    }
    for kind, score in scores:
        if kind == "fine":
            assert (score.reward, score.error) == (1.0, None)
        else:
            assert score.excluded
            assert sentences[kind] in score.error
    assert metrics["reward/failed"] == pytest.approx(8 / 9)
    assert metrics["reward_mean"] == 1.0, "of those that have a reward"


class ReleasingEngine(RecordingEngine):
    """Writes a file after a number of completions."""

    def __init__(self, engine: Any, count: int, file: Path) -> None:
        super().__init__(engine)
        self.fixed_order = False
        self.count, self.file = count, file

    def poll(self, timeout: float | None = 0.0) -> list[FinishedCompletion]:
        finished = super().poll(timeout)
        if sum(map(len, self.calls)) >= self.count:
            self.file.touch()
        return finished


def slow_and_fast(group: Any, release: Path) -> tuple[list[int], list[float]]:
    """The slow tool replies when all others have had their turns."""
    engine = ReleasingEngine(SingleRankEngine(OneLetterEngine()), (1 + 3 * 4) * SAMPLES, release)
    tasks = [make_task(turns=2, length=1, until=str(release)), *(make_task(turns=4, length=1) for _ in range(3))]
    trajectories = run_rollout(engine, tasks, workers=3)
    return [len(call) for call in engine.calls], [trajectory.reward for trajectory in trajectories]


def test_a_slow_tool_delays_no_other_episode(ranks: Ranks, tmp_path: Path) -> None:
    ((rounds, rewards),) = ranks(1, slow_and_fast, tmp_path / "release")
    assert rewards == [1.0] * 4 * SAMPLES, "none waited for the slow one until its time limit"
    assert sum(rounds) == (2 + 3 * 4) * SAMPLES


def limited(group: Any) -> list[tuple[float, dict[str, float], int]]:
    results = []
    for settings in ({"budget": 28}, {"max_turns": 2, "unfinished_reward": -0.5}):
        answers = run_rollout(SingleRankEngine(OneLetterEngine()), [make_task(turns=5, length=4)], **settings)
        results.append((answers[0].reward, answers[0].components, len(answers[0].completions)))
    return results


def test_limits_end_a_conversation_with_its_reward_so_far(ranks: Ranks) -> None:
    ((over_budget, unfinished),) = ranks(1, limited)
    assert over_budget == (0.0, {"over_budget": 1.0}, 4), "4 + 4·(1 + 4) tokens and 5 more do not fit"
    assert unfinished == (-0.5, {"unfinished": 1.0}, 2)


def test_rewards_of_turns_are_summed() -> None:
    assert Score(1.0, {"a": 1.0}).plus(Score(0.5, {"a": 1.0, "b": 2.0}, "lost")) == Score(
        1.5, {"a": 2.0, "b": 2.0}, "lost"
    )
    assert Score(1.0, excluded=True).plus(Score(1.0)).excluded
    assert Score(1.0).plus(Score(1.0, excluded=True)).excluded


EPISODE = """
class Echo:
    def __init__(self, example, times):
        self.times = times

    async def step(self, said):
        self.times -= 1
        return ("again", 0.5) if self.times else (None, 1.0)
"""


def test_episodes_and_servers_are_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "echo.py").write_text(EPISODE)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "go"}\n')
    chosen = ("--environment.kind=episodes", f"--environment.episode={tmp_path / 'echo.py'}:Echo")
    settings = ("--environment.settings.times=2", "--environment.max_turns=4", "--environment.keep_reasoning=true")
    config = load(EvalConfig, None, [*chosen, f"--environment.path={tmp_path / 'rows.jsonl'}", *settings])
    environment = config.environment.build(0)
    assert environment.keep_reasoning
    episode = environment.reset(environment.tasks[0])
    assert [step(environment, [episode], ["x"])[0] for _ in range(2)] == [
        TurnResult(Score(0.5), "again"),
        TurnResult(Score(1.5)),
    ]
    environment.close()
    monkeypatch.setattr("postlude.rollout.openenv.find_spec", lambda name: None)
    config = load(
        EvalConfig, None, ["--environment.kind=openenv", "--environment.address=http://x", "--environment.max_turns=4"]
    )
    with pytest.raises(ImportError, match="pip install openenv"):
        config.environment.build(0)


ROOT = Path(__file__).parents[2]


def test_example_tool_answers_and_scores() -> None:
    reply = load_callable(str(ROOT / "examples" / "environment.py:reply"))
    for reply_text, heard in {
        "?12+3": "=15;",
        "?12*(3-1)": "=24;",
        "?12+": "=error;",
        "?a.b": "=error;",
        "?-": "=error;",
    }.items():
        assert reply("12+3:", [reply_text], {"sum": 15}) == heard
    assert reply("12+3:", ["15"], {"sum": 15}) == {"reward": 1.0, "asked": 0.0}
    assert reply("12+3:", ["?12+3", "16"], {"sum": 15}) == {"reward": 0.0, "asked": 1.0}


@pytest.mark.slow
@pytest.mark.thorough
def test_example_tool_environment_trains(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "postlude", "grpo", "examples/calculator.yaml", "--run", str(tmp_path / "run")]
    subprocess.run(
        [*command, "--loggers=[]", "--export=false"], cwd=ROOT, check=True, timeout=1200, capture_output=True
    )
    lines = [line for line in read_metrics(tmp_path / "run") if line["phase"] == "grpo"]
    assert mean(line["reward_mean"] for line in lines[-5:]) > lines[0]["reward_mean"] + 0.25
    assert lines[-1]["reward/asked"] > 0.9 > lines[0]["reward/asked"]
