"""A reward model: transformers scores its export as the engine does, and a policy can be trained with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from postlude.cli import main
from postlude.data import Batch
from postlude.data.chat import Encoder
from postlude.engine import AdamW, Engine
from postlude.engine.export import export
from postlude.hf.builtin import BUILTIN
from postlude.hf.load import load_model, load_tokenizer
from postlude.layout import Layout
from postlude.model import OutputInputs
from postlude.objectives import BradleyTerry
from postlude.objectives.preference import sequence_scores
from postlude.rollout.environments import SingleTurn
from postlude.rollout.episode import AssistantTurn, Episode
from postlude.rollout.reward_model import ModelReward
from postlude.rollout.tasks import Task
from tests.conftest import Ranks
from tests.rollout.episodes import collect

SEQUENCES = [list(b"2+2=4"), list(b"2+2=five"), list(b"1+1="), list(b"1+1=11!")]


def scores(engine: Engine, batch: Batch) -> list[float]:
    """Returns `sequence_scores` of each sequence."""
    results = []
    for sequence in batch.sequences:

        def processor(inputs: OutputInputs) -> dict[str, torch.Tensor]:
            by_sequence = sequence_scores(inputs)
            return {"score": by_sequence[inputs.microbatch.packing.sequence_index()]}

        (values,) = engine.evaluate_tokens(Batch([sequence]), processor, shifted=False)["score"]
        results.append(float(values[0]))
    return results


def train_and_export(group: Any, layout: str, hf: dict[str, Any], directory: str) -> list[float]:
    config = BUILTIN["tiny-dense"]()
    for name, value in {"num_hidden_layers": 2, "initializer_range": 0.1, **hf}.items():
        setattr(config, name, value)
    engine = Engine(config, layout=Layout.parse(layout), optimizer=AdamW(lr=1e-2), critic=True, budget=64)
    batch = Batch(SEQUENCES, groups=[0, 0, 1, 1])
    losses = []
    for _ in range(4):
        losses.append(engine.forward_backward(batch, BradleyTerry()).loss)
        engine.optimizer_step()
    assert losses[-1] < 0.8 * losses[0] == pytest.approx(0.8 * 0.6931472)
    tokenizer = load_tokenizer("tiny-dense")
    export(engine, directory, tokenizer, torch.float32, card=None, overwrite=False, classifier=True)
    second_engine = Engine(directory, layout=Layout.parse(layout), critic=True, budget=64)
    expected_scores = scores(engine, batch)
    assert scores(second_engine, batch) == pytest.approx(expected_scores, rel=1e-5, abs=1e-6), (
        "it is loaded with its value head"
    )
    return expected_scores


@pytest.mark.parametrize(("layout", "tied"), [("pp=2", True), ("dp_shard=2", False)])
def test_transformers_scores_equal_the_export(ranks: Ranks, tmp_path: Path, layout: str, tied: bool) -> None:
    (actual, _) = ranks(2, train_and_export, layout, {"tie_word_embeddings": tied}, str(tmp_path / "model"))
    hf_model, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert hf_model.config.num_labels == 1
    with torch.no_grad():
        expected = [float(hf_model(torch.tensor([sequence])).logits) for sequence in SEQUENCES]
    assert max(expected) - min(expected) > 0.1
    assert actual == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "model").eos_token is not None


def export_one(group: Any, directory: str) -> None:
    train_and_export(group, "tp=1", {}, directory)


@pytest.fixture(scope="module")
def reward_model(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("reward") / "model"
    ranks(1, export_one, str(directory))
    return directory


def tasks_of(*prompts: str) -> list[Task]:
    return [Task(prompt, {}, f"row {index}") for index, prompt in enumerate(prompts)]


def test_an_environment_scores_prompt_and_completion_as_transformers_does(reward_model: Path) -> None:
    hf_model = AutoModelForSequenceClassification.from_pretrained(reward_model)
    tasks = tasks_of("1+1=", "a longer question: 2+2=")
    environment = SingleTurn(tasks, ModelReward(str(reward_model), device="cpu", budget=64))
    episodes = [environment.reset(task) for task in tasks for _ in range(2)]
    texts = ["2", "three", "4", ""]
    for episode, text in zip(episodes, texts, strict=True):
        environment.submit(episode, AssistantTurn(text))
    results = collect(environment, 4)
    end = load_tokenizer("tiny-dense").eos_token_id
    for episode, text in zip(episodes, texts, strict=True):
        tokens = [*str(episode.task.prompt).encode(), *text.encode(), end]
        with torch.no_grad():
            expected = float(hf_model(torch.tensor([tokens])).logits)
        assert results[id(episode)].score.reward == pytest.approx(expected, rel=1e-4, abs=1e-5)
    environment.close()


def test_a_reward_model_reads_all_turns_of_an_episode(reward_model: Path) -> None:
    hf_model = AutoModelForSequenceClassification.from_pretrained(reward_model)
    reward, end = ModelReward(str(reward_model), device="cpu", budget=256), load_tokenizer("tiny-dense").eos_token_id
    turns = [AssistantTurn("<think>?</think>three"), AssistantTurn("2")]
    text = [*b"1+1=three", end, *b"No. Again:", *b"2", end]
    chat = Encoder(tokenizer=load_tokenizer("tiny-dense")).conversation(
        [
            {"role": "user", "content": "1+1="},
            {"role": "assistant", "content": "three"},
            {"role": "user", "content": "No. Again:"},
            {"role": "assistant", "content": "2"},
        ]
    )[0]
    for prompt, tokens in (("1+1=", text), ([{"role": "user", "content": "1+1="}], chat.tokens)):
        reward.submit(Episode(Task(prompt, {}, "row"), turns, ["No. Again:"]))
        ((_, score),) = reward.poll()
        with torch.no_grad():
            expected = float(hf_model(torch.tensor([tokens])).logits)
        assert score.reward == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_published_reward_model_without_an_output_head_is_read(reward_model: Path, tmp_path: Path) -> None:
    hf_model = AutoModelForSequenceClassification.from_pretrained(reward_model)
    hf_model.config.tie_word_embeddings = False
    hf_model.save_pretrained(tmp_path / "transformers")
    postlude_model = load_model(tmp_path / "transformers", value_head=True)
    assert postlude_model.value_head is not None
    torch.testing.assert_close(postlude_model.value_head.weight.data, hf_model.score.weight.data[0].float())
    with pytest.raises(ValueError, match=r"lacks 1 tensor\(s\) .*lm_head\.weight"):
        load_model(tmp_path / "transformers")


def test_completion_that_cannot_be_scored_fails_its_reward_call(reward_model: Path) -> None:
    (task,) = tasks = tasks_of("1+1=")
    environment = SingleTurn(tasks, ModelReward(str(reward_model), device="cpu", budget=8))
    long, short = environment.reset(task), environment.reset(task)
    environment.submit(long, AssistantTurn("much longer than that"))
    environment.submit(short, AssistantTurn("2"))
    results = collect(environment, 2)
    assert results[id(long)].score.excluded
    assert not results[id(short)].score.excluded


def test_a_model_without_a_value_head_is_refused(tmp_path: Path) -> None:
    environment = SingleTurn(tasks_of("1"), ModelReward("tiny-dense", device="cpu"))
    with pytest.raises(ValueError, match=r"tiny-dense has no tensor score\.weight, so it is not a reward model"):
        environment.trial_call(environment.tasks[0], AssistantTurn("1"))


@pytest.mark.slow
def test_policy_trains_with_the_reward_model(ranks: Ranks, tmp_path: Path, reward_model: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{number}+1="}) + "\n" for number in range(8)))
    words = ["grpo", f"--environment.path={rows}", f"--environment.model={reward_model}", "--environment.device=cpu"]
    words += ["--environment.kind=reward_model", "--steps=2", "--prompts_per_step=2", "--samples_per_prompt=4"]
    words += ["--sampling.max_new_tokens=4", "--evaluation.every=0", "--budget=64", "--export=false"]
    assert main([*words, f"--run={tmp_path / 'run'}", "--loggers=[]", "--device=cpu"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(len(set(line["rewards"])) > 2 and line["grad_norm"] > 0 for line in lines)
