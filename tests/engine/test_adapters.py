"""Several adapters in one engine: each is bit-identical to the adapter of an engine with it alone."""

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from postlude import Batch, Engine, Layout, Loss, OutputInputs
from postlude.engine.adapters import add_adapter, export_adapter, load_adapter, remove_adapter, stream_adapters
from postlude.engine.base_weights import load_adapter_state, save_adapter_state
from postlude.lora import LoRA
from postlude.model.adapters import is_adapter
from postlude.model.parallel import local_shard
from postlude.optimizer import SGD, AdamW
from tests.conftest import Ranks
from tests.engine.live_tensors import live_matrices, storage_bytes
from tests.engine.training import BUDGET, DAMPED, LENGTHS, assert_refused, config, error_text, policy
from tests.engine.training import batch as batch_of
from tests.equality import assert_equal, difference
from tests.meshes import mesh

MOE, DENSE = config("tiny-moe", num_hidden_layers=2), config("tiny-dense", num_hidden_layers=2)
LORAS = {
    "a": LoRA(rank=4, alpha=8.0, targets="attention,experts"),
    "b": LoRA(rank=2, alpha=16.0, targets="q_proj,experts", rslora=True, experts="per_expert"),
}
SEEDS = {"a": 3, "b": 4}
STEP = AdamW(lr=3e-3, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.2, max_grad_norm=None)
# What happens, in order: (adapter, seed of a batch), or (adapter, None) for a step. Gradients wait while others step.
CALLS = [("a", 0), ("b", 1), ("a", 2), ("b", None), ("a", None), ("b", 3), ("a", 4), ("a", None), ("b", None)]


def batch(seed: int) -> Batch:
    """Returns three microbatches, so that two data-parallel ranks have unequal shares."""
    return batch_of(seed, LENGTHS[:5])


def build(layout: str, source: Any = MOE, **options: Any) -> Engine:
    return Engine(source, mesh=mesh(Layout.parse(layout)), budget=BUDGET, **{"optimizer": DAMPED, "lora": {}} | options)


def add(engine: Engine, name: str) -> None:
    add_adapter(engine, name, LORAS[name], seed=SEEDS[name])


def adapter(engine: Engine, name: str) -> dict[str, Tensor]:
    return {key: tensor.clone() for key, tensor in stream_adapters(engine, name=name)}


def run_calls(engine: Engine, calls: list[tuple[str, int | None]]) -> dict[str, list[Any]]:
    """Makes the calls. Returns their results by adapter; b's steps have their own settings."""
    results: dict[str, list[Any]] = {}
    for name, seed in calls:
        engine.set_adapter(name)
        if seed is None:
            result = engine.optimizer_step(STEP if name == "b" else None)
            results.setdefault(name, []).append((result.step, result.grad_norm, result.lr))
        else:
            results.setdefault(name, []).append(engine.forward_backward(batch(seed), policy).loss)
    return results


def results(engine: Engine, name: str) -> dict[str, Any]:
    engine.set_adapter(name)
    moments = {
        f"{parameter} {key}": value.clone()
        for parameter, tensor in engine.parameters.items()
        for key, value in engine.optimizer.state[tensor].items()
    }
    return {
        "adapter": adapter(engine, name),
        "logprobs": torch.cat(engine.logprobs(batch(9)).logprob),
        "merged": {key: tensor.clone() for key, tensor in engine.stream_weights()},
        "moments": moments,
        "step": engine.step,
    }


def run_together_and_alone(group: Any, layout: str, options: dict[str, Any]) -> dict[str, Any]:
    joint_engine = build(layout, **options)
    for name in LORAS:
        add(joint_engine, name)
    new = {name: adapter(joint_engine, name) for name in LORAS}
    calls = run_calls(joint_engine, CALLS)
    differing = []
    for name in LORAS:
        alone = build(layout, **options)
        add(alone, name)
        if calls[name] != run_calls(alone, [call for call in CALLS if call[0] == name])[name]:
            differing.append(f"calls of {name}")
        actual, expected = results(joint_engine, name), results(alone, name)
        differing += [f"{name} {key}" for key in expected if not identical(actual[key], expected[key])]
    joint_engine.set_adapter(None)
    plain = build(layout, **options)
    base = torch.cat(joint_engine.logprobs(batch(9)).logprob)
    if not torch.equal(base, torch.cat(plain.logprobs(batch(9)).logprob)):
        differing.append("the model alone")
    joint_engine.set_adapter("a")
    distance = difference(torch.cat(joint_engine.logprobs(batch(9)).logprob), base)
    return {"differing": differing, "from base": distance, "new": new}


def new_adapters(group: Any) -> dict[str, dict[str, Tensor]]:
    engine = build("", lora=LORAS, seed=SEEDS["a"])
    remove_adapter(engine, "b")
    add(engine, "b")
    return {name: adapter(engine, name) for name in LORAS}


