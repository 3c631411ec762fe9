"""SchedulePlan: one microbatch's pass through a stage in segments, to be interleaved with another microbatch's.

A plan runs the same steps as `LanguageModel.forward`. It cuts their list at layers and at exchanges between ranks. The
steps between two cuts are a segment: its autograd graph ends at the cuts, and it is differentiated by itself. So the
forward of one microbatch and the backward of another can alternate, and the exchanges of one run while the other
computes:

    interleave(next_plan.forward_steps(), plan.backward_steps(loss))

Deferred weight gradients are computed during exchanges too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from postlude.model.context import ForwardContext
from postlude.model.parallel import FSDPUnit
from postlude.model.recompute import recomputed
from postlude.model.steps import LayerStep, run_step
from postlude.ops.all_to_all import AllToAllPlan
from postlude.ops.linear import DeferredWgrads, defer_wgrad, flush_wgrad, main_grad, set_main_grad

StepGenerator = Generator[None, None, Any]
"""Work that yields wherever an exchange is running, so that other work can be done, and returns a result."""
OnGradsReady = Callable[[FSDPUnit], None]
"""Called with a module when the backward has added everything to its gradients."""


@dataclass(frozen=True)
class PlannedStep:
    """A step of a plan, and the context it runs in.

    Its `owner` is one use of a block, compared by identity. Only its owner's steps read what it writes, except for the
    names in `SHARED` and for steps without an owner. The latter are the stage's own; each of them starts a segment.
    """

    step: LayerStep
    context: ForwardContext
    owner: object | None = None
    name: str = ""
    """The name in a timeline."""
    completes: tuple[FSDPUnit, ...] = ()
    """Modules of which this is the first step: their gradients are complete after its backward. It starts a segment."""
    offloading: Callable[[ForwardContext, list[Tensor]], AbstractContextManager[None]] = lambda context, held: (
        contextlib.nullcontext()
    )
    """Offloads what the step saves: its layer's `LogicalLayer.offloading`."""
    used_again: tuple[nn.Module, ...] = ()
    """Modules that several steps use, this one first. The gradients of each of their parameters are summed before they
    are added to its gradient, as without a plan. Their weight gradients must not be deferred."""


SHARED = ("hidden", "embedding")
OUTPUT = "output"
"""The name that the last step writes: the result of the forward, any pytree."""


@dataclass(slots=True, eq=False)
class PlannedValue:
    """A value that a segment wrote and others read. Of a tensor with gradient they read `tensor`, a detached leaf.

    `edge` is where the writer's graph continues. `gradient` came back through an exchange; the gradients of other
    readers accumulate in `tensor.grad`.
    """

    tensor: Any
    edge: GradientEdge | None = None
    gradient: Tensor | None = None

    @classmethod
    def of(cls, written: Any) -> PlannedValue:
        if not isinstance(written, Tensor) or not written.requires_grad:
            return cls(written)
        leaf = written.detach().requires_grad_()
        set_main_grad(leaf, main_grad(written))  # of a weight that is passed along, such as the embedding's
        return cls(leaf, get_gradient_edge(written))

    def take(self) -> Tensor | None:
        gradient: Tensor | None = self.gradient if self.tensor is None else self.tensor.grad
        self.tensor = self.gradient = None
        return gradient


@dataclass(slots=True)
class PlanSegment:
    """The steps between two cuts.

    A forward pauses before a step that synchronises with the host. A backward `pauses` once for the same owner, before
    its last segment; its first pause is at the very beginning. So forward and backward have equally many pauses, and
    each exchange of one overlaps with compute of the other.
    """

    steps: tuple[PlannedStep, ...]
    read_later: frozenset[str]
    """Names of its values that later segments read."""
    name: str
    pauses: bool = False
    written: list[PlannedValue] = field(default_factory=list)

    @property
    def used_again(self) -> Sequence[nn.Module]:
        """Modules that its steps use first and others use again."""
        return [module for planned in self.steps for module in planned.used_again]


