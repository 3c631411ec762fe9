"""Measures a training step on one GPU: its time, and how often the host waits for the device.

PYTHONPATH=src python benchmarks/step.py --json benchmarks/results/step_h200.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from postlude import AdamW, Batch, Engine, ranks
from postlude.objectives import SFT

SHARED = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
MODELS: dict[str, PretrainedConfig] = {
    "dense": Qwen3Config(**SHARED, intermediate_size=3072),
    "moe": Qwen3MoeConfig(
        **SHARED, moe_intermediate_size=256, num_experts=64, num_experts_per_tok=4, norm_topk_prob=True
    ),
}
WARM_UP, STEPS = 3, 6


def batch(generator: torch.Generator) -> Batch:
    lengths = torch.randint(100, 1500, (32,), generator=generator).tolist()
    return Batch([torch.randint(SHARED["vocab_size"], (length,), generator=generator) for length in lengths])


def step(engine: Engine, data: Batch) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    engine.forward_backward(data, SFT())
    engine.optimizer_step()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def waits(engine: Engine, data: Batch) -> int:
    """Returns how often the host waited for CUDA in one step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        engine.forward_backward(data, SFT())
        engine.optimizer_step()
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


def measure(hf: PretrainedConfig) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    engine = Engine(hf, budget=4096, device="cuda", optimizer=AdamW(lr=1e-5))
    batches = [batch(generator) for _ in range(2)]
    times = [step(engine, batches[index % 2]) for index in range(WARM_UP + STEPS)][WARM_UP:]
    return {"median_s": statistics.median(times), "best_s": min(times), "waits": waits(engine, batches[0])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args()
    with ranks():
        results = {name: measure(hf) for name, hf in MODELS.items()}
    report = {"device": torch.cuda.get_device_name(), "torch": str(torch.__version__), "results": results}
    print(json.dumps(report, indent=2))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
