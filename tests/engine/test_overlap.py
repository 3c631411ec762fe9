"""Overlapped and zero-bubble steps are bit-identical to plain ones: losses, metrics, gradients and weights."""

import gc
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor

from postlude import AdamW, Batch, Engine, Layout, ModelConfig
from postlude import ranks as started
from postlude.model.parallel import local_shard
from postlude.objectives import MTP, SFT
from postlude.options import Overlap
from postlude.pipeline.schedule import zero_bubble
from postlude.trace.recorder import Recording
from tests.engine.live_tensors import live_matrices
from tests.meshes import mesh
from tests.model.small import REPLAYED_EXPERTS, sequences, small_config

LENGTHS = (20, 17, 3, 25, 6, 11, 9, 14, 2, 12, 19, 23)


def config(pattern: str, **changes: Any) -> ModelConfig:
    return small_config(pattern, blocks={"E": REPLAYED_EXPERTS}, **changes)


def size(layout: str) -> int:
    return Layout.parse(layout).world_size


def batch(step: int) -> Batch:
    return Batch(sequences(*LENGTHS, seed=step))


def gradients(engine: Engine) -> dict[str, Tensor]:
    return {
        name: local_shard(parameter.grad).clone()
        for name, parameter in engine.parameters.items()
        if parameter.grad is not None
    }


def with_and_without_overlap(
    group: Any, layout: str, source: ModelConfig, steps: int, options: dict[str, Any], overlap: Overlap = True
) -> list[tuple[list[Any], dict[str, Tensor], dict[str, Tensor]]]:
    """Returns losses and metrics of every step, the first gradients and the last weights: plain, overlapped."""
    results = []
    for how in (False, overlap):
        ahead = bool(source.pattern.mtp)
        placement = {"layout": Layout()} if "device" in options else {"mesh": mesh(Layout.parse(layout))}
        optimizer = AdamW(lr=1e-2, max_grad_norm=0.5)
        engine = Engine(source, budget=32, optimizer=optimizer, mtp=ahead, overlap=how, **placement, **options)
        step_results, first = [], {}
        for step in range(steps):
            result = engine.forward_backward(batch(step % 5), MTP(objective=SFT()) if ahead else SFT())
            first = first or gradients(engine)
            step_results.append((result.loss, result.metrics, engine.optimizer_step().grad_norm))
        last = {name: local_shard(parameter).clone() for name, parameter in engine.parameters.items()}
        results.append((step_results, first, last))
    return results


def assert_identical(outputs: list[Any]) -> None:
    for plain, overlapped in outputs:
        assert plain[0] == overlapped[0]
        for before, after in zip(plain[1:], overlapped[1:], strict=True):
            assert before.keys() == after.keys()
            unequal = [name for name in before if not torch.equal(before[name], after[name])]
            assert not unequal


CUTS = "[*E]|[*-][*E]|E[M-]|[*E]"  # explicit cuts, and exchanges between experts
MANY = "pp=2,vpp=2,dp_shard=2,ep=2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "pattern", "options", "overlap"),
    [
        pytest.param("dp_shard=2,ep=2", "[GE][*E]/[*E]", {}, True, marks=pytest.mark.thorough),
        (MANY, CUTS, {"recompute": "selective"}, True),
        ("dp_shard=2,ep=2", "E*E{2}/E*", {}, True),  # a layer's segments read the same hidden states
        ("pp=2", "[*-][*-]", {"recompute": "none"}, "zero_bubble"),
        ("pp=2", "[*-][*-]", {"recompute": "full"}, "zero_bubble"),
    ],
)
def test_overlapped_steps_equal_plain_steps(
    ranks: Any, layout: str, pattern: str, options: dict[str, Any], overlap: Overlap
) -> None:
    source = config(pattern, tied_head=overlap == "zero_bubble")
    assert_identical(ranks(size(layout), with_and_without_overlap, layout, source, 2, options, overlap))


