"""LoRA adapters train over NCCL as on one rank."""

from typing import Any

import pytest
import torch

from postlude import Engine, Layout
from postlude.engine.adapters import stream_adapters
from tests.conftest import Ranks
from tests.engine.test_lora import RANK4, SOURCES, fill
from tests.engine.training import BUDGET, DAMPED, batch, policy
from tests.equality import assert_equal
from tests.nccl.conftest import mesh


def train(group: Any, source: str, layout: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    engine = Engine(
        SOURCES[source],
        mesh=mesh(Layout.parse(layout)),
        budget=BUDGET,
        optimizer=DAMPED,
        lora=RANK4,
        compute_dtype=torch.float32,
        **options,
    )
    for name, parameter in engine.parameters.items():
        if name.endswith(".b"):
            fill(name, parameter)
    loss = engine.forward_backward(batch(0), policy).loss
    gradients = {name: tensor.cpu() for name, tensor in stream_adapters(engine, gradients=True)}
    engine.optimizer_step()
    logprobs = torch.cat(engine.logprobs(batch(1)).logprob)
    return {"loss": torch.tensor(loss), "log-probs after a step": logprobs} | gradients


@pytest.mark.parametrize(
    ("source", "layout", "options"),
    [
        ("dense", "tp=2", {}),
        ("moe", "dp_shard=2,ep=2", {"overlap": True}),
        ("hybrid", "pp=2", {"overlap": "zero_bubble"}),
        ("latent", "tp=2,ep=2", {}),
    ],
    ids=str,
)
def test_lora_training_in_layout_equals_one_rank(
    nccl_ranks: Ranks, source: str, layout: str, options: dict[str, Any]
) -> None:
    expected = nccl_ranks(1, train, source, "", {})[0]
    actual = nccl_ranks(Layout.parse(layout).world_size, train, source, layout, options)[0]
    assert actual.keys() == expected.keys()
    for name in expected:
        assert_equal(actual[name], expected[name], name)
