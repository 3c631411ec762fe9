"""Measures how much zero bubble shortens the step of a pipeline, compared with the planner's prediction.

    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/zero_bubble.py --json zero_bubble_cpu.json

Ranks on this machine run an engine over gloo. A layer sleeps instead of computing: in its forward, in its
backward, and for the gradient of its weights. So steps show the schedule, even on busy cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from postlude import Batch, Engine, Layout, ModelConfig, Pattern, launch
from postlude.model.blocks import BLOCKS, MLP, MLPConfig
from postlude.model.context import ForwardContext
from postlude.objectives import SFT
from postlude.ops.linear import DeferredWgrads, wgrad_queue
from postlude.options import ZERO_BUBBLE, Overlap
from postlude.plan.cost import ActionCost
from postlude.plan.forecast import simulate_step

TOKENS = 16
WAYS: dict[str, Overlap] = {"1F1B": False, "zero bubble": ZERO_BUBBLE}


class SleepingMLP(MLP):
    """Sleeps in the forward, and where its weight gradients would be computed."""

    seconds = 0.0

    def sublayer(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        weight = self.up_proj.weight
        return super().sublayer(_Sleep.apply(hidden, weight, self.seconds, wgrad_queue(weight)), context)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, seconds: float, later: DeferredWgrads | None) -> Tensor:
        ctx.given = weight, seconds, later
        time.sleep(seconds)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight, seconds, later = ctx.given
        time.sleep(seconds)
        if later is None:
            time.sleep(seconds)
        else:
            later.append((weight, lambda: time.sleep(seconds)))
        return gradients[0], None, None, None


def steps(pp: int, microbatches: int, seconds: float, repeats: int) -> dict[str, list[float]]:
    """Seconds of each step, by the order. Runs on ranks."""
    SleepingMLP.seconds = seconds
    blocks = {"-": MLPConfig(intermediate_size=16)}
    config = ModelConfig(pattern=Pattern.parse(f"[-]{{{pp}}}"), blocks=blocks, hidden_size=16, vocab_size=32)
    options: dict[str, Any] = {"layout": Layout(pp=pp), "budget": TOKENS, "blocks": {**BLOCKS, "-": SleepingMLP}}
    engines = {name: Engine(config, overlap=overlap, device="cpu", **options) for name, overlap in WAYS.items()}
    batch = Batch([torch.arange(TOKENS)] * microbatches)
    seconds_by_name: dict[str, list[float]] = {name: [] for name in WAYS}
    for repeat in range(repeats + 1):
        for name, engine in engines.items():
            engine.zero_grad()
            dist.barrier()
            begun = time.perf_counter()
            engine.forward_backward(batch, SFT())
            dist.barrier()
            seconds_by_name[name] += [time.perf_counter() - begun] if repeat else []
    return seconds_by_name


def forecast_steps(pp: int, microbatches: int, seconds: float) -> dict[str, float]:
    """Returns the same times from the planner."""
    apart = {"F": ActionCost(seconds), "B": ActionCost(seconds), "W": ActionCost(seconds)}
    costs = {"1F1B": apart | {"B": ActionCost(2 * seconds)}, "zero bubble": apart}
    return {
        name: simulate_step(
            Layout(pp=pp), lambda action, name=name: costs[name][action.kind], microbatches=microbatches, overlap=way
        ).seconds
        for name, way in WAYS.items()
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.05, help="of a forward, and of both parts of a backward")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the numbers there, too")
    options = parser.parse_args()
    shape = options.pp, options.microbatches, options.seconds
    measured = launch(steps, *shape, options.repeats, nproc=options.pp, device="cpu")[0]
    forecast = forecast_steps(*shape)
    result = {
        "pp": options.pp,
        "microbatches": options.microbatches,
        "seconds": options.seconds,
        "steps": {
            name: {"measured": statistics.median(times), "forecast": forecast[name], "all": times}
            for name, times in measured.items()
        },
        "torch": torch.__version__,
        "date": str(date.today()),
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
