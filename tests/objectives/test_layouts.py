"""Every objective in every layout equals its formula written plainly on one rank: loss and every gradient."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from postlude import LanguageModel, Layout, load_model
from postlude.data import Batch
from postlude.engine import Engine
from postlude.hf.builtin import tiny_dense
from postlude.model.parallel import held, region
from postlude.objectives import SFT, PolicyGradient
from tests.conftest import Ranks
from tests.equality import TOLERANCE, difference
from tests.meshes import mesh
from tests.objectives import plain
from tests.objectives.cases import OBJECTIVES, batch_for, settings_of

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
    ("distill", "mixed"),
    ("distill", "with labels"),
]


def tiny() -> Any:
    config = tiny_dense()
    config.initializer_range = 0.1
    config.num_hidden_layers = 2
    return config


@functools.cache
def one_rank() -> tuple[LanguageModel, Batch]:
    model = load_model(tiny())
    return model, batch_for(model)


@functools.cache
def engine_of(layout: str) -> Engine:
    # Several microbatches, as large as all the pairs together.
    return Engine(tiny(), mesh=mesh(Layout.parse(layout)), budget=48)


def compare(group: dist.ProcessGroup, layout: str, kind: str, name: str) -> dict[str, float]:
    """How far this rank's loss and gradients are from the plain formula's."""
    model, batch = one_rank()
    settings = settings_of(kind, name, model)
    objective, expected = OBJECTIVES[kind](**settings), plain.PLAIN[kind](model, batch, **settings)
    critic = settings.get("critic")
    critic_wanted = None
    if critic is not None:  # a critic shares the trunk with what it is the critic of
        critic_wanted = torch.autograd.grad(expected, critic.weight, retain_graph=True)[0]
        critic_loss, expected = objective, expected + 0.5 * plain.sft(model, batch)
        objective = lambda inputs: critic_loss(inputs) + 0.5 * SFT()(inputs)  # noqa: E731
    names, parameters = zip(*model.named_parameters(), strict=True)
    wanted = dict(zip(names, torch.autograd.grad(expected, parameters), strict=True))

    engine = engine_of(layout)
    engine.zero_grad()
    result = engine.forward_backward(batch, objective)
    off = {"loss": difference(torch.tensor(result.loss), expected.detach())}
    for parameter, tensor in engine.parameters.items():
        assert tensor.grad is not None, parameter
        whole = wanted[parameter]
        scale = float(whole.abs().max())
        off[parameter] = float((held(tensor.grad) - whole[region(tensor)]).abs().max()) / scale
    if critic is not None:  # the caller's own: its gradients are the parts of each rank's tokens
        part = torch.zeros_like(critic.weight) if critic.weight.grad is None else critic.weight.grad
        dist.all_reduce(part, group=group)
        off["critic"] = difference(part, critic_wanted)
    return off


@pytest.mark.parametrize(("kind", "name"), CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_plain_formula(ranks: Ranks, layout: str, kind: str, name: str) -> None:
    for off in ranks(2, compare, layout, kind, name):
        assert max(off.values()) <= TOLERANCE, {each: value for each, value in off.items() if value > TOLERANCE}


@pytest.mark.parametrize(
    ("kind", "name"), [("preference", "DPO"), ("policy", "GSPO with all"), ("value", "clipped"), ("distill", "mixed")]
)
@pytest.mark.parametrize("layout", ["tp=2,cp=2", "pp=2,cp=2"])
def test_axes_together(ranks: Ranks, layout: str, kind: str, name: str) -> None:
    for off in ranks(4, compare, layout, kind, name):
        assert max(off.values()) <= TOLERANCE, {each: value for each, value in off.items() if value > TOLERANCE}


def metrics(group: dist.ProcessGroup, layout: str, settings: dict[str, Any]) -> tuple[dict[str, float], Tensor]:
    model, batch = one_rank()
    engine = engine_of(layout)
    found = engine.forward_backward(batch, PolicyGradient(**settings)).metrics
    engine.zero_grad()
    with torch.no_grad():
        return dict(found), plain.policy_with_metrics(model, batch, **settings)[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_equal_one_ranks(ranks: Ranks, layout: str) -> None:
    for found, wanted in ranks(2, metrics, layout, {"ratio": "sequence", "clip_low": 0.05, "clip_high": 0.05}):
        assert found == pytest.approx({name: wanted[name] for name in found}, rel=1e-4, abs=1e-6)
