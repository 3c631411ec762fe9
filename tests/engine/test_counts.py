"""Denominators are checked before a pass: an unknown or zero count raises, and the engine stays usable."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from postlude import Batch, Engine, Layout, Loss, OutputInputs
from postlude.model.blocks import MoEConfig
from postlude.objectives import MTP, SFT, Objective, PolicyGradient, total
from postlude.options import SharePrefixes
from tests.engine.training import bitwise_equal, error_text
from tests.equality import assert_equal
from tests.meshes import mesh
from tests.model.small import sequences, small_config

EXPERTS = MoEConfig(experts=4, top_k=2, intermediate_size=12, balance_coefficient=0.5, z_coefficient=0.1)
DENSE = small_config("[*-]{2}")
AHEAD = small_config("[*E]{2}/[*E]", blocks={"E": EXPERTS})
LENGTHS = (20, 5, 9, 12, 3, 30)


def batch(**columns: Any) -> Batch:
    return Batch(sequences(*LENGTHS), columns)


def engine_in(layout: str, source: Any = DENSE) -> Engine:
    return Engine(source, mesh=mesh(Layout.parse(layout)), budget=32, mtp=bool(source.pattern.mtp))


def gradients(engine: Engine) -> dict[str, Tensor]:
    actual = {name: tensor.clone() for name, tensor in engine.gradients()}
    engine.zero_grad()
    return actual


# --- a step of several calls


def step_in_two_calls(group: Any, layout: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Runs a step in one call and in two with the counts of both. Returns also the errors of incomplete counts."""
    engine, objective = engine_in(layout, AHEAD), MTP(objective=SFT(), weight=0.3)
    full_batch = batch()
    parts = [Batch(full_batch.sequences[:2]), Batch(full_batch.sequences[2:])]
    engine.forward_backward(full_batch, objective)
    expected, counts = gradients(engine), engine.count(*parts)
    targets = sum(LENGTHS) - len(LENGTHS)
    ahead = sum(max(0, length - 2) for length in LENGTHS)
    assert counts == {"sequences": 6, "tokens": targets, "tokens +1": ahead, "all_tokens": sum(LENGTHS)}
    sentences = []
    for name in ("tokens", "tokens +1", "all_tokens"):
        fewer = {column: count for column, count in counts.items() if column != name}
        sentences.append(error_text(lambda fewer=fewer: engine.forward_backward(parts[0], objective, counts=fewer)))
    other_counts = {**counts, "tokens": 1.0 + group.rank()}
    sentences.append(error_text(lambda: engine.forward_backward(parts[0], objective, counts=other_counts)))
    for part in parts:
        engine.forward_backward(part, objective, counts=counts)
    return expected, gradients(engine), sentences


@pytest.mark.parametrize("layout", ["dp_shard=2", "pp=2"])
def test_several_calls_with_the_counts_of_the_step_equal_one(ranks: Any, layout: str) -> None:
    """Including MTP depths and their auxiliary losses. Counts that lack one of them are refused."""
    for expected, actual, (tokens, ahead, every, differ) in ranks(2, step_in_two_calls, layout):
        for name, gradient in expected.items():
            assert_equal(actual[name], gradient, name)
        assert tokens.startswith('LookupError: a loss is a mean over "tokens", whose sum over the step is not known')
        assert ahead.startswith('LookupError: a loss is a mean over "tokens +1", whose sum over the step is not known')
        assert every.startswith('LookupError: counts has no "all_tokens"')
        assert "or different counts" in differ


def step_with_shared_tokens(group: Any, share: SharePrefixes) -> dict[str, Tensor]:
    """Returns the gradients of a step of two calls with the counts of both, whose sequences begin alike."""
    source = small_config("[*E]{2}", blocks={"E": EXPERTS})
    engine = Engine(source, budget=32, share_prefixes=share)
    tokens = sequences(20)[0]
    parts = [Batch([tokens[:length] for length in lengths]) for lengths in ((20, 12), (9, 15, 8))]
    counts = engine.count(*parts)
    results = [engine.forward_backward(part, SFT(), counts=counts) for part in parts]
    assert all((result.shared_tokens > 0) == (share == "always") for result in results)
    return gradients(engine)


