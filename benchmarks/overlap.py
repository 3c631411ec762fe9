"""Measures how much of the expert exchanges hides behind compute when a forward and a backward are interleaved.

    python benchmarks/overlap.py --device cuda --json overlap_h200.json
    python benchmarks/overlap.py --device cpu --json overlap_cpu.json

On a GPU one rank has all experts, and each exchange is a pause of a measured length on a separate stream, and the
rows wait for its end: a kernel of one thread that sleeps, or with `--by copy` a copy to the host's memory, which
uses no multiprocessor. On the CPU two ranks exchange rows over gloo, and each exchange takes at least that
long, as on a slow link. The pauses together are `--share` of a step's compute. A step is timed with and without them,
plain and overlapped; the time they add to a step, divided by their length, is exposed, and the rest hidden.

A GPU at its power limit computes faster after a pause, so that it regains some of the pause elsewhere.
There events on both streams also measure how long exchanges take in a step, and how long compute is idle for them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import postlude
from postlude import Batch, Engine, Layout, ModelConfig, Pattern
from postlude.model.blocks import BLOCKS, AttentionConfig, MoE, MoEConfig
from postlude.model.context import ForwardContext
from postlude.model.steps import LayerStep, exchange
from postlude.objectives import SFT


@dataclass
class Pause:
    """How long an exchange takes at least, and how many there were. `watched` is told of each, if it is a list.

    On a GPU `wait` is what waits on the current stream, given how long or how much.
    """

    seconds: float = 0.0
    amount: int = 0
    count: int = 0
    watched: list[TimedExchange] | None = None
    wait: Callable[[int], None] = lambda amount: None


@dataclass
class TimedExchange:
    """An exchange on a GPU: `begun` and `ended` on its stream, `stood` and `went_on` on that which waits for it."""

    name: str
    begun: torch.cuda.Event
    ended: torch.cuda.Event
    stood: torch.cuda.Event
    went_on: torch.cuda.Event

    @classmethod
    def named(cls, name: str) -> TimedExchange:
        return cls(name, *(torch.cuda.Event(enable_timing=True) for _ in range(4)))

    @property
    def took(self) -> float:
        """Seconds from when it could begin to when it had ended."""
        return self.begun.elapsed_time(self.ended) / 1e3

    @property
    def stalled(self) -> float:
        """Seconds in which compute stood still for it."""
        return self.stood.elapsed_time(self.went_on) / 1e3


PAUSE = Pause()


@dataclass(frozen=True)
class SlowExchange:
    """An exchange between ranks, or with this rank alone, with a delay."""

    exchange: Any
    stream: torch.cuda.Stream | None

    @property
    def reverse(self) -> SlowExchange:
        return SlowExchange(self.exchange.reverse if self.exchange is not None else None, self.stream)

    def __call__(self, rows: Tensor, *arguments: Any) -> Tensor:
        moved: Tensor = _DelayedExchange.apply(rows, self)
        return moved

    def start(self, rows: Tensor, *arguments: Any) -> Callable[[], Tensor]:
        PAUSE.count += 1
        if self.stream is not None:
            kind, name = arguments[:2] if len(arguments) > 1 else ("exchange", "")
            return self._on_gpu(rows, self.stream, f"{kind} {name.rpartition(' ')[2]}")
        arrive = self.exchange.start(rows)
        ready = time.perf_counter() + PAUSE.seconds

        def wait() -> Tensor:
            arrived: Tensor = arrive()
            time.sleep(max(0.0, ready - time.perf_counter()))
            return arrived

        return wait

    def _on_gpu(self, rows: Tensor, stream: torch.cuda.Stream, name: str) -> Callable[[], Tensor]:
        watched = TimedExchange.named(name)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            watched.begun.record()
            if PAUSE.amount:
                PAUSE.wait(PAUSE.amount)
            watched.ended.record()

        def wait() -> Tensor:
            watched.stood.record()
            torch.cuda.current_stream().wait_event(watched.ended)
            watched.went_on.record()
            if PAUSE.watched is not None:
                PAUSE.watched.append(watched)
            return rows * 1

        return wait


class _DelayedExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: SlowExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.start(rows)()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.reverse.start(gradients[0])(), None


class SlowMoE(MoE):
    """Experts at the end of slow ways."""

    def steps(self) -> tuple[LayerStep, ...]:
        def between() -> Iterator[LayerStep]:
            for step in super(SlowMoE, self).steps():
                if step.name == "plan":
                    yield replace(step, syncs_host=True)
                elif step.name == "experts" and self.mesh.ep.group is None:
                    yield exchange("dispatch", "rows", plan_name="to_experts")
                    yield step
                    yield exchange("combine", "rows", plan_name="to_tokens")
                else:
                    yield step

        return tuple(between())

    def plan(self, pending_route: Any, context: ForwardContext) -> Mapping[str, Any]:
        values = super().plan(pending_route, context)
        stream = STREAMS[0] if STREAMS else None
        return {
            **values,
            "to_experts": SlowExchange(values["to_experts"], stream),
            "to_tokens": SlowExchange(values["to_tokens"], stream),
        }


STREAMS: list[torch.cuda.Stream] = []


def model(device: str) -> ModelConfig:
    if device == "cuda":
        blocks: dict[str, Any] = {
            "*": AttentionConfig(heads=32, kv_heads=8, head_dim=128),
            "E": MoEConfig(experts=16, top_k=4, intermediate_size=1536),
        }
        return ModelConfig(pattern=Pattern.parse("[*E]{4}"), blocks=blocks, hidden_size=4096, vocab_size=32768)
    blocks = {
        "*": AttentionConfig(heads=4, kv_heads=4, head_dim=64),
        "E": MoEConfig(experts=8, top_k=2, intermediate_size=512),
    }
    return ModelConfig(pattern=Pattern.parse("[*E]{4}"), blocks=blocks, hidden_size=256, vocab_size=512)


def measure(device: str, options: argparse.Namespace) -> dict[str, Any]:
    """One case, on every rank alike."""
    on_gpu = device == "cuda"
    if on_gpu and not STREAMS:
        STREAMS.append(torch.cuda.Stream(priority=-1))  # as that of the group which exchanges rows with experts
    config = model(device)
    tokens = options.tokens or (8192 if on_gpu else 256)
    generator = torch.Generator().manual_seed(0)
    ranks = 1 if on_gpu else 2
    lengths = [tokens // 4] * 4 * options.microbatches * ranks
    batch = Batch([torch.randint(config.vocab_size, (length,), generator=generator) for length in lengths])
    layout = Layout() if on_gpu else Layout(dp_shard=2, ep=2)

    peaks: dict[bool, float] = {}

    def step(engine: Engine) -> float:
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            allocated = torch.cuda.memory_allocated()
        began = time.perf_counter()
        engine.forward_backward(batch, SFT())
        if on_gpu:
            torch.cuda.synchronize()
            peaks[engine.options.overlap] = (torch.cuda.max_memory_allocated() - allocated) / 2**30
        seconds = time.perf_counter() - began
        engine.zero_grad()
        return seconds

    engines = {
        overlap: Engine(
            config, layout=layout, budget=tokens, overlap=overlap, blocks={**BLOCKS, "E": SlowMoE}, device=device
        )
        for overlap in (False, True)
    }
    PAUSE.seconds, PAUSE.amount = 0.0, 0
    for engine in engines.values():
        print(f"warming up: {step(engine):.2f} s, then {step(engine):.2f} s", file=sys.stderr, flush=True)
    PAUSE.count = 0
    step(engines[False])
    exchanges = PAUSE.count
    compute = statistics.median(step(engines[False]) for _ in range(options.repeats))
    pause = options.share * compute / exchanges
    amount = 0
    if on_gpu:
        PAUSE.wait = WAITS[options.by]()
        amount, pause = calibrated(pause)
    times: dict[tuple[bool, bool], list[float]] = {(o, p): [] for o in (False, True) for p in (False, True)}
    for _ in range(options.repeats):
        for (overlap, paused), durations in times.items():
            PAUSE.seconds, PAUSE.amount = (pause, amount) if paused else (0.0, 0)
            durations.append(step(engines[overlap]))
    medians = {key: statistics.median(durations) for key, durations in times.items()}
    total_pause = exchanges * pause
    exposed = {overlap: (medians[overlap, True] - medians[overlap, False]) / total_pause for overlap in (False, True)}
    watched = {name: watch(lambda overlap=overlap: step(engines[overlap])) for name, overlap in KINDS} if on_gpu else {}
    return {
        "exchanges": exchanges,
        "pause_ms": 1e3 * pause,
        "exchange_s": total_pause,
        "step_s": {
            name: {"without": medians[overlap, False], "with": medians[overlap, True]} for name, overlap in KINDS
        },
        "watched": watched or None,
        "hidden": {"plain": 1 - exposed[False], "overlapped": 1 - exposed[True]},
        "step_gib": {"plain": peaks[False], "overlapped": peaks[True]} if on_gpu else None,
    }


KINDS = (("plain", False), ("overlapped", True))


def watch(step: Callable[[], float]) -> dict[str, Any]:
    """How long the exchanges of one step on a GPU take, all of one kind together, and how long each kind is stood for.

    How much is hidden follows by itself: nothing is compared with another step.
    """
    PAUSE.watched = []
    seconds = step()
    torch.cuda.synchronize()
    exchanges, PAUSE.watched = PAUSE.watched, None
    took, stalled = sum(exchange.took for exchange in exchanges), sum(exchange.stalled for exchange in exchanges)
    by_name = {
        name: [
            round(1e3 * sum(getattr(exchange, key) for exchange in exchanges if exchange.name == name), 2)
            for key in SEEN
        ]
        for name in dict.fromkeys(exchange.name for exchange in exchanges)
    }
    result = {"step_s": seconds, "exchanges": len(exchanges), "took_s": took, "stalled_s": stalled}
    return {**result, "hidden": 1 - stalled / took, "ms_took_and_stalled": by_name}


SEEN = ("took", "stalled")


SLEEP = """
extern "C" __global__ void pause_for(int nanoseconds) {
    long long began, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(began));
    do {
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - began < nanoseconds);
}
"""


def sleeping() -> Callable[[int], None]:
    """Nanoseconds of a thread that sleeps. One that counts cycles would keep others from its multiprocessor's."""
    kernel = torch.cuda._compile_kernel(SLEEP, "pause_for")
    return lambda nanoseconds: kernel(args=[nanoseconds])


