"""LoRA: every layout trains the same adapters as one rank, on a frozen model."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from postlude import Engine, LanguageModel, Layout, Loss, OutputInputs
from postlude.engine.adapters import export_adapter, load_adapter, stream_adapters
from postlude.engine.failure_state import OFFLOADED
from postlude.hf.linear_layers import linear_layers
from postlude.lora import LoRA
from postlude.model.adapters import is_adapter
from postlude.model.blocks import BLOCKS, MoEConfig
from postlude.model.parallel import local_shard, region
from postlude.objectives import MTP
from tests.conftest import Ranks
from tests.engine.live_tensors import live_matrices, storage_bytes
from tests.engine.training import BUDGET, DAMPED, assert_refused, batch, bitwise_equal, config, error_text, policy
from tests.equality import TOLERANCE, assert_equal, difference
from tests.meshes import mesh
from tests.model.small import small_config

RANK4 = LoRA(rank=4, alpha=8.0)
EVERY_LAYER = LoRA(rank=4, alpha=8.0, targets="all,router,embedding,head", ranks={"head": 3})


def build(layout: str, source: Any, lora: LoRA = RANK4, **options: Any) -> Engine:
    engine = Engine(source, mesh=mesh(Layout.parse(layout)), budget=BUDGET, optimizer=DAMPED, lora=lora, **options)
    for name, parameter in engine.parameters.items():  # B starts from zero, which hides mistakes in A's gradient
        if name.endswith(".b"):
            fill(name, parameter)
    return engine


@torch.no_grad()
def fill(name: str, parameter: Tensor) -> None:
    full_tensor = torch.empty(parameter.shape).normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    local_shard(parameter).copy_(full_tensor[region(parameter)])


def train(group: Any, layout: str, source: Any, options: dict[str, Any]) -> dict[str, Any]:
    engine = build(layout, source, **options)
    first = engine.forward_backward(batch(0), policy)
    gradients = {name: tensor.clone() for name, tensor in stream_adapters(engine, gradients=True)}
    engine.optimizer_step()
    second = engine.forward_backward(batch(1), policy)
    engine.optimizer_step()
    return {
        "losses": torch.tensor([first.loss, second.loss]),
        "logprobs": torch.cat(engine.logprobs(batch(2)).logprob),
        "gradients": gradients,
        "adapters": {name: tensor.clone() for name, tensor in stream_adapters(engine)},
        "merged": {name: tensor.clone() for name, tensor in engine.stream_weights()},
    }


SOURCES = {
    "dense": config("tiny-dense", num_hidden_layers=2),
    "moe": config("tiny-moe", num_hidden_layers=2),
    "hybrid": small_config("[*-][M-][GE]", vocab_size=256, initializer_range=0.1),
    "latent": small_config(
        "[+-][*E]", vocab_size=256, blocks={"E": MoEConfig(experts=4, top_k=2, intermediate_size=12)}
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "layout", "options"),
    [
        ("hybrid", "pp=2", {"overlap": "zero_bubble"}),
        pytest.param("moe", "pp=2,dp_shard=2,ep=2", {"recompute": "full"}, marks=pytest.mark.thorough),
        pytest.param("latent", "pp=2,cp=2,tp=2,ep=2", {"overlap": True}, marks=pytest.mark.thorough),
        ("moe", "tp=2,ep=2", {"lora": EVERY_LAYER}),
        ("moe", "pp=2", {"lora": EVERY_LAYER, "overlap": "zero_bubble"}),
        pytest.param("hybrid", "dp_shard=2", {"lora": EVERY_LAYER}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_training_in_a_layout_equals_one_rank(ranks: Ranks, source: str, layout: str, options: dict[str, Any]) -> None:
    expected = ranks(1, train, "", SOURCES[source], {"lora": options.get("lora", RANK4)})[0]
    actual = ranks(Layout.parse(layout).world_size, train, layout, SOURCES[source], options)[0]
    for key in ("losses", "logprobs"):
        assert_equal(actual[key], expected[key], key)
    for key in ("gradients", "adapters", "merged"):
        assert actual[key].keys() == expected[key].keys()
        for name in expected[key]:
            assert_equal(actual[key][name], expected[key][name], f"{key} of {name}")


def train_mtp_projection(group: Any, layout: str, directory: str) -> dict[str, Tensor]:
    source = small_config("[*-]{2}/[*-]", vocab_size=256, initializer_range=0.1, tied_head=False)
    if not layout:
        names = {name for name, layer in linear_layers(source, BLOCKS).items() if layer.group != "none"}
        every_layer = build("", source, LoRA(rank=2, targets=tuple(names - {"embedding", "head"})), mtp=True)
        assert every_layer.parameters.keys() == {
            f"{name}.adapter.{side}" for name in names - {"embedding", "head"} for side in "ab"
        }
    engine = build(layout, source, LoRA(rank=2, targets="proj"), mtp=True)
    engine.forward_backward(batch(0), MTP(objective=policy))
    gradients = {f"gradient of {name}": tensor.clone() for name, tensor in stream_adapters(engine, gradients=True)}
    export_adapter(engine, f"{directory}/{layout or 'one rank'}")
    return gradients | {name: tensor.clone() for name, tensor in engine.stream_weights()}


@pytest.mark.parametrize("layout", ["tp=2", "pp=2", "dp_shard=2"])
def test_the_projection_of_mtp_is_adapted_as_every_layer_that_can_be_named(
    ranks: Ranks, layout: str, tmp_path: Path
) -> None:
    expected = ranks(1, train_mtp_projection, "", str(tmp_path))[0]
    assert all(bool(expected[f"gradient of mtp.0.proj.adapter.{side}"].any()) for side in "ab")
    actual = ranks(2, train_mtp_projection, layout, str(tmp_path))[0]
    assert actual.keys() == expected.keys()
    for name in expected:
        assert_equal(actual[name], expected[name], name)


def compare_with_merged(group: Any, lora: LoRA) -> dict[str, float]:
    """Returns the differences of log-probs with adapters from those of the merged and the frozen model."""
    source = SOURCES["moe"]
    engine, base = build("", source, lora), Engine(source, mesh=mesh(Layout()), budget=BUDGET)
    adapted, plain = torch.cat(engine.logprobs(batch(0)).logprob), torch.cat(base.logprobs(batch(0)).logprob)
    model = LanguageModel(base.config)
    engine.copy_weights(model)
    for name, tensor in model.state_dict().items():
        base.tensors[name].detach().copy_(tensor)
    merged = torch.cat(base.logprobs(batch(0)).logprob)
    return {"merged": difference(adapted, merged), "frozen": difference(adapted, plain)}


@pytest.mark.parametrize("lora", [RANK4, LoRA(rank=3, targets="head"), LoRA(rank=70, targets="router,embedding,head")])
def test_streamed_weights_equal_the_merged_model(ranks: Ranks, lora: LoRA) -> None:
    (differences,) = ranks(1, compare_with_merged, lora)
    assert differences["merged"] < TOLERANCE
    assert differences["frozen"] > 1e-3


def new_adapters_and_reference(group: Any, layout: str) -> dict[str, Any]:
    source = SOURCES["dense"]
    base = Engine(source, mesh=mesh(Layout.parse(layout)), budget=BUDGET)
    engine = Engine(source, mesh=mesh(Layout.parse(layout)), budget=BUDGET, optimizer=DAMPED, lora=RANK4)
    weights = {name: tensor.clone() for name, tensor in engine.tensors.items() if not is_adapter(name)}
    plain = torch.cat(base.logprobs(batch(0)).logprob)
    gc.collect()
    before = live_matrices()
    known = {id(tensor) for tensor in before}
    reference = engine.reference()
    allocated = storage_bytes(tensor for tensor in live_matrices() if id(tensor) not in known)
    for seed in range(2):
        engine.forward_backward(batch(seed), policy)
        engine.optimizer_step()
    trained, later = torch.cat(engine.logprobs(batch(0)).logprob), engine.reference()
    engine.forward_backward(batch(2), policy)
    engine.optimizer_step()
    engine.set_adapter(None)
    return {
        "plain": plain,
        "reference": torch.cat(reference.logprobs(batch(0)).logprob),
        "reference of a loaded one": torch.cat(later.logprobs(batch(0)).logprob),
        "trained": trained,
        "active": engine.adapters.active,
        "allocated": allocated,
        "kept of a loaded one": sum(weight.numel() for weight in later.weights.values()),
        "kept": sum(weight.numel() for weight in reference.weights.values()),
        "adapters": sum(
            local_shard(parameter).numel() for parameter in engine.training_states["default"].parameters.values()
        ),
        "frozen": all(torch.equal(local_shard(engine.tensors[name]), local_shard(weights[name])) for name in weights),
        "without gradient": all(
            parameter.grad is None
            for training_state in engine.training_states.values()
            for stage in training_state.stages.models.values()
            for name, parameter in stage.named_parameters()
            if not is_adapter(name)
        ),
    }


@pytest.mark.parametrize("layout", ["", "dp_shard=2"])
def test_reference_of_new_adapters_is_the_base_model(ranks: Ranks, layout: str) -> None:
    actual = ranks(Layout.parse(layout).world_size, new_adapters_and_reference, layout)[0]
    assert torch.equal(actual["reference"], actual["plain"])
    assert difference(actual["trained"], actual["plain"]) > 1e-4
    assert actual["kept"] == 0 < actual["kept of a loaded one"] == actual["adapters"]
    assert torch.equal(actual["reference of a loaded one"], actual["trained"])
    assert actual["allocated"] == 0
    assert actual["frozen"]
    assert actual["without gradient"]
    assert actual["active"] is None  # as it was before the references were evaluated


def save(group: Any, layout: str, directory: str) -> tuple[dict[str, Tensor], list[float]]:
    engine = build(layout, SOURCES["moe"])
    steps(engine, range(2))
    engine.save(directory)
    return {name: tensor.clone() for name, tensor in stream_adapters(engine)}, steps(engine, range(2, 4))


def load(group: Any, layout: str, directory: str) -> tuple[dict[str, Tensor], list[float]]:
    engine = Engine(SOURCES["moe"], mesh=mesh(Layout.parse(layout)), budget=BUDGET, optimizer=DAMPED, lora=RANK4)
    engine.load(directory)
    return {name: tensor.clone() for name, tensor in stream_adapters(engine)}, steps(engine, range(2, 4))


def steps(engine: Engine, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        losses.append(engine.forward_backward(batch(seed), policy).loss)
        engine.optimizer_step()
    return losses


def test_checkpoint_has_only_adapters_and_loads_in_other_layouts(ranks: Ranks, tmp_path: Path) -> None:
    saved, losses = ranks(2, save, "dp_shard=2,ep=2", str(tmp_path / "saved"))[0]
    tensors = json.loads((tmp_path / "saved" / "state.json").read_text())["tensors"]
    assert {name.rsplit("/", 1)[1] for name in tensors if not name.startswith("rng")} == saved.keys()
    for layout in ("dp_shard=2,ep=2", "tp=2"):
        loaded, resumed_losses = ranks(2, load, layout, str(tmp_path / "saved"))[0]
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
        assert_equal(torch.tensor(resumed_losses), torch.tensor(losses), "losses")


def refuse(group: Any, directory: str) -> None:
    engine = build("", SOURCES["dense"])
    engine.save(f"{directory}/adapters")
    other_engine = Engine(SOURCES["dense"], mesh=mesh(Layout()), budget=BUDGET, seed=1, lora=RANK4, optimizer=DAMPED)
    reordered = build("", SOURCES["dense"])
    for name, tensor in reordered.tensors.items():
        if not is_adapter(name):
            tensor.detach().copy_(tensor.detach().flatten().flip(0).view_as(tensor))
    full_engine = Engine(SOURCES["dense"], mesh=mesh(Layout()), budget=BUDGET, optimizer=DAMPED)
    full_engine.save(f"{directory}/model")
    assert_refused(
        {
            "of another base model": lambda: other_engine.load(f"{directory}/adapters"),
            "of another base": lambda: reordered.load(f"{directory}/adapters"),
            "holds LoRA adapters only": lambda: full_engine.load(f"{directory}/adapters"),
            "holds a whole model": lambda: engine.load(f"{directory}/model"),
            "weights='split'": lambda: build("", SOURCES["dense"], weights="split"),
            "q_proj": lambda: build("", SOURCES["dense"], LoRA(targets=("q_porj",))),
        }
    )


def test_invalid_lora_calls_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1, refuse, str(tmp_path))


def export(group: Any, layout: str, directory: str) -> dict[str, Tensor]:
    engine = build(layout, SOURCES["moe"])
    export_adapter(engine, directory)
    return {name: tensor.clone() for name, tensor in stream_adapters(engine)}


def read_back(group: Any, layout: str, directory: str) -> tuple[dict[str, Tensor], str]:
    options = {"mesh": mesh(Layout.parse(layout)), "budget": BUDGET}
    engine = Engine(SOURCES["moe"], lora=RANK4, **options)
    load_adapter(engine, directory)
    other_engine = Engine(SOURCES["moe"], lora=LoRA(rank=4, targets="attention"), **options)
    return {name: tensor.clone() for name, tensor in stream_adapters(engine)}, error_text(
        lambda: load_adapter(other_engine, directory)
    )


def test_exported_adapters_are_read_back_bit_exactly(ranks: Ranks, tmp_path: Path) -> None:
    exported = ranks(2, export, "dp_shard=2,ep=2", str(tmp_path / "adapter"))[0]
    (actual, refused), _ = ranks(2, read_back, "tp=2", str(tmp_path / "adapter"))
    assert actual.keys() == exported.keys()
    assert all(torch.equal(actual[name], exported[name]) for name in exported)
    assert 'has another adapter "default" of layers.0.' in refused


def after_failures(group: Any, directory: str) -> None:
    engine = build("", SOURCES["dense"])
    export_adapter(engine, directory)
    calls = {
        "stream": lambda: stream_adapters(engine),
        "gradients": lambda: stream_adapters(engine, gradients=True),
        "export": lambda: export_adapter(engine, directory),
        "load": lambda: load_adapter(engine, directory),
    }
    engine.offload()
    for call in calls.values():
        assert_refused({OFFLOADED: call})
    engine.onload()

    def fails(inputs: OutputInputs) -> Loss:
        raise LookupError("no such column")

    error_text(lambda: engine.forward_backward(batch(0), fails))
    for name, call in calls.items():
        assert_refused({"the gradients of this step were lost" if name == "gradients" else "nothing": call})


def test_an_offloaded_engine_and_lost_gradients_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1, after_failures, str(tmp_path / "adapter"))


def train_on_last_stage(group: Any, directory: str) -> list[dict[str, Tensor]]:
    """Returns the adapter after a step that follows a checkpoint, without and with a resume."""
    results = []
    for resumes in (False, True):
        engine = build("pp=2", small_config("[*-]{2}", vocab_size=256), LoRA(rank=2, targets="head"))
        if resumes:
            engine.load(directory)
        else:
            engine.optimizer_step()  # without gradients
            engine.forward_backward(batch(0), policy)
            engine.optimizer_step()
            engine.save(directory)
        engine.forward_backward(batch(1), policy)
        engine.optimizer_step()
        results.append({name: tensor.clone() for name, tensor in stream_adapters(engine)})
    return results


def test_a_rank_that_trains_nothing_counts_steps_without_gradients(ranks: Ranks, tmp_path: Path) -> None:
    for uninterrupted, resumed in ranks(2, train_on_last_stage, str(tmp_path / "checkpoint")):
        assert bitwise_equal(resumed, uninterrupted)
