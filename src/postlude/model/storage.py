"""A check that parameters are stored so that every rank trains its own part of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from postlude.model.blocks import SeparateUnit
from postlude.model.parallel import is_dtensor
from postlude.world.mesh import Mesh


def check_storage(parameters: Iterable[tuple[str, nn.Parameter]], separate: Sequence[SeparateUnit], mesh: Mesh) -> None:
    """Raises for plain parameters, which tensor-parallel ranks would train independently."""
    if mesh.tp.size == 1:
        return
    of_experts = {id(parameter) for unit in separate if unit.experts for parameter in unit.module.parameters()}
    for name, parameter in parameters:
        if not is_dtensor(parameter) and id(parameter) not in of_experts:
            raise TypeError(
                f"{name} is a plain parameter, which tp={mesh.tp.size} ranks would update independently; "
                "make it with postlude.model.parallel.sharded_parameter."
            )
