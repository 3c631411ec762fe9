"""Steps: a layer's computation, stated once. `forward` runs the list; a schedule plan interleaves the same list."""

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

    A `compute` step runs on this rank, synchronous collectives included. An `exchange` moves the value that it reads
    first by the `AllToAllPlan` that it reads second; it is started and awaited separately. The residual stream is
    called `hidden`. `again`: the whole step may be run again under selective recompute; exchanges never are. `once`: it
    is not run again either where a plan recomputes everything between exchanges. `waits`: the host waits here for the
    result of an earlier step.
    """

    name: str
    kind: Literal["compute", "exchange"]
    reads: tuple[str, ...]
    run: Run
    again: bool = False
    once: bool = False
    waits: bool = False


def compute(name: str, run: Run, *, again: bool = True, once: bool = False, waits: bool = False) -> Step:
    """Builds a compute step. It reads the values named by `run`'s parameters before `context`."""
    return Step(name, "compute", _reads(run), run, again and not once, once, waits)


def exchange(name: str, moved: str, *, along: str) -> Step:
    """Builds a step that moves the value named `moved` by the `AllToAllPlan` named `along`."""

    def run(rows: Tensor, plan: AllToAllPlan, context: ForwardContext) -> Mapping[str, Tensor]:
        return {moved: plan(rows, name, context.recorder)}

    return Step(name, "exchange", (moved, along), run)


def run_steps(steps: Iterable[Step], hidden: Tensor, context: ForwardContext) -> Tensor:
    """Runs the steps on the residual stream and returns the new one."""
    values: dict[str, Any] = {"hidden": hidden}
    for step in steps:
        run_step(step, values, context)
    output: Tensor = values["hidden"]
    return output


def run_step(step: Step, values: dict[str, Any], context: ForwardContext) -> None:
    """Runs one step and adds the values that it writes."""
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
