"""Zero-bubble schedules are bit-identical to 1F1B, in every layout."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
import torch

from postlude import AdamW, Batch, Engine, Layout, ModelConfig
from postlude.model.parallel import local_shard
from postlude.objectives import MTP, SFT
from postlude.options import Overlap
from postlude.pipeline.schedule import zero_bubble
from postlude.trace.recorder import Recording
from tests.engine.test_overlap import assert_identical, config, gradients
from tests.meshes import mesh
from tests.model.small import sequences, small_config

LENGTHS = (20, 17, 3, 25, 6, 11, 9, 14, 2, 12, 19, 23)


def with_and_without_zero_bubble(group: Any, layout: str, source: ModelConfig, options: dict[str, Any]) -> list[Any]:
    """Returns losses, log-probs and metrics of two steps, the first gradients and the last weights."""
    results = []
    overlap: Overlap
    for overlap in (False, "zero_bubble"):
        ahead = bool(source.pattern.mtp)
        rank_mesh, optimizer = mesh(Layout.parse(layout)), AdamW(lr=1e-2, max_grad_norm=0.5)
        engine = Engine(source, budget=32, optimizer=optimizer, mtp=ahead, overlap=overlap, mesh=rank_mesh, **options)
        step_results, first = [], {}
        for step in range(2):
            batch = Batch(sequences(*LENGTHS, seed=step))
            result = engine.forward_backward(batch, MTP(objective=SFT()) if ahead else SFT())
            first = first or gradients(engine)
            step_results.append((result.loss, result.metrics, engine.optimizer_step().grad_norm))
            step_results.append(torch.cat(engine.logprobs(batch).logprob).tolist())
        results.append(
            (
                step_results,
                first,
                {name: local_shard(parameter).clone() for name, parameter in engine.parameters.items()},
            )
        )
    return results


def executed_actions(group: Any, layout: str) -> tuple[str, int]:
    """Returns a rank's actions in order, and the number of microbatches."""
    engine = Engine(small_config("[*-]{4}"), budget=32, mesh=mesh(Layout.parse(layout)), overlap="zero_bubble")
    recording = Recording(engine.mesh.pp.rank, engine.device)
    result = engine.forward_backward(Batch(sequences(*LENGTHS)), SFT(), recorder=recording)
    letters = {"forward": "F", "backward": "B", "weights": "W"}
    spans = sorted(recording.spans(), key=lambda span: span.start)
    actions = [f"{letters[span.kind]}{span.microbatch}@{engine.mesh.pp.rank}" for span in spans if span.kind in letters]
    return " ".join(name for name, _ in groupby(actions)), result.microbatches


def test_ranks_run_the_planned_turns(ranks: Any) -> None:
    for rank, (actions, microbatches) in enumerate(ranks(2, executed_actions, "pp=2")):
        assert microbatches > 2
        assert actions == " ".join(map(str, zero_bubble(pp=2, microbatches=microbatches, rank=rank)))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_zero_bubble_with_microbatches_of_unequal_length(ranks: Any, recompute: str) -> None:
    assert_identical(
        ranks(
            2, with_and_without_zero_bubble, "pp=2", small_config("[*-][*-]", tied_head=True), {"recompute": recompute}
        )
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("size", "layout", "pattern", "options"),
    [
        (4, "pp=4", "[*-]{4}", {}),
        (4, "pp=4", "[*E]{4}", {"recompute": "full"}),
        (2, "pp=2", "M[M*]-[*E]", {"recompute": "selective"}),
        (2, "pp=2", "[GE][*E]/[*E]", {}),
        (4, "pp=2,tp=2", "[*-][*E]/[*-]", {"recompute": "full"}),
        (4, "pp=2,dp_shard=2,ep=2", "[GE][*E]/[*E]", {}),
        (4, "pp=2,dp_shard=2,ep=2", "[*E]{2}", {"recompute": "full"}),
        (4, "pp=2,dp_shard=2", "[M-][*-]", {"compute_dtype": torch.bfloat16}),
        (4, "pp=2,cp=2", "[*-][*E]", {"recompute": "selective"}),
        (4, "pp=2,dp_replicate=2", "[*-]{2}", {}),
        (4, "pp=4", "[*-]{4}/[*-]", {"compute_dtype": torch.bfloat16}),
    ],
)
def test_zero_bubble_in_every_layout(ranks: Any, size: int, layout: str, pattern: str, options: dict[str, Any]) -> None:
    assert_identical(ranks(size, with_and_without_zero_bubble, layout, config(pattern), options))


@pytest.mark.thorough
def test_zero_bubble_with_a_repeated_mtp_depth(ranks: Any) -> None:
    """Its stage defers no gradient, and still has W actions."""
    assert_identical(
        ranks(2, with_and_without_zero_bubble, "pp=2", config("[*-][*E]/[*-]/[*-]", mtp_repeated=True), {})
    )
