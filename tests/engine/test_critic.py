"""The value head is updated, clipped, saved and resumed like every parameter, and is not exported."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig

import postlude
from postlude import LanguageModel, Layout, Pattern, load_model
from postlude.cli import main
from postlude.data import Batch
from postlude.engine import AdamW, Engine
from postlude.engine.export import export
from postlude.hf.export import export_hf
from postlude.hf.read_model import Recast
from postlude.lora import LoRA
from postlude.model import OutputInputs
from postlude.model.parallel import local_shard, region
from postlude.objectives import Loss, Objective, PolicyGradient, ValueLoss
from postlude.objectives.advantages import gae
from tests.engine.training import (
    DAMPED,
    PlainTrainer,
    batch,
    bitwise_equal,
    build,
    config,
    error_text,
    policy,
    train,
    weights,
)
from tests.equality import assert_equal

DENSE = config("tiny-dense", num_hidden_layers=2)
UNTIED = config("tiny-dense", num_hidden_layers=2, tie_word_embeddings=False)
LAYOUTS = ["tp=2", "pp=2", "cp=2", "dp_shard=2", "dp_replicate=2"]


def value(inputs: OutputInputs) -> Loss:
    """The critic's loss alone; its target is the column "advantages"."""
    columns = {**inputs.microbatch.columns, "returns": inputs.microbatch.column("advantages")}
    microbatch = dataclasses.replace(inputs.microbatch, columns=columns)
    return ValueLoss(clip=None, over="mask")(dataclasses.replace(inputs, microbatch=microbatch))


def policy_and_value(inputs: OutputInputs) -> Loss:
    return policy(inputs) + 0.5 * value(inputs)


def both_unless_empty(inputs: OutputInputs) -> Loss:
    """A microbatch without tokens has a loss without a graph."""
    return policy_and_value(inputs) if len(inputs.microbatch) else Loss(torch.zeros(()))


def size(layout: str) -> int:
    return Layout.parse(layout).world_size


