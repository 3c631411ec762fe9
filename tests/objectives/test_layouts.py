"""Every objective in every layout equals its plain formula on one rank: loss and every gradient."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from postlude import LanguageModel, Layout
from postlude.data import Batch
from postlude.engine import Engine
from postlude.hf.builtin import BUILTIN
from postlude.hf.read_model import model_from_hf
from postlude.model.parallel import local_shard, region
from postlude.objectives import PolicyGradient
from tests.conftest import Ranks
from tests.equality import TOLERANCE, assert_equal, difference
from tests.meshes import mesh
from tests.objectives import plain
from tests.objectives.cases import OBJECTIVES, SETTINGS, batch_for, with_critic

LAYOUTS = ["tp=2", "pp=2", "cp=2", "dp_shard=2"]
CASES = [
    ("sft", "over a mask"),
    ("sft", "z-loss"),
    ("preference", "DPO"),
    ("preference", "SimPO"),
    ("preference", "NLL of the chosen"),
    ("policy", "PPO"),
    ("policy", "GSPO with all"),
    ("policy", "TIS on policy"),
    ("policy", "entropy"),
    ("policy", "Dr. GRPO"),
    ("value", "clipped"),
    ("value", "value head alone"),
    ("ppo", "policy and critic"),
    ("distill", "mixed"),
    ("distill", "with labels"),
    ("reward", "centred"),
    ("orpo", "plain"),
    ("kto", "desirable counts more"),
]
CRITIC = [case for case in CASES if case[0] in ("value", "ppo", "reward")]


def tiny() -> Any:
    config = BUILTIN["tiny-dense"]()
    config.initializer_range = 0.1
    config.num_hidden_layers = 2
    return config


@functools.cache
def one_rank() -> tuple[LanguageModel, Batch]:
    model = with_critic(model_from_hf(tiny())[1])
    return model, batch_for(model)


@functools.cache
def engine_of(layout: str) -> Engine:
    # Several microbatches, as large as all the pairs together.
    engine = Engine(tiny(), mesh=mesh(Layout.parse(layout)), budget=48, critic=True)
    critic, value_head = engine.parameters.get("value_head.weight"), one_rank()[0].value_head
    if critic is not None and value_head is not None:
        local_shard(critic).copy_(value_head.weight.detach()[region(critic)])
    return engine


def compare(group: dist.ProcessGroup, layout: str, kind: str, name: str) -> dict[str, float]:
    """Returns the differences of this rank's loss and gradients from the plain formula's."""
    model, batch = one_rank()
    settings = SETTINGS[kind][name]
    objective, expected = OBJECTIVES[kind](**settings), plain.PLAIN[kind](model, batch, **settings)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(expected, parameters, allow_unused=True)
    expected_gradients = dict(zip(names, gradients, strict=True))
    head = "value_head.weight"
    unreached = {"value head alone": [parameter_name for parameter_name in names if parameter_name != head]}.get(
        name, [] if (kind, name) in CRITIC else [head]
    )
    assert [parameter_name for parameter_name in names if expected_gradients[parameter_name] is None] == unreached

    engine = engine_of(layout)
    engine.zero_grad()
    result = engine.forward_backward(batch, objective)
    off = {"loss": difference(torch.tensor(result.loss), expected.detach())}
    for parameter, tensor in engine.parameters.items():
        assert tensor.grad is not None, parameter
        actual, full_gradient = local_shard(tensor.grad), expected_gradients[parameter]
        if full_gradient is None:
            off[parameter] = float(actual.abs().sum())
        else:
            off[parameter] = float((actual - full_gradient[region(tensor)]).abs().max()) / float(
                full_gradient.abs().max()
            )
    return off


def objectives_in_layouts() -> list[Any]:
    """Every objective in every layout. `make test` has each in one layout, and sequence-level losses in cp=2."""
    results = []
    for turn, layout in enumerate(LAYOUTS):
        for place, (kind, name) in enumerate(CASES):
            quick = turn == place % 4 or (layout == "cp=2" and kind in ("preference", "reward", "kto", "orpo"))
            mark = pytest.mark.slow if quick else pytest.mark.thorough
            results.append(pytest.param(layout, kind, name, id=f"{layout}-{kind}-{name}", marks=mark))
    return results


@pytest.mark.parametrize(("layout", "kind", "name"), objectives_in_layouts())
def test_equals_the_plain_formula(ranks: Ranks, layout: str, kind: str, name: str) -> None:
    for off in ranks(2, compare, layout, kind, name):
        assert_within(off)


def assert_within(off: dict[str, float]) -> None:
    assert max(off.values()) <= TOLERANCE, {name: value for name, value in off.items() if value > TOLERANCE}


@pytest.mark.parametrize(("kind", "name"), CRITIC[:1])
def test_critic_with_dp_replicate_equals_the_plain_formula(ranks: Ranks, kind: str, name: str) -> None:
    for off in ranks(2, compare, "dp_replicate=2", kind, name):
        assert_within(off)


def values(group: dist.ProcessGroup, layout: str) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the values of the engine's critic, and those of the plain formula."""
    model, batch = one_rank()
    expected = [torch.zeros(length) for length in batch.lengths]
    places = [1] * len(expected)
    with torch.no_grad():
        for token in plain.tokens_of(model, batch):
            expected[token.sequence][places[token.sequence]] = token.hidden @ model.value_head.weight
            places[token.sequence] += 1
    return engine_of(layout).values(batch), expected


@pytest.mark.parametrize("layout", [*LAYOUTS, "dp_replicate=2"])
def test_values_equal_the_plain_formula_in_input_order(ranks: Ranks, layout: str) -> None:
    for actual, expected in ranks(2, values, layout):
        assert [(values.dtype, len(values)) for values in actual] == [
            (torch.float32, len(values)) for values in expected
        ]
        assert_equal(torch.cat(actual), torch.cat(expected), "values")  # together: those of one sequence may be near 0


@pytest.mark.parametrize(
    ("kind", "name"),
    [("preference", "DPO"), ("policy", "GSPO with all"), ("ppo", "policy and critic"), ("distill", "mixed")],
)
@pytest.mark.parametrize("layout", ["tp=2,cp=2", pytest.param("pp=2,cp=2", marks=pytest.mark.thorough)])
@pytest.mark.slow
def test_combined_axes_equal_the_plain_formula(ranks: Ranks, layout: str, kind: str, name: str) -> None:
    for off in ranks(4, compare, layout, kind, name):
        assert_within(off)


def metrics(group: dist.ProcessGroup, layout: str, settings: dict[str, Any]) -> tuple[dict[str, float], Tensor]:
    model, batch = one_rank()
    engine = engine_of(layout)
    actual = engine.forward_backward(batch, PolicyGradient(**settings)).metrics
    engine.zero_grad()
    with torch.no_grad():
        return dict(actual), plain.policy_with_metrics(model, batch, **settings)[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_equal_those_of_one_rank(ranks: Ranks, layout: str) -> None:
    for actual, expected in ranks(2, metrics, layout, {"ratio": "sequence", "clip_low": 0.05, "clip_high": 0.05}):
        assert actual == pytest.approx({name: expected[name] for name in actual}, rel=1e-4, abs=1e-6)
