"""The batches of the layout comparison cover what objectives compute."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from postlude import Layout, load_model, pack
from postlude.hf.builtin import BUILTIN
from postlude.verify.cases import BUDGET, FRESH_RANGE, Case, batches
from postlude.verify.choices import TOLERANCES
from postlude.verify.compare import Report
from tests.meshes import verify


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_some_ratios_are_clipped_and_some_are_not(seed: int) -> None:
    """For both signs of advantages, and without ratios so large that only their rounding is compared."""
    config = BUILTIN["tiny-dense"]()
    config.initializer_range = FRESH_RANGE
    model = load_model(config, seed=seed)
    batch = batches("grpo", model.config, seed)["many"]
    microbatches = pack(batch.sequences, budget=BUDGET, columns=batch.columns)
    kinds = set()
    for microbatch in microbatches:
        with torch.no_grad():
            losses = model(microbatch, targets=True)
        ratios = (-losses - microbatch.column("old_logprobs")).exp()[microbatch.targets >= 0]
        raised = microbatch.column("advantages")[microbatch.targets >= 0] > 0
        clipped = torch.where(raised, ratios > 1.28, ratios < 0.8)
        kinds |= set(zip(raised.tolist(), clipped.tolist(), strict=True))
        assert ratios.log().abs().max() < 6
    assert len(kinds) == 4


def test_a_gradient_that_is_no_number_is_the_worst() -> None:
    report = Report(Case("tiny-dense", layout=Layout()), 0.0, 0.0, 0.0, {"bias": 0.5, "weight": float("nan")})
    assert report.worst[0] == "weight"
    assert not report.passes()


def test_tolerance_follows_the_rounding_of_one_rank() -> None:
    """At most ten times the tolerance, and not for a tolerance that is given."""
    report = Report(Case("tiny-dense", layout=Layout()), 0.0, 0.0, 0.0, {"bias": 1.5e-5, "weight": 9e-6})
    assert not report.passes()
    assert replace(report, rounding={"bias": 1e-5}).passes()
    assert not replace(report, rounding={"bias": 7e-6, "weight": 1e-5}).passes()
    assert not replace(report, rounding={"bias": 1e-5}).passes(1e-5)
    assert not replace(report, gradients={"bias": 2e-4}, rounding={"bias": 1.0}).passes()


def test_rounding_is_measured_where_a_layout_is_not_within_the_tolerance(ranks: Any) -> None:
    """In bf16 tp=2 and one rank differ by more than the tolerance, and by less than both from fp32."""
    case = Case("tiny-dense", layout=Layout(tp=2), compute_dtype=torch.bfloat16, initializer_range=0.2)
    report = ranks(2, verify, case)[0]
    assert max(report.offs.values()) > TOLERANCES["bfloat16"]
    assert report.rounding.keys() == report.offs.keys()
    assert report.passes()
    assert not report.passes(TOLERANCES["bfloat16"])
