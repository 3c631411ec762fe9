"""Overlapped steps are bit-identical to plain ones: losses, metrics, gradients and weights, in every layout."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from postlude import AdamW, Batch, Engine, Layout, ModelConfig
from postlude import ranks as started
from postlude.model.blocks import MoEConfig
from postlude.model.parallel import local_shard
from postlude.objectives import MTP, SFT
from postlude.trace.recorder import Recording
from tests.engine.live_tensors import live_matrices
from tests.meshes import mesh
from tests.model.small import sequences, small_config

EXPERTS = MoEConfig(
    experts=4,
    top_k=2,
    intermediate_size=12,
    shared_intermediate_size=8,
    selection_bias=True,
    selection_bias_rate=1e-3,
    balance_coefficient=0.01,
    router_fp32=True,
)
PATTERNS = ["[*E]{4}", "*E{2}-", "[*-][*E]{3}", "M[M*]-[*E]", "[GE][*E]/[*E]"]
LENGTHS = (20, 17, 3, 25, 6, 11, 9, 14, 2, 12, 19, 23)


def config(pattern: str, **changes: Any) -> ModelConfig:
    return small_config(pattern, blocks={"E": EXPERTS}, **changes)


def batch(step: int) -> Batch:
    return Batch(sequences(*LENGTHS, seed=step))


def gradients(engine: Engine) -> dict[str, Tensor]:
    return {
        name: local_shard(parameter.grad).clone()
        for name, parameter in engine.parameters.items()
        if parameter.grad is not None
    }


def with_and_without_overlap(
    group: Any, layout: str, source: ModelConfig, steps: int, options: dict[str, Any]
) -> list[tuple[list[Any], dict[str, Tensor], dict[str, Tensor]]]:
    """Returns losses and metrics of every step, the first gradients and the last weights: plain, overlapped."""
    results = []
    for overlap in (False, True):
        ahead = bool(source.pattern.mtp)
        placement = {"layout": Layout()} if "device" in options else {"mesh": mesh(Layout.parse(layout))}
        optimizer = AdamW(lr=1e-2, max_grad_norm=0.5)
        engine = Engine(source, budget=32, optimizer=optimizer, mtp=ahead, overlap=overlap, **placement, **options)
        step_results, first = [], {}
        for step in range(steps):
            result = engine.forward_backward(batch(step % 5), MTP(objective=SFT()) if ahead else SFT())
            first = first or gradients(engine)
            step_results.append((result.loss, result.metrics, engine.optimizer_step().grad_norm))
        results.append(
            (
                step_results,
                first,
                {name: local_shard(parameter).clone() for name, parameter in engine.parameters.items()},
            )
        )
    return results


def assert_identical(outputs: list[Any]) -> None:
    for plain, overlapped in outputs:
        assert plain[0] == overlapped[0]
        for before, after in zip(plain[1:], overlapped[1:], strict=True):
            assert before.keys() == after.keys()
            unequal = [name for name in before if not torch.equal(before[name], after[name])]
            assert not unequal


LAYOUTS = {"": 1, "dp_shard=2,ep=2": 2, "pp=2": 2, "pp=2,vpp=2,dp_shard=2,ep=2": 4, "pp=2,cp=2,ep=2": 4}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp_shard=2,ep=2", pytest.param("pp=2,cp=2,ep=2", marks=pytest.mark.thorough)])
def test_overlapped_steps_equal_plain_steps(ranks: Any, layout: str) -> None:
    assert_identical(ranks(LAYOUTS[layout], with_and_without_overlap, layout, config("[GE][*E]/[*E]"), 2, {}))


@pytest.mark.thorough
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("layout", "trunk"),
    [("pp=2,dp_shard=2,ep=2", "[*E]{2}"), ("pp=2,dp_shard=2,ep=2", "[*E]|"), ("dp_shard=2,tp=2,ep=2", "[*E]{2}")],
)
def test_overlapped_experts_in_two_mtp_depths(ranks: Any, layout: str, trunk: str, tied: bool, recompute: str) -> None:
    source = config(f"{trunk}/[*E]/[*E]", tied_head=tied)
    assert_identical(ranks(4, with_and_without_overlap, layout, source, 2, {"recompute": recompute}))


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"compute_dtype": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("layout", ["dp_shard=2,ep=2", "pp=2"])
def test_overlapped_repeated_mtp_depth_with_experts(ranks: Any, layout: str, options: dict[str, Any]) -> None:
    """Where gradients wait for the last microbatch, FSDP sums a plain step's in two: before its last one, and after."""
    source = config("[*E]{2}/[*E]/[*E]", mtp_repeated=True)
    assert_identical(ranks(LAYOUTS[layout], with_and_without_overlap, layout, source, 2, options))


def exchanges_outside_the_plan(group: Any, layout: str, objective: Any, mtp: bool) -> set[str]:
    """Returns the exchanges that a step started outside the plan."""
    engine = Engine(config("[*E]/[*E]"), budget=32, mesh=mesh(Layout.parse(layout)), mtp=mtp, overlap=True)
    recording = Recording(0, torch.device("cpu"))
    engine.forward_backward(batch(0), objective, recorder=recording)
    return {span.name for span in recording.spans() if span.kind == "exchange"}


