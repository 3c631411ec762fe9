"""Steps: a layer's computation, defined once. `forward` runs the list; a schedule plan interleaves the same list."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal, cast

from torch import Tensor

from postlude.model.context import ForwardContext
from postlude.model.recompute import Recompute, recomputed
from postlude.ops.all_to_all import AllToAllPlan

StepFunction = Callable[..., Mapping[str, Any]]


@dataclass(frozen=True)
class LayerStep:
    """One named piece of a layer: `run(*reads, context)` returns the values it writes, by name.

    A `compute` step runs on this rank, synchronous collectives included. An `exchange` is an all-to-all, and
    its `reads` are the names of a tensor and of an `AllToAllPlan`; a schedule plan starts and awaits it separately.
    The residual stream is called `hidden`.

    recompute_selective: with selective recompute, cheap results of the step are recomputed, exchanges are not.
    never_recompute: the step is not recomputed by a schedule plan with full recompute either.
    syncs_host: the host waits here for the result of an earlier step.
    """

    name: str
    kind: Literal["compute", "exchange"]
    reads: tuple[str, ...]
    run: StepFunction
    recompute_selective: bool = False
    never_recompute: bool = False
    syncs_host: bool = False


def compute(
    name: str,
    run: StepFunction,
    *,
    recompute_selective: bool = True,
    never_recompute: bool = False,
    syncs_host: bool = False,
) -> LayerStep:
    """Builds a compute step. Its inputs are matched by name: those of `run`'s parameters, the last being `context`."""
    recompute_selective = recompute_selective and not never_recompute
    return LayerStep(name, "compute", _reads(run), run, recompute_selective, never_recompute, syncs_host)


def exchange(name: str, tensor_name: str, *, plan_name: str) -> LayerStep:
    """Builds a step that sends the tensor named `tensor_name` by the `AllToAllPlan` named `plan_name`."""

    def run(rows: Tensor, plan: AllToAllPlan, context: ForwardContext) -> Mapping[str, Tensor]:
        return {tensor_name: plan(rows, name, context.recorder)}

    return LayerStep(name, "exchange", (tensor_name, plan_name), run)


def run_steps(steps: Iterable[LayerStep], hidden: Tensor, context: ForwardContext) -> Tensor:
    values: dict[str, Any] = {"hidden": hidden}
    for step in steps:
        run_step(step, values, context)
    output: Tensor = values["hidden"]
    return output


def run_step(step: LayerStep, values: dict[str, Any], context: ForwardContext) -> None:
    mode: Recompute = context.recompute if step.recompute_selective and context.recompute == "selective" else "none"
    with context.recorder.span("wait", step.name) if step.syncs_host else contextlib.nullcontext():
        values.update(recomputed(step.run, mode, *(values[name] for name in step.reads), context))


def _reads(run: StepFunction) -> tuple[str, ...]:
    # From its code: a cache of signatures would keep `run` alive, and the tensors that it closes over.
    code = cast(FunctionType, inspect.unwrap(getattr(run, "__func__", run))).__code__
    names = code.co_varnames[1 if hasattr(run, "__self__") else 0 : code.co_argcount]
    if not names or names[-1] != "context":
        raise TypeError(
            f"a step's function must have `context` as its last parameter, but {run.__qualname__} takes {names}."
        )
    return names[:-1]