def full_critic(engine: Engine) -> Tensor:
    """Returns the critic's weight, gathered from all ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    critic = engine.parameters.get("value_head.weight")
    dist.all_gather_object(everyone, None if critic is None else (region(critic), local_shard(critic)))
    actual = torch.zeros(engine.config.hidden_size)
    for place, part in filter(None, everyone):
        actual[place] = part
    return actual


def steps(group: Any, layout: str, objective: Objective, lengths: tuple[int, ...]) -> dict[str, Any]:
    engine = build(layout, DENSE, optimizer=DAMPED, critic=True)
    losses, norms = [], []
    for seed in range(4):
        losses.append(engine.forward_backward(batch(seed, lengths), objective).loss)
        norms.append(engine.optimizer_step().grad_norm)
    numbers = {"losses": torch.tensor(losses), "norms": torch.tensor(norms)}
    return {**numbers, "critic": full_critic(engine), "weights": weights(engine)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "lengths"),
    [
        ("dp_shard=2", (20, 17, 3, 25, 6)),
        pytest.param("dp_shard=2", (9,), id="dp_shard=2 with nothing for one rank"),
        pytest.param("cp=2,tp=2", (20, 17, 3, 25, 6), marks=pytest.mark.thorough),
        pytest.param("pp=2,dp_replicate=2", (20, 17, 3, 25, 6), marks=pytest.mark.thorough),
    ],
)
def test_steps_with_a_critic_equal_torchs_adamw_on_a_plain_model(
    ranks: Any, layout: str, lengths: tuple[int, ...]
) -> None:
    plain = PlainTrainer(DENSE, DAMPED, value_head=True)
    critic = plain.model.value_head
    assert critic is not None
    losses, shares = [], []
    for seed in range(4):
        losses.append(plain.backward(batch(seed, lengths), policy_and_value))
        assert critic.weight.grad is not None
        shares.append(float(critic.weight.grad.norm()))
        plain.step(DAMPED.lr * DAMPED.schedule.factor(seed))
    assert all(norm > 0.5 for norm in plain.norms)  # the clip is at work,
    assert max(share / norm for share, norm in zip(shares, plain.norms, strict=True)) > 0.1  # and the critic counts
    for actual in ranks(size(layout), steps, layout, both_unless_empty, lengths):
        assert_equal(actual["losses"], torch.tensor(losses), "losses")
        assert_equal(actual["norms"], torch.tensor(plain.norms), "norms")
        assert_equal(actual["critic"], critic.weight, "critic")
        expected = plain.weights()
        for name, tensor in actual["weights"].items():
            assert_equal(tensor, expected[name], name)


# --- PPO


def ppo(inputs: OutputInputs) -> Loss:
    return PolicyGradient()(inputs) + 0.5 * ValueLoss()(inputs)


def ppo_run(group: Any, layout: str) -> list[dict[str, float]]:
    """Completions whose reward, at the last token, grows with their length."""
    engine = build(layout, DENSE, optimizer=AdamW(lr=3e-3), critic=True)
    input_batch = batch(1)
    masks = [(torch.arange(length) >= length // 3).float() for length in input_batch.lengths]
    rewards = [torch.zeros(length) for length in input_batch.lengths]
    for reward in rewards:
        reward[-1] = len(reward) / 10
    results = []
    for _ in range(12):
        values = engine.values(input_batch)
        advantages, returns = gae(rewards, values, masks=masks, gamma=1.0, lam=0.95)
        columns = {
            "response_mask": masks,
            "advantages": advantages,
            "returns": returns,
            "old_values": values,
            "old_logprobs": engine.logprobs(input_batch).logprob,
        }
        result = engine.forward_backward(Batch(input_batch.sequences, columns), ppo)
        engine.optimizer_step()
        results.append(dict(result.metrics))
    return results


@pytest.mark.slow
def test_policy_and_critic_train_together(ranks: Any) -> None:
    for metrics in ranks(2, ppo_run, "dp_shard=2"):
        assert metrics[0]["value"] == 0.0  # from zero
        assert metrics[0]["ratio"] == pytest.approx(1.0, abs=1e-5)
        assert metrics[-1]["value_error"] < 0.5 * metrics[0]["value_error"]


# --- checkpoints


def save_and_continue(
    group: Any, layout: str, hf: PretrainedConfig, first: Objective, directory: str
) -> tuple[list[Tensor], list[float]]:
    engine = build(layout, hf, critic=True)
    train(engine, [1, 2], first)
    engine.save(directory)
    return engine.values(batch(9)), train(engine, [3, 4, 5], policy_and_value)


def load_and_continue(
    group: Any, layout: str, hf: PretrainedConfig, directory: str
) -> tuple[list[Tensor], list[float]]:
    engine = build(layout, hf, critic=True, seed=1)
    engine.load(directory)
    return engine.values(batch(9)), train(engine, [3, 4, 5], policy_and_value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hf", "before", "after", "first"),
    [
        pytest.param(DENSE, "pp=2", "tp=2", policy_and_value, id="pp=2 -> tp=2"),
        pytest.param(DENSE, "dp_shard=2", "cp=2", policy, id="saved before the critic learned"),
        pytest.param(UNTIED, "pp=2", "dp_shard=2", value, id="saved when only the critic had learned"),
    ],
)
def test_a_critic_resumes_in_another_layout(
    ranks: Any, tmp_path: Path, hf: PretrainedConfig, before: str, after: str, first: Objective
) -> None:
    directory = str(tmp_path / "checkpoint")
    ((values, losses), *_) = ranks(size(before), save_and_continue, before, hf, first, directory)
    assert bool(torch.cat(values).any()) == (first is not policy)
    for actual, resumed in ranks(size(after), load_and_continue, after, hf, directory):
        if first is policy:
            assert not torch.cat(actual).any()
        else:
            assert_equal(torch.cat(actual), torch.cat(values), "values")
        assert_equal(torch.tensor(resumed), torch.tensor(losses), "losses")


def load_mismatched_checkpoints(group: Any, critic: bool, directory: str) -> tuple[str, bool]:
    saved, engine = (build("pp=2", DENSE, critic=has_critic) for has_critic in (critic, not critic))
    for tested_engine in (saved, engine):
        train(tested_engine, [1])
    saved.save(directory)
    before = weights(engine)
    return error_text(lambda: engine.load(directory)), bitwise_equal(before, weights(engine))


@pytest.mark.parametrize(
    ("critic", "sentence"),
    [
        (
            False,
            "was saved without a critic, but this engine has one. Load it with critic=False, or export that engine and "
            "start this one from the export.",
        ),
        (True, "was saved with a critic, but this engine has none. Give the engine critic=True."),
    ],
)
@pytest.mark.slow
def test_checkpoints_with_and_without_a_critic_are_not_interchangeable(
    ranks: Any, tmp_path: Path, critic: bool, sentence: str
) -> None:
    directory = tmp_path / "checkpoint"
    expected = f"ValueError: {directory} {sentence}"
    assert ranks(2, load_mismatched_checkpoints, critic, str(directory)) == [(expected, True)] * 2


# --- what leaves the engine


def stream_copy_and_export(group: Any, layout: str, directory: str) -> tuple[bool, bool, bool, bool]:
    engine = build(layout, DENSE, critic=True)
    train(engine, [1, 2], policy_and_value)
    engine.export_hf(directory)
    sampler = LanguageModel(engine.config)
    engine.copy_weights(sampler)
    second_engine = build(layout, directory, critic=True)
    return (
        list(weights(engine)) == list(weights(build(layout, DENSE))) == [name for name, _ in engine.gradients()],
        bitwise_equal(weights(second_engine), weights(engine)),
        bool(torch.cat(engine.values(batch(3))).any()),
        bool(torch.cat(second_engine.values(batch(3))).any()),
    )


@pytest.mark.slow
def test_streams_copies_and_exports_exclude_the_critic(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, stream_copy_and_export, "pp=2", str(tmp_path / "export")) == [(True, True, True, False)] * 2
    _, actual = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not actual["unexpected_keys"]


# --- where a value head starts from


def heads(group: Any, layout: str, directory: str) -> dict[str, Tensor]:
    """Returns the value head of engines by their source. One rank writes the sources."""
    if not layout:
        engine = build("", UNTIED, critic=True)
        train(engine, [1], value)
        engine.save(f"{directory}/checkpoint")
        export(engine, f"{directory}/exported", None, torch.float32, card=None, overwrite=False, classifier=True)
        export_hf(load_model(f"{directory}/checkpoint", value_head=True), f"{directory}/loaded")
        classifier = AutoModelForSequenceClassification.from_pretrained(f"{directory}/exported")
        classifier.save_pretrained(f"{directory}/classifier")  # without a head of the language model
        engine = build("", f"{directory}/exported", critic=True, lora=LoRA(rank=2))
        engine.save(f"{directory}/adapters")
        for source in (["checkpoint"], ["adapters", "exported"], ["exported", "--without-value-head"]):
            paths = [f"{directory}/{part}" if part[0] != "-" else part for part in source]
            assert main(["convert", *paths, f"{directory}/from-{source[-1]}"]) == 0
    pattern = str(Pattern.parse("[*-]*-"))
    sources = {name: f"{directory}/{name}" for name in ("checkpoint", "exported", "loaded", "classifier")}
    converted = {name: f"{directory}/from-{name}" for name in ("checkpoint", "exported", "--without-value-head")}
    cases: dict[str, dict[str, Any]] = {
        name: {"source": source} for name, source in (sources | {f"from {n}": s for n, s in converted.items()}).items()
    }
    cases |= {f"{name}, recast": {"source": Recast(source, pattern)} for name, source in sources.items()}
    cases |= {f"{name}, lora": {"source": source, "lora": LoRA(rank=2)} for name, source in sources.items()}
    return {name: full_critic(build(layout, critic=True, **case)) for name, case in cases.items()}


def test_an_engine_starts_from_the_value_head_of_every_source_that_has_one(ranks: Any, tmp_path: Path) -> None:
    for layout in ("", "pp=2"):
        for actual in ranks(size(layout), heads, layout, str(tmp_path)):
            assert not actual.pop("from --without-value-head").any()
            expected = actual["checkpoint"]
            assert expected.any()
            for name, head in actual.items():
                assert torch.equal(head, expected), (layout, name)


def no_critic(group: Any) -> str:
    return error_text(lambda: build("pp=2", DENSE).values(batch(1)))


def test_values_without_a_critic_are_refused_on_every_rank(ranks: Any) -> None:
    sentence = (
        "ValueError: this model has no value head: make it with Engine(..., critic=True) or "
        "LanguageModel(value_head=True)."
    )
    assert ranks(2, no_critic) == [sentence] * 2


@pytest.mark.parametrize("critic", [True, False])
def test_a_source_with_a_value_head_that_is_left_out_is_named(
    critic: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    export_hf(load_model(DENSE, value_head=True), tmp_path / "model")
    with postlude.ranks():
        Engine(tmp_path / "model", critic=critic)
    assert ("has a value head (score.weight), which this model leaves out" in caplog.text) is not critic
