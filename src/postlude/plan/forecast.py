"""StepForecast: the simulated time of a step of a model in a layout, and the memory of its ranks."""

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
    """One simulated step. Averages are over pipeline ranks."""

    timeline: SimulatedTimeline
    seconds: float
    """The whole step, with what follows its last backward."""
    exchange: float
    """Seconds of exchanges with experts, on average."""
    exposed: float
    """Seconds of these exchanges that no compute hides."""
    waited: float
    """Seconds of waits for tokens, weights or gradients, on average."""

    @property
    def bubble(self) -> float:
        """The fraction of the schedule in which a pipeline rank idles, on average."""
        makespan = self.timeline.makespan
        return 1 - sum(self.timeline.busy) / (makespan * len(self.timeline.schedule)) if makespan else 0.0


@dataclass(frozen=True)
class StepForecast:
    """The time and the memory of a step."""

    model: CostModel
    step: StepTime
    memory: list[MemoryEstimate]
    """The estimate of each pipeline rank."""

    @property
    def peak(self) -> int:
        """Bytes of the rank that needs most."""
        return max(rank_memory.total for rank_memory in self.memory)

    @property
    def tokens(self) -> int:
        return self.model.microbatches * self.model.options.budget * self.model.layout.dp

    @property
    def tokens_per_second(self) -> float:
        """Per GPU."""
        return self.tokens / self.step.seconds / self.model.layout.world_size

    @property
    def mfu(self) -> float:
        """Model FLOPs over the peak FLOPs of the GPUs."""
        return self.tokens_per_second * self.model.model_flops / self.model.hardware.flops


def entry_seconds(costs: list[ActionCost]) -> float:
    """Returns the seconds of a schedule entry: one action, or a forward and a backward, perfectly interleaved.

    The GPU computes one thing at a time, so both computes add up. An exchange of one runs behind the compute of the
    other, and exchanges share a link:

        max(C₁ + C₂, C₁ + X₁, C₂ + X₂, X₁ + X₂)     C: compute and waits, X: exchange
    """
    if len(costs) == 1:
        return costs[0].total
    computes, exchanges = [work.compute + work.waited for work in costs], [work.exchange for work in costs]
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
    """Simulates a step's schedule. `cost` is a `CostModel`, or returns what was measured.

    With "zero_bubble", the cost of a B is without its weight gradients (`CostModel.with_deferred_wgrads`). `after` are
    the seconds of the optimizer after the last backward.
    """
    schedule = schedule_of(layout, microbatches, overlap=overlap)
    seconds: dict[ScheduleEntry, float] = {}
    exchange = exposed = waited = 0.0
    for entries in schedule:
        for entry in entries:
            costs = [cost(action) for action in entry]
            seconds[entry] = entry_seconds(costs)
            exchange += sum(work.exchange for work in costs)
            waited += sum(work.waited for work in costs)
            exposed += seconds[entry] - sum(work.compute + work.waited for work in costs)
    timeline = simulate_schedule(
        schedule, stages=layout.stages, seconds=seconds.__getitem__, transfer_seconds=transfer_seconds
    )
    means = (total / layout.pp for total in (exchange, exposed, waited))
    return StepTime(timeline, timeline.makespan + after, *means)


def forecast(model: CostModel) -> StepForecast:
    """Returns the time of a step in the cost model's layout, and each pipeline rank's memory."""
    layout, overlap = model.layout, model.options.overlap
    step = simulate_step(
        layout,
        model.with_deferred_wgrads if overlap == ZERO_BUBBLE else model,
        microbatches=model.microbatches,
        overlap=overlap,
        transfer_seconds=model.transfer_seconds,
        after=model.step_seconds,
    )
    return StepForecast(model, step, memory_of(model))


def memory_of(model: CostModel) -> list[MemoryEstimate]:
    """Returns what each pipeline rank needs on a GPU."""
    return estimate_memory(
        model.config,
        model.options,
        compute_bytes=model.compute_bytes,
        frozen=model.frozen,
        device="cuda",
        microbatches=model.microbatches,
        mtp=model.mtp,
        sizes=model.sizes,
    )