@dataclass(slots=True)
class AsyncExchange:
    step: LayerStep
    name: str
    sent: PlannedValue = field(default_factory=lambda: PlannedValue(None))
    received: PlannedValue = field(default_factory=lambda: PlannedValue(None))
    plan: AllToAllPlan | None = None


class SchedulePlan:
    """Made by `LanguageModel.build_schedule_plan`, for one forward and one backward after it.

    The last of `steps` writes `OUTPUT`. With deferred_wgrad, gradients of weights are computed separately from those of
    activations.
    """

    def __init__(self, steps: Sequence[PlannedStep], context: ForwardContext, *, deferred_wgrad: bool = True) -> None:
        self.context = context
        self.parts = _cut(steps)  # segments and exchanges, in order; the backward removes them from the end
        self.wgrad_queue: DeferredWgrads | None = [] if deferred_wgrad else None
        self.pending_wgrads: list[tuple[int, list[FSDPUnit]]] = []  # for `flush_wgrads`: queue length, complete modules

    def forward(self) -> Any:
        return interleave(self.forward_steps())[0]

    def backward(self, output: Tensor, gradient: Tensor | None = None, complete: OnGradsReady | None = None) -> None:
        """Runs the whole backward. See `backward_steps`."""
        interleave(self.backward_steps(output, gradient, complete))

    def forward_steps(self) -> StepGenerator:
        """Runs every step, pausing at exchanges. Returns what the last one wrote."""
        recorder, values = self.context.recorder, dict[str, PlannedValue]()
        for part in self.parts:
            if isinstance(part, AsyncExchange):
                tensor_name, plan_name = part.step.reads
                part.sent, part.plan = values[tensor_name], values[plan_name].tensor
                assert part.plan is not None
                wait = part.plan.start(part.sent.tensor.detach(), "exchange", part.name, recorder)
                yield
                received = wait().requires_grad_(part.sent.edge is not None)
                part.sent.tensor = None  # not needed after it was sent
                part.received = values[tensor_name] = PlannedValue(received)
                continue
            if part.steps[0].step.syncs_host:
                yield
            with recorder.span("forward", part.name):
                written = self._run(part, {name: value.tensor for name, value in values.items()})
            if OUTPUT in written:
                return written[OUTPUT]
            read_later = {name: PlannedValue.of(value) for name, value in written.items() if name in part.read_later}
            part.written = [value for value in read_later.values() if value.edge is not None]
            values = {name: value for name, value in values.items() if name in part.read_later} | read_later
        raise AssertionError(f"no step writes {OUTPUT!r}")

    def backward_steps(
        self,
        output: Tensor,
        gradient: Tensor | None = None,
        complete: OnGradsReady | None = None,
        *,
        compute_wgrads: bool = True,
    ) -> StepGenerator:
        """Differentiates `output`, computed from the forward's result, and adds to every parameter's gradient.

        `gradient` is that of `output` unless it is a scalar. Without `compute_wgrads`, deferred weight gradients are
        left to `flush_wgrads`. `complete` is called for each module here, and then again there.
        """
        flush = self._flush if compute_wgrads else _skip
        recorder = self.context.recorder
        roots: list[tuple[Any, Tensor | None]] = [(output, gradient)]  # of the next segment, with their gradients
        queue, new_wgrads = self.wgrad_queue if self.wgrad_queue is not None else [], 0  # of the last segment
        done: list[FSDPUnit] = []
        reused = [module for part in self.parts if isinstance(part, PlanSegment) for module in part.used_again]
        with _summing(reused) as summed:
            while self.parts:
                part = self.parts.pop()
                if isinstance(part, AsyncExchange):
                    gradient_out = part.received.take()
                    if gradient_out is not None and part.sent.edge is not None:
                        assert part.plan is not None
                        wait = part.plan.reverse.start(gradient_out, "exchange back", part.name, recorder)
                        del gradient_out
                        # Weight gradients are computed partly now, during the other microbatch's exchange, and partly
                        # after its turn, during this one. Those of the last segment belong to no complete module.
                        flush(len(queue) - new_wgrads)
                        self._notify(done, complete)
                        yield
                        flush((len(queue) + 1) // 2)
                        part.sent.gradient = wait()
                    continue
                if part.pauses:
                    yield
                queued_before = len(queue)
                self._backward_segment(part, roots)
                roots = []
                summed.add(part.used_again)
                new_wgrads = len(queue) - queued_before
                completed = [module for planned in reversed(part.steps) for module in planned.completes]
                if completed and not compute_wgrads:
                    self.pending_wgrads.append((len(queue), completed))
                done += completed
                if not any(isinstance(near, AsyncExchange) for near in self.parts[-3:]):
                    flush(len(queue))  # no exchange is near that they could overlap with
                    self._notify(done, complete)
        flush(len(queue))
        self._notify(done, complete)

    def _backward_segment(self, segment: PlanSegment, roots: list[tuple[Any, Tensor | None]]) -> None:
        """Differentiates one segment, from `roots` and from the gradients of the values that it wrote."""
        written = [(value.edge, value.take()) for value in segment.written]
        segment.written = []
        roots = [*roots, *((edge, gradient) for edge, gradient in written if gradient is not None)]
        if roots:
            edges, gradients = map(list, zip(*roots, strict=True))
            with self.context.recorder.span("backward", segment.name):
                torch.autograd.backward(edges, gradients)

    def flush_wgrads(self, complete: OnGradsReady | None = None) -> None:
        """Computes the weight gradients that a backward deferred, and calls `complete` for each module."""
        computed = 0
        for count, modules in self.pending_wgrads:
            self._flush(count - computed)
            self._notify(modules, complete)
            computed = count
        self.pending_wgrads = []

    def _run(self, segment: PlanSegment, values: dict[str, Any]) -> dict[str, Any]:
        """Runs a segment and returns what it wrote, by name.

        With full recompute, steps marked `never_recompute` are not repeated.
        """
        before = values
        reads_hidden = "hidden" in values and any("hidden" in planned.step.reads for planned in segment.steps)
        if reads_hidden and "hidden" in segment.read_later:
            # Later readers' gradients are then added in this segment's graph, before its own, as without a plan.
            hidden: Tensor = values["hidden"]
            values = values | {"hidden": hidden.view_as(hidden)}
        first, held = segment.steps[0], [value for value in before.values() if isinstance(value, Tensor)]
        with defer_wgrad(self.wgrad_queue), first.offloading(first.context, held):
            if self.context.recompute != "full":
                values = _run_steps(segment.steps, values)
            else:
                for never_recompute, group in groupby(segment.steps, key=lambda planned: planned.step.never_recompute):
                    values = recomputed(_run_steps, "none" if never_recompute else "full", tuple(group), values)
            written = {name: value for name, value in values.items() if name not in before or value is not before[name]}
            held += [written[name] for name in written.keys() & segment.read_later if isinstance(written[name], Tensor)]
        return written

    def _flush(self, count: int) -> None:
        """Computes the first `count` deferred weight gradients. Ranks need not agree on the number."""
        if self.wgrad_queue and count:
            with self.context.recorder.span("weights", "gradients"):
                flush_wgrad(self.wgrad_queue[:count])
                del self.wgrad_queue[:count]

    def _notify(self, done: list[FSDPUnit], complete: OnGradsReady | None) -> None:
        """Calls `complete` for finished modules, at the same point on every rank, since it may wait for other ranks."""
        if complete is not None and done:
            with self.context.recorder.span("fsdp", "gradients"):
                for module in done:
                    complete(module)
        done.clear()


class _ReusedGradients:
    """Sums the gradients of parameters that are used more than once, and adds the sum to their gradient in one go.

    Gradients are taken as they arrive. FSDP might otherwise add one to a sum in another dtype before the next arrives.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        parameters = _parameters(modules)
        self.before = {parameter: parameter.grad for parameter in parameters}
        self.hooks = {parameter: parameter.register_post_accumulate_grad_hook(self._take) for parameter in parameters}
        self.sums: dict[Tensor, Tensor] = {}
        for parameter in parameters:
            parameter.grad = None

    @torch.no_grad()
    def _take(self, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None  # the hook runs after it was added
        self.sums[parameter] = self.sums[parameter].add_(gradient) if parameter in self.sums else gradient

    @torch.no_grad()
    def add(self, modules: Iterable[nn.Module]) -> None:
        """Adds the sums to the gradients of these modules, which are complete."""
        for parameter in _parameters(modules):
            if parameter in self.hooks:
                self.hooks.pop(parameter).remove()
                parameter.grad, total = self.before[parameter], self.sums.pop(parameter, None)
                if parameter.grad is None:
                    parameter.grad = total
                elif total is not None:
                    parameter.grad += total


@contextlib.contextmanager
def _summing(modules: Sequence[nn.Module]) -> Iterator[_ReusedGradients]:
    """Restores the parameters' gradients after a failed backward too."""
    summed = _ReusedGradients(modules)
    try:
        yield summed
    finally:
        summed.add(modules)


def _parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    trained = (parameter for module in modules for parameter in module.parameters() if parameter.requires_grad)
    return list(dict.fromkeys(trained))


def _run_steps(steps: Iterable[PlannedStep], values: dict[str, Any]) -> dict[str, Any]:
    values = dict(values)
    for planned in steps:
        run_step(planned.step, values, planned.context)
    return values


def _skip(count: int) -> None:
    """Computes no weight gradients."""


def interleave(*generators: StepGenerator) -> list[Any]:
    """Runs generators in turn, each during the others' exchanges. Returns their results."""
    results: dict[int, Any] = {}
    while len(results) < len(generators):
        for index, generator in enumerate(generators):
            if index not in results:
                try:
                    next(generator)
                except StopIteration as end:
                    results[index] = end.value
    return [results[index] for index in range(len(generators))]


def _cut(steps: Iterable[PlannedStep]) -> list[PlanSegment | AsyncExchange]:
    """Cuts a plan into segments and exchanges, in order; each segment has the names that are read after it."""
    groups: list[list[PlannedStep]] = [[]]
    for planned in steps:
        if planned.step.kind == "exchange":
            groups += [[planned], []]
            continue
        if planned.step.syncs_host or planned.completes or planned.owner is None:
            groups.append([])
        groups[-1].append(planned)
    groups = [group for group in groups if group]
    parts: list[PlanSegment | AsyncExchange] = []
    for index, group in enumerate(groups):
        if group[0].step.kind == "exchange":
            parts.append(AsyncExchange(group[0].step, group[0].name))
            continue
        owner = group[-1].owner
        read = {
            name
            for later in groups[index + 1 :]
            for planned in later
            for name in planned.step.reads
            if name in SHARED or planned.owner is None or planned.owner is owner
        }
        first_owner = group[0].owner
        synced = any(
            planned.step.syncs_host for earlier in groups[:index] for planned in earlier if planned.owner is first_owner
        )
        last = all(planned.owner is not first_owner for later in groups[index + 1 :] for planned in later)
        name = _join_names([planned.name for planned in group])
        parts.append(PlanSegment(tuple(group), frozenset(read), name, pauses=synced and last))
    pausing = [part for part in parts if isinstance(part, PlanSegment) and part.pauses]
    if pausing:
        pausing[-1].pauses = False
        end = parts[-1]
        assert isinstance(end, PlanSegment)  # the last part is never an exchange
        end.pauses = True
    return parts


def _join_names(names: Sequence[str]) -> str:
    """ "layers.0 attention.sublayer" and "layers.0 moe.route" -> "layers.0 attention.sublayer+moe.route"."""
    layer = names[0].rpartition(" ")[0]
    return "+".join([names[0], *(name.removeprefix(f"{layer} ") for name in names[1:])])
