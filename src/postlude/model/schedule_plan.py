"""SchedulePlan: one microbatch's way through a stage, step by step, to be interleaved with that of another.

A plan runs the very steps that `LanguageModel.forward` runs. It cuts their list at layers, and where rows are exchanged
between ranks. What lies between two cuts is a piece, whose graph ends at its edges, and which is differentiated by
itself. So the forward of one microbatch and the backward of another can take turns, and each one's exchanges are under
way while the other computes:

    interleave(next_one.forward_steps(), this_one.backward_steps(loss))

The gradients of weights, which nobody waits for, are made while an exchange is under way, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from postlude.model.context import ForwardContext
from postlude.model.parallel import FSDPUnit
from postlude.model.recompute import recomputed
from postlude.model.steps import Step, run_step
from postlude.ops.all_to_all import AllToAllPlan
from postlude.ops.linear import DeferredWgrads, defer_wgrad, flush_wgrad

StepGenerator = Generator[None, None, Any]
"""Work that pauses wherever something is under way, so that other work can be done; in the end it returns a result."""
OnGradsReady = Callable[[FSDPUnit], None]
"""Told of a module when a backward has added all that it adds to its gradients."""


@dataclass(frozen=True, eq=False)
class StepOwner:
    """One use of a block: each is its own."""

    name: str


@dataclass(frozen=True)
class PlannedStep:
    """A step of a plan, and the context it runs in.

    What it writes is read by its `owner`'s steps alone, but for the names in `SHARED`, and by steps without an owner:
    those of the stage itself, before each of which a cut is made.
    """

    step: Step
    context: ForwardContext
    owner: StepOwner | None = None
    name: str = ""
    """What a timeline calls it."""
    completes: tuple[FSDPUnit, ...] = ()
    """Modules of which no step comes before this one, so that with its backward all of theirs is done. A cut is made
    before it."""
    used_again: tuple[nn.Module, ...] = ()
    """Modules that steps use more than once, and none before this one. What a backward gives each of their parameters
    is one sum, as in a forward at once, before it is added to what is there; nothing of theirs may be put off."""


SHARED = ("hidden", "embedding")
OUTPUT = "leaving"
"""What the last step writes: the result of the forward, any tree."""


@dataclass(slots=True, eq=False)
class Value:
    """What a piece wrote and others read. Of a tensor with a gradient they read `tensor`, cut from the writer's graph.

    `edge` is where that graph goes on, and `gradient` what came back by an exchange; what other readers give adds up in
    `tensor.grad`.
    """

    tensor: Any
    edge: GradientEdge | None = None
    gradient: Tensor | None = None

    @classmethod
    def of(cls, written: Any) -> Value:
        """A value as it leaves a piece."""
        if not isinstance(written, Tensor) or not written.requires_grad:
            return cls(written)
        return cls(written.detach().requires_grad_(), get_gradient_edge(written))

    def take(self) -> Tensor | None:
        """Its gradient, and let go of the rest."""
        found: Tensor | None = self.gradient if self.tensor is None else self.tensor.grad
        self.tensor = self.gradient = None
        return found


@dataclass(slots=True)
class PlanSegment:
    """Steps between two cuts, and the names of what is read after the second.

    A forward pauses before a step that waits, so a backward `pauses` once for the same owner, before its last piece, or
    the first time at the very beginning: with as many pauses they stay abreast, and what one has begun is always
    followed by work of the other.
    """

    steps: tuple[PlannedStep, ...]
    lasting: frozenset[str]
    name: str
    pauses: bool = False
    written: list[Value] = field(default_factory=list)

    @property
    def used_again(self) -> Sequence[nn.Module]:
        """Those of its steps."""
        return [module for each in self.steps for module in each.used_again]


@dataclass(slots=True)
class AsyncExchange:
    """An exchange between two pieces."""

    step: Step
    name: str
    left: Value = field(default_factory=lambda: Value(None))
    arrived: Value = field(default_factory=lambda: Value(None))
    way: AllToAllPlan | None = None


class SchedulePlan:
    """Made by `LanguageModel.build_schedule_plan`, for one forward and one backward after it.

    `steps` begin from no values and end with one that writes `OUTPUT`. With deferred_wgrad the gradients of weights are
    made apart from those of activations.
    """

    def __init__(self, steps: Sequence[PlannedStep], context: ForwardContext, *, deferred_wgrad: bool = True) -> None:
        self.context = context
        self.parts = _cut(steps)
        self.later: DeferredWgrads | None = [] if deferred_wgrad else None
        self.left: list[tuple[int, list[FSDPUnit]]] = []  # how many were put off up to where these modules were done

    def forward(self) -> Any:
        """All of it at once. Returns what the last step wrote, as it is."""
        return interleave(self.forward_steps())[0]

    def backward(self, output: Tensor, gradient: Tensor | None = None, complete: OnGradsReady | None = None) -> None:
        """All of it at once. See `backward_steps`."""
        interleave(self.backward_steps(output, gradient, complete))

    def forward_steps(self) -> StepGenerator:
        """Run every step. Returns what the last one wrote, as it is."""
        recorder, values = self.context.recorder, dict[str, Value]()
        for part in self.parts:
            if isinstance(part, AsyncExchange):
                moved, along = part.step.reads
                part.left, part.way = values[moved], values[along].tensor
                assert part.way is not None
                arrive = part.way.start(part.left.tensor.detach(), "exchange", part.name, recorder)
                yield
                arrived = arrive().requires_grad_(part.left.edge is not None)
                part.left.tensor = None  # what was sent is of no more use
                part.arrived = values[moved] = Value(arrived)
                continue
            if part.steps[0].step.waits:
                yield
            with recorder.span("forward", part.name):
                found = self._run(part, {name: value.tensor for name, value in values.items()})
            if OUTPUT in found:
                return found[OUTPUT]
            kept = {name: Value.of(each) for name, each in found.items() if name in part.lasting}
            part.written = [value for value in kept.values() if value.edge is not None]
            values = {name: value for name, value in values.items() if name in part.lasting} | kept
        raise AssertionError(f"no step writes {OUTPUT!r}")

    def backward_steps(
        self,
        output: Tensor,
        gradient: Tensor | None = None,
        complete: OnGradsReady | None = None,
        *,
        weights: bool = True,
    ) -> StepGenerator:
        """Differentiate `output`, which was made from what the forward returned: add to every parameter's gradient.

        `gradient` is that of `output`, if it is no scalar. Without `weights`, what is put off is left for
        `flush_wgrads`; `complete` is told of modules with what they have here, and there again.
        """
        make = self._make if weights else _leave
        recorder = self.context.recorder
        edges: list[Any] = [output]
        upstream: list[Tensor | None] = [gradient]
        later, fresh = self.later if self.later is not None else [], 0
        done: list[FSDPUnit] = []
        again = [module for part in self.parts if isinstance(part, PlanSegment) for module in part.used_again]
        with _summed(again) as summed:
            while self.parts:
                part = self.parts.pop()
                if isinstance(part, AsyncExchange):
                    arriving = part.arrived.take()
                    if arriving is not None and part.left.edge is not None:
                        assert part.way is not None
                        arrive = part.way.reverse.start(arriving, "exchange back", part.name, recorder)
                        del arriving
                        # Some are made now, for the other's exchange, and some after its turn, for this one. What the
                        # last piece put off belongs to no module that is done.
                        make(len(later) - fresh)
                        self._tell(done, complete)
                        yield
                        make((len(later) + 1) // 2)
                        part.left.gradient = arrive()
                    continue
                if part.pauses:
                    yield
                fresh = -len(later)
                for value in part.written:
                    if (found := value.take()) is not None:
                        edges.append(value.edge)
                        upstream.append(found)
                part.written = []
                if edges:
                    with recorder.span("backward", part.name):
                        torch.autograd.backward(edges, upstream)
                edges, upstream = [], []
                summed.add(part.used_again)
                fresh += len(later)
                completed = [module for each in reversed(part.steps) for module in each.completes]
                if completed and not weights:
                    self.left.append((len(later), completed))
                done += completed
                if not any(isinstance(each, AsyncExchange) for each in self.parts[-3:]):
                    make(len(later))  # no exchange is near whose time they could fill
                    self._tell(done, complete)
        make(len(later))
        self._tell(done, complete)

    def flush_wgrads(self, complete: OnGradsReady | None = None) -> None:
        """The gradients of weights that a backward has left, module by module, each of which is then told of."""
        made = 0
        for count, modules in self.left:
            self._make(count - made)
            self._tell(modules, complete)
            made = count
        self.left = []

    def _run(self, piece: PlanSegment, values: dict[str, Any]) -> dict[str, Any]:
        """What the steps of a piece write, by name. Where all is recomputed, steps to be run once are left out."""
        before = values
        with defer_wgrad(self.later):
            if self.context.recompute != "full":
                values = _written(piece.steps, values)
            else:
                for once, together in groupby(piece.steps, key=lambda each: each.step.once):
                    values = recomputed(_written, "none" if once else "full", tuple(together), values)
        return {name: each for name, each in values.items() if name not in before or each is not before[name]}

    def _make(self, count: int) -> None:
        """The first so many of the gradients that were put off. How many there are, ranks need not agree on."""
        if self.later and count:
            with self.context.recorder.span("weights", "gradients"):
                flush_wgrad(self.later[:count])
                del self.later[:count]

    def _tell(self, done: list[FSDPUnit], complete: OnGradsReady | None) -> None:
        """Of the modules that are done: at the same place on every rank, since what is told may wait for the others."""
        if complete is not None and done:
            with self.context.recorder.span("fsdp", "gradients"):
                for module in done:
                    complete(module)
        done.clear()


class _Summed:
    """What a backward gives to parameters that were used more than once: it is added to their gradients in one.

    It is taken as it is made. Left where it is, FSDP might add it to a sum in another dtype before the next comes.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        found = _parameters(modules)
        self.before = {each: each.grad for each in found}
        self.hooks = {each: each.register_post_accumulate_grad_hook(self._take) for each in found}
        self.sums: dict[Tensor, Tensor] = {}
        for each in found:
            each.grad = None

    @torch.no_grad()
    def _take(self, parameter: Tensor) -> None:
        found, parameter.grad = parameter.grad, None
        assert found is not None  # the hook is called when it was added
        self.sums[parameter] = self.sums[parameter].add_(found) if parameter in self.sums else found

    @torch.no_grad()
    def add(self, modules: Iterable[nn.Module]) -> None:
        """To the gradients of these, to which nothing more comes."""
        for each in _parameters(modules):
            if each in self.hooks:
                self.hooks.pop(each).remove()
                each.grad, found = self.before[each], self.sums.pop(each, None)
                if each.grad is None:
                    each.grad = found
                elif found is not None:
                    each.grad += found


