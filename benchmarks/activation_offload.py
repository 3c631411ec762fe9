"""Measures activation offload on one GPU: time and peak memory of an update, beside full recompute and neither.

    PYTHONPATH=src python benchmarks/activation_offload.py --json benchmarks/results/activation_offload_h200.json
    PYTHONPATH=src python benchmarks/activation_offload.py --smoke          # tiny, on any machine

An update is a forward and backward of SFT over two microbatches, and AdamW's step. `host` is the pinned memory of the
pages. `equal` compares the gradient norm of the first step with that of the workload's first case, to the bit. From
8,192 tokens on attention is cuDNN's, whose backward adds in another order each time: "full, again" shows it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from workloads import GIB, SHAPES, Clock, Results, free_memory, peak_gib, profile, result_or_failure

from postlude import AdamW, Batch, Engine, ranks
from postlude.objectives import SFT

CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "offload": {"offload_activations": True},
    "offload ::4": {"offload_activations": "::4"},
    "full": {"recompute": "full"},
    "full, offload": {"recompute": "full", "offload_activations": True},
    "full, again": {"recompute": "full"},
}


@dataclass(frozen=True)
class Workload:
    """Sequences of one length in microbatches of `budget` tokens, and the cases that are measured with them."""

    shape: str
    length: int
    budget: int
    sequences: int
    cases: tuple[str, ...] = tuple(CASES)[:-1]


WORKLOADS = {
    "0.6b": Workload("0.6b", 4096, 8192, 4),
    "8b": Workload("8b", 4096, 8192, 4),
    "8b-wide": Workload("8b", 4096, 65536, 16, ("full", "full, offload")),
    "8b-long": Workload("8b", 65536, 65536, 1, ("full", "full, offload", "full, again")),
}
SMOKE = {"smoke": Workload("smoke", 16, 32, 4), "smoke-moe": Workload("smoke-moe", 16, 32, 4)}


def measure(workload: Workload, case: str, device: str, *, profiled: bool) -> dict[str, Any]:
    """Returns what one case takes."""
    config = SHAPES[workload.shape]()
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(config.vocab_size, (workload.sequences, workload.length), generator=generator)
    batch, objective = Batch(list(rows)), SFT()
    engine = Engine(config, device=device, budget=workload.budget, optimizer=AdamW(lr=1e-6), **CASES[case])

    def step() -> float:
        engine.forward_backward(batch, objective)
        return engine.optimizer_step().grad_norm

    first = step()
    free_memory(device)
    clock = Clock(device, warm_up=0 if workload.budget > 2**14 else 1, enough=4.0)
    seconds = clock(step)
    result = {"seconds": round(seconds, 4), "tokens_per_second": round(rows.numel() / seconds), "grad_norm": first}
    result |= {"peak_gib": peak_gib(device), "host_gib": round(pinned_bytes(engine) / GIB, 2)}
    return result | (profile(step, device, rows=12) if profiled else {})


def pinned_bytes(engine: Engine) -> int:
    """Returns the bytes of all pages."""
    layers = [layer for stage in engine.stage_models.values() for layer in stage.logical_layers]
    offloads = {layer.offload for layer in layers if layer.offload is not None}
    return sum(page.numel() for offload in offloads for page in offload.pages)


def run(workloads: dict[str, Workload], results: Results, cases: Sequence[str], *, profiled: bool) -> None:
    for name, workload in workloads.items():
        expected = None
        for case in (case for case in workload.cases if case in cases):
            free_memory(results.device)
            found = result_or_failure(case_of(workload, case, results.device, profiled=profiled))
            expected = expected or found.get("grad_norm")
            if expected is not None and "grad_norm" in found:
                found["equal"] = found["grad_norm"] == expected
            results.add({"workload": name, "case": case, **found})
            print(f"{name:10} {case:16}", *(f"{key} {value}" for key, value in found.items() if key != "top"))


def case_of(workload: Workload, case: str, device: str, *, profiled: bool) -> Callable[[], dict[str, Any]]:
    return lambda: measure(workload, case, device, profiled=profiled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--profile", action="store_true", help="print the kernels and copies that take longest")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--commit", help="of a copy of the tree without its repository")
    options = parser.parse_args()
    device = "cpu" if options.smoke else "cuda"
    workloads = SMOKE if options.smoke else {name: WORKLOADS[name] for name in options.workloads}
    command = "PYTHONPATH=src python benchmarks/activation_offload.py"
    with ranks(device=device):
        results = Results(command, device, options.json, commit=options.commit)
        run(workloads, results, options.cases, profiled=options.profile)


if __name__ == "__main__":
    main()
