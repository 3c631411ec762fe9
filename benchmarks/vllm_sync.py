"""Measures how long weights take from an engine into a real vLLM on the same GPU, by each method.

    PYTHONPATH=src python benchmarks/vllm_sync.py --vllm PYTHON --json benchmarks/results/vllm_sync_h200.json

"copy" copies as many bytes from device to device: the bound of "ipc", which writes each byte to a shared buffer, copies
it out of it and into vLLM's parameters. "disk" writes safetensors to `--directory` and has vLLM read them. After each
the probe compares vLLM's log-probs with the engine's. Weights are random, of a published model's shape, from one rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from workloads import GIB, SHAPES, Results

from postlude import Engine, load_tokenizer, ranks
from postlude.generate.probe import WeightProbe
from postlude.recipes.config.rollout import LaunchedVLLM
from postlude.recipes.rollouts.server_commands import build_server_command
from postlude.recipes.sequence_limit import SequenceLimit
from postlude.serving.clients.server_weights import WeightsVersion
from postlude.serving.launch.launcher import LocalLauncher
from postlude.serving.launch.supervisor import ServerSupervisor, SupervisedClient
from postlude.serving.weights.transfer import SharedMemoryTransfer

METHODS = ("copy", "ipc", "disk")


def start_vllm(arguments: argparse.Namespace, work: Path) -> SupervisedClient:
    """Starts vLLM with dummy weights. Returns its client when it is ready."""
    rollout = LaunchedVLLM(
        python=arguments.vllm,
        gpus=1 if arguments.device == "cuda" else 0,
        arguments=("--enforce-eager",),
        start_timeout=arguments.start,
    )
    command = build_server_command(
        rollout,
        str(work / "model"),
        getattr(torch, arguments.dtype),
        arguments.device,
        weights=False,
        limit=SequenceLimit(2048),
        model_limit=2**18,
        sync="ipc",
        memory_fraction=arguments.fraction if arguments.device == "cuda" else None,
    )
    supervisor = ServerSupervisor(command, 1, LocalLauncher(work / "logs", ["0"]), max_restarts=0)
    return SupervisedClient(supervisor)


def main() -> None:
    """Measures each method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="an interpreter that has vLLM")
    parser.add_argument("--shape", choices=list(SHAPES), default="8b-whole")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--repeats", type=int, default=3, help="the median counts; each also runs once before")
    parser.add_argument("--fraction", type=float, default=0.3, help="of the GPU for vLLM")
    parser.add_argument("--start", type=float, default=300.0, help="seconds until vLLM must be ready")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--directory", type=Path, default=Path(tempfile.gettempdir()), help="where safetensors and logs go"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = Results(" ".join(sys.argv), arguments.device, arguments.json)
    work = Path(tempfile.mkdtemp(dir=arguments.directory))
    config = SHAPES[arguments.shape]()
    config.architectures = ["Qwen3MoeForCausalLM" if "moe" in config.model_type else "Qwen3ForCausalLM"]
    config.save_pretrained(work / "model")
    load_tokenizer("tiny-dense").save_pretrained(work / "model")
    begun = time.perf_counter()
    with ThreadPoolExecutor(1) as thread, ranks(device=arguments.device):
        starting = thread.submit(start_vllm, arguments, work)
        engine = Engine(
            config, device=arguments.device, weights="rounded", compute_dtype=getattr(torch, arguments.dtype)
        )
        moved = sum(tensor.nbytes for _, tensor in engine.stream_weights())
        print(f"{arguments.shape}: {moved / GIB:.2f} GiB, built after {time.perf_counter() - begun:.1f} s", flush=True)
        client = starting.result()
        print(f"vLLM ready after {time.perf_counter() - begun:.1f} s", flush=True)
        probe = WeightProbe(engine, None, None, 1024)
        versions = iter(range(1, 1000))
        with closing(client), closing(SharedMemoryTransfer(engine, timeout=120.0)) as transfer:

            def by_copy() -> float:
                source = torch.empty(min(moved, 4 * GIB), dtype=torch.uint8, device=arguments.device)
                target, start = torch.empty_like(source), time.perf_counter()
                for _ in range(4):
                    target.copy_(source)
                _wait(arguments.device)
                return (time.perf_counter() - start) / 4 * moved / source.numel()

            def by_ipc() -> float:
                sent = transfer.send(client, WeightsVersion(None, f"bench.{next(versions)}", probe.score()))
                assert sent.servers == 1, [server.problem for server in client.pool.servers]
                return sent.seconds

            def by_disk() -> float:
                version, scored, start = f"bench.{next(versions)}", probe.score(), time.perf_counter()
                engine.export_hf(work / version)
                client.reload(WeightsVersion(str(work / version), version, scored))
                return time.perf_counter() - start

            steps: dict[str, Callable[[], float]] = {"copy": by_copy, "ipc": by_ipc, "disk": by_disk}
            for method in arguments.methods:
                seconds = [steps[method]() for _ in range(1 + (arguments.repeats if method != "disk" else 1))]
                median = statistics.median(seconds[1:])
                server = client.pool.servers[0]
                difference = (
                    None
                    if method == "copy" or server.weights.probe_result is None
                    else server.weights.probe_result.logprob_diff
                )
                case: dict[str, Any] = {
                    "case": method,
                    "shape": arguments.shape,
                    "gib": round(moved / GIB, 2),
                    "seconds": round(median, 3),
                    "first_s": round(seconds[0], 3),
                    "gb_per_second": round(moved / 1e9 / median, 1),
                    "logprob_diff": difference,
                }
                results.add(case)
                print(json.dumps(case), flush=True)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
