"""The parallel layout: the degree of parallelism along each axis, as one value that is passed down.

`Layout` has only the numbers and needs no torch; `world/mesh.py` maps them to running ranks.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Annotated, TypeAlias

from postlude.checks import Bounds

Degree: TypeAlias = Annotated[int, Bounds(least=1)]


@dataclass(frozen=True)
class Stage:
    """One contiguous part of the model: `index` of `count`, from the embedding to the head."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.index < self.count:
            raise ValueError(f"stage {self.index} of {self.count} does not exist; stages count from 0 to count - 1.")

    @property
    def first(self) -> bool:
        """Whether this stage embeds the tokens."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether this stage holds the final norm and the output head."""
        return self.index == self.count - 1


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of parallelism. One rank is the layout of ones, on the same code path as any other.

    Experts are sharded over `ep` ranks *within* a pipeline stage: `ep` divides dp_shard · cp · tp and adds no ranks.
    """

    pp: Degree = 1
    """Pipeline ranks."""
    vpp: Degree = 1
    """Virtual pipeline: stages per pipeline rank."""
    dp_replicate: Degree = 1
    """Data-parallel replicas."""
    dp_shard: Degree = 1
    """Data-parallel ranks that shard the parameters."""
    cp: Degree = 1
    """Context-parallel ranks: they share every sequence."""
    tp: Degree = 1
    """Tensor-parallel ranks: they share every matrix."""
    ep: Degree = 1
    """Expert-parallel ranks, among the others."""

    def __post_init__(self) -> None:
        for axis in fields(self):
            degree = getattr(self, axis.name)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise ValueError(f"Layout({axis.name}={degree!r}): a degree is a whole number of at least 1.")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(
                f"Layout(pp=1, vpp={self.vpp}): virtual stages interleave pipeline ranks, so they need pp of at least "
                "2. Use vpp=1, or raise pp."
            )
        if (self.dp_shard * self.cp * self.tp) % self.ep:
            raise ValueError(
                f"{self}: ep={self.ep} does not divide dp_shard·cp·tp = {self.dp_shard}·{self.cp}·{self.tp} = "
                f"{self.dp_shard * self.cp * self.tp}. Experts are folded into these ranks; use an ep that divides it."
            )

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Parses a layout as it is written on the command line: `"pp=2,cp=2"`. The empty string is one rank."""
        names = [axis.name for axis in fields(cls)]
        degrees: dict[str, int] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, degree = (piece.strip() for piece in part.partition("="))
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"the axes are {', '.join(names)}."
                raise ValueError(f"layout {text!r}: {name!r} is not an axis; {hint}")
            if not equals or not (degree.isascii() and degree.isdigit()):
                raise ValueError(f"layout {text!r}: {part!r} is not of the form {name}=N with N a whole number.")
            if name in degrees:
                raise ValueError(f"layout {text!r}: {name!r} is given twice.")
            degrees[name] = int(degree)
        return cls(**degrees)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Data-parallel ranks, replicated and sharded: each runs its own microbatches."""
        return self.dp_replicate * self.dp_shard

    @property
    def stages(self) -> int:
        """Pipeline stages, virtual ones included."""
        return self.pp * self.vpp

    def __str__(self) -> str:
        degrees = ", ".join(
            f"{axis.name}={getattr(self, axis.name)}" for axis in fields(self) if getattr(self, axis.name) > 1
        )
        return f"Layout({degrees})"


def nearest_degrees(degree: int, fitting: Iterable[int]) -> str:
    """Returns the fitting degrees next to one that does not fit, for a message: "2 or 4"."""
    ordered = sorted(set(fitting))
    below, above = [fit for fit in ordered if fit < degree][-1:], [fit for fit in ordered if fit > degree][:1]
    return " or ".join(map(str, below + above))
