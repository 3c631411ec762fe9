"""Times the output head of Megatron-Core, verl, SkyRL and NeMo RL and Postlude's processor in the same GPTModel.

    PYTHONPATH=.:src:.venv-peers python benchmarks/frameworks.py --json benchmarks/results/frameworks_h200.json
    PYTHONPATH=.:src:.venv-peers python benchmarks/frameworks.py --smoke          # tiny, on any machine

One layer of Megatron's GPTModel in bf16, forward and backward, on one rank: median of 5 after 2. Log-probs of all
tokens and, where the framework has it, the entropy: what tests/peers compares. "Head" is the time above the same
model whose head only averages its hidden states. "Extra" is peak memory above weights and tokens, gradients included.
The packages are those of `make test-peers`; a framework that is not there is left out.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import time
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.integrations.megatron import LogprobsProcessor
from tests.peers.frameworks import Inputs, backward, megatron, release_of, unseeded_gpt_model
from tests.peers.rl_frameworks import WAYS, Results

SHAPES = "8192x4096x131072,16384x2048x151936"
LENGTH = 1024  # of a sequence; Megatron's own attention keeps all scores
CHUNK = 1024  # tokens that SkyRL and NeMo RL project at a time: SkyRL's default
WARM_UP, REPEATS = 2, 5
Step = Callable[[Any, Inputs], Results]


def megatron_loss(model: Any, inputs: Inputs) -> Results:
    return {"logprob": -model(*inputs.model, labels=inputs.labels)}


def megatron_fused_loss(model: Any, inputs: Inputs) -> Results:
    with mock.patch.multiple(model.config, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="native"):
        return megatron_loss(model, inputs)


def megatron_postlude(model: Any, inputs: Inputs) -> Results:
    return {"logprob": model(*inputs.model, labels=inputs.labels, output_processor=LogprobsProcessor()).logprob}


def trunk(model: Any, inputs: Inputs) -> Results:
    def processor(*, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states.mean(-1).t()

    return {"logprob": model(*inputs.model, output_processor=processor)}


def steps(device: str) -> dict[str, tuple[str, Step, Step]]:
    """By name: the framework, its own way and Postlude's."""
    ways: dict[str, tuple[str, Step, Step]] = {
        "Megatron, loss": ("megatron-core", megatron_loss, megatron_postlude),
    }
    if device == "cuda":  # it is compiled
        ways["Megatron, fused loss"] = ("megatron-core", megatron_fused_loss, megatron_postlude)
    for name, way in WAYS.items():
        if PathFinder.find_spec(way.framework.replace("-", "_")) and not (way.kernel and device == "cpu"):
            framework_step, postlude = (
                lambda m, i, call=call: call(m, i, CHUNK) for call in (way.theirs, way.postlude)
            )
            ways[name] = (way.framework, framework_step, postlude)
    return ways


def measure(step: Step, model: Any, inputs: Inputs, device: str) -> dict[str, float | str]:
    """Milliseconds and extra GiB of a forward and backward, or the error if memory runs out."""

    def run() -> None:
        model.zero_grad()
        backward(inputs, step(model, inputs))

    gpu = device == "cuda"
    times = []
    try:
        for _ in range(WARM_UP):
            run()
        model.zero_grad()
        gc.collect()
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if gpu else 0
        for _ in range(REPEATS):
            if gpu:
                torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            if gpu:
                torch.cuda.synchronize()
            times.append(1000 * (time.perf_counter() - start))
    except torch.cuda.OutOfMemoryError as error:
        return {"error": str(error).splitlines()[0][:200]}
    finally:
        model.zero_grad()
        gc.collect()
        if gpu:
            torch.cuda.empty_cache()
    extra = (torch.cuda.max_memory_allocated() - before) / 2**30 if gpu else 0.0
    return {"ms": round(statistics.median(times), 2), "extra_gib": round(extra, 2)}


def compare(step: Step, other: Step, model: Any, inputs: Inputs) -> float | None:
    """The largest difference of log-probs in nats."""
    try:
        with torch.no_grad():
            pair = [way(model, inputs)["logprob"].float() for way in (step, other)]
        return float((pair[0] - pair[1]).abs().max())
    except torch.cuda.OutOfMemoryError:
        return None


def run_shape(shape: str, device: str, length: int) -> list[dict[str, Any]]:
    tokens, hidden, vocabulary = (int(size) for size in shape.split("x"))
    dtype = torch.bfloat16
    model = unseeded_gpt_model(
        vocabulary,
        length,
        tied=False,
        dtype=dtype,
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=hidden // 128,
        ffn_hidden_size=hidden,
        use_cpu_initialization=device == "cpu",
        perform_initialization=device == "cpu",
    ).to(device, dtype)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name and "weight" in name else 0.0, hidden**-0.5)
    inputs = Inputs(device, batch=tokens // length, length=length, vocabulary=vocabulary)
    base = measure(trunk, model, inputs, device)
    cases = [{"shape": shape, "name": "no head", **base}]
    for name, (framework, framework_step, postlude) in steps(device).items():
        case: dict[str, Any] = {"shape": shape, "name": name, "framework": framework, "release": release_of(framework)}
        case |= {
            "theirs": measure(framework_step, model, inputs, device),
            "postlude": measure(postlude, model, inputs, device),
        }
        for result in (case["theirs"], case["postlude"]):
            if "ms" in result:
                result["head_ms"] = round(result["ms"] - base["ms"], 2)
        case["logprob_difference"] = compare(framework_step, postlude, model, inputs)
        cases.append(case)
        print(json.dumps(case), flush=True)
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES, help="tokens x hidden x vocabulary, comma-separated")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="tiny, on any machine")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes, length = ("32x128x256", 16) if options.smoke else (options.shapes, LENGTH)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    cases = []
    with megatron(device):
        for shape in shapes.split(","):
            cases += run_shape(shape, device, length)
            gc.collect()
    dist.destroy_process_group()
    if options.json:
        machine = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        versions = {"torch": str(torch.__version__), "date": datetime.date.today().isoformat()}
        report = {"command": "benchmarks/frameworks.py", "device": machine, **versions, "chunk": CHUNK, "cases": cases}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
