"""An objective may use other parts of the model in each microbatch: no rank waits for another, and layouts agree."""

from typing import Any

import pytest
import torch
from torch import Tensor

from postlude import Batch, Engine, Layout, Loss, OutputInputs
from postlude.lora import LoRA
from postlude.model.blocks import MoEConfig
from postlude.objectives import MTP, SFT, ValueLoss
from tests.engine.test_critic import full_critic
from tests.equality import assert_equal
from tests.meshes import mesh
from tests.model.small import sequences, small_config

EXPERTS = MoEConfig(experts=4, top_k=2, intermediate_size=12, balance_coefficient=0.1)
AHEAD = small_config("[*-][*E]/[*E]", blocks={"E": EXPERTS})
LENGTHS = (30, 31)  # a microbatch each


def constant(inputs: OutputInputs) -> Loss:
    return Loss(torch.zeros(len(inputs.microbatch)))


def values(inputs: OutputInputs) -> Loss:
    return ValueLoss(clip=None, over="tokens")(inputs)


def first_depth(inputs: OutputInputs) -> Loss:
    ahead = next(iter(inputs.depths()))
    return Loss(-ahead.head.logprobs(ahead.hidden, ahead.microbatch.targets).logprob, depth=1)


def everything(inputs: OutputInputs) -> Loss:
    return MTP(objective=lambda inputs: SFT()(inputs) + 0.5 * values(inputs), weight=0.5)(inputs)


PARTS = {"constant": constant, "head": SFT(), "values": values, "depth": first_depth}


def different_parts(group: Any, layout: str, part: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """Returns loss and gradients if the second microbatch uses one part, and the first everything."""

    def objective(inputs: OutputInputs) -> Loss:
        return everything(inputs) if inputs.microbatch.index == 0 else PARTS[part](inputs)

    engine = Engine(AHEAD, mesh=mesh(Layout.parse(layout)), budget=32, critic=True, mtp=True, **options)
    for name, parameter in engine.parameters.items():
        if name.startswith("value_head"):
            torch.nn.init.constant_(parameter, 0.1)
    tokens = sequences(*LENGTHS)
    batch = Batch(tokens, {"returns": [torch.linspace(0, 1, len(row)) for row in tokens]})
    result = engine.forward_backward(batch, objective)
    evaluated = engine.evaluate_loss(batch, objective).loss
    gradients = {name: tensor.clone() for name, tensor in engine.gradients()}
    engine.optimizer_step()
    critic = {"value_head": full_critic(engine)} if "lora" not in options else {}
    return {"loss": torch.tensor(result.loss), "evaluated": torch.tensor(evaluated), **gradients, **critic}


@pytest.mark.parametrize(
    ("part", "layout", "options"),
    [
        *((part, "dp_shard=2", {}) for part in PARTS),
        ("constant", "dp_shard=2", {"gather_once": True}),
        ("values", "dp_shard=2", {"overlap": True}),
        ("constant", "dp_shard=2,ep=2", {"overlap": True}),
        ("values", "tp=2", {}),
        ("constant", "cp=2", {}),
        ("constant", "pp=2", {}),
        ("values", "dp_shard=2", {"lora": LoRA(rank=2)}),
    ],
    ids=str,
)
def test_microbatches_may_use_different_parts_in_every_layout(
    ranks: Any, part: str, layout: str, options: dict[str, Any]
) -> None:
    (expected,) = ranks(1, different_parts, "", part, {"lora": options["lora"]} if "lora" in options else {})
    for actual in ranks(2, different_parts, layout, part, options):
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            assert_equal(actual[name], tensor, name)


def gathered(group: Any, layout: str, mtp: bool) -> list[dict[str, Tensor]]:
    """Returns the gradients of an objective without depths, gathered once and for each microbatch."""
    results = []
    for gather_once in (True, False):
        options: dict[str, Any] = {"compute_dtype": torch.bfloat16, "mtp": mtp, "gather_once": gather_once}
        engine = Engine(AHEAD, mesh=mesh(Layout.parse(layout)), budget=32, **options)
        engine.forward_backward(Batch(sequences(*LENGTHS)), SFT())
        results.append({name: tensor.clone() for name, tensor in engine.gradients()})
    return results


@pytest.mark.parametrize(
    ("layout", "mtp"),
    [("dp_shard=2", False), ("dp_shard=2", True), pytest.param("pp=2,dp_shard=2", False, marks=pytest.mark.slow)],
)
def test_depths_that_the_objective_does_not_use_may_be_gathered_once(ranks: Any, layout: str, mtp: bool) -> None:
    for once, each in ranks(Layout.parse(layout).world_size, gathered, layout, mtp):
        for name, gradient in each.items():
            assert_equal(once[name], gradient, name)
