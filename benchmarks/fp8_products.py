"""The time of the four products of a Qwen3-8B layer in FP8, and of rounding their tokens, beside those in bf16.

    PYTHONPATH=src python benchmarks/fp8_products.py --rows 16 64 128 256 8192

Each is a CUDA graph of 20 calls with as many weights as do not fit the L2 cache together, so that every call reads its
weight from memory as a step of decoding does. The error is the largest, relative to the largest result, in bf16.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from workloads import Results

from postlude.ops.block_fp8 import FP8Weight
from postlude.ops.decode_linear import COUNTERS
from postlude.ops.kernels import block_fp8
from postlude.ops.norm import Norm

PRODUCTS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
WITH_RESIDUAL = ("o", "down")
CALLS, REPEATS = 20, 5
L2_CACHES = 300e6  # bytes, six times the L2 cache of an H200


def microseconds(call: Callable[[int], Any]) -> float:
    """Returns the time of one call. It gets the number of the call."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call(0)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for number in range(CALLS):
                call(number)
    times = []
    for _ in range(REPEATS + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / CALLS * 1e3)
    return round(statistics.median(times[1:]), 2)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def measure(name: str, rows: int) -> dict[str, Any]:
    features, width = PRODUCTS[name]
    copies = max(2, int(L2_CACHES / (features * width)))
    weight = random(features, width)
    quantized = FP8Weight.like(weight)
    quantized.write(weight)
    values, scales = [quantized.values.clone() for _ in range(copies)], quantized.scales
    weights = [weight.clone() for _ in range(max(2, copies // 2))]
    hidden, residual = random(rows, width), random(rows, features) if name in WITH_RESIDUAL else None
    counters = torch.zeros(COUNTERS, dtype=torch.int32, device="cuda")

    def bf16(number: int) -> Tensor:
        matrix = weights[number % len(weights)].t()
        return hidden @ matrix if residual is None else torch.addmm(residual, hidden, matrix)

    tokens = block_fp8.quantize(hidden)

    def fp8(number: int) -> Tensor:
        matrix = values[number % copies]
        return block_fp8.product(tokens, matrix, scales, torch.bfloat16, residual=residual, counters=counters)

    restored = tokens.values[:rows].double() * tokens.scales.t()[:rows].repeat_interleave(128, 1)
    expected = restored @ quantized.rounded(torch.float64).t() + (0 if residual is None else residual)
    error = (fp8(0) - expected).abs().max() / expected.abs().max()
    norm, gated = Norm(random(width), 1e-6, 0.0), random(rows, 2 * width)
    return {
        "product": name,
        "rows": rows,
        "bf16_us": microseconds(bf16),
        "fp8_us": microseconds(fp8),
        "error": round(error.item(), 5),
        "rounding_us": microseconds(lambda number: block_fp8.quantize(hidden)),
        "norm_and_rounding_us": microseconds(lambda number: block_fp8.quantize(hidden, norm)),
        "gate_and_rounding_us": microseconds(lambda number: block_fp8.quantize(gated, activation="silu")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 128, 256])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = Results(" ".join(("benchmarks/fp8_products.py", *sys.argv[1:])), "cuda", arguments.json)
    for rows in arguments.rows:
        for name in PRODUCTS:
            results.add(measure(name, rows))
            print(results.cases[-1], flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
