"""Steps: a layer's work, stated once. `forward` runs the list; a schedule may run the same list interleaved."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from postlude.model.context import ForwardContext
from postlude.model.recompute import Recompute, recomputed
from postlude.ops.all_to_all import AllToAllPlan

Run = Callable[..., Mapping[str, Any]]


@dataclass(frozen=True)
class Step:
    """One named piece of a layer: `run(*reads, context)` returns the values it writes, by name.

    `compute` works on this rank, and with others where all wait for each other; an `exchange` moves the value it reads
    first along the `AllToAllPlan` it reads second, and can be begun and waited for apart. The residual stream is called
    `hidden`. `again` says whether the step as a whole may be run again where activations are recomputed selectively;
    exchanges never are. `once` says that it is not, either, where a plan recomputes everything between exchanges.
    `waits` says that the host waits here for what an earlier step asked for.
    """

    name: str
    kind: Literal["compute", "exchange"]
    reads: tuple[str, ...]
    run: Run
    again: bool = False
    once: bool = False
    waits: bool = False


def compute(name: str, run: Run, *, again: bool = True, once: bool = False, waits: bool = False) -> Step:
    """A step that is no exchange. What it reads are the names of `run`'s parameters before `context`."""
    return Step(name, "compute", _reads(run), run, again and not once, once, waits)


def exchange(name: str, moved: str, *, along: str) -> Step:
    """A step that moves the value called `moved` along the `AllToAllPlan` called `along`."""

    def run(rows: Tensor, way: AllToAllPlan, context: ForwardContext) -> Mapping[str, Tensor]:
        return {moved: way(rows, name, context.recorder)}

    return Step(name, "exchange", (moved, along), run)


def run_steps(steps: Iterable[Step], hidden: Tensor, context: ForwardContext) -> Tensor:
    """Run a list from the residual stream that enters to the one that leaves."""
    values: dict[str, Any] = {"hidden": hidden}
    for step in steps:
        run_step(step, values, context)
    leaving: Tensor = values["hidden"]
    return leaving


def run_step(step: Step, values: dict[str, Any], context: ForwardContext) -> None:
    """Run one step on the values that it reads, and add those that it writes."""
    mode: Recompute = context.recompute if step.again and context.recompute == "selective" else "none"
    with context.recorder.span("wait", step.name) if step.waits else contextlib.nullcontext():
        values.update(recomputed(step.run, mode, *(values[name] for name in step.reads), context))


def _reads(run: Run) -> tuple[str, ...]:
    names = _parameters(getattr(run, "__func__", run))[1 if hasattr(run, "__self__") else 0 :]
    if not names or names[-1] != "context":
        raise TypeError(f"a step's function ends in a `context` parameter, but {run.__qualname__} takes {names}.")
    return names[:-1]


@functools.cache
def _parameters(function: Run) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)
