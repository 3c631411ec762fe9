"""Spans on a GPU have the duration of the device work, and recording does not synchronise."""

import time

import pytest
import torch
import torch.distributed as dist

from postlude import ranks
from postlude.ops.all_to_all import AllToAllPlan
from postlude.trace.recorder import Recording

pytestmark = pytest.mark.gpu

CYCLES = 100_000_000  # some 50 ms


def test_span_times_are_device_times() -> None:
    with ranks(device="cuda") as rank:
        group = dist.group.WORLD
        assert group is not None
        rows, way = torch.randn(8, 4, device=rank.device), AllToAllPlan([8], [8], group)
        way.start(rows)()  # NCCL is made at its first exchange
        recording = Recording(0, rank.device)
        before = time.perf_counter()
        with recording.span("forward", "long"):
            torch.cuda._sleep(CYCLES)
        arrive = way.start(rows, "exchange", "there", recording)
        with recording.span("forward", "beside"):
            torch.cuda._sleep(CYCLES)
        arrived = arrive()
        seconds = time.perf_counter() - before
        spans = {span.label: span for span in recording.spans()}
        assert torch.equal(arrived, rows)
        long, beside, other = spans["F long"], spans["F beside"], spans["F there"]
        assert long.end - long.start > 2 * seconds  # the host was through long before
        assert other.start >= long.end
        assert other.end < beside.end  # it went on beside
        assert spans["wait there"].end - spans["wait there"].start < 0.2 * (beside.end - beside.start)
        assert before - 1e-3 <= long.start <= before + 1.0  # two clocks, laid over each other once