@contextlib.contextmanager
def _summed(modules: Sequence[nn.Module]) -> Iterator[_Summed]:
    """Also after a backward that failed, parameters take what comes to them as ever."""
    summed = _Summed(modules)
    try:
        yield summed
    finally:
        summed.add(modules)


def _parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    found = (each for module in modules for each in module.parameters() if each.requires_grad)
    return list(dict.fromkeys(found))


def _written(steps: Iterable[PlannedStep], values: dict[str, Any]) -> dict[str, Any]:
    """The values with those that steps write."""
    values = dict(values)
    for each in steps:
        run_step(each.step, values, each.context)
    return values


def _leave(count: int) -> None:
    """Make none."""


def interleave(*all_moves: StepGenerator) -> list[Any]:
    """Run them in turn, each while what the others began is under way. Returns what each returns."""
    results: dict[int, Any] = {}
    while len(results) < len(all_moves):
        for index, moves in enumerate(all_moves):
            if index not in results:
                try:
                    next(moves)
                except StopIteration as end:
                    results[index] = end.value
    return [results[index] for index in range(len(all_moves))]


def _cut(steps: Iterable[PlannedStep]) -> list[PlanSegment | AsyncExchange]:
    """Pieces and crossings in order, each piece with the names that are read after it."""
    groups: list[list[PlannedStep]] = [[]]
    for each in steps:
        if each.step.kind == "exchange":
            groups += [[each], []]
            continue
        if each.step.waits or each.completes or each.owner is None:
            groups.append([])
        groups[-1].append(each)
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
            for each in later
            for name in each.step.reads
            if name in SHARED or each.owner is None or each.owner is owner
        }
        begun = group[0].owner
        waited = any(each.step.waits for earlier in groups[:index] for each in earlier if each.owner is begun)
        last = all(each.owner is not begun for later in groups[index + 1 :] for each in later)
        name = _together([each.name for each in group])
        parts.append(PlanSegment(tuple(group), frozenset(read), name, pauses=waited and last))
    pausing = [part for part in parts if isinstance(part, PlanSegment) and part.pauses]
    if pausing:
        pausing[-1].pauses = False
        end = parts[-1]
        assert isinstance(end, PlanSegment)  # an exchange ends nothing
        end.pauses = True
    return parts


def _together(names: Sequence[str]) -> str:
    """ "layers.0 attention.work" and "layers.0 moe.route" -> "layers.0 attention.work+moe.route"."""
    layer = names[0].rpartition(" ")[0]
    return "+".join([names[0], *(name.removeprefix(f"{layer} ") for name in names[1:])])
