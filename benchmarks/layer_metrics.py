"""The cost of a MoE layer's metrics: one layer, forward and backward, with and without them.

    PYTHONPATH=src python benchmarks/layer_metrics.py

The layer is Qwen3-30B-A3B's (attention and 128 experts, top-8) on 8,192 packed tokens in bf16; on a CPU a small one.
Groups of passes alternate between both, and times are medians of a pass. The device is waited for after a group only,
as in training, where the host is ahead of it.
"""

from __future__ import annotations

import json
import statistics
import time

import torch

from postlude import LanguageModel, ModelConfig, Pattern, pack
from postlude.model.blocks import AttentionConfig, MoEConfig
from postlude.model.context import ForwardContext

LARGE = {"hidden_size": 2048, "heads": 32, "head_dim": 128, "experts": 128, "top_k": 8, "inner": 768, "tokens": 8192}
SMALL = {"hidden_size": 32, "heads": 4, "head_dim": 8, "experts": 8, "top_k": 2, "inner": 16, "tokens": 64}
PASSES = 10  # in a group


def measure(sizes: dict[str, int], device: str, repeats: int) -> dict[str, float]:
    """Returns milliseconds of a forward and backward with and without metrics, and the share of the metrics."""
    config = ModelConfig(
        pattern=Pattern.parse("[*E]"),
        hidden_size=sizes["hidden_size"],
        vocab_size=256,
        blocks={
            "*": AttentionConfig(heads=sizes["heads"], kv_heads=4, head_dim=sizes["head_dim"]),
            "E": MoEConfig(experts=sizes["experts"], top_k=sizes["top_k"], intermediate_size=sizes["inner"]),
        },
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = LanguageModel(config, dtype=dtype)
        hidden = torch.randn(sizes["tokens"], sizes["hidden_size"], dtype=dtype, requires_grad=True)
    (microbatch,) = pack([torch.zeros(sizes["tokens"] // 8, dtype=torch.long)] * 8, budget=sizes["tokens"])
    microbatch = microbatch.to(device)
    (layer,) = model.logical_layers
    moe = layer.blocks[1]
    times: dict[str, list[float]] = {"with": [], "without": []}
    for repeat in range(2 * repeats + 4):
        kind = "with" if repeat % 2 else "without"
        _wait(device)
        start = time.perf_counter()
        for _ in range(PASSES):
            context = ForwardContext(microbatch, model.mesh)
            if kind == "without":
                context.is_first_call(f"{moe.name}.metrics")  # as in a layer that is recomputed
            layer(hidden, context).sum().backward()
        _wait(device)
        if repeat >= 4:  # the first compile kernels
            times[kind].append(1e3 * (time.perf_counter() - start) / PASSES)
        model.zero_grad()
        assert (moe.take_metric_sums() is not None) == (kind == "with")
    medians = {f"{kind}_ms": statistics.median(values) for kind, values in times.items()}
    return medians | {"share": medians["with_ms"] / medians["without_ms"] - 1}


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    gpu = torch.cuda.is_available()
    print(json.dumps(measure(LARGE if gpu else SMALL, "cuda" if gpu else "cpu", repeats=20)))