@pytest.mark.slow
def test_depths_requested_by_an_objective_are_exchanged_by_the_plan(ranks: Any) -> None:
    (actual, _) = ranks(2, exchanges_outside_the_plan, "dp_shard=2,ep=2", MTP(objective=SFT()), True)
    assert {"mtp.0.layers.0 moe.dispatch", "mtp.0.layers.0 moe.combine"} < actual
    (actual, _) = ranks(2, exchanges_outside_the_plan, "dp_shard=2,ep=2", SFT(), False)
    assert actual == {"layers.0 moe.dispatch", "layers.0 moe.combine"}


def steps_with_evaluations(group: Any, layout: str) -> list[Any]:
    """Two batches per step, and log-probs before, during and after: plain, overlapped."""
    results = []
    for overlap in (False, True):
        engine = Engine(config("[*E]{2}"), budget=32, mesh=mesh(Layout.parse(layout)), overlap=overlap)
        tensors: list[Any] = []
        for step in range(2):
            tensors += engine.logprobs(batch(step)).logprob
            engine.forward_backward(batch(step), SFT())
            tensors += engine.logprobs(batch(step)).logprob
            engine.forward_backward(batch(step + 1), SFT())
            tensors.append(torch.tensor(engine.optimizer_step().grad_norm))
        results.append(tensors + engine.logprobs(batch(0)).logprob)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp_shard=2,ep=2", pytest.param("pp=2", marks=pytest.mark.thorough)])
def test_gradients_accumulate_and_evaluations_use_gathered_weights(ranks: Any, layout: str) -> None:
    for plain, overlapped in ranks(2, steps_with_evaluations, layout):
        assert all(torch.equal(*pair) for pair in zip(plain, overlapped, strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["dp_shard=2,ep=2", "pp=2"])
def test_overlapped_steps_in_bf16(ranks: Any, layout: str) -> None:
    """Gradients of single microbatches are bf16, and their sums fp32."""
    assert_identical(
        ranks(2, with_and_without_overlap, layout, config("[ME][*E]"), 2, {"compute_dtype": torch.bfloat16})
    )


def left_alive(group: Any, overlap: Any) -> list[tuple[int, ...]]:
    """Returns the shapes of activations that a second pass leaves alive, also in reference cycles."""
    engine = Engine(config("[*E]{2}/[*E]"), mesh=mesh(Layout(pp=2)), budget=32, overlap=overlap, mtp=True)

    engine.forward_backward(batch(0), MTP(objective=SFT()))  # makes the gradients
    gc.collect()
    before = live_matrices()
    known = {id(tensor) for tensor in before}
    gc.disable()
    try:
        engine.forward_backward(batch(1), MTP(objective=SFT()))
        after = [tensor for tensor in live_matrices() if id(tensor) not in known]
    finally:
        gc.enable()
    gradients = {
        parameter.grad.untyped_storage().data_ptr()
        for parameter in engine.parameters.values()
        if parameter.grad is not None
    }
    return [tuple(tensor.shape) for tensor in after if tensor.untyped_storage().data_ptr() not in gradients]


@pytest.mark.parametrize("overlap", [False, True, "zero_bubble"])
def test_pass_frees_all_activations(ranks: Any, overlap: Any) -> None:
    assert ranks(2, left_alive, overlap) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [3, pytest.param(100, marks=pytest.mark.thorough)])
def test_overlapped_stages_with_explicit_cuts_and_recompute(ranks: Any, steps: int) -> None:
    """Cuts in the pattern, two stages per rank, exchanges between experts, selective recompute."""
    source, layout = config("[*E]|[*-][*E]|E[M-]|[*E]"), "pp=2,vpp=2,dp_shard=2,ep=2"
    options = {"recompute": "selective"}
    assert_identical(ranks(4, with_and_without_overlap, layout, source, steps, options, patience=900))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.thorough)])
def test_overlapped_layers_that_are_a_single_moe(ranks: Any, recompute: str) -> None:
    """Norm and residual read the same hidden states in segments that are differentiated one after the other."""
    options = {"recompute": recompute}
    assert_identical(ranks(2, with_and_without_overlap, "dp_shard=2,ep=2", config("E*E{2}/E*"), 1, options))


@pytest.mark.thorough
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("layout", ["dp_shard=2,ep=2", "pp=2,vpp=2,dp_shard=2,ep=2", "pp=2,cp=2,ep=2"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_100_overlapped_steps(ranks: Any, pattern: str, layout: str, recompute: str) -> None:
    if "/" in pattern:
        layout = layout.replace(",vpp=2", "")  # it has as many layers as a pipeline of two has stages
    size, options = LAYOUTS.get(layout, 4), {"recompute": recompute}
    patience = 900  # 200 steps of four ranks, which may have two cores
    assert_identical(ranks(size, with_and_without_overlap, layout, config(pattern), 100, options, patience=patience))


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("pattern", "tied"), [("[*E]{2}", False), ("[M-][*E]/[*-]", False), ("[*E][*-]/[*-]", True)])
def test_overlapped_steps_on_a_gpu(pattern: str, tied: bool, recompute: str) -> None:
    """In bf16 too, where kernels add weight gradients to fp32 accumulators."""
    experts = replace(EXPERTS, intermediate_size=32)
    sizes: dict[str, Any] = {"hidden_size": 64, "tied_head": tied, "blocks": {"E": experts}}
    with started(device="cuda"):
        assert_identical(
            [
                with_and_without_overlap(
                    None, "", small_config(pattern, **sizes), 3, {"recompute": recompute, "device": "cuda"}
                )
            ]
        )
