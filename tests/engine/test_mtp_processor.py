"""A custom per-token loss of MTP depths: layouts and schedule plans equal one rank."""

from typing import Any

import pytest
import torch
from torch import Tensor

from postlude import Batch, Engine, Layout
from postlude.data import IGNORE
from postlude.model import OutputInputs
from postlude.model.blocks import MoEConfig
from postlude.objectives import MTP, SFT
from tests.engine.training import error_text
from tests.equality import assert_equal
from tests.meshes import mesh
from tests.model.small import sequences, small_config

CONFIG = small_config(
    "[*-][*E]/[*E]/[*E]",
    vocab_size=40,
    initializer_range=0.1,
    blocks={"E": MoEConfig(experts=4, top_k=2, intermediate_size=12, router_fp32=True)},
)
LENGTHS = (20, 17, 3, 25, 6, 2, 9, 14)


def focal(depth: int, inputs: OutputInputs, context: Any) -> Tensor:
    """A focal loss with larger weights at deeper depths, and a column with another share."""
    logprob = inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets).logprob
    return -depth * (1 - logprob.exp()) ** context["gamma"] * logprob * (1 + inputs.microbatch.column("score"))


def nll(depth: int, inputs: OutputInputs, context: Any) -> Tensor:
    return -inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets).logprob


def skipping(depth: int, inputs: OutputInputs, context: Any) -> Tensor:
    """Returns no gradient for a microbatch without targets."""
    targets = inputs.microbatch.targets
    return nll(depth, inputs, context) if (targets != IGNORE).any() else torch.zeros(len(targets))


def summed(depth: int, inputs: OutputInputs, context: Any) -> Tensor:
    return nll(depth, inputs, context).sum()


def trained(
    group: Any, layout: str, processor: Any, options: dict[str, Any], lengths: tuple[int, ...] = LENGTHS
) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    """Returns loss, metrics and gradients of one step."""
    batch = sequences(*lengths)
    columns = {
        "score": [torch.linspace(0, 1, len(tokens)) for tokens in batch],
        "mask": [torch.ones(len(tokens)) for tokens in batch],
    }
    stop = options.pop("stop_trunk", False)
    engine = Engine(CONFIG, mesh=mesh(Layout.parse(layout)), budget=32, mtp=True, **options)
    objective = MTP(
        objective=SFT(), weight=0.5, over="mask", stop_trunk=stop, processor=processor, context={"gamma": 2.0}
    )
    result = engine.forward_backward(Batch(batch, columns), objective)
    return result.loss, result.metrics, {name: tensor.clone() for name, tensor in engine.gradients()}


def assert_same(actual: Any, expected: Any) -> None:
    assert actual[0] == pytest.approx(expected[0], rel=1e-5)
    assert actual[1] == pytest.approx(expected[1], rel=1e-5)
    assert actual[2].keys() == expected[2].keys()
    for name, gradient in expected[2].items():
        assert_equal(actual[2][name], gradient, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("tp=2", {"stop_trunk": True}),
        pytest.param("cp=2", {}, marks=pytest.mark.thorough),
        ("dp_shard=2,ep=2", {"overlap": True}),
        ("pp=2", {"overlap": True, "stop_trunk": True}),
    ],
    ids=str,
)
def test_a_layout_equals_one_rank(ranks: Any, layout: str, options: dict[str, Any]) -> None:
    plain = {name: value for name, value in options.items() if name == "stop_trunk"}
    (expected,) = ranks(1, trained, "", focal, plain)
    assert expected[1]["mtp_2/loss"] > expected[1]["mtp_1/loss"] > 0
    assert expected[2]["mtp.0.proj.weight"].any()
    for actual in ranks(2, trained, layout, focal, options):
        assert_same(actual, expected)


@pytest.mark.slow
def test_default_loss_written_as_a_processor_equals_the_default(ranks: Any) -> None:
    (default,), (custom,) = (ranks(1, trained, "", processor, {}) for processor in (None, nll))
    named = {f"mtp_{depth}/loss": default[1][f"mtp_{depth}/nll"] for depth in (1, 2)}
    assert {name: custom[1][name] for name in named} == pytest.approx(named, rel=1e-5)
    other_metrics = {name: value for name, value in default[1].items() if not name.startswith("mtp_")}
    assert_same(
        (custom[0], {name: custom[1][name] for name in other_metrics}, custom[2]),
        (default[0], other_metrics, default[2]),
    )


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"overlap": True}], ids=str)
def test_ranks_without_mtp_targets_do_not_block_other_ranks(ranks: Any, options: Any) -> None:
    """One of two ranks has only sequences of two tokens, so no token is two ahead."""
    (expected,) = ranks(1, trained, "", nll, {}, (32, 2))
    for actual in ranks(2, trained, "dp_shard=2", skipping, options, (32, 2)):
        assert_same(actual, expected)


def refused(group: Any, processor: Any) -> str:
    return error_text(lambda: trained(group, "", processor, {}))


def test_an_mtp_processor_with_a_wrong_result_raises(ranks: Any) -> None:
    (sentence,) = ranks(1, refused, summed)
    assert "the MTP processor returned a tensor of shape (), but this microbatch has 25 tokens" in sentence
    assert sentence.endswith(
        "Return one loss for each of them, [T]; inputs.gather(values) makes them of values for `hidden`."
    )
    (sentence,) = ranks(1, refused, returns_nothing)
    assert "the MTP processor returned a NoneType" in sentence


def returns_nothing(depth: int, inputs: OutputInputs, context: Any) -> None:
    """Returns None."""