def identical(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(identical(first[key], second[key]) for key in first)
    return torch.equal(first, second) if isinstance(first, Tensor) else first == second


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("", {}),
        ("pp=2", {"critic": True}),
        ("dp_shard=2,ep=2", {}),
        pytest.param("tp=2", {"recompute": "full"}, marks=pytest.mark.thorough),
        pytest.param("dp_shard=2,ep=2", {"overlap": True, "gather_once": True}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_each_adapter_equals_one_trained_alone(ranks: Ranks, layout: str, options: dict[str, Any]) -> None:
    size, (new,) = Layout.parse(layout).world_size, ranks(1, new_adapters)
    for actual in ranks(size, run_together_and_alone, layout, options):
        assert actual["differing"] == []
        assert actual["from base"] > 1e-3
        assert identical(actual["new"], new)


def save_checkpoints(group: Any, layout: str, directory: str) -> dict[str, Any]:
    engine = build(layout)
    for name in LORAS:
        add(engine, name)
    run_calls(engine, CALLS)
    engine.save(f"{directory}/all", extra={"epoch": 3})
    for name in LORAS:
        save_adapter_state(engine, f"{directory}/{name}", name=name, extra={"of": name})
        export_adapter(engine, f"{directory}/{name}-peft", name=name)
    saved = {name: adapter(engine, name) for name in LORAS}
    return {"saved": saved, "later": run_calls(engine, CALLS), "then": {name: adapter(engine, name) for name in LORAS}}


def load_checkpoints(group: Any, layout: str, directory: str) -> dict[str, Any]:
    """Loads a checkpoint into an engine without adapters, and single states into one that trains another."""
    full_engine, single, peft = build(layout), build(layout), build(layout)
    extra = [full_engine.load(f"{directory}/all")]
    whole_loaded = {name: adapter(full_engine, name) for name in LORAS}
    add_adapter(single, "other", LoRA(rank=3, targets="attention"))
    single.set_adapter("other")
    single.forward_backward(batch(5), policy)
    gradients = {key: tensor.clone() for key, tensor in stream_adapters(single, gradients=True)}
    single_loaded, peft_loaded = {}, {}
    for name in LORAS:
        extra.append(load_adapter_state(single, f"{directory}/{name}", name=f"new {name}"))
        single_loaded[name] = adapter(single, f"new {name}")
        load_adapter(peft, f"{directory}/{name}-peft", name=name)
        peft_loaded[name] = adapter(peft, name)
    single.set_adapter("other")
    unchanged = identical(gradients, dict(stream_adapters(single, gradients=True)))
    later = run_calls(full_engine, CALLS)
    single_calls = [(f"new {name}", seed) for name, seed in CALLS if name == "a"]
    single_later = run_calls(single, single_calls)["new a"]
    return {
        "extra": extra,
        "loaded": [whole_loaded, single_loaded, peft_loaded],
        "kept": unchanged,
        "later": later,
        "single later": single_later,
        "then": {name: adapter(full_engine, name) for name in LORAS},
    }


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp_shard=2,ep=2", pytest.param("pp=2", marks=pytest.mark.thorough)])
def test_checkpoints_of_all_or_one_adapter_load_in_other_layouts(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    saved = ranks(2, save_checkpoints, "dp_shard=2,ep=2", str(tmp_path))[0]
    for actual in ranks(2, load_checkpoints, layout, str(tmp_path)):
        assert actual["extra"] == [{"epoch": 3}, {"of": "a"}, {"of": "b"}]
        assert all(identical(loaded, saved["saved"]) for loaded in actual["loaded"])
        assert actual["kept"]
        if layout == "dp_shard=2,ep=2":
            assert actual["later"] == saved["later"]
            assert actual["single later"] == saved["later"]["a"]
            assert identical(actual["then"], saved["then"])
        for name in LORAS:
            for loaded_loss, saved_loss in zip(actual["later"][name], saved["later"][name], strict=True):
                assert_equal(torch.tensor(loaded_loss), torch.tensor(saved_loss), name, tolerance=1e-4)


def switch_and_remove(group: Any, directory: str) -> None:
    engine = build("", DENSE)
    engine.logprobs(batch(0))  # the first forward of a process fills caches that stay, such as rotary frequencies
    gc.collect()
    base, tensors = storage_bytes(live_matrices()), dict(engine.tensors)
    assert_refused(
        {
            "no adapter is active, and the model is frozen": lambda: engine.forward_backward(batch(0), policy),
            "no adapter is active, and": engine.optimizer_step,
            "no active adapter": lambda: export_adapter(engine, directory),
            'no adapter "x". There are none; add_adapter makes one.': lambda: engine.set_adapter("x"),
            "'a/b'": lambda: add_adapter(engine, "a/b", LoRA()),
            "''": lambda: add_adapter(engine, "", LoRA()),
        }
    )
    add_adapter(engine, "a", LoRA(rank=4))
    add_adapter(engine, "b", LoRA(rank=2, targets="attention"))
    assert all(
        stage.state_dict()[name].data_ptr() == tensors[name].data_ptr()
        for training_state in engine.training_states.values()
        for stage in training_state.stages.models.values()
        for name in tensors
    )
    engine.set_adapter("a")
    assert_refused({'has an adapter "a" already': lambda: add_adapter(engine, "a", LoRA())})
    engine.forward_backward(batch(0), policy)

    def fails(inputs: OutputInputs) -> Loss:
        raise LookupError("no such column")

    engine.set_adapter("b")
    error_text(lambda: engine.forward_backward(batch(0), fails))
    assert_refused({"gradients of this step were lost": engine.optimizer_step})
    engine.set_adapter("a")
    engine.optimizer_step()  # whose gradients are not lost
    engine.set_adapter("b")
    assert_refused({"gradients of this step were lost": engine.optimizer_step})
    engine.zero_grad()
    assert_refused(
        {
            "a step's settings are of SGD": lambda: engine.optimizer_step(SGD()),
            "8-bit moments": lambda: engine.optimizer_step(replace(STEP, moments="8bit")),
        }
    )
    bytes_before = storage_bytes(live_matrices())
    for name in ("a", "b"):
        remove_adapter(engine, name)
    assert_refused(
        {
            'no adapter "a"': lambda: engine.set_adapter("a"),
            "trains all weights": lambda: add_adapter(build("", DENSE, lora=None), "a", LoRA()),
        }
    )
    gc.collect()
    assert storage_bytes(live_matrices()) <= base < bytes_before
    assert engine.adapters.active is None


def test_switching_adapters_copies_nothing_and_invalid_calls_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1, switch_and_remove, str(tmp_path / "adapter"))


def refused_checkpoints(group: Any, directory: str) -> None:
    engine = build("", DENSE, lora=LoRA(rank=2, targets="attention"))
    add_adapter(engine, "b", LoRA(rank=3, targets="attention"))
    engine.save(f"{directory}/all")
    save_adapter_state(engine, f"{directory}/one", name="b")
    unadapted = build("", DENSE)
    add_adapter(unadapted, "c", LoRA(rank=2))
    other_engine = build("", DENSE)
    add_adapter(other_engine, "b", LoRA(rank=3, alpha=1.0, targets="attention"))
    before = {name: local_shard(tensor).clone() for name, tensor in other_engine.training_states["b"].tensors.items()}
    other = 'has another adapter "b" of layers.0.'
    assert_refused(
        {
            'has no adapter "c", which this engine has': lambda: unadapted.load(f"{directory}/all"),
            other: lambda: other_engine.load(f"{directory}/all"),
            other[:-1]: lambda: load_adapter_state(other_engine, f"{directory}/one", name="b"),
            "load it with engine.load": lambda: load_adapter_state(unadapted, f"{directory}/all", name="d"),
            "was saved with AdamW": lambda: build("", DENSE, optimizer=SGD()).load(f"{directory}/all"),
        }
    )
    assert other_engine.adapters.names == ("b",)  # what was made for the load is gone
    assert all(torch.equal(before[name], tensor) for name, tensor in other_engine.training_states["b"].tensors.items())


def test_checkpoints_of_other_adapters_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1, refused_checkpoints, str(tmp_path))
    state = json.loads((tmp_path / "all" / "state.json").read_text())
    assert state["adapters"].keys() == {"b"}
    assert all(is_adapter(name) for name in state["tensors"] if not name.startswith("rng"))


def step_settings(group: Any, layout: str) -> list[bool]:
    """Full training: a step with its own settings equals that of an engine created with them."""
    first_engine = build(layout, DENSE, lora=None, optimizer=AdamW(lr=1.0))
    second_engine = build(layout, DENSE, lora=None, optimizer=STEP)
    for seed in range(3):
        results = []
        for engine, settings in ((first_engine, STEP), (second_engine, None)):
            engine.forward_backward(batch(seed), policy)
            results.append(engine.optimizer_step(settings))
        assert results[0] == results[1]
    return [
        torch.equal(x, y)
        for (_, x), (_, y) in zip(first_engine.stream_weights(), second_engine.stream_weights(), strict=True)
    ]


@pytest.mark.parametrize("layout", ["", "dp_shard=2"])
def test_optimizer_step_takes_its_own_settings_in_full_training(ranks: Ranks, layout: str) -> None:
    assert all(map(all, ranks(Layout.parse(layout).world_size, step_settings, layout)))


def use_different_adapters(group: Any) -> tuple[str, str]:
    engine = build("tp=2", DENSE, lora={"a": LoRA(rank=2), "b": LoRA(rank=2)})
    engine.set_adapter("ab"[engine.mesh.tp.rank])
    refused = error_text(lambda: engine.forward_backward(batch(0), policy))
    engine.set_adapter("a")
    return refused, error_text(lambda: engine.forward_backward(batch(0), policy))


def test_ranks_that_use_different_adapters_are_refused_before_the_pass(ranks: Ranks) -> None:
    for refused, afterwards in ranks(2, use_different_adapters):
        assert "or use different adapters" in refused
        assert afterwards == "nothing"