BF16, FULL, SELECTIVE = {"compute_dtype": torch.bfloat16}, {"recompute": "full"}, {"recompute": "selective"}
OFTEN = [
    ("pp=2,dp_shard=2,ep=2", "[*E]{2}/[*E]/[*E]", FULL, {"tied_head": True}),
    ("pp=2,dp_shard=2,ep=2", "[*E]{2}/[*E]/[*E]", {}, {}),
    ("pp=2,dp_shard=2,ep=2", "[*E]|/[*E]/[*E]", SELECTIVE, {"tied_head": True}),
    ("dp_shard=2,tp=2,ep=2", "[*E]{2}/[*E]/[*E]", SELECTIVE, {}),
    *(("dp_shard=2,ep=2", "[*E]{2}/[*E]/[*E]", options, {"mtp_repeated": True}) for options in (FULL, BF16)),
    ("pp=2", "[*E]{2}/[*E]/[*E]", {}, {"mtp_repeated": True}),
    *((layout, "[ME][*E]", BF16, {}) for layout in ("dp_shard=2,ep=2", "pp=2")),
    *((MANY, pattern, FULL, {}) for pattern in ("[*E]{4}", "*E{2}-", "[*-][*E]{3}", "M[M*]-[*E]", CUTS)),
    *(("pp=2,cp=2,ep=2", pattern, {}, {}) for pattern in ("[*E]{4}", "[GE][*E]/[*E]")),
    ("dp_shard=2,ep=2", "E*E{2}/E*", FULL, {}),
]
ZERO_BUBBLE = [
    ("pp=4", "[*E]{4}", FULL, {}),
    ("pp=2", "M[M*]-[*E]", SELECTIVE, {}),
    ("pp=2,tp=2", "[*-][*E]/[*-]", FULL, {}),
    ("pp=2,dp_shard=2,ep=2", "[GE][*E]/[*E]", {}, {}),
    ("pp=2,dp_shard=2", "[M-][*-]", BF16, {}),
    ("pp=2,cp=2", "[*-][*E]", SELECTIVE, {}),
    ("pp=2,dp_replicate=2", "[*-]{2}", {}, {}),
    ("pp=4", "[*-]{4}/[*-]", BF16, {}),
    ("pp=2", "[*-][*E]/[*-]/[*-]", {}, {"mtp_repeated": True}),  # whose stage defers no gradient, and has W actions
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "pattern", "options", "changes", "overlap"),
    [*((*case, True) for case in OFTEN), *((*case, "zero_bubble") for case in ZERO_BUBBLE)],
)
def test_many_overlapped_steps(
    ranks: Any, layout: str, pattern: str, options: dict[str, Any], changes: dict[str, Any], overlap: Overlap
) -> None:
    """Where gradients wait for the last microbatch, FSDP sums a plain step's in two: before its last one, and after."""
    source, patience = config(pattern, **changes), 900  # two runs of four ranks, which may have two cores
    assert_identical(
        ranks(size(layout), with_and_without_overlap, layout, source, 10, options, overlap, patience=patience)
    )


def executed_actions(group: Any, layout: str) -> tuple[str, int]:
    """Returns a rank's actions in order, and the number of microbatches."""
    engine = Engine(small_config("[*-]{4}"), budget=32, mesh=mesh(Layout.parse(layout)), overlap="zero_bubble")
    recording = Recording(engine.mesh.pp.rank, engine.device)
    result = engine.forward_backward(batch(0), SFT(), recorder=recording)
    letters = {"forward": "F", "backward": "B", "weights": "W"}
    spans = sorted(recording.spans(), key=lambda span: span.start)
    actions = [f"{letters[span.kind]}{span.microbatch}@{engine.mesh.pp.rank}" for span in spans if span.kind in letters]
    return " ".join(name for name, _ in groupby(actions)), result.microbatches


def test_ranks_run_the_planned_turns(ranks: Any) -> None:
    for rank, (actions, microbatches) in enumerate(ranks(2, executed_actions, "pp=2")):
        assert microbatches > 2
        assert actions == " ".join(map(str, zero_bubble(pp=2, microbatches=microbatches, rank=rank)))


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


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("pattern", "tied"), [("[*E]{2}", False), ("[M-][*E]/[*-]", False), ("[*E][*-]/[*-]", True)])
def test_overlapped_steps_on_a_gpu(pattern: str, tied: bool, recompute: str) -> None:
    """In bf16 too, where kernels add weight gradients to fp32 accumulators."""
    experts = replace(REPLAYED_EXPERTS, intermediate_size=32)
    sizes: dict[str, Any] = {"hidden_size": 64, "tied_head": tied, "blocks": {"E": experts}}
    with started(device="cuda"):
        options = {"recompute": recompute, "device": "cuda"}
        assert_identical([with_and_without_overlap(None, "", small_config(pattern, **sizes), 3, options)])
