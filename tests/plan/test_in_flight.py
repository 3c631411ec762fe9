"""The planner's in-flight microbatch count equals that of a running pipeline."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from postlude import Batch, Engine, Layout
from postlude.objectives import SFT
from postlude.options import Overlap
from postlude.plan.memory import schedule_of
from postlude.plan.simulator import peak_held
from postlude.trace.recorder import Recording
from tests.conftest import Ranks

MICROBATCHES = 5


def most_in_flight(group: Any, layout: str, overlap: Overlap) -> int:
    """Returns the most microbatch passes through a stage between the start of forward and the end of backward."""
    engine = Engine("tiny-dense", layout=Layout.parse(layout), budget=16, device="cpu", overlap=overlap)
    recording = Recording(dist.get_rank(), torch.device("cpu"))
    batch = Batch([list(range(16))] * MICROBATCHES)
    engine.forward_backward(batch, SFT(), recorder=recording)
    several = len(engine.stage_models) > 1
    passes: dict[tuple[str, int], tuple[float, float]] = {}
    for span in recording.spans():
        if span.kind in ("forward", "backward") and span.microbatch is not None:
            key = span.name if several else "", span.microbatch
            begin, end = passes.get(key, (span.start, span.end))
            passes[key] = min(begin, span.start), max(end, span.end)
    return max(sum(begin <= at < end for begin, end in passes.values()) for at, _ in passes.values())


@pytest.mark.parametrize(
    ("layout", "overlap"), [("pp=2", False), ("pp=2", True), ("pp=2", "zero_bubble"), ("pp=2,vpp=2", False)]
)
def test_pipeline_in_flight_count_equals_the_planners(ranks: Ranks, layout: str, overlap: Overlap) -> None:
    schedule = schedule_of(Layout.parse(layout), MICROBATCHES, overlap=overlap)
    assert ranks(2, most_in_flight, layout, overlap) == [peak_held(turns, lambda _: 1) for turns in schedule]
