"""Environments: tasks are the same in every process, and conversations keep the sampled tokens."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from postlude.data.chat import Encoder
from postlude.data.datasets import RowOrder, read_rows
from postlude.hf.load import byte_tokenizer
from postlude.pool.worker_pool import WorkerError
from postlude.rollout.environments import MultiTurn, SingleTurn, Transcript, TurnResult, is_chat
from postlude.rollout.function_reward import FunctionReward
from postlude.rollout.rewards import Score
from postlude.rollout.tasks import DatasetTasks, ReasoningGym, Task, hold_out, last_tasks
from postlude.rollout.verifiers import GymEntries, decode_entries, gym_dataset
from tests.rollout.episodes import step
from tests.rollout.functions import guess

ROWS = '{"prompt": "1 + 1 =", "answer": 2}\n{"prompt": [{"role": "user", "content": "2 + 2"}], "answer": 4}\n'


@pytest.fixture
def tasks(tmp_path: Path) -> DatasetTasks:
    (tmp_path / "train.jsonl").write_text(ROWS)
    return DatasetTasks(read_rows(tmp_path / "train.jsonl"))


@pytest.fixture(scope="module")
def words() -> Iterator[ReasoningGym]:
    pytest.importorskip("reasoning_gym")
    gym = ReasoningGym("word_ladder", seed=3, size=300)
    yield gym
    gym.close()


def holds_the_answer(prompt: Any, completion: str, example: Mapping[str, Any]) -> float:
    return float(str(example["answer"]) in completion)


def test_each_row_is_a_task(tasks: DatasetTasks) -> None:
    assert tasks[0] == Task("1 + 1 =", {"prompt": "1 + 1 =", "answer": 2}, "line 1 of train.jsonl")
    assert [is_chat(tasks[index].prompt) for index in range(len(tasks))] == [False, True]
    wrapped = DatasetTasks(tasks.rows, chat=True, system="Be brief.")
    assert wrapped[0].prompt == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1 ="}]
    assert wrapped[1].prompt == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2"}]
    with pytest.raises(ValueError, match='no column "question"'):
        DatasetTasks(tasks.rows, prompt="question")
    with pytest.raises(
        ValueError, match=r'column "answer" in line 1 of train\.jsonl holds a int, but a prompt is text'
    ):
        DatasetTasks(tasks.rows, prompt="answer")[0]
    with pytest.raises(ValueError, match="system is given, but chat is off"):
        DatasetTasks(tasks.rows, system="x")
    with pytest.raises(IndexError, match="there is no task 2: they count from 0 to 1"):
        tasks[2]


SUMS = [f"{first}+{second}=" for first in range(5) for second in range(4)]  # 20 prompts, and each several times


def copies(*numbers: int) -> list[Task]:
    """Returns tasks with the prompts of these numbers, as text or messages, distinguished by their rows."""
    return [
        Task(SUMS[number] if number % 2 else [{"role": "user", "content": SUMS[number]}], {"place": place}, f"{place}")
        for place, number in enumerate(numbers)
    ]


def test_held_out_prompts_are_none_of_those_trained_on() -> None:
    numbers = [(7 * place) % 13 for place in range(60)]
    tasks = copies(*numbers)
    held_out = hold_out(tasks, 6)
    assert held_out.indices == [54, 55, 56, 57, 58, 59]
    sampler = RowOrder(len(tasks), seed=1, skip=held_out)
    kept_count = sum(number not in numbers[54:] for number in numbers)
    trained = sampler.take(3 * kept_count)
    assert all(trained.count(index) == 3 for index in trained), "every other task once an epoch"
    assert sampler.progress == 3.0
    held_out_prompts = {str(tasks[index].prompt) for index in held_out.indices}
    assert len(held_out_prompts) == 6
    assert not held_out_prompts & {str(tasks[index].prompt) for index in trained}


def test_duplicate_prompts_count_once_among_held_out_ones() -> None:
    tasks = copies(0, 1, 2, 3, 3, 2, 3, 3)
    assert hold_out(tasks, 2).indices == [5, 7]
    assert [index for index in range(8) if index not in hold_out(tasks, 2)] == [0, 1]
    assert hold_out(tasks, 2, by="row").indices == [6, 7]
    for count, expected in ((0, 0), (4, 4), (5, 4)):
        with pytest.raises(
            ValueError, match=f"{count} tasks are to be held out, but 8 tasks have {expected} different p"
        ):
            hold_out(tasks, count)
    assert last_tasks(tasks, 2).indices == [5, 7], "an evaluation asks what training held out"
    assert last_tasks(tasks, 6).indices == [0, 1, 4, 5, 6, 7], "and then copies"
    assert last_tasks(tasks, 8).indices == list(range(8))


def test_held_out_prompts_do_not_depend_on_the_process() -> None:
    script = """
