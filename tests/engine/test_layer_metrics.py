"""Router metrics per layer: known choices give known numbers, and every layout reports one rank's."""

import math
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

from postlude import AdamW, Batch
from postlude.engine import PassResult
from postlude.engine.pass_metrics import layer_label
from postlude.model.blocks import MoE
from postlude.objectives import MTP, SFT
from tests.engine.test_replay import batch, config
from tests.engine.training import build
from tests.equality import assert_equal
from tests.model.small import REPLAYED_EXPERTS, sequences, small_config

LENGTHS = (9, 4, 12)
TOKENS = sum(LENGTHS)
BIAS = torch.tensor([0.5, -0.25, 0.0, 0.25])
OBJECTIVE = MTP(objective=SFT())


def layers_of(result: PassResult) -> dict[str, Tensor]:
    values = {**result.metrics, **result.layer_vectors}
    return {name: torch.tensor(value) for name, value in values.items() if name.startswith("moe/")}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_equal(actual[name], value, name)


def known(group: Any) -> tuple[PassResult, PassResult]:
    """Router logits of zero, experts 0 and 2 for every token; then twice as many tokens in two passes of one step."""
    engine = build("", small_config("[*E]", blocks={"E": REPLAYED_EXPERTS}))
    for name, tensor in engine.tensors.items():
        if "router" in name:
            torch.nn.init.zeros_(tensor)
        if "selection_bias" in name:
            tensor.copy_(BIAS)
    routing = [torch.tensor([0, 2]).expand(length, 1, 2) for length in LENGTHS]
    input_batch = Batch(sequences(*LENGTHS), {"routing": routing})
    first = engine.forward_backward(input_batch, SFT())
    engine.evaluate_loss(input_batch, SFT())
    engine.logprobs(input_batch)
    return first, engine.forward_backward(input_batch, SFT())


def test_known_choices_give_known_metrics_for_each_pass(ranks: Any) -> None:
    (results,) = ranks(1, known)
    for result in results:
        assert result.layer_vectors == {"moe/layer_00/load": [TOKENS, 0.0, TOKENS, 0.0]}
        expected = {
            "load_max_over_mean": 2.0,
            "idle_experts": 0.5,
            "entropy": math.log(4),
            "z_loss": math.log(4) ** 2,
            "balance_loss": 1.0,  # whatever the choices are, if all scores are equal
            "selection_bias_range": 0.75,
            "routing_changed": 0.5,  # by its bias the router would choose 0 and 3
        }
        for name, value in expected.items():
            for form in (f"moe/layer_00/{name}", f"moe/{name}", f"moe/{name}_worst"):
                assert result.metrics[form] == pytest.approx(value, rel=1e-6), form
        assert sum(name.startswith("moe/") for name in result.metrics) == 3 * len(expected)


def reported_and_computed_metrics(group: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the engine's metrics, and those computed from the routers' logits and choices."""
    routed: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    balance = MoE.balance

    def watched(self: MoE, weights: Tensor, logits: Tensor, scores: Tensor, choice: Tensor, context: Any) -> Tensor:
        real = slice(None) if context.token_mask is None else context.token_mask
        routed[self.name].append((logits.detach().double()[real], choice[real]))
        return balance(self, weights, logits, scores, choice, context)

    engine = build("", config(), mtp=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MoE, "balance", watched)
        result = engine.forward_backward(Batch(sequences(20, 17, 3, 25, 6)), OBJECTIVE)
    assert result.microbatches > 1
    expected, by_metric = {}, defaultdict(list)
    for name, passes in routed.items():
        logits, choices = (torch.cat(parts) for parts in zip(*passes, strict=True))
        load = torch.bincount(choices.flatten(), minlength=4).double()
        values = {
            "load_max_over_mean": load.max() / load.mean(),
            "idle_experts": (load == 0).double().mean(),
            "entropy": torch.distributions.Categorical(logits=logits).entropy().mean(),
            "z_loss": logits.logsumexp(-1).square().mean(),
            "selection_bias_range": torch.tensor(0.0),
        }
        for metric, value in values.items():
            expected["{}/{}/{}".format(*layer_label(name), metric)] = value
            by_metric[metric].append(value)
        expected["{}/{}/load".format(*layer_label(name))] = load
    for metric, by_layer in by_metric.items():
        layers = torch.stack(by_layer)
        expected[f"moe/{metric}"] = layers.mean()
        expected[f"moe/{metric}_worst"] = layers.amin() if metric == "entropy" else layers.amax()
    return layers_of(result), expected


def test_metrics_equal_the_routers_choices_in_every_layer_and_depth(ranks: Any) -> None:
    ((actual, expected),) = ranks(1, reported_and_computed_metrics)
    assert {name.split("/")[1] for name in actual if name.count("/") == 2} == {
        "layer_00",
        "layer_02",
        "layer_03",
        "mtp_1_layer_00",
    }
    balance = {name for name in actual if "balance_loss" in name}  # a loss that tests of its gradient cover
    assert len(balance) == 4 + 2
    assert_same({name: value for name, value in actual.items() if name not in balance}, expected)


LAYOUTS = ("tp=2,ep=2", "pp=2,vpp=2")  # tests/verify compares what layers measure in every layout
MORE_LAYOUTS = ("cp=2", "dp_shard=2,ep=2", "pp=2")


def measured(group: Any, layouts: tuple[str, ...], recompute: str) -> list[list[dict[str, Tensor]]]:
    """Two passes of one step with replayed routing, and one after the step moved the selection bias."""
    results = []
    for layout in layouts:
        engine = build(layout, config(), optimizer=AdamW(lr=1e-3), mtp=True, recompute=recompute)
        input_batch, other_batch = batch(), Batch(sequences(5, 30, 7, 2, seed=1))
        counts = engine.count(input_batch, other_batch)
        passes = [
            engine.forward_backward(step_batch, OBJECTIVE, counts=counts) for step_batch in (input_batch, other_batch)
        ]
        engine.optimizer_step()
        results.append([layers_of(result) for result in (*passes, engine.forward_backward(other_batch, OBJECTIVE))])
    return results


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [LAYOUTS, pytest.param(MORE_LAYOUTS, marks=pytest.mark.thorough)], ids=str)
def test_layout_metrics_equal_one_rank(ranks: Any, layouts: tuple[str, ...]) -> None:
    """Each token counts once under tp and cp, every stage and depth under pp and vpp, a recomputed layer once."""
    ((expected,),) = ranks(1, measured, ("",), "none")
    assert "moe/layer_02/routing_changed" in expected[0]
    assert "moe/routing_changed" not in expected[1]
    assert expected[2]["moe/selection_bias_range"] == pytest.approx(2e-3)
    for rank in ranks(2, measured, layouts, "full"):
        for passes in rank:
            for actual, values in zip(passes, expected, strict=True):
                assert_same(actual, values)
