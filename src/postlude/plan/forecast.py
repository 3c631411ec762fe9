"""StepForecast: a step of a model in a layout, run on the clock with the cost model, and the memory of its ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from postlude.layout import Layout
from postlude.options import ZERO_BUBBLE, Overlap
from postlude.pipeline.schedule import Action, ScheduleEntry
from postlude.plan.cost import ActionCost, CostModel
from postlude.plan.memory import MemoryEstimate, estimate_memory, schedule_of
from postlude.plan.simulator import SimulatedTimeline, simulate_schedule


@dataclass(frozen=True)
class StepTime:
    """One step on the clock. Shares are of all pipeline ranks together."""

    timeline: SimulatedTimeline
    seconds: float
    """The whole step, what comes after its last backward included."""
    exchange: float
    """Seconds a pipeline rank exchanges with experts, on average."""
    exposed: float
    """How much of that no compute hides."""
    waited: float
    """Seconds a pipeline rank waits for other tokens, weights or gradients, on average."""

    @property
    def bubble(self) -> float:
        """The share of the schedule in which a pipeline rank idles, on average."""
        makespan = self.timeline.makespan
        return 1 - sum(self.timeline.busy) / (makespan * len(self.timeline.schedule)) if makespan else 0.0

    @property
    def in_flight(self) -> tuple[int, ...]:
        """For each pipeline rank, the most forwards of a stage that await their backward."""
        return self.timeline.peak_in_flight


@dataclass(frozen=True)
class StepForecast:
    """What a step will take."""

    model: CostModel
    overlap: Overlap
    step: StepTime
    memory: list[MemoryEstimate]
    """Of each pipeline rank."""

    @property
    def peak(self) -> int:
        """Bytes of the rank that needs most."""
        return max(each.total for each in self.memory)

    @property
    def tokens(self) -> int:
        """Of a step, on all ranks."""
        return self.model.microbatches * self.model.budget * self.model.layout.dp

    @property
    def tokens_a_second(self) -> float:
        """On one GPU."""
        return self.tokens / self.step.seconds / self.model.layout.world_size

    @property
    def mfu(self) -> float:
        """FLOPs that the model needs over those that the GPUs could have done."""
        return self.tokens_a_second * self.model.model_flops / self.model.machine.flops


def turn_seconds(works: list[ActionCost]) -> float:
    """How long a turn takes: one action, or a forward and a backward that are run in turn, perfectly interleaved.

    The GPU computes one thing at a time, so both computes add up. An exchange of the one runs behind the compute of
    the other, and exchanges share a link:

        max(C₁ + C₂, C₁ + X₁, C₂ + X₂, X₁ + X₂)     C: compute and what is waited for, X: exchange
    """
    if len(works) == 1:
        return works[0].alone
    computes, exchanges = [work.compute + work.waited for work in works], [work.exchange for work in works]
    longest = max(compute + exchange for compute, exchange in zip(computes, exchanges, strict=True))
    return max(sum(computes), sum(exchanges), longest)


def simulate_step(
    layout: Layout,
    cost: Callable[[Action], ActionCost],
    *,
    microbatches: int,
    overlap: Overlap = False,
    transfer_seconds: float = 0.0,
    after: float = 0.0,
) -> StepTime:
    """Run a step's schedule on the clock. `cost` may be a `CostModel`, or give what was measured.

    With "zero_bubble" it is asked for what a B takes without its weights' gradients, and a W with: `CostModel.apart`.
    `after` are seconds that follow the last backward: the optimizer's.
    """
    schedule = schedule_of(layout, microbatches, overlap=overlap)
    seconds: dict[ScheduleEntry, float] = {}
    exchange = exposed = waited = 0.0
    for turns in schedule:
        for turn in turns:
            works = [cost(action) for action in turn]
            seconds[turn] = turn_seconds(works)
            exchange += sum(work.exchange for work in works)
            waited += sum(work.waited for work in works)
            exposed += seconds[turn] - sum(work.compute + work.waited for work in works)
    timeline = simulate_schedule(
        schedule, stages=layout.stages, seconds=seconds.__getitem__, transfer_seconds=transfer_seconds
    )
    means = (total / layout.pp for total in (exchange, exposed, waited))
    return StepTime(timeline, timeline.makespan + after, *means)


def forecast(model: CostModel, *, overlap: Overlap = False) -> StepForecast:
    """A step of the cost model's layout: its time, and each pipeline rank's memory."""
    layout = model.layout
    step = simulate_step(
        layout,
        model.apart if overlap == ZERO_BUBBLE else model,
        microbatches=model.microbatches,
        overlap=overlap,
        transfer_seconds=model.transfer_seconds,
        after=model.step_seconds,
    )
    return StepForecast(model, overlap, step, memory_of(model, overlap=overlap))


def memory_of(model: CostModel, *, overlap: Overlap) -> list[MemoryEstimate]:
    """What each pipeline rank needs on a GPU, with AdamW's two moments."""
    return estimate_memory(
        model.config,
        model.layout,
        budget=model.budget,
        compute_bytes=model.compute_bytes,
        moments=2,
        recompute=model.recompute,
        device="cuda",
        microbatches=model.microbatches,
        overlap=overlap,
        mtp=model.mtp,
        sizes=model.sizes,
    )
