"""Reward functions get the arguments they name, per completion, batch or group; sums are weighted."""

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from postlude.data.datasets import read_rows
from postlude.pool import process_pool
from postlude.rollout import coroutine_pool
from postlude.rollout.environments import SingleTurn
from postlude.rollout.episode import AssistantTurn, Episode
from postlude.rollout.function_reward import FunctionReward
from postlude.rollout.reward import Reward, Weighted, WeightedSum
from postlude.rollout.reward_call import TrainerState
from postlude.rollout.rewards import Score
from postlude.rollout.tasks import DatasetTasks, Task
from tests.clock import Clock
from tests.conftest import PATIENCE
from tests.rollout.episodes import collect, step
from tests.rollout.functions import at_step
from tests.rollout.reward_pool import pass_limit, wait_for_file

ROWS = [Task(f"question {number}", {"answer": number, "level": "easy"}, f"line {number + 1}") for number in range(4)]


def score(reward: Reward, texts: Sequence[str], tasks: Sequence[Task] = ROWS) -> list[Score]:
    """Returns the score of each text as a completion of the task at its index."""
    environment = SingleTurn(tasks, reward)
    with closing(environment):
        episodes = [environment.reset(tasks[place % len(tasks)]) for place in range(len(texts))]
        return [result.score or Score(math.nan) for result in step(environment, episodes, texts)]


def seen_by(function: Callable[..., Any], turn: AssistantTurn, **options: Any) -> Score:
    reward = FunctionReward(function, workers=0, **options)
    environment = SingleTurn(ROWS, reward)
    (result,) = step(environment, [environment.reset(ROWS[2])], [turn])
    environment.close()
    assert result.score is not None
    return result.score


def test_a_reward_function_gets_the_arguments_that_it_names() -> None:
    calls: list[dict[str, Any]] = []

    def named(completion: str, answer: int, length: int, truncated: bool, completion_ids: list[int]) -> float:
        calls.append({"completion": completion, "answer": answer, "length": length, "truncated": truncated})
        return float(sum(completion_ids))

    def everything(**fields: Any) -> float:
        calls.append(fields)
        return 1.0

    def optional(completion: str, level: str = "?", missing: int = 7) -> float:
        calls.append({"level": level, "missing": missing})
        return 1.0

    turn = AssistantTurn("so 2", (5, 6, 7), truncated=True)
    assert seen_by(named, turn).reward == 18.0
    seen_by(everything, turn)
    seen_by(optional, turn)
    assert calls == [
        {"completion": "so 2", "answer": 2, "length": 3, "truncated": True},
        {
            "prompt": "question 2",
            "completion": "so 2",
            "raw_completion": "so 2",
            "answer_text": "so 2",
            "completion_ids": [5, 6, 7],
            "length": 3,
            "truncated": True,
            "transcript": [{"role": "assistant", "content": "so 2"}],
            "example": {"answer": 2, "level": "easy"},
            "trainer_state": TrainerState(),
            "answer": 2,
            "level": "easy",
        },
        {"level": "easy", "missing": 7},
    ]


def test_a_reward_function_with_an_unknown_argument_is_refused() -> None:
    def strange(completion: str, anwser: int) -> float:
        return 1.0

    error = str(seen_by(strange, AssistantTurn("2")).error)
    assert 'strange(completion, anwser) asks for "anwser", which is no column of the row' in error
    assert "on line 3:" in error
    assert "answer, level, prompt, completion, raw_completion, answer_text, transcript, completion_ids, len" in error


