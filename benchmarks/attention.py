"""Packed causal attention alone, forward and backward: our Triton kernels, flash attention, and what `attend` chooses.

    PYTHONPATH=src python benchmarks/attention.py --json benchmarks/results/attention_h200.json

TFLOP/s count what causal attention needs: half of length² pairs, 4 · heads · width FLOPs per pair forward, and
2.5 times that backward, which recomputes scores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from workloads import MIXES

from postlude import pack
from postlude.ops.attention import PackedAttention, ScoreConfig, attend, triton_packed_attention, varlen_attention
from postlude.ops.packing import Packing

KERNELS: dict[str, PackedAttention] = {"triton": triton_packed_attention, "flash": varlen_attention, "attend": attend}


@dataclass(frozen=True)
class Case:
    """Heads, and the microbatches that they attend over: the lengths of each one's sequences."""

    name: str
    heads: int
    kv_heads: int
    microbatches: tuple[tuple[int, ...], ...]
    width: int = 128

    @property
    def flops(self) -> float:
        """FLOPs of the forward."""
        pairs = sum(length * (length + 1) / 2 for lengths in self.microbatches for length in lengths)
        return 4 * self.width * self.heads * pairs


def packed(mix: str, budget: int) -> tuple[tuple[int, ...], ...]:
    sequences = [torch.zeros(length, dtype=torch.int64) for length in MIXES[mix]()]
    return tuple(microbatch.packing.lengths for microbatch in pack(sequences, budget=budget))


def cases() -> list[Case]:
    return [
        Case("log-normal to 4096, 8k, 16 / 8 heads", 16, 8, packed("log-normal", 8192)),
        Case("log-normal to 4096, 16k, 16 / 8 heads", 16, 8, packed("log-normal", 16384)),
        Case("log-normal to 4096, 16k, 32 / 8 heads", 32, 8, packed("log-normal", 16384)),
        Case("log-normal to 4096, 16k, 32 / 4 heads", 32, 4, packed("log-normal", 16384)),
        Case("long tail to 16k, 16k, 32 / 8 heads", 32, 8, packed("long-tail", 16384)),
        Case("one of 16k, 32 / 8 heads", 32, 8, ((16384,),)),
        Case("one of 131k, 16 / 8 heads", 16, 8, ((131072,),)),
    ]


def milliseconds(run: Callable[[], Any], count: int) -> float:
    run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in itertools.pairwise(events))


def read(case: Case, attention: PackedAttention, count: int) -> dict[str, float]:
    torch.manual_seed(0)
    scores = ScoreConfig(scale=case.width**-0.5)
    inputs: list[tuple[Packing, Sequence[Tensor], Tensor]] = []
    for lengths in case.microbatches:
        packing = Packing.from_lengths(lengths, "cuda")
        query, key, value, upstream = (
            torch.randn(packing.total, heads, case.width, device="cuda", dtype=torch.bfloat16)
            for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads)
        )
        inputs.append((packing, [tensor.requires_grad_() for tensor in (query, key, value)], upstream))

    @torch.no_grad()
    def forward() -> None:
        for packing, (query, key, value), _ in inputs:
            attention(query, key, value, packing, packing, scores)

    def both() -> None:
        for packing, (query, key, value), upstream in inputs:
            output = attention(query, key, value, packing, packing, scores)
            torch.autograd.grad(output, (query, key, value), upstream)

    alone, together = milliseconds(forward, count), milliseconds(both, count)
    times = {"forward_ms": alone, "both_ms": together}
    return times | {
        "forward_tflops": case.flops / alone / 1e9,
        "backward_tflops": 2.5 * case.flops / (together - alone) / 1e9,
        "both_tflops": 3.5 * case.flops / together / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--count", type=int, default=5, help="readings, of which the median is taken")
    options = parser.parse_args()
    results = []
    for case in cases():
        for name, attention in KERNELS.items():
            line = {**asdict(case), "kernels": name, **read(case, attention, options.count)}
            results.append(line)
            tflops = " / ".join(f"{line[part + '_tflops']:.0f}" for part in ("forward", "backward", "both"))
            print(f"{case.name:40} {name:8} {line['both_ms']:8.2f} ms  {tflops} TFLOP/s", flush=True)
    if options.json:
        report = {"device": torch.cuda.get_device_name(), "torch": str(torch.__version__), "results": results}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