from postlude.rollout.tasks import Task, task_identity
print(task_identity(Task([{"role": "user", "content": "1"}], {"set": {"a", "b", "c", "d"}}), "row").hex())
"""
    environments = [{**os.environ, "PYTHONHASHSEED": seed} for seed in ("1", "2")]
    command = [sys.executable, "-c", script]
    processes = [
        subprocess.run(command, capture_output=True, env=environment, check=True) for environment in environments
    ]
    assert processes[0].stdout == processes[1].stdout != b""


def test_single_turn_episode_is_scored_and_ends(tasks: DatasetTasks) -> None:
    environment = SingleTurn(tasks, FunctionReward(holds_the_answer, workers=0))
    episodes = [environment.reset(tasks[0]), environment.reset(tasks[1]), environment.reset(tasks[1])]
    turns = step(environment, episodes, ["it is 2", "4", "5"])
    assert [turn.score for turn in turns] == [Score(1.0), Score(1.0), Score(0.0)]
    assert all(turn.done for turn in turns)
    assert [episode.score for episode in episodes] == [turn.score for turn in turns]
    with pytest.raises(ValueError, match=r"the episode of task 'line 1 of train\.jsonl' is over"):
        step(environment, episodes[:1], ["again"])
    environment.close()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_conversation_continues_until_the_environment_returns_a_reward(workers: int) -> None:
    games = [Task("guess", {"number": 5}), Task("guess", {"number": 8}), Task("guess", {"number": 3})]
    environment = MultiTurn(games, guess, max_turns=3, unfinished_reward=-0.5, workers=workers)
    episodes = [environment.reset(game) for game in games]
    first = step(environment, episodes, ["5", "2", "what?"])
    assert first[0] == TurnResult(Score(1.0, {"turns": 1.0}))
    assert first[1] == TurnResult(observation="higher")
    assert "ValueError: invalid literal" in str(first[2].score and first[2].score.error)
    assert environment.failures.failures["raised"] == 1
    assert step(environment, episodes[1:2], ["9"]) == [TurnResult(observation=[{"role": "user", "content": "Think!"}])]
    assert step(environment, episodes[1:2], ["7"]) == [TurnResult(Score(-0.5, {"unfinished": 1.0}))]
    assert [turn.text for turn in episodes[1].turns] == ["2", "9", "7"]
    assert episodes[1].observations == ["higher", [{"role": "user", "content": "Think!"}]]
    environment.close()


def test_turn_returns_a_score_or_an_observation() -> None:
    with pytest.raises(ValueError, match="a turn has a score, and is the last, or an observation"):
        TurnResult()
    with pytest.raises(ValueError, match="max_turns is 0"):
        MultiTurn([], guess, max_turns=0)


def test_transcript_trains_on_the_sampled_tokens() -> None:
    """It equals the encoded conversation, although sampled tokens are never encoded again."""
    tokenizer = byte_tokenizer()
    encoder = Encoder(tokenizer=tokenizer)
    talk = [
        {"role": role, "content": content}
        for role, content in (("user", "guess"), ("assistant", "5é"), ("user", "lower"), ("assistant", "3"))
    ]
    transcript = Transcript(encoder.prompt(talk[:1]))
    sampled = [tokenizer("5é<|im_end|>")["input_ids"], tokenizer("3<|im_end|>")["input_ids"]]
    transcript.add_completion(sampled[0], [-0.5] * len(sampled[0]))
    transcript.add_observation(encoder.observation("lower", sampled[0], chat=True))
    transcript.add_completion(sampled[1], [-0.25] * len(sampled[1]))
    (expected,) = encoder.conversation(talk)
    kept_length = len(transcript.tokens)
    assert transcript.tokens == expected.tokens[:kept_length]
    assert transcript.mask == expected.mask[:kept_length]
    assert tokenizer.decode(expected.tokens[kept_length:]) == "\n"
    assert sum(transcript.logprobs) == -0.5 * len(sampled[0]) - 0.25 * len(sampled[1])
    assert len(transcript.logprobs) == kept_length
    with pytest.raises(ValueError, match="1 tokens come with 2 log-probs"):
        transcript.add_completion([1], [0.0, 0.0])


SAME_SEED = """
from postlude.rollout.verifiers import GymEntries, decode_entries
from postlude.pool.process_pool import open_pool
workers = open_pool(GymEntries("word_ladder", {}, 3, 300), count=1, timeout=60.0)
pages = [workers.call_all([(index, index + 1)])[0].value for index in (299, 0, 256)]
print([decode_entries(page)[0]["question"] for page in pages])
"""


@pytest.mark.slow
def test_a_seed_and_an_index_give_the_same_task_in_every_process(words: ReasoningGym) -> None:
    """word_ladder iterates over sets, so without care it depends on the process's hash seed."""
    expected = str([words[index].example["question"] for index in (299, 0, 256)])
    done = subprocess.run([sys.executable, "-c", SAME_SEED], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == expected, done.stderr


def test_reasoning_gym_prompt_requests_an_answer_tag(words: ReasoningGym) -> None:
    task = words[4]
    assert is_chat(task.prompt)
    content = task.prompt[0]["content"]  # type: ignore[index]
    assert content == task.example["question"] + "\nGive your final answer between <answer> and </answer>."
    assert task.name == "word_ladder 3:4"
    with pytest.raises(IndexError, match="there is no task 300"):
        words[300]
    (asked,) = ReasoningGym("chain_sum", {"min_terms": 2, "max_terms": 2}, seed=1, size=1, chat=False, tag="result")
    assert asked.prompt == asked.example["question"] + "\nGive your final answer between <result> and </result>."


@pytest.mark.slow
def test_reasoning_gym_uses_its_own_scores() -> None:
    pytest.importorskip("reasoning_gym")
    gym = ReasoningGym("chain_sum", {"min_terms": 2, "max_terms": 3}, seed=1, size=40, chat=False)
    environment = SingleTurn(gym, FunctionReward(gym.reward(), workers=1))
    chosen = [gym[i] for i in range(3)]
    results = [str(task.example["answer"]) for task in chosen]
    completions = [f"<answer>{results[0]}</answer>", results[1], "<answer>nonsense</answer>"]
    turns = step(environment, [environment.reset(task) for task in chosen], completions)
    assert [turn.score for turn in turns][:2] == [Score(1.0, {"answered": 1.0}), Score(0.0, {"answered": 0.0})]
    assert turns[2].score is not None
    assert turns[2].score.reward < 0.5
    environment.close()
    gym.close()
    assert gym[39].prompt  # what was made stays


@pytest.mark.thorough
def test_every_reasoning_gym_task_can_be_created() -> None:
    pytest.importorskip("reasoning_gym")
    from reasoning_gym.factory import DATASETS

    for name in sorted(set(DATASETS) - {"composite"}):
        source = GymEntries(name, {}, 0, 2)
        source.prepare()
        assert len(decode_entries(source(0, 1))) == 1


@pytest.mark.parametrize(
    ("name", "config", "sentence"),
    [
        ("chain_sums", {}, r'reasoning-gym has no task "chain_sums"; did you mean (.* or )?chain_sum'),
        ("zzzzzz", {}, r'has no task "zzzzzz"; it has ab, acre, '),
        ("chain_sum", {"min_term": 2}, r'task "chain_sum" has no setting "min_term"; did you mean "min_terms"\?'),
        ("chain_sum", {"min_terms": -1}, 'refuses these settings of "chain_sum"'),
    ],
)
def test_unknown_task_gives_clear_error(name: str, config: dict[str, Any], sentence: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match=sentence):
        gym_dataset(name, config)


def test_an_unknown_task_is_refused_before_any_is_made() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(
        WorkerError, match=r'GymEntries cannot be loaded: reasoning-gym has no task "chain_sums"; did you'
    ):
        ReasoningGym("chain_sums")


def test_invalid_reasoning_gym_settings_give_clear_errors() -> None:
    with pytest.raises(ValueError, match='config has "seed"'):
        ReasoningGym("chain_sum", {"seed": 1})
    with pytest.raises(ValueError, match="size is 0"):
        ReasoningGym("chain_sum", size=0)


def test_transcript_keeps_the_routing_of_sampled_tokens() -> None:
    def routing(length: int, expert: int) -> torch.Tensor:
        return torch.cat((torch.full((length - 1, 2, 1), expert), torch.full((1, 2, 1), -1))).short()

    transcript = Transcript([5, 6])
    transcript.add_completion([7, 8], [0.0, 0.0], routing(4, 1))
    transcript.add_observation([9])
    transcript.add_completion([3], [0.0], routing(6, 2))
    assert transcript.routing is not None
    assert transcript.routing[:, 0, 0].tolist() == [1, 1, 1, 2, 2, -1]
    with pytest.raises(ValueError, match="routing is of 3 tokens, but there are 7"):
        transcript.add_completion([4], [0.0], routing(3, 1))


def test_prompt_that_has_the_answer_is_refused(tmp_path: Path) -> None:
    talk = [{"from": "human", "value": "1+2="}, {"from": "gpt", "value": "3"}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"prompt": talk[:end]}) + "\n" for end in (1, 2)))
    tasks = DatasetTasks(read_rows(tmp_path / "chats.jsonl"))
    assert tasks[0].prompt == [{"role": "user", "content": "1+2="}]
    with pytest.raises(ValueError, match=r"line 2 of .*\(column \"prompt\"\) ends with a message of the assistant"):
        tasks[1]
