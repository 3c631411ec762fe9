"""A recorded step equals an unrecorded one bit for bit, and has one span per compute piece, exchange and wait."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from postlude import Engine
from postlude.data import Batch
from postlude.model.parallel import local_shard
from postlude.objectives import SFT
from postlude.trace.recorder import NO_RECORDER, Recorder, Recording
from postlude.trace.spans import COMPUTE, Span
from tests.engine.test_overlap import config
from tests.engine.training import BUDGET, build
from tests.model.small import sequences

MICROBATCHES = 3


def step(engine: Engine, recorder: Recorder = NO_RECORDER) -> tuple[float, dict[str, Tensor]]:
    lengths = [BUDGET] * MICROBATCHES * engine.layout.dp
    loss = engine.forward_backward(Batch(sequences(*lengths)), SFT(), recorder=recorder).loss
    gradients = {
        name: local_shard(parameter.grad).clone()
        for name, parameter in engine.parameters.items()
        if parameter.grad is not None
    }
    engine.zero_grad()
    return loss, gradients


def run_recorded_step(group: Any, layout: str, pattern: str, overlap: bool) -> tuple[bool, list[Span]]:
    """Returns whether the gradients equal those of an unrecorded step, and the spans."""
    engine = build(layout, config(pattern), overlap=overlap)
    loss, gradients = step(engine)
    recording = Recording(dist.get_rank(), engine.device)
    repeated, later_spans = step(engine, recording)
    is_equal = loss == repeated and gradients.keys() == later_spans.keys()
    return is_equal and all(torch.equal(gradients[name], later_spans[name]) for name in gradients), recording.spans()


def count_kinds(spans: list[Span]) -> Counter[str]:
    return Counter(span.kind for span in spans)


@pytest.mark.parametrize("overlap", [False, True])
def test_recording_changes_no_gradient_and_has_every_span(ranks: Any, overlap: bool) -> None:
    for rank, (is_equal, spans) in enumerate(ranks(2, run_recorded_step, "dp_shard=2,ep=2", "[*E]{2}", overlap)):
        assert is_equal
        assert all(span.rank == rank and span.start <= span.end for span in spans)
        counts, exchanges = count_kinds(spans), 2 * 2 * MICROBATCHES  # there and back in each of two layers
        assert counts["exchange"] == counts["exchange back"] == exchanges
        # What is exchanged is handed over and waited for, and so is how much it will be; at the end nothing.
        assert counts["wait"] == 4 * exchanges + exchanges // 2 + 1
        if not overlap:
            assert counts["forward"] == counts["backward"] == MICROBATCHES
            assert counts["weights"] == 0
            continue
        # A layer is cut before the wait for sizes and at both exchanges; the embedding and the output stand apart.
        assert counts["forward"] == MICROBATCHES * (2 * 4 + 2)
        assert counts["weights"] >= MICROBATCHES * 2
        names = {span.label for span in spans}
        assert {"F2 layers.0 attention.sublayer+moe.route+moe.exchange_sizes", "B0 layers.1 moe.experts"} <= names
        assert {"F0 layers.1 moe.dispatch", "B1 layers.0 moe.combine", "wait 1 layers.0 moe.combine"} <= names


def test_compute_spans_do_not_overlap(ranks: Any) -> None:
    """An exchange overlaps another microbatch's compute: it starts before it and is waited for after it."""
    for _, spans in ranks(2, run_recorded_step, "dp_shard=2,ep=2", "[*E]{2}", True):
        computed = sorted((span for span in spans if span.kind in COMPUTE), key=lambda span: span.start)
        assert all(first.end <= second.start for first, second in itertools.pairwise(computed))
        sent = next(span for span in spans if span.label == "B0 layers.1 moe.combine")
        waited = next(
            span for span in spans if span.label == "wait 0 layers.1 moe.combine" and span.start >= sent.start
        )
        between = [span for span in computed if sent.start <= span.start and span.end <= waited.start]
        assert {"forward"} <= {span.kind for span in between if span.microbatch != 0}


def test_wait_spans_of_pipeline_name_the_awaited_action(ranks: Any) -> None:
    (first, spans), (second, other_spans) = ranks(2, run_recorded_step, "pp=2", "[*-]{2}", False)
    assert first
    assert second
    assert [span.label for span in spans if span.kind == "wait"] == [
        *(f"wait {index} for B{index}@1" for index in range(MICROBATCHES)),
        "wait for pending sends",
    ]
    assert count_kinds(other_spans)["forward"] == MICROBATCHES
    assert {span.label for span in other_spans if span.kind == "forward"} == {"F0 stage 1", "F1 stage 1", "F2 stage 1"}


def test_recording_of_failed_step_has_completed_spans_only() -> None:
    recording = Recording(0, torch.device("cpu"))
    with recording.span("forward", "whole"):
        pass
    with pytest.raises(RuntimeError), recording.span("forward", "half"):
        raise RuntimeError
    assert [span.name for span in recording.spans()] == ["whole"]
