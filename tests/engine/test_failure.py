"""When a rank dies or fails in the middle of a step, the others stop with a sentence that names it."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch.distributed as dist

from postlude import Batch, Engine, Layout, Loss, OutputInputs, RankError, launch
from postlude.objectives import SFT

TIMEOUT = 30.0


def train(layout: str, end: str) -> None:
    """Train until the last rank comes to its end, in the middle of its second step."""
    engine = Engine("tiny-dense", layout=Layout.parse(layout), budget=16)
    seen = 0

    def objective(inputs: OutputInputs) -> Loss:
        nonlocal seen
        seen += 1
        if seen == 4 and dist.get_rank() == dist.get_world_size() - 1:
            if end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise LookupError("no such column")
        return SFT()(inputs)

    while True:
        engine.forward_backward(Batch([[1, 2, 3, 4, 5, 6, 7, 8]] * 4), objective)
        engine.optimizer_step()


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["pp=2", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("tp=2", "dp_shard=2"))]
)
@pytest.mark.parametrize(
    ("end", "sentence"),
    [("killed", r"rank 1 of 2 was killed by SIGKILL"), ("fails", r"rank 1 of 2 failed: LookupError: .*no such column")],
)
def test_a_rank_that_dies_in_a_step_ends_the_others(layout: str, end: str, sentence: str) -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match=sentence):
        launch(train, layout, end, nproc=2, timeout=TIMEOUT, device="cpu")
    assert time.monotonic() - began < TIMEOUT + 20  # with the start of the ranks
