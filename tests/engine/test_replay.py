"""Routing replay: every layout equals one rank; batches that cannot be replayed are refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from postlude import AdamW, Batch, Layout, ModelConfig
from postlude.objectives import MTP, SFT
from tests.engine.training import build, error_text
from tests.equality import assert_equal
from tests.model.small import REPLAYED_EXPERTS, sequences, small_config
from tests.model.test_replay import random_routing

LENGTHS = (20, 17, 3, 25, 6, 11, 9, 14, 2, 12)


def config(pattern: str = "[*E][*-][*E]{2}/[*E]") -> ModelConfig:
    return small_config(pattern, blocks={"E": REPLAYED_EXPERTS})


def batch() -> Batch:
    """Every fifth token, and the second sequence, use the router's own choice."""
    routing = random_routing(3, sum(LENGTHS), experts=4)
    routing[::5] = -1
    by_sequence = list(routing.split(LENGTHS))
    by_sequence[1] = torch.full_like(by_sequence[1], -1)
    return Batch(sequences(*LENGTHS), {"routing": by_sequence})


def learned(group: Any, layout: str, input_batch: Batch, options: dict[str, Any]) -> dict[str, Any]:
    engine = build(layout, config(), optimizer=AdamW(lr=1e-2), mtp=True, **options)
    result = engine.forward_backward(input_batch, MTP(objective=SFT()))
    results = {"loss": torch.tensor(result.loss), "changed": result.metrics.get("moe/routing_changed")}
    layers = {**result.metrics, **result.layer_vectors}
    results["layers"] = {name: torch.tensor(value) for name, value in layers.items() if name.startswith("moe/")}
    results["gradients"] = {name: tensor.clone() for name, tensor in engine.gradients()}
    results["logprobs"] = torch.cat(engine.logprobs(input_batch).logprob)
    engine.optimizer_step()
    results["biases"] = {name: tensor.clone() for name, tensor in engine.tensors.items() if "selection_bias" in name}
    return results


@pytest.fixture(scope="module")
def expected(ranks: Any) -> dict[str, Any]:
    return ranks(1, learned, "", batch(), {})[0]


def assert_identical(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert_equal(actual["loss"], expected["loss"], "loss")
    assert_equal(actual["logprobs"], expected["logprobs"], "log-probs")
    assert actual["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        assert_equal(actual["gradients"][name], gradient, name)
    assert actual["layers"].keys() == expected["layers"].keys()
    for name, value in expected["layers"].items():
        assert_equal(actual["layers"][name], value, name)
    for name, bias in actual["biases"].items():
        assert torch.equal(bias, expected["biases"][name]), name


def test_replay_changes_the_results(ranks: Any, expected: dict[str, Any]) -> None:
    """Without replay, losses, log-probs and gradients differ, and no routing metric is reported."""
    (plain,) = ranks(1, learned, "", Batch(sequences(*LENGTHS)), {})
    assert plain["changed"] is None
    assert 0.3 < expected["changed"] < 0.7  # by chance, two of four are the same half the time
    assert abs(plain["loss"] - expected["loss"]) > 1e-3
    start = LENGTHS[0]
    sequence_slice = slice(start, start + LENGTHS[1])  # of the sequence that chooses for itself nothing changed
    assert torch.equal(plain["logprobs"][sequence_slice], expected["logprobs"][sequence_slice])
    assert (plain["logprobs"] - expected["logprobs"]).abs().max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("pp=2,cp=2,ep=2", {"recompute": "selective", "overlap": True}),
        pytest.param("pp=2,vpp=2,dp_shard=2,ep=2", {"overlap": True}, marks=pytest.mark.thorough),
        pytest.param("cp=2,tp=2,ep=4", {}, marks=pytest.mark.thorough),
        pytest.param("dp_replicate=2", {}, marks=pytest.mark.thorough),
    ],
)
def test_layout_equals_one_rank(ranks: Any, expected: dict[str, Any], layout: str, options: dict[str, Any]) -> None:
    for actual in ranks(Layout.parse(layout).world_size, learned, layout, batch(), options):
        assert_identical(actual, expected)


def test_overlapped_is_bit_identical_to_plain(ranks: Any, expected: dict[str, Any]) -> None:
    (actual,) = ranks(1, learned, "", batch(), {"overlap": True})
    assert torch.equal(actual["loss"], expected["loss"])
    assert all(torch.equal(actual["gradients"][name], gradient) for name, gradient in expected["gradients"].items())


def changed_fraction(group: Any, layout: str, input_batch: Batch) -> float | None:
    engine = build(layout, config("[*E]|[*E]{2}"))
    return engine.forward_backward(input_batch, SFT()).metrics.get("moe/routing_changed")


@pytest.mark.parametrize("router", [0, 2])
def test_metrics_of_a_single_stages_routers_are_reported(ranks: Any, router: int) -> None:
    """For the first and the last pipeline stage: one router replays, the others choose."""
    routing = random_routing(3, sum(LENGTHS), experts=4)
    routing[:, [other_router for other_router in range(3) if other_router != router]] = -1
    input_batch = Batch(sequences(*LENGTHS), {"routing": list(routing.split(LENGTHS))})
    (expected,) = ranks(1, changed_fraction, "", input_batch)
    assert expected is not None
    assert 0.3 < expected < 0.7
    assert ranks(2, changed_fraction, "pp=2", input_batch) == [expected, expected]


def refusals(group: Any, input_batch: Batch) -> str:
    return error_text(lambda: build("", config()).logprobs(input_batch))


def test_batches_with_invalid_routing_are_refused(ranks: Any) -> None:
    def changed_batch(change: Any) -> Batch:
        return replace(batch(), columns={"routing": [change(experts) for experts in batch().columns["routing"]]})

    def with_expert(routing: Tensor) -> Tensor:
        return torch.where(routing == 3, 4, routing)

    for change, message in (
        (with_expert, "expert 4 of layers.0.moe, whose experts are numbered from 0 to 3"),
        (lambda routing: routing[:, :2], "(2, 2) per token, but the model sends a token to 2 experts in each of 3"),
        (lambda routing: routing[:, :, :1], "(3, 1) per token"),
        (lambda routing: routing[:-1], 'column "routing" has 24 values for sequence 3, which has 25 tokens'),
        (lambda routing: routing.float(), "torch.float32, but experts have numbers"),
    ):
        assert message in ranks(1, refusals, changed_batch(change))[0]