@pytest.mark.parametrize("workers", [0, 1])
def test_a_reward_function_may_ask_for_the_state_of_the_trainer(workers: int) -> None:
    """A call has completions of one state alone."""
    environment = SingleTurn(ROWS, FunctionReward(at_step, workers=workers))
    with closing(environment):
        episodes = [environment.reset(task) for task in ROWS]
        for number, episode in enumerate(episodes):
            episode.trainer_state = TrainerState(3 + number // 2, 0.5, 8)
        scores = [result.score for result in step(environment, episodes, ["x"] * 4)]
    assert [score and score.reward for score in scores] == [2 + 3 / 8 + 0.5] * 2 + [2 + 4 / 8 + 0.5] * 2


def test_batched_reward_function_gets_ordered_lists_up_to_the_batch_size() -> None:
    sizes: list[int] = []

    def trl(completions: list[str], answer: list[int], **columns: Any) -> list[float]:
        sizes.append(len(completions))
        texts = {"raw_completions", "answer_texts", "transcripts", "trainer_state"}
        assert set(columns) == {"prompts", "completion_ids", "lengths", "truncated", "examples", "level", *texts}
        assert columns["lengths"] == [0] * len(completions)
        return [float(text == str(number)) for text, number in zip(completions, answer, strict=True)]

    texts = ["0", "no", "2", "3", "0", "1", "no"]
    scores = score(FunctionReward(trl, workers=0, batch_size=3), texts)
    assert [score.reward for score in scores] == [1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    assert sizes == [3, 3, 1]


FILE = """
def one(completion, answer):
    return {"length": len(completion), "answer": answer}

def several(prompts, completions, answer):
    import array
    return [{"length": len(c), "answer": a} for c, a in zip(completions, answer)]

async def awaited(completion, answer):
    return {"length": len(completion), "answer": answer}

def raises(completion): return 1 / 0
def few(completions): return [1.0]
def number(completions): return 1.0
def nan(completions): return [1.0, float("nan"), 1.0, "good"]
def hangs(completion):
    import pathlib, time
    if completion == "hang":
        pathlib.Path(__file__).with_name("started").touch()
        time.sleep(600)
    return 1.0
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(FILE)
    return tmp_path / "rewards.py"


def test_processes_lists_and_coroutines_give_the_same_scores(file: Path) -> None:
    texts = ["a", "bb", "ccc", "dddd", "e"]
    expected = [
        Score(float(len(text) + place % 4), {"length": len(text), "answer": place % 4})
        for place, text in enumerate(texts)
    ]
    for name in ("one", "several", "awaited"):
        for workers in (0, 1):
            assert score(FunctionReward(f"{file}:{name}", workers=workers), texts) == expected, (name, workers)


@pytest.mark.parametrize(
    ("name", "sentences"),
    [
        ("raises", ["NAME failed on line 1: ZeroDivisionError: division by zero (rewards.py, line 12)"]),
        (
            "few",
            ["NAME returned 1 rewards for 4 completions, the first of line 1, but it returns a list with a reward"],
        ),
        ("number", ["NAME returned 1.0 for 4 completions, the first of line 1, but it returns a list with a reward"]),
        (
            "nan",
            [
                "",
                "NAME returned nan for line 2, but a reward is finite.",
                "",
                "NAME returned 'good' for line 4, but a reward is a number or a dict of numbers.",
            ],
        ),
    ],
)
def test_a_failure_names_function_row_and_value(file: Path, name: str, sentences: list[str]) -> None:
    """An invalid value fails its own completion; a call that fails, all of its completions."""
    scores = score(FunctionReward(f"{file}:{name}", workers=0), ["x"] * 4)
    for place, row_score in enumerate(scores):
        sentence = (
            sentences[place % len(sentences)].replace("NAME", f"{file}:{name}").replace("line 1:", f"line {place + 1}:")
        )
        assert row_score.excluded == bool(sentence)
        assert (row_score.error or "").startswith(sentence), row_score.error
    with pytest.raises(ValueError, match=r"That was a trial on line 1 with the completion .*Fix it"):
        FunctionReward(f"{file}:{name}", workers=0).trial_call(ROWS[0], AssistantTurn("x"))


def test_a_call_that_hangs_names_its_row(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_pool, "time", clock := Clock())
    reward = FunctionReward(f"{file}:hangs", workers=1, timeout=PATIENCE)
    with closing(SingleTurn(ROWS, reward)) as environment:
        episodes = [environment.reset(task) for task in ROWS[:3]]
        for episode, text in zip(episodes, ["x", "hang", "x"], strict=True):
            environment.submit(episode, AssistantTurn(text))
        results = collect(environment, 1)
        wait_for_file(file.with_name("started"))
        pass_limit(reward._pool, clock)
        results |= collect(environment, 2)
    scores = [results[id(episode)].score or Score(math.nan) for episode in episodes]
    assert [score.excluded for score in scores] == [False, True, False]
    assert scores[1].error == f"{file}:hangs took more than 300 s and was ended on line 2."


def test_group_reward_is_called_once_with_all_completions() -> None:
    groups: list[list[str]] = []

    def longest(completions: list[str]) -> np.ndarray[Any, Any]:
        groups.append(completions)
        return np.array([len(text) == max(map(len, completions)) for text in completions], dtype=np.float32)

    environment = SingleTurn(ROWS, FunctionReward(longest, workers=0, group=True))
    first, second = environment.reset_group(ROWS[0], 2), environment.reset_group(ROWS[1], 3)
    for episode, text in ((second[1], "long"), (first[0], "x"), (second[0], "s")):
        environment.submit(episode, AssistantTurn(text))
    assert environment.poll(0.0) == environment.poll(None) == []
    environment.submit(first[1], AssistantTurn("yy"))
    environment.submit(second[2], AssistantTurn("even longer"))
    results = collect(environment, 5)
    assert sorted(groups) == [["s", "long", "even longer"], ["x", "yy"]]
    rewards = [results[id(episode)].score.reward for episode in (*first, *second)]  # type: ignore[union-attr]
    assert rewards == [0.0, 1.0, 0.0, 0.0, 1.0]
    environment.close()


def test_group_reward_requires_a_batched_function() -> None:
    def score_one(completion: str) -> float:
        return 1.0

    with pytest.raises(ValueError, match=r"score_one\(completion\) takes one completion, but group is true"):
        FunctionReward(score_one, workers=0, group=True)


def test_coroutines_run_concurrently_up_to_the_limit_and_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coroutine_pool, "time", clock := Clock())
    running, most, full = 0, 0, asyncio.Event()

    async def slow(completion: str) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 5:
            full.set()
        try:
            await full.wait()
            await asyncio.sleep(600 if completion == "hang" else 0)
        finally:
            running -= 1
        return float(len(completion))

    texts = ["hang" if place == 4 else "x" * place for place in range(20)]
    reward = FunctionReward(slow, workers=0, concurrency=5, timeout=PATIENCE)
    with closing(SingleTurn(ROWS, reward)) as environment:
        episodes = [environment.reset(ROWS[place % len(ROWS)]) for place in range(20)]
        for episode, text in zip(episodes, texts, strict=True):
            environment.submit(episode, AssistantTurn(text))
        results = collect(environment, 19)
        clock.passed += 1000  # the others have ended
        results |= collect(environment, 1)
    scores = [results[id(episode)].score or Score(math.nan) for episode in episodes]
    assert most == 5
    assert [place for place, score in enumerate(scores) if score.error] == [4]
    assert "took more than 300 s and was given up on line 1." in str(scores[4].error)
    assert [score.reward for score in scores[5:]] == [float(place) for place in range(5, 20)]


def length(completion: str) -> float:
    return float(len(completion))


def style(completion: str) -> dict[str, float]:
    return {"reward": float(completion.islower()), "exclaims": float("!" in completion)}


async def fails_on_b(completions: list[str]) -> list[float]:
    return [math.nan if text == "b" else 2.0 for text in completions]


def test_several_rewards_are_summed_with_their_weights() -> None:
    rewards = {
        "length": Weighted(FunctionReward(length, workers=0), 0.1),
        "style": Weighted(FunctionReward(style, workers=0), -2.0),
        "watched": Weighted(FunctionReward(length, workers=0), 0.0),
    }
    scores = score(WeightedSum(rewards), ["abc", "ABCD!"])
    assert scores == [
        Score(0.1 * 3 - 2.0 * 1, {"length": 3.0, "style": 1.0, "style/exclaims": 0.0, "watched": 3.0}),
        Score(0.1 * 5 - 2.0 * 0, {"length": 5.0, "style": 0.0, "style/exclaims": 1.0, "watched": 5.0}),
    ]
    with pytest.raises(ValueError, match="the weight of length is nan, but a weight is a finite number"):
        Weighted(FunctionReward(length, workers=0), math.nan)


@pytest.mark.parametrize("failed_reward", [None, -1.0])
def test_sum_of_rewards_fails_if_one_reward_fails(failed_reward: float | None) -> None:
    rewards = {
        "length": Weighted(FunctionReward(length, workers=0)),
        "other": Weighted(FunctionReward(fails_on_b, workers=0, failed_reward=failed_reward), 3.0),
    }
    first, second, third = score(WeightedSum(rewards), ["a", "b", "cc"])
    assert (first.reward, third.reward) == (7.0, 8.0)
    assert second.error == "fails_on_b returned nan for line 2, but a reward is finite."
    assert (second.excluded, second.reward) == ((True, 0.0) if failed_reward is None else (False, -1.0))


def test_a_reward_of_weight_0_only_measures() -> None:
    rewards = {
        "length": Weighted(FunctionReward(length, workers=0)),
        "watched": Weighted(FunctionReward(fails_on_b, workers=0), 0.0),
    }
    first, second = score(WeightedSum(rewards), ["a", "b"])
    assert first == Score(1.0, {"length": 1.0, "watched": 2.0})
    assert (second.reward, second.error, second.excluded) == (1.0, None, False)
    assert {name: value for name, value in second.components.items() if not math.isnan(value)} == {
        "length": 1.0,
        "watched/failed": 1.0,
        "watched/invalid": 1.0,
    }


def content_length(completions: list[Any], **columns: Any) -> list[float]:
    return [float(len(completion[0]["content"])) for completion in completions]


def only_odd(completions: list[Any], answer: list[int], **columns: Any) -> list[float | None]:
    return [10.0 if number % 2 else None for number in answer]


def test_rewards_of_trl_get_messages_where_the_prompt_is_messages(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": [{"role": "user", "content": "2+2?"}]}\n')
    (task,) = [DatasetTasks(read_rows(file), system="Add.")[0]]
    assert score(FunctionReward(content_length, workers=0), ["four"], [task]) == [Score(4.0)]

    def texts(completions: list[str]) -> list[float]:
        return [float(len(completion)) for completion in completions]

    file.write_text('{"prompt": "2+2?"}\n')
    tasks = [DatasetTasks(read_rows(file), chat=True)[0]]
    assert score(FunctionReward(texts, workers=0), ["four"], tasks) == [Score(4.0)]


def test_none_in_a_list_is_a_reward_that_does_not_apply() -> None:
    rewards = {
        "length": Weighted(FunctionReward(length, workers=0)),
        "odd": Weighted(FunctionReward(only_odd, workers=0), 0.5),
    }
    first, second = score(WeightedSum(rewards), ["abc", "abcd"])
    assert (first.reward, first.error, first.excluded) == (3.0, None, False)
    assert math.isnan(first.components["odd"])
    assert second == Score(9.0, {"length": 4.0, "odd": 10.0})
    alone, _ = score(FunctionReward(only_odd, workers=0), ["a", "b"])
    assert alone.excluded
    assert alone.error == "only_odd returned None for line 1, and there is no other reward of it."
    (summed, _) = score(WeightedSum({"odd": Weighted(FunctionReward(only_odd, workers=0))}), ["a", "b"])
    assert summed == alone


class Constant(Reward):
    """A custom kind of reward."""

    name = "constant"

    def __init__(self) -> None:
        self.waiting: list[Episode] = []

    def submit(self, episode: Episode) -> None:
        self.waiting.append(episode)

    def poll(self, timeout: float | None = 0.0) -> list[tuple[Episode, Score]]:
        waiting, self.waiting = self.waiting, []
        return [(episode, Score(4.0)) for episode in waiting]

    def trial_call(self, task: Task, turn: AssistantTurn) -> None:
        pass


def test_custom_reward_kind_is_one_class() -> None:
    rewards = {"constant": Weighted(Constant(), 0.5), "length": Weighted(FunctionReward(length, workers=0))}
    assert score(WeightedSum(rewards), ["abc"]) == [Score(5.0, {"constant": 4.0, "length": 3.0})]


def test_single_episode_is_its_own_group() -> None:
    episode = Episode(ROWS[0])
    assert episode.group == [episode]
