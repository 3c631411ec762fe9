"""Training in a layout equals a plain model with torch's optimizer; other calls do not change the state."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from postlude import Layout
from postlude.data import Batch, pack, unpack
from postlude.engine import AdamW, Engine, LRSchedule
from postlude.hf.load import load_model
from postlude.hf.read_model import model_from_hf
from postlude.model import ModelConfig, OutputInputs
from postlude.model.blocks import MoE, MoEConfig
from tests.engine.training import (
    BUDGET,
    DAMPED,
    PlainTrainer,
    batch,
    bitwise_equal,
    build,
    config,
    error_text,
    infinite_gradient,
    optimizer_state,
    policy,
    train,
    weights,
)
from tests.equality import assert_equal
from tests.hf.attention_families import CONFIGS

DENSE, MOE = config("tiny-dense", num_hidden_layers=2), config("tiny-moe", num_hidden_layers=2)
SOURCES = {"dense": DENSE, "moe": MOE, "deep": config("tiny-dense")}
LAYOUTS = [("tp=2", "dense"), ("pp=2", "dense"), ("dp_shard=2", "dense"), ("cp=2", "dense"), ("dp_shard=2,ep=2", "moe")]
MORE = [
    ("tp=2,pp=2", "dense"),
    ("pp=2,vpp=2", "deep"),
    ("dp_replicate=2,dp_shard=2", "dense"),
    ("pp=2,dp_shard=2,ep=2", "moe"),
]


def cases(layouts: list[tuple[str, str]], more: list[tuple[str, str]]) -> list[Any]:
    thorough = [pytest.param(*case, marks=pytest.mark.thorough) for case in more]
    return [*(pytest.param(*case, marks=pytest.mark.slow) for case in layouts), *thorough]


def run(ranks: Any, layout: str, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    actual: list[Any] = ranks(Layout.parse(layout).world_size, function, layout, *arguments)
    return actual


def assert_all_equal(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        assert_equal(actual[name], tensor, name)


# --- the optimizer


def five_steps(group: Any, layout: str, hf: PretrainedConfig) -> dict[str, Any]:
    engine = build(layout, hf, optimizer=DAMPED)
    losses, steps = [], []
    for seed in range(5):
        losses.append(engine.forward_backward(batch(seed), policy).loss)
        steps.append(engine.optimizer_step())
    return {"losses": losses, "steps": steps, "weights": weights(engine)}


@pytest.mark.parametrize(("layout", "model"), cases(LAYOUTS, MORE))
def test_steps_equal_torchs_adamw_on_a_plain_model(ranks: Any, layout: str, model: str) -> None:
    plain = PlainTrainer(SOURCES[model], DAMPED)
    # Up over two steps, then half a cosine from 1 down to 0.1 at step 20.
    factors = [0.5, 1.0, *(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 18)) for step in range(3))]
    losses = []
    for seed, factor in enumerate(factors):
        losses.append(plain.backward(batch(seed)))
        plain.step(DAMPED.lr * factor)
    assert max(plain.norms) > 0.5  # the clip is at work
    expected = plain.weights()
    for actual in run(ranks, layout, five_steps, SOURCES[model]):
        assert_equal(torch.tensor(actual["losses"]), torch.tensor(losses), "losses")
        assert_equal(torch.tensor([step.grad_norm for step in actual["steps"]]), torch.tensor(plain.norms), "norms")
        assert [step.step for step in actual["steps"]] == [1, 2, 3, 4, 5]
        assert [step.lr for step in actual["steps"]] == pytest.approx(plain.rates, rel=1e-12)
        assert not any(step.skipped for step in actual["steps"])
        assert_all_equal(actual["weights"], expected)


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (LRSchedule(), {0: 1.0, 1000: 1.0}),
        (LRSchedule(warmup=4), {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0, 99: 1.0}),
        (LRSchedule(shape="linear", warmup=2, steps=12, floor=0.2), {0: 0.5, 1: 1.0, 2: 1.0, 7: 0.6, 12: 0.2, 50: 0.2}),
        (LRSchedule(shape="cosine", steps=10), {0: 1.0, 5: 0.5, 10: 0.0, 11: 0.0}),
    ],
)
def test_a_schedule_warms_up_and_decays(schedule: LRSchedule, factors: dict[int, float]) -> None:
    assert {step: schedule.factor(step) for step in factors} == pytest.approx(factors)


# --- calls in between


def part(full_batch: Batch, rows: list[int]) -> Batch:
    columns = {name: [values[row] for row in rows] for name, values in full_batch.columns.items()}
    return Batch([full_batch.sequences[row] for row in rows], columns)


def with_evaluation_between(group: Any, layout: str, hf: PretrainedConfig) -> tuple[Any, ...]:
    alone, interrupted = build(layout, hf), build(layout, hf)
    for engine in (alone, interrupted):
        for seed in range(2):
            if engine is interrupted:
                engine.logprobs(batch(9, (1, 31, 4)), entropy=True)
            engine.forward_backward(batch(seed), policy)
            if engine is interrupted:
                engine.topk(batch(8, (2,)), 3)
                reference = engine.reference()
                reference.logprobs(batch(7, (5, 9)))
            if seed == 0:
                engine.optimizer_step()
    gradients = [{name: tensor.clone() for name, tensor in engine.gradients()} for engine in (alone, interrupted)]
    return bitwise_equal(*gradients), bitwise_equal(weights(alone), weights(interrupted))


@pytest.mark.parametrize(("layout", "model"), cases([LAYOUTS[1], LAYOUTS[4]], MORE[:2]))
def test_training_with_evaluation_in_between_equals_training_alone(ranks: Any, layout: str, model: str) -> None:
    for actual in run(ranks, layout, with_evaluation_between, SOURCES[model]):
        assert actual == (True, True)


def measured(group: Any, layout: str, hf: PretrainedConfig) -> tuple[Any, ...]:
    engine = build(layout, hf)
    actual = engine.evaluate_loss(batch(1), policy)
    untouched = all(parameter.grad is None for parameter in engine.parameters.values())
    return actual, engine.forward_backward(batch(1), policy), untouched


@pytest.mark.parametrize(("layout", "model"), cases([LAYOUTS[1], *LAYOUTS[3:]], []))
def test_evaluate_loss_equals_forward_backward_without_gradients(ranks: Any, layout: str, model: str) -> None:
    for actual, expected, untouched in run(ranks, layout, measured, SOURCES[model]):
        assert untouched
        assert actual.loss == pytest.approx(expected.loss, rel=1e-6)
        of_objective = {name: value for name, value in expected.metrics.items() if not name.startswith("moe/")}
        assert actual.metrics == pytest.approx(of_objective, rel=1e-5, abs=1e-7)
        assert (actual.tokens, actual.microbatches) == (expected.tokens, expected.microbatches)


# --- a gradient that is not finite


def skipping(group: Any, layout: str, hf: PretrainedConfig) -> tuple[Any, ...]:
    engine, other_engine = build(layout, hf), build(layout, hf)
    train(engine, [1])
    before = weights(engine), optimizer_state(engine)
    engine.forward_backward(batch(2), infinite_gradient)
    skipped = engine.optimizer_step()
    unchanged = bitwise_equal(weights(engine), before[0]) and bitwise_equal(optimizer_state(engine), before[1])
    losses = train(engine, [2, 3])
    expected = train(other_engine, [1, 2, 3])[1:]
    facts = skipped.skipped, math.isfinite(skipped.grad_norm), skipped.step, engine.skipped, engine.step
    return facts, unchanged, losses, expected, bitwise_equal(weights(engine), weights(other_engine))


@pytest.mark.parametrize(("layout", "model"), cases(LAYOUTS[1:3], MORE))
def test_non_finite_step_is_skipped_on_all_ranks_and_changes_nothing(ranks: Any, layout: str, model: str) -> None:
    for facts, unchanged, losses, expected, equal in run(ranks, layout, skipping, SOURCES[model]):
        assert facts == (True, False, 1, 1, 3)
        assert unchanged
        assert losses == expected
        assert equal


# --- reading: reference, topk, evaluate


def reference_run(group: Any, layout: str, hf: PretrainedConfig, offload: bool) -> tuple[Any, ...]:
    engine, other_engine = build(layout, hf), build(layout, hf)
    for tested_engine in (engine, other_engine):
        train(tested_engine, [1])
    input_batch = batch(5, (4, 19, 1, 30))
    before, before_topk = engine.logprobs(input_batch, entropy=True), engine.topk(input_batch, 3)
    reference = engine.reference(offload=offload)
    train(engine, [2])
    scores, topk = reference.logprobs(input_batch, entropy=True), reference.topk(input_batch, 3)
    train(engine, [3])
    train(other_engine, [2, 3])
    moved = not torch.equal(torch.cat(engine.logprobs(input_batch).logprob), torch.cat(before.logprob))
    equal = all(
        torch.equal(actual_row, two)
        for actual, expected in (
            (scores.logprob, before.logprob),
            (scores.entropy or (), before.entropy or ()),
            (topk[0], before_topk[0]),
            (topk[1], before_topk[1]),
        )
        for actual_row, two in zip(actual, expected, strict=True)
    )
    return moved, equal, bitwise_equal(weights(engine), weights(other_engine))


@pytest.mark.parametrize(("layout", "model"), cases(LAYOUTS[1:3], MORE[2:]))
def test_reference_keeps_its_weights_and_does_not_change_the_engine(ranks: Any, layout: str, model: str) -> None:
    for offload in (False, True):
        for actual in run(ranks, layout, reference_run, SOURCES[model], offload):
            assert actual == (True, True, True)


def read(group: Any, layout: str, hf: PretrainedConfig) -> dict[str, list[Tensor]]:
    engine, input_batch = build(layout, hf), batch(4, (6, 1, 30, 11, 2))
    logprobs, ids = engine.topk(input_batch, 4)
    cool = engine.logprobs(dataclasses.replace(input_batch, temperature=0.7), entropy=True)
    assert cool.entropy is not None
    actual = engine.evaluate_tokens(input_batch, custom_values, shifted=False)
    return {"logprobs": logprobs, "ids": ids, "cool": cool.logprob, "entropy": cool.entropy, **actual}


def custom_values(inputs: OutputInputs) -> dict[str, Tensor]:
    """Outputs of a custom head: [T, 2], and integers [T]."""
    values = inputs.gather(inputs.hidden[:, :2].float())
    return {"own": values, "token": inputs.microbatch.tokens * 10}


@pytest.mark.parametrize(("layout", "model"), cases(LAYOUTS, MORE))
def test_topk_logprobs_and_custom_values_equal_the_plain_model(ranks: Any, layout: str, model: str) -> None:
    input_batch = batch(4, (6, 1, 30, 11, 2))
    plain = load_model(SOURCES[model], dtype=torch.float32)
    microbatches = pack(input_batch.sequences, budget=BUDGET)
    with torch.no_grad():
        logits = unpack(microbatches, [plain(microbatch) for microbatch in microbatches], shifted=False)
        hidden = [plain(microbatch, output_processor=lambda inputs, _: inputs.hidden) for microbatch in microbatches]
    hidden_by_sequence = unpack(microbatches, hidden, shifted=False)
    for actual in run(ranks, layout, read, SOURCES[model]):
        for index, sequence in enumerate(map(torch.as_tensor, input_batch.sequences)):
            logprobs = logits[index].log_softmax(-1)[:-1]
            cool = (logits[index] / 0.7).log_softmax(-1)[:-1]
            assert_equal(actual["logprobs"][index][1:], logprobs.topk(4).values, "top-k log-probs")
            assert_equal(logprobs.gather(1, actual["ids"][index][1:]), logprobs.topk(4).values, "top-k ids")
            assert_equal(actual["cool"][index][1:], cool.gather(1, sequence[1:, None])[:, 0], "log-probs")
            assert_equal(actual["entropy"][index][1:], -(cool.exp() * cool).sum(-1), "entropy")
            assert all(not actual[name][index][0].any() for name in ("logprobs", "ids", "cool", "entropy"))
            assert_equal(actual["own"][index], hidden_by_sequence[index][:, :2], "own values")
            assert torch.equal(actual["token"][index], sequence * 10)


# --- recompute


def recomputing(group: Any, layout: str, hf: PretrainedConfig) -> dict[str, Any]:
    actual = {}
    for recompute in ("none", "selective", "full"):
        engine = build(layout, hf, recompute=recompute)
        loss = engine.forward_backward(batch(1), policy).loss
        actual[recompute] = loss, {name: tensor.clone() for name, tensor in engine.gradients()}
    return actual


@pytest.mark.parametrize(("layout", "model"), cases(LAYOUTS[4:], LAYOUTS[:4]))
def test_recompute_changes_neither_loss_nor_gradients(ranks: Any, layout: str, model: str) -> None:
    for actual in run(ranks, layout, recomputing, SOURCES[model]):
        loss, gradients = actual["none"]
        for recompute in ("selective", "full"):
            assert actual[recompute][0] == loss
            assert_all_equal(actual[recompute][1], gradients)


# --- the selection bias of a MoE, which no family has yet: the engine is given a config that does


def biased(hf: PretrainedConfig) -> ModelConfig:
    _, model = model_from_hf(hf)
    block = model.blocks["E"]
    assert isinstance(block, MoEConfig)
    changed = dataclasses.replace(block, selection_bias=True, selection_bias_rate=0.01, balance_coefficient=0.0)
    return dataclasses.replace(model, blocks={**model.blocks, "E": changed})


def selection_biases(engine: Engine) -> dict[str, Tensor]:
    return {
        block.name: block.selection_bias.clone()
        for stage in engine.stage_models.values()
        for block in stage.modules()
        if isinstance(block, MoE)
    }


def balancing(group: Any, layout: str, recompute: str, directory: str) -> tuple[dict[str, Tensor], bool]:
    engine = build(layout, biased(MOE), recompute=recompute)
    for seed in range(3):
        engine.logprobs(batch(9))  # an evaluation does not count
        engine.forward_backward(batch(seed), policy)
        engine.optimizer_step()
    engine.save(directory)
    second_engine = build(layout, biased(MOE), seed=1)
    second_engine.load(directory)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, selection_biases(engine))
    gathered: dict[str, Tensor] = {}
    is_equal = bitwise_equal(selection_biases(engine), selection_biases(second_engine))
    for biases in everyone:
        is_equal = is_equal and all(torch.equal(gathered.get(name, bias), bias) for name, bias in biases.items())
        gathered |= biases
    return dict(sorted(gathered.items())), is_equal


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        ("dp_shard=2,ep=2", "none"),
        ("tp=2", "full"),
        pytest.param("pp=2,cp=2,ep=2", "selective", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.slow
def test_selection_biases_follow_the_load_of_all_ranks(ranks: Any, tmp_path: Any, layout: str, recompute: str) -> None:
    ((expected, _),) = run(ranks, "", balancing, "none", str(tmp_path / "one"))
    assert any(bias.any() for bias in expected.values())
    for actual, is_equal in run(ranks, layout, balancing, recompute, str(tmp_path / "many")):
        assert is_equal
        assert bitwise_equal(actual, expected)


BIASED = CONFIGS["glm4_moe"]()  # as DeepSeek-V3 and Nemotron-H choose experts, too


def selection_bias_by_rate(group: Any, directory: str) -> dict[str, Any]:
    """Returns the selection biases after three steps without a learning rate, by their rate; and the export."""
    actual: dict[str, Any] = {}
    for rate in (None, 0.0, 0.01):
        engine = build("", BIASED, selection_bias_rate=rate, optimizer=AdamW(lr=0.0))
        for block in engine.stage_models[0].blocks:
            for buffer in block.buffers():
                buffer.fill_(0.25)  # as loaded
        engine.zero_grad()
        before = {name: bias.clone() for name, bias in engine.tensors.items() if "selection_bias" in name}
        for seed in range(3):
            engine.forward_backward(batch(seed, vocab_size=61), policy)
            engine.optimizer_step()
        actual[str(rate)] = {name: (engine.tensors[name] - bias).abs().max().item() for name, bias in before.items()}
        exported = engine.export_hf(Path(directory) / str(rate))
        actual[f"{rate} exported"] = {
            name: tensor for name, tensor in load_model(exported).state_dict().items() if "selection_bias" in name
        }
        assert bitwise_equal(actual[f"{rate} exported"], {name: engine.tensors[name] for name in before})
    return actual


def test_a_selection_bias_is_updated_by_its_own_rate_only(ranks: Any, tmp_path: Path) -> None:
    (actual,) = ranks(1, selection_bias_by_rate, str(tmp_path))
    for rate, far in ("None", 0.0), ("0.0", 0.0):
        assert set(actual[rate].values()) == {far}
    assert all(0.0 < moved < 0.0301 for moved in actual["0.01"].values())


def test_a_selection_bias_rate_needs_a_router_with_a_bias() -> None:
    with pytest.raises(ValueError, match=r"selection_bias_rate is 0.01, but no router of \[\*E\]\{2\} has"):
        model_from_hf(MOE)[1].with_selection_bias_rate(0.01)
    with pytest.raises(ValueError, match="selection_bias_rate is -1, but it must be a number of at least 0"):
        model_from_hf(BIASED)[1].with_selection_bias_rate(-1.0)


def refused_topk(group: Any) -> list[str]:
    engine = build("", config("tiny-dense"))
    messages = [error_text(lambda k=k: engine.topk(batch(1), k)) for k in (0, -1, engine.config.vocab_size + 1)]
    logprobs, _ = engine.topk(batch(1), 1)  # the engine stays usable
    return [*messages, str(logprobs[0].shape[1])]


def test_topk_of_0_or_above_the_vocabulary_is_refused(ranks: Any) -> None:
    (messages,) = ranks(1, refused_topk)
    for message, k in zip(messages[:3], (0, -1, DENSE.vocab_size + 1), strict=True):
        assert message.startswith(f"ValueError: topk(k={k}): k counts tokens of the vocabulary; use 1 to ")
    assert messages[3] == "1"
