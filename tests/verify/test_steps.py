"""Optimizer steps, clipping, critic, top-k and a checkpoint of a layout equal one rank's; a fault is found."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from postlude import Layout
from postlude.engine.checkpoint import _SavedTrainingState
from postlude.engine.optimizers import ShardedAdamW
from postlude.engine.training_state import TrainingState
from postlude.lora import LoRA
from postlude.verify.cases import Case
from postlude.verify.compare import Report, compare
from tests.engine.training import config
from tests.meshes import mesh
from tests.model.small import small_config

DENSE = config("tiny-dense", num_hidden_layers=2)
RESTORE, CLIPPED_STEP = _SavedTrainingState.restore_counts, ShardedAdamW.clipped_step


def unclipped(self: ShardedAdamW, settings: Any, lr: float, norm: Tensor) -> None:
    CLIPPED_STEP(self, settings, lr, 1e-3 * norm)


def without_moments(self: _SavedTrainingState) -> None:
    RESTORE(self)
    for state in self.training_state.optimizer.state.values():
        state["exp_avg"].zero_()


FAULTS: dict[str, AbstractContextManager[Any]] = {
    "none": nullcontext(),
    "clipping": patch.object(ShardedAdamW, "clipped_step", unclipped),
    "norm": patch.object(TrainingState, "gradient_norm", lambda self: torch.ones((), dtype=torch.float64)),
    "moments": patch.object(_SavedTrainingState, "restore_counts", without_moments),
}


def compared(group: Any, case: Case, fault: str) -> Report | None:
    with FAULTS[fault]:
        return compare(case, mesh=mesh(case.layout))


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (Case(DENSE, layout=Layout(dp_shard=2), steps=True), "none"),
        (Case(DENSE, layout=Layout(dp_shard=2), steps=True), "clipping"),
        (Case(DENSE, layout=Layout(pp=2), objective="sft", steps=True), "norm"),
        (Case(DENSE, layout=Layout(tp=2), objective="dpo", steps=True), "moments"),
        (Case(small_config("[*-][*E]/[*-]"), layout=Layout(dp_shard=2), objective="sft", steps=True), "none"),
        (Case(small_config("[*-]{2}"), layout=Layout(pp=2), objective="sft", lora=LoRA(rank=2), steps=True), "none"),
    ],
    ids=["dense", "clipping", "norm", "moments", "depths", "lora"],
)
def test_steps_equal_one_ranks_unless_something_is_wrong(ranks: Any, case: Case, fault: str) -> None:
    report = ranks(case.layout.world_size, compared, case, fault)[0]
    assert report.passes() == (fault == "none"), report.worst_of_steps
    assert {"gradient norm 1", "gradient norm 2", "top-k"} < report.steps.keys()
    assert ("values" in report.steps) == (case.lora is None)
    if fault != "none":
        assert report.worst[1] < 1e-5 < report.worst_of_steps[1]
