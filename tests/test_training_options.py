"""The options that an engine, the recipes' configs and the planner share are one definition."""

import inspect
from dataclasses import fields, replace
from typing import Any

import pytest

from postlude import AdamW, Engine, HeadConfig, Layout
from postlude.engine import EngineOptions
from postlude.lora import LoRA
from postlude.recipes.config.load import load
from postlude.recipes.config.settings import TrainingConfig
from postlude.recipes.registry import RECIPES
from postlude.router_losses import RouterLosses
from postlude.training_options import TrainingOptions
from tests.meshes import mesh

CHANGED: dict[str, Any] = {
    "budget": 16,
    "share_prefixes": "off",
    "seed": 3,
    "layout": Layout(pp=2),
    "optimizer": AdamW(lr=0.5),
    "weights": "split",
    "fp8": "1:-1",
    "lora": LoRA(rank=2),
    "selection_bias_rate": 0.25,
    "router_losses": RouterLosses(z_coefficient=0.5),
    "head": HeadConfig(memory_budget=1),
    "recompute": "full",
    "overlap": True,
    "gather_once": True,
    "offload_activations": "::3",
}


@pytest.mark.parametrize("name", [field.name for field in fields(TrainingOptions)])
def test_every_option_is_a_config_key_and_an_argument_of_the_engine(name: str) -> None:
    config = TrainingConfig(**{name: CHANGED[name]})
    assert TrainingOptions.of(config) == TrainingOptions(**{name: CHANGED[name]}) != TrainingOptions()
    assert getattr(EngineOptions.of(config), name) == CHANGED[name]
    assert name in inspect.signature(Engine).parameters


@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False), ("1:-1", "1:-1"), ("0", "0")])
def test_a_config_chooses_layers_by_text(text: str, value: bool | str) -> None:
    fp8 = load(TrainingConfig, overrides=["--fp8", text]).fp8
    assert (type(fp8), fp8) == (type(value), value)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_config_keeps_the_fields_that_its_base_declares_otherwise(name: str) -> None:
    for config in RECIPES[name].config.__mro__:
        for base in config.__bases__ if issubclass(config, TrainingConfig) else ():
            inherited = getattr(base, "model_fields", {}).keys() - inspect.get_annotations(config).keys()
            for key in inherited:
                assert repr(config.model_fields[key]) == repr(base.model_fields[key]), key


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"budget": 0}, "budget is 0, but it must be a number of at least 1"),
        ({"recompute": "most"}, "recompute is 'most', but the choices are 'none', 'selective', 'full'"),
        ({"weights": "split", "lora": {}}, "weights='split' stores trained weights below fp32, but with lora"),
        ({"overlap": "zero_bubble"}, "fills the bubble of a pipeline, but pp is 1"),
        ({"fp8": "first"}, "fp8 is 'first', but it must be true, false, or layers by their numbers, such as 1:-1"),
        ({"fp8": "::0"}, "fp8 is '::0', but it must be true, false, or layers by their numbers"),
        ({"selection_bias_rate": -1.0}, "selection_bias_rate is -1, but it must be a number of at least 0"),
    ],
)
def test_invalid_options_are_refused_when_they_are_made(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        TrainingOptions(**options)


def mesh_options(_: Any) -> tuple[Layout, Layout, str]:
    one = EngineOptions(mesh=mesh(Layout()))
    with pytest.raises(ValueError, match="layout is") as refused:
        replace(one, layout=Layout(pp=2))
    return one.layout, EngineOptions.of(one).layout, str(refused.value)


def test_a_mesh_has_the_layout(ranks: Any) -> None:
    layout, copied, message = ranks(1, mesh_options)[0]
    assert layout == copied == Layout()
    assert message.endswith("Leave either out.")