def copying() -> Callable[[int], None]:
    """Bytes that a copy engine brings to the host."""
    there = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    host_buffer = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    return lambda size: host_buffer[:size].copy_(there[:size], non_blocking=True)


WAITS: dict[str, Callable[[], Callable[[int], None]]] = {"sleep": sleeping, "copy": copying}


def calibrated(seconds: float) -> tuple[int, float]:
    """Returns the amount of work for a pause of about this length, and the pause's length."""
    amount = 1_000_000
    for count in (20, 20, 20):
        torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        for _ in range(count):
            PAUSE.wait(amount)
        events[1].record()
        torch.cuda.synchronize()
        took = events[0].elapsed_time(events[1]) / 1e3 / count
        used, amount = amount, max(1, int(amount * seconds / took))
    return used, took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=0, help="of a microbatch; by default 8192, on the CPU 256")
    parser.add_argument("--share", type=float, nargs="+", default=[0.25, 0.5], help="of compute that exchanges take")
    parser.add_argument("--by", choices=list(WAITS), default="sleep", help="what an exchange is on a GPU")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for share in options.share:
        case = argparse.Namespace(**vars(options) | {"share": share})
        size = 1 if options.device == "cuda" else 2
        result = postlude.launch(measure, options.device, case, nproc=size, device=options.device)[0]
        results.append({"share": share, "by": options.by if options.device == "cuda" else "gloo", **result})
        print(json.dumps(results[-1]), flush=True)
        if options.json is not None:
            machine = torch.cuda.get_device_name() if options.device == "cuda" else "two ranks on a CPU"
            written = {"machine": machine, "torch": torch.__version__, "date": date.today().isoformat()}
            shape = {"microbatches": options.microbatches, "pattern": str(model(options.device).pattern)}
            options.json.write_text(json.dumps({**written, **shape, "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