def test_shared_tokens_have_the_counts_of_the_step(ranks: Any) -> None:
    """Of the auxiliary losses too, whose gradients are those of the routers."""
    (expected,), (actual,) = (ranks(1, step_with_shared_tokens, share) for share in ("off", "always"))
    for name, gradient in expected.items():
        assert_equal(actual[name], gradient, name)


def losses_with_empty_counts(group: Any) -> list[float]:
    engine, part = engine_in("dp_shard=2"), batch()
    passes = (engine.forward_backward, engine.evaluate_loss)
    return [run(part, SFT(), **options).loss for run in passes for options in ({}, {"counts": {}})]


def test_empty_counts_are_those_of_the_batch(ranks: Any) -> None:
    for losses in ranks(2, losses_with_empty_counts):
        assert len(set(losses)) == 1


# --- a loss over sequences, further ahead


def sequence_loss_at_depth(inputs: OutputInputs) -> Loss:
    loss = SFT()(inputs)
    for ahead in inputs.depths():
        logprob = ahead.head.logprobs(ahead.hidden, ahead.microbatch.targets).logprob
        loss = loss + Loss(-ahead.microbatch.sequence_sum(logprob), "sequences", depth=1)
    return loss


def depth_loss_in_layout(group: Any, layout: str) -> tuple[float, dict[str, Tensor]]:
    engine = engine_in(layout, AHEAD)
    return engine.forward_backward(batch(), sequence_loss_at_depth).loss, gradients(engine)


def test_sequence_loss_at_a_depth_is_the_mean_in_every_layout(ranks: Any) -> None:
    ((loss, expected),) = ranks(1, depth_loss_in_layout, "")
    for layout in ("dp_shard=2", "cp=2"):
        for found_loss, actual in ranks(2, depth_loss_in_layout, layout):
            assert_equal(torch.tensor(found_loss), torch.tensor(loss), "loss")
            for name, gradient in expected.items():
                assert_equal(actual[name], gradient, name)


# --- what is refused, before a pass or after it


def named_loss(inputs: OutputInputs) -> Loss:
    return Loss(SFT()(inputs).values, metrics={"loss": total(torch.ones(()))})


def loss_with_zero_count(inputs: OutputInputs) -> Loss:
    return SFT()(inputs) + Loss(inputs.gather(inputs.hidden).float().sum(-1), over="none")


def loss_with_unknown_count(inputs: OutputInputs) -> Loss:
    return Loss(inputs.gather(inputs.hidden).float().sum(-1), over="nothing such")


def loss_with_wrong_shape(inputs: OutputInputs) -> Loss:
    return Loss(inputs.hidden.float().sum().expand(3), over="tokens")


ZEROS: dict[str, Any] = {"none": [0.0] * len(LENGTHS)}
BEFORE: dict[str, tuple[Objective, Batch, str]] = {
    "zero sum": (SFT(over="none"), batch(**ZEROS), 'a mean over "none", whose weights sum to 0 in this batch'),
    "zero sum beside depths": (
        MTP(objective=PolicyGradient(over="none")),
        batch(**ZEROS),
        'a mean over "none", whose weights sum to 0 in this batch',
    ),
    "unknown": (SFT(over="mask"), batch(**ZEROS), 'a mean over "mask", whose sum over the step is not known'),
    "sequences": (SFT(), batch(sequences=[7.0] * 6), 'a column is named "sequences", which is the name of a count'),
    "all_tokens": (SFT(), batch(all_tokens=[7.0] * 6), 'a column is named "all_tokens", which is the name of a count'),
    "further ahead": (SFT(), batch(**{"tokens +1": [7.0] * 6}), 'a column is named "tokens +1", which is the name of'),
}
AFTER: dict[str, tuple[Objective, Batch, str]] = {
    "zero sum": (loss_with_zero_count, batch(**ZEROS), 'a mean over "none", whose weights sum to 0 in this batch'),
    "unknown": (loss_with_unknown_count, batch(), 'the microbatch has no column "nothing such"'),
    "a metric named loss": (named_loss, batch(), 'a metric is named "loss", which the loss itself is called'),
    "shape": (loss_with_wrong_shape, batch(), 'values over "tokens" have shape (3,)'),
}


