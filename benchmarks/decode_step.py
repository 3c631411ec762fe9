"""The time of one decode step of the generator, and of each of its kernels, at a given number of rows and context.

    PYTHONPATH=src python benchmarks/decode_step.py --rows 16 128 512 --context 192 --profile
    PYTHONPATH=src python benchmarks/decode_step.py --rows 128 --context 640 --prompt 512 --group 16   # shared prompts
    PYTHONPATH=src python benchmarks/decode_step.py --rows 16 --lora 32
    PYTHONPATH=src python benchmarks/decode_step.py --shape 8b --rows 128 --quantization fp8 --profile

Weights and keys are random. The share of the roofline is the time to read the weights, keys and states that must be
read once, at 4.8 TB/s, over the time of the step; a shared prompt counts once.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import decode
import torch
from decode_bytes import DecodeBytes
from decode_workloads import BANDWIDTH
from workloads import SHAPES

from postlude import load_model
from postlude.generate.cuda_graphs import DecodeStep, bucket
from postlude.generate.decode_cache import PrefillSequence
from postlude.generate.decode_rows import KEY, LENGTH, LIMIT
from postlude.generate.generator import Generator
from postlude.generate.graph_scheduler import DecodeCapacity, GraphBuffers
from postlude.generate.pages import pages_for
from postlude.ops.paged_attention import PAGE_SIZE
from postlude.ops.shared_pages import SharedPages, TileShape, shared_tiles

MARGIN = 128  # tokens that steps of a measurement may add
REPLAYS = 20
STUCK_SECONDS = 60


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.6b")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 128, 512])
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--prompt", type=int, default=0, help="tokens of the context that a group shares")
    parser.add_argument("--group", type=int, default=1, help="rows with the same prompt")
    parser.add_argument("--lora", type=int, default=0)
    parser.add_argument("--quantization", choices=["fp8"], help="of the weights; the roofline stays that of bf16")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def fill(buffers: GraphBuffers, rows: int, context: int, prompt: int, group: int) -> TileShape | None:
    """Writes rows of this length. Returns the shape of the tiles that share pages."""
    state, cache = buffers.model_step.rows, buffers.cache
    shared_pages, free = prompt // PAGE_SIZE, iter(range(buffers.capacity.pages))
    state.numbers.zero_()
    state.numbers[LENGTH, :rows] = context
    state.numbers[LIMIT] = 1 << 30
    state.numbers[KEY] = torch.arange(state.size)
    state.settings.fill_(1.0)
    pages: dict[int, list[int]] = {}
    for row in range(rows):
        first = pages[row - 1][:shared_pages] if row % group else [next(free) for _ in range(shared_pages)]
        pages[row] = first + [next(free) for _ in range(pages_for(context + MARGIN) - shared_pages)]
        cache.table[row, : len(pages[row])] = torch.tensor(pages[row], dtype=torch.int32)
    if group == 1 or not shared_pages:
        return None
    shared = SharedPages.of(state.size, shared_tiles(pages))
    cache.shared.copy_(shared)
    return shared.shape


def start_states(buffers: GraphBuffers) -> None:
    """Starts every row with the recurrent states after one token, if the model has any."""
    buffers.model_step(0, [PrefillSequence(tokens=[0], pages=[0])])
    rows = torch.arange(buffers.capacity.rows, device=buffers.cache.device)
    buffers.cache.start_rows(rows, torch.zeros_like(rows), [])


def needed_bytes(config: Any, rows: int, context: int, prompt: int, group: int) -> float:
    """Bytes that a step must read: its weights once, every key and value once, and the states of every row."""
    needed, shared = DecodeBytes.of(config), prompt // PAGE_SIZE * PAGE_SIZE if group > 1 else 0
    tokens = torch.tensor([context - shared])
    return needed.weights(rows) + rows / group * needed.completion(tokens, shared, group).item()


def measure(arguments: argparse.Namespace, generator: Generator, adapter: str | None, rows: int) -> dict[str, Any]:
    context, prompt, group = arguments.context, arguments.prompt, arguments.group
    longest = pages_for(context + MARGIN)
    capacity = DecodeCapacity(rows=bucket(rows), pages=rows * longest + 1, pages_per_row=longest, stops=8)
    with generator.generation_mode(adapter):
        buffers = GraphBuffers.of(generator.model, generator.adapters, capacity, torch.device("cuda"))
        began = time.perf_counter()
        start_states(buffers)
        torch.cuda.synchronize()
        print(f"a prompt of one token: {time.perf_counter() - began:.1f} s", flush=True)
        step = DecodeStep(bucket(rows), False, False, False, fill(buffers, rows, context, prompt, group))
        began = time.perf_counter()
        buffers.graphs(step)
        torch.cuda.synchronize()
        first = time.perf_counter() - began
        times = []
        for _ in range(3):
            buffers.model_step.rows.numbers[LENGTH, :rows] = context
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(REPLAYS):
                buffers.graphs(step)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / REPLAYS)
        milliseconds = min(times)
        config = SHAPES[arguments.shape]()
        floor = needed_bytes(config, rows, context, prompt, group) / BANDWIDTH * 1e3
        result = {
            "rows": rows, "context": context, "prompt": prompt, "group": group, "lora": arguments.lora,
            "quantization": arguments.quantization,
            "step_ms": round(milliseconds, 4), "tokens_per_second": round(1000 * rows / milliseconds),
            "roofline": round(floor / milliseconds, 3), "first_step_s": round(first, 2),
        }  # fmt: skip
        print(result, flush=True)
        if arguments.profile:
            buffers.model_step.rows.numbers[LENGTH, :rows] = context
            result["kernels"] = kernels(buffers, step)
    return result


def kernels(buffers: GraphBuffers, step: DecodeStep) -> list[tuple[str, float, int]]:
    """Prints and returns the kernels of a replayed step: name, µs of all calls, and their number."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            buffers.graphs(step)
        torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name] += event.device_time_total
            calls[event.name] += 1
    table = [(name[:90], round(total / 3, 1), calls[name] // 3) for name, total in spent.most_common(16)]
    print(f"    kernels {sum(spent.values()) / 3:.0f} µs, {sum(calls.values()) // 3} of them")
    for name, microseconds, count in table:
        print(f"    {microseconds:9.1f} µs {count:5d} × {microseconds / max(1, count):7.2f}  {name}")
    return table


def main() -> None:
    arguments = options()
    faulthandler.dump_traceback_later(STUCK_SECONDS, repeat=True)  # says where the time goes
    began = time.perf_counter()
    model = load_model(SHAPES[arguments.shape](), dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    print(f"weights made in {time.perf_counter() - began:.1f} s", flush=True)
    generator = Generator(model, quantization=arguments.quantization)
    adapter = decode.load_adapter(generator, arguments.lora) if arguments.lora else None
    results = [measure(arguments, generator, adapter, rows) for rows in arguments.rows]
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
