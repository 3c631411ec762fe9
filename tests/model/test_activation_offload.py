"""Activation offload: the same results to the bit, less memory on the device, and host memory that is used again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from postlude import LanguageModel, Layout, pack
from postlude.data import Microbatch
from postlude.layout import Stage
from postlude.lora import LoRA
from postlude.model.blocks import AttentionConfig, MLPConfig
from postlude.model.offload import ActivationOffload, _SavedStorage
from postlude.model.stack import LogicalLayer
from tests.engine.training import batch, build, policy
from tests.model.small import small_config, small_microbatch

PATTERN = "[*-][S-][*E]*[M-]G+*"


def gradients(model: LanguageModel) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def offload_of(model: LanguageModel) -> ActivationOffload:
    (offload,) = {layer.offload for layer in model.logical_layers if layer.offload is not None}
    return offload


def storages(offload: ActivationOffload) -> list[_SavedStorage]:
    """Returns what graphs keep now."""
    saved = [item for item in gc.get_objects() if type(item) is _SavedStorage]
    return [storage for storage in saved if storage.layer.offload is offload]


def forward(model: LanguageModel, microbatch: Microbatch, *, planned: bool) -> Callable[[], None]:
    """Runs a forward. Returns the backward."""
    if planned:
        plan = model.build_schedule_plan(microbatch, targets=True)
        loss = plan.forward().sum()
        return lambda: plan.backward(loss)
    loss = model(microbatch, targets=True).sum()
    backward: Callable[[], None] = loss.backward
    return backward


@pytest.mark.parametrize(
    ("recompute", "planned"),  # with full recompute a plan is refused: nothing would move
    [("none", False), ("selective", True), ("full", False)],
)
def test_gradients_are_equal_to_the_bit_and_memory_is_used_again(recompute: Any, planned: bool) -> None:
    expected, model = (
        LanguageModel(small_config(PATTERN), recompute=recompute, offload_activations=chosen)
        for chosen in (False, True)
    )
    offload = offload_of(model)
    page_counts = []
    for lengths in ((30, 20, 10), (9, 2), (25, 30)):
        microbatch = small_microbatch(*lengths)
        forward(expected, microbatch, planned=planned)()
        backward = forward(model, microbatch, planned=planned)
        kept = storages(offload)
        moved = [saved for saved in kept if saved.pieces]
        on_device = [saved for saved in moved if saved.storage is not None]
        assert len(moved) > 5
        assert len(moved) - len(on_device) > len(moved) / 2
        assert len(offload.free) < len(offload.pages)
        del kept, moved, on_device
        backward()
        del backward
        page_counts.append(len(offload.pages))
        assert len(offload.free) == len(offload.pages)
        assert not storages(offload)
    assert page_counts[0] == page_counts[-1]
    assert same_bits(gradients(model), gradients(expected))


def same_bits(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_parameters_and_what_runs_last_stay() -> None:
    model = LanguageModel(small_config("[*-][S-]*/*", hidden_size=24), offload_activations=True)
    chosen = {layer.name for layer in model.logical_layers if layer.offload is not None}
    assert chosen == {"layers.0", "layers.1"}  # not the last layer of the trunk and its depth
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    loss = model(small_microbatch(12, 8), targets=True).sum()  # so short that parameters are as large as activations
    kept = storages(offload_of(model))
    on_device = {saved.storage.data_ptr(): saved for saved in kept if saved.storage is not None}
    assert len(on_device.keys() & parameters) > 4
    assert not any(on_device[address].pieces for address in on_device.keys() & parameters)
    assert any(saved.storage is None for saved in kept)
    loss.backward()


def test_a_storage_is_copied_once() -> None:
    """Queries and keys as views of one product, saved by two operations, and by the next layer again."""
    offload, context = ActivationOffload(), Context(small_microbatch(30, 20))
    module = torch.nn.Identity()
    product = torch.randn(50, 64, requires_grad=True)
    with offload.layer(module, context, [product]):  # type: ignore[arg-type]
        whole = product * 2
        left, right = whole.split(32, 1)
        result = (left * right).sin()
    with offload.layer(module, context, []):  # type: ignore[arg-type]
        output = result.cos() + left.exp().sum()
    by_size = sorted(saved.size for saved in storages(offload) if saved.pieces)
    # the product; sin's input; cos's input; exp's result
    assert by_size == [50 * 32 * 4] * 3 + [50 * 64 * 4]
    output.sum().backward()
    gradient, product.grad = product.grad, None
    whole = product * 2
    left, right = whole.split(32, 1)
    ((left * right).sin().cos() + left.exp().sum()).sum().backward()
    assert gradient is not None
    assert product.grad is not None
    assert torch.equal(gradient, product.grad)


class Context:
    """What a layer needs of its context."""

    offloaded_before = None
    recompute = "none"
    shared_tensors: tuple[Tensor, ...] = ()

    def __init__(self, microbatch: Microbatch) -> None:
        self.microbatch = microbatch


def test_a_dropped_graph_returns_its_pages_and_a_forward_without_gradients_takes_none() -> None:
    model = LanguageModel(small_config(PATTERN), offload_activations="::2")
    offload = offload_of(model)
    with torch.no_grad():
        model(small_microbatch(30, 20), targets=True)
    assert not offload.pages
    loss = model(small_microbatch(30, 20), targets=True).sum()
    assert offload.pages
    del loss
    assert len(offload.free) == len(offload.pages)


def test_a_graph_that_is_kept_gives_its_gradients_twice() -> None:
    model = LanguageModel(small_config(PATTERN), offload_activations=True)
    loss = model(small_microbatch(30, 20), targets=True).sum()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    first = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    second = torch.autograd.grad(loss, parameters, allow_unused=True)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(first, second, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("stages", [1, 2])
def test_layers_are_chosen_by_their_numbers_in_the_whole_model(stages: int) -> None:
    config, chosen = small_config("[*-]S-*--*"), set()
    for index in range(stages):
        model = LanguageModel(config, stage=Stage(index, stages), offload_activations="::2,-1")
        chosen |= {layer.name for layer in model.logical_layers if isinstance(layer, LogicalLayer) and layer.offload}
    assert chosen == {"layers.0", "layers.2", "layers.4"}


def train(group: Any, layout: str, model: str, options: dict[str, Any]) -> dict[bool, tuple[list[float], Any, int]]:
    """Returns losses, trained tensors and pages of host memory, without offload and with it."""
    results = {}
    for offload in (False, True):
        engine = build(layout, model, offload_activations=offload, **options)
        losses = [engine.forward_backward(batch(seed), policy).loss for seed in (0, 1)]
        engine.optimizer_step()
        losses.append(engine.forward_backward(batch(2), policy).loss)
        state = {f"{name} gradient": parameter.grad for name, parameter in engine.parameters.items()}
        layers = [layer for stage in engine.stage_models.values() for layer in stage.logical_layers]
        offloads = {layer.offload for layer in layers if layer.offload is not None}
        results[offload] = losses, state | engine.parameters, sum(len(each.pages) for each in offloads)
        assert all(len(each.free) == len(each.pages) for each in offloads)
    return {
        offload: (
            losses,
            {
                name: tensor if tensor is None else getattr(tensor, "_local_tensor", tensor).detach().clone()
                for name, tensor in state.items()
            },
            pages,
        )
        for offload, (losses, state, pages) in results.items()
    }


@pytest.mark.parametrize(
    ("layout", "model", "options"),
    [
        ("tp=2", "tiny-moe", {"recompute": "selective"}),
        ("dp_shard=2,ep=2", "tiny-hybrid", {"overlap": True}),
        ("pp=2", "tiny-moe", {"overlap": "zero_bubble"}),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                ("pp=2", "tiny-hybrid", {"recompute": "full"}),
                ("tp=2", "tiny-hybrid", {"recompute": "selective"}),
                ("dp_shard=2", "tiny-moe", {"lora": LoRA(rank=4)}),
                ("pp=2,vpp=2", "tiny-hybrid", {"overlap": True}),
                ("cp=2", "tiny-hybrid", {"gather_once": True}),
                ("dp_shard=2,ep=2,pp=2", "tiny-moe", {"recompute": "selective"}),
            )
        ),
    ],
    ids=str,
)
def test_every_layout_trains_as_without_offload(ranks: Any, layout: str, model: str, options: dict[str, Any]) -> None:
    pages = 0  # of all ranks: the last of a pipeline may have none
    for results in ranks(Layout.parse(layout).world_size, train, layout, model, options):
        (expected_losses, expected, _), (losses, state, own_pages) = results[False], results[True]
        pages += own_pages
        assert losses == expected_losses
        assert state.keys() == expected.keys()
        for name, tensor in state.items():
            assert (tensor is None) == (expected[name] is None), name
            assert tensor is None or torch.equal(tensor, expected[name]), name
    assert pages


def step_on_gpu(
    pattern: str, offload_activations: bool | str, **options: Any
) -> tuple[dict[str, Tensor], int, ActivationOffload | None]:
    """Returns the gradients of three microbatches of other lengths, and the most bytes that activations took."""
    config = small_config(
        pattern,
        hidden_size=1024,
        vocab_size=8192,
        initializer_range=0.02,
        blocks={"-": MLPConfig(intermediate_size=4096), "*": AttentionConfig(heads=8, kv_heads=2, head_dim=128)},
    )
    model = LanguageModel(config, offload_activations=offload_activations, **options).to("cuda", torch.bfloat16)
    model.reset()
    most = 0
    for length in (4096, 3000, 8000):
        (microbatch,) = pack([torch.arange(length)], budget=8192)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = model(microbatch.to("cuda"), targets=True).sum()
        most = max(most, torch.cuda.max_memory_allocated() - before)
        loss.backward()
    offloads = [layer.offload for layer in model.logical_layers if layer.offload is not None]
    return gradients(model), most, offloads[0] if offloads else None


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_gradients_on_a_gpu_are_equal_to_the_bit_in_less_memory(recompute: Any) -> None:
    """Products alone, whose kernels have the same bits each time."""
    expected, most, _ = step_on_gpu("-{12}", False, recompute=recompute)
    actual, less, offload = step_on_gpu("-{12}", True, recompute=recompute)
    assert same_bits(actual, expected)
    assert offload is not None
    assert len(offload.free) == len(offload.pages) > 0
    if recompute == "none":
        assert less < 0.6 * most


@pytest.mark.gpu
def test_attention_on_a_gpu_has_the_same_gradients() -> None:
    """Its backward adds in another order each time, so the norm of the difference is compared."""
    (expected, most, _), (actual, less, _) = (step_on_gpu("[*-]{8}", choice) for choice in (False, "::2"))
    for name, gradient in actual.items():
        assert (gradient - expected[name]).float().norm() < 0.02 * expected[name].float().norm(), name
    assert less < 0.8 * most