def refused_before(group: Any, layout: str) -> list[str]:
    """Raises before the pass: the gradients of the step so far are kept."""
    engine, fresh = engine_in(layout), engine_in(layout)
    engine.forward_backward(batch(), SFT())
    sentences = []
    for objective, bad_batch, _ in BEFORE.values():
        trained, measured = (
            error_text(partial(call, bad_batch, objective)) for call in (engine.forward_backward, engine.evaluate_loss)
        )
        assert trained == measured
        sentences.append(trained)
    for tested_engine in (engine, fresh):
        tested_engine.forward_backward(batch(), SFT())
    fresh.forward_backward(batch(), SFT())
    assert bitwise_equal(gradients(engine), gradients(fresh))
    return sentences


def refused_after(group: Any, layout: str) -> list[str]:
    """Raises after the pass: only the gradients of the step are lost."""
    engine, fresh = engine_in(layout), engine_in(layout)
    sentences = []
    for objective, bad_batch, _ in AFTER.values():
        assert error_text(partial(engine.evaluate_loss, bad_batch, objective)) != "nothing"
        sentences.append(error_text(partial(engine.forward_backward, bad_batch, objective)))
        assert "the gradients of this step were lost" in error_text(engine.optimizer_step)
        engine.zero_grad()
    for tested_engine in (engine, fresh):
        tested_engine.forward_backward(batch(), SFT())
    assert bitwise_equal(gradients(engine), gradients(fresh))
    return sentences


@pytest.mark.parametrize(
    ("refused", "cases", "layout"),
    [
        (refused_before, BEFORE, "cp=2"),
        (refused_before, BEFORE, "pp=2"),
        (refused_after, AFTER, ""),
        (refused_after, AFTER, "dp_shard=2"),
        pytest.param(refused_after, AFTER, "pp=2", marks=pytest.mark.thorough),
    ],
)
def test_unknown_counts_raise_on_every_rank_and_the_engine_stays_usable(
    ranks: Any, layout: str, refused: Callable[..., list[str]], cases: dict[str, tuple[Any, Any, str]]
) -> None:
    results = ranks(Layout.parse(layout).world_size, refused, layout)
    for number, (name, (_, _, sentence)) in enumerate(cases.items()):
        messages = [sentences[number] for sentences in results]
        if refused is refused_after or name in ("zero sum", "zero sum beside depths", "unknown"):
            assert all(sentence in message for message in messages), (name, messages)
        else:  # a rank that could read its part says that another could not
            assert any(sentence in message for message in messages), (name, messages)


# --- what an evaluation brings back

DTYPES = (torch.bool, torch.uint8, torch.int16, torch.int32, torch.bfloat16, torch.float16, torch.float64)


def evaluated(group: Any, layout: str) -> dict[str, list[Tensor]]:
    engine = engine_in(layout)

    def processor(inputs: OutputInputs) -> dict[str, Tensor]:
        places = inputs.microbatch.batch_indices
        actual = {f"{dtype}": (places % 7 - 3).to(dtype) for dtype in DTYPES}
        actual["wide"] = torch.stack((places, -places), -1).to(torch.int16)
        return actual | {f"a name of its own for layer {index}": places for index in range(200)}

    actual = engine.evaluate_tokens(batch(), processor, shifted=False)
    batch_indices = engine.evaluate_tokens(batch(), lambda inputs: {"x": inputs.microbatch.batch_indices})["x"]
    assert len(batch_indices) == len(LENGTHS)
    (alone,) = engine.evaluate_tokens(Batch(sequences(6)), processor, shifted=False)["wide"]  # one rank has no token
    assert alone[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    return actual


@pytest.mark.parametrize("layout", ["", "pp=2", "cp=2", pytest.param("dp_shard=2", marks=pytest.mark.thorough)])
def test_values_of_any_dtype_and_name_are_returned(ranks: Any, layout: str) -> None:
    places = torch.arange(sum(LENGTHS)).split(LENGTHS)
    for actual in ranks(Layout.parse(layout).world_size, evaluated, layout):
        assert len(actual) == len(DTYPES) + 201
        for dtype in DTYPES:
            for values, expected in zip(actual[str(dtype)], places, strict=True):
                assert torch.equal(values, (expected % 7 - 3).to(dtype))
        for values, expected in zip(actual["wide"], places, strict=True):
            assert torch.equal(values, torch.stack((expected, -expected), -1).to(torch.int16))
        assert all(map(torch.equal, actual["a name of its own for layer 199"], places))
