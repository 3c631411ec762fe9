"""Every layout equals one rank: loss, per-token log-probs and entropy, and every parameter's gradient."""

from __future__ import annotations

from typing import Any

import pytest

from postlude import Layout
from postlude.verify import GRID, Case, Report, compare
from tests.meshes import mesh


def verify(group: Any, case: Case) -> Report | None:
    return compare(case, mesh=mesh(case.layout))


def check(ranks: Any, case: Case) -> Report:
    report = ranks(case.layout.world_size, verify, case)[0]
    assert isinstance(report, Report)
    return report


def label(value: Any) -> str:
    return str(value) if not isinstance(value, Layout) else str(value)[7:-1].replace(" ", "")


def cases() -> list[Any]:
    """Every layout with both models and objectives. One look at each axis is quick; the rest takes minutes."""
    found = []
    for layout in GRID:
        for model in ("tiny-moe",) if layout.ep > 1 else ("tiny-dense", "tiny-moe"):
            for objective in ("grpo", "sequence"):
                quick = layout.world_size == 2 and objective == ("grpo" if model == "tiny-moe" else "sequence")
                case = Case(model, layout, objective, initializer_range=0.1)
                name = f"{label(layout)}-{model}-{objective}"
                found.append(pytest.param(case, id=name, marks=() if quick else pytest.mark.slow))
    return found


@pytest.mark.parametrize("case", cases())
def test_a_layout_equals_one_rank(ranks: Any, case: Case) -> None:
    report = check(ranks, case)
    assert report.passes(), (report.loss, report.logprob, report.entropy, report.worst)
