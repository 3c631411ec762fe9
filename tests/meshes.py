"""Meshes of the test ranks, made once per layout, and the comparison of a case on them."""

import functools
from typing import Any

from postlude.layout import Layout
from postlude.verify.cases import Case
from postlude.verify.compare import Report, compare
from postlude.world.mesh import Mesh
from tests.process_groups import CALL_GROUPS


@functools.cache
def mesh(layout: Layout) -> Mesh:
    with CALL_GROUPS.kept():
        return Mesh(layout)


def verify(group: Any, case: Case) -> Report | None:
    """Compares a case on a rank. The first rank returns the report."""
    return compare(case, mesh=mesh(case.layout))


def equal_to_one_rank(ranks: Any, case: Case) -> Report:
    """Asserts that a layout equals one rank. Returns the comparison."""
    report: Report = ranks(case.layout.world_size, verify, case)[0]
    assert report.passes(), (report.loss, report.logprob, report.entropy, report.worst)
    return report
