"""Compares the planner with measured steps: time, microbatches in flight, memory.

The forward and backward of one stage are measured alone, on every rank. The schedule is then simulated with these
times, and compared with whole steps. Both are measured alternately, and medians are taken.

PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/plan_check.py --json benchmarks/results/plan_cpu.json
PYTHONPATH=src python benchmarks/plan_check.py --device cuda --json benchmarks/results/plan_h200.json

On a CPU ranks communicate over gloo, and memory is that of all live tensors. On a GPU there is one rank, and
memory is torch.cuda.max_memory_allocated.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from postlude import AdamW, Batch, Engine, LanguageModel, Layout
from postlude.engine.batch_sharding import shard_batch
from postlude.engine.normalizer import LossNormalizer, MetricAccumulator, MetricIndex
from postlude.objectives import SFT
from postlude.ops.linear import blas_fp32_matmul
from postlude.pipeline.schedule import Action
from postlude.plan.cost import ActionCost
from postlude.plan.forecast import simulate_step
from postlude.plan.memory import estimate_memory
from postlude.trace.recorder import Recording
from postlude.world.launcher import run_on_ranks

MIB, GIB = 2**20, 2**30


def dense(hidden: int, layers: int, vocabulary: int = 2048) -> Qwen3Config:
    heads = max(1, hidden // 128)
    return Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads * 2,
        num_key_value_heads=heads, head_dim=64 if hidden < 2048 else 128, intermediate_size=3 * hidden,
        tie_word_embeddings=False,
    )  # fmt: skip


def experts(hidden: int, layers: int, vocabulary: int = 2048, count: int = 8) -> Qwen3MoeConfig:
    heads = max(1, hidden // 128)
    return Qwen3MoeConfig(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads * 2,
        num_key_value_heads=heads, head_dim=64, moe_intermediate_size=hidden, num_experts=count, num_experts_per_tok=2,
        norm_topk_prob=True, tie_word_embeddings=False,
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    name: str
    model: PretrainedConfig
    layout: str = ""
    microbatches: int = 4
    tokens: int = 256
    recompute: str = "none"
    overlap: bool = False
    device: str = "cpu"


CPU = (
    Case("dense, one rank", dense(256, 4)),
    Case("dense, one rank, full recompute", dense(256, 4), recompute="full"),
    Case("dense, one rank, overlap", dense(256, 4), overlap=True),
    Case("experts, one rank, selective", experts(256, 4), recompute="selective"),
    Case("dense, pp=2", dense(256, 4), "pp=2", 6),
    Case("dense, pp=2, 2 microbatches", dense(256, 4), "pp=2", 2),
    Case("dense, pp=2,vpp=2", dense(256, 8), "pp=2,vpp=2", 6),
    Case("dense, uneven stages", dense(256, 5), "pp=2", 5),
    Case("dense, dp_shard=2", dense(256, 4), "dp_shard=2"),
    Case("experts, ep=2", experts(256, 4), "dp_shard=2,ep=2"),
    Case("experts, pp=2, overlap", experts(256, 4), "pp=2", 6, overlap=True),
)
H200 = tuple(
    Case(
        f"{name}, {tokens} tokens, {recompute}{', overlap' * overlap}", model, "", 3, tokens, recompute, overlap, "cuda"
    )
    for name, model in (
        ("dense 0.4B", dense(1024, 16, 32000)),
        ("dense 2.4B", dense(2560, 16, 128000)),
        ("experts 3B", experts(1024, 16, 32000, 64)),
    )
    for tokens, recompute, overlap in (
        (8192, "none", False),
        (16384, "none", False),
        (16384, "selective", False),
        (16384, "full", False),
        (8192, "none", True),
    )
)


class LiveBytes(TorchDispatchMode):
    """Tracks the peak bytes of live tensors on a CPU, whose allocator does not count."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.storages: dict[int, weakref.ref[Any]] = {}
        self.peak = 0
        states = [state for parameter_state in engine.optimizer.state.values() for state in parameter_state.values()]
        for tensor in (*engine.parameters.values(), *states):
            self._track(tensor)

    def _track(self, tensor: Any) -> None:
        if isinstance(tensor, Tensor) and tensor.device.type != "meta":
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            key = storage._cdata
            if key not in self.storages:
                self.storages[key] = weakref.ref(storage, lambda _: self.storages.pop(key, None))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            self._track(leaf)
        # FSDP frees what it gathered by shrinking it, so sizes are read anew.
        living = sum(storage.nbytes() for leaf in list(self.storages.values()) if (storage := leaf()) is not None)
        self.peak = max(self.peak, living)
        return result


class CaseRunner:
    """One case on its running ranks."""

    def __init__(self, case: Case) -> None:
        self.case, self.layout = case, Layout.parse(case.layout)
        self.device = torch.device(case.device, 0) if case.device == "cuda" else torch.device("cpu")
        self.engine = Engine(
            case.model, layout=self.layout, budget=case.tokens, device=self.device, optimizer=AdamW(lr=1e-5),
            recompute=case.recompute, overlap=case.overlap,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        count = case.microbatches * self.layout.dp
        self.batch = Batch(
            [torch.randint(case.model.vocab_size, (case.tokens,), generator=generator) for _ in range(count)]
        )
        self.local_batch = self.shard_batch()
        self.times: dict[tuple[str, int, bool], list[float]] = defaultdict(list)
        self.rest: dict[str, list[float]] = defaultdict(list)

    def shard_batch(self) -> Any:
        engine = self.engine
        return shard_batch(self.batch, engine.mesh, engine.config, budget=engine.options.budget, device=self.device)

    def clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def timed(self, work: Callable[[], Any]) -> tuple[float, Any]:
        began = self.clock()
        result = work()
        return self.clock() - began, result

    def step(self) -> None:
        """A whole step, from when all ranks begin to when all are done."""
        dist.barrier()
        began = self.clock()
        self.engine.forward_backward(self.batch, SFT())
        self.engine.optimizer_step()
        dist.barrier()
        self.rest["step"].append(self.clock() - began)

    def time_stages(self) -> None:
        """Times forward and backward of this rank's stages for first, last and other microbatches; and the rest."""
        engine = self.engine
        scale = LossNormalizer(self.local_batch.microbatches, self.local_batch.counts, cp_size=engine.mesh.cp.size)
        tally = MetricAccumulator(scale, MetricIndex())
        for index, stage in engine.stage_models.items():
            stage.train()
            engine.stages.sharding[index].begin_pass(train=True)
            microbatch = self.local_batch.microbatches[0]
            for turn, last in enumerate((False, False, True)):
                shape = (len(microbatch) // self.layout.tp, engine.config.hidden_size)
                entered = None
                if not stage.stage.first:
                    entered = torch.randn(shape, dtype=engine.compute_dtype, device=self.device, requires_grad=True)
                options: dict[str, Any] = {}
                if stage.stage.last:
                    options["output_processor"] = lambda inputs, _: tally.evaluate(SFT(), inputs)
                dist.barrier()
                with blas_fp32_matmul(engine.compute_dtype):
                    seconds, output = self.timed(lambda s=stage, m=microbatch, e=entered, h=options: s(m, e, **h))
                    self.times["F", index, turn == 0].append(seconds)
                    if last:
                        engine.stages.sharding[index].before_last_backward()
                    gradient = None if output.ndim == 0 else torch.randn_like(output)
                    dist.barrier()
                    seconds, _ = self.timed(lambda s=stage, out=output, g=gradient: self.backward(s, out, g))
                    self.times["B", index, last].append(seconds)
            engine.stages.sharding[index].finish_grads()
            engine.stages.sharding[index].end_pass()
        dist.barrier()
        self.rest["optimizer"].append(self.timed(engine.optimizer_step)[0])
        dist.barrier()
        self.rest["deal"].append(self.timed(self.shard_batch)[0])
        if self.layout.pp > 1:
            self.rest["transfer"].append(self.transfer())

    def backward(self, stage: LanguageModel, output: Tensor, gradient: Tensor | None) -> None:
        """With what comes after it: with overlap, gradients are summed when a layer has all of them."""
        output.backward(gradient)
        for module in (*reversed(stage.logical_layers), stage):
            self.engine.stages.sharding[stage.stage.index].grads_ready(module)

    def transfer(self) -> float:
        """Half of a way there and back, of what stages hand on."""
        sent = torch.zeros(self.case.tokens // self.layout.tp, self.engine.config.hidden_size)
        other = 1 - dist.get_rank()
        began = self.clock()
        if dist.get_rank() == 0:
            dist.send(sent, other)
            dist.recv(sent, other)
        else:
            dist.recv(sent, other)
            dist.send(sent, other)
        return (self.clock() - began) / 2

    def in_flight(self) -> list[int]:
        """The most microbatches between the begin of a forward and the end of their backward, on each pipeline rank."""
        recording = Recording(dist.get_rank(), self.device)
        self.engine.forward_backward(self.batch, SFT(), recorder=recording)
        self.engine.zero_grad()
        ends: dict[tuple[str, int], list[float]] = {}
        for span in recording.spans():
            if span.kind in ("forward", "backward") and span.microbatch is not None:
                stage = span.name if self.layout.vpp > 1 else ""
                begin, end = ends.setdefault((stage, span.microbatch), [span.start, span.end])
                ends[stage, span.microbatch] = [min(begin, span.start), max(end, span.end)]
        moments = sorted(
            [(begin, 1) for begin, _ in ends.values()] + [(end, -1) for _, end in ends.values()],
            key=lambda event: event[0],
        )
        count = largest = 0
        for _, change in moments:
            count += change
            largest = max(largest, count)
        return self.gathered(largest)[:: self.layout.world_size // self.layout.pp]

    def peak(self) -> int:
        """Bytes of the rank that has most, in a step after the first."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.step()
            return torch.cuda.max_memory_allocated()
        with LiveBytes(self.engine) as living:
            self.step()
        return max(self.gathered(living.peak))

    @staticmethod
    def gathered(value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values


def check(case: Case, rounds: int) -> dict[str, Any]:
    """Measures one case and predicts it. Every rank runs this; the first one's result counts."""
    torch.set_num_threads(1)
    bench = CaseRunner(case)
    layout = bench.layout
    for _ in range(2):
        bench.step()
    bench.time_stages()
    bench.times.clear(), bench.rest.clear()
    for _ in range(rounds):
        bench.step()
        bench.time_stages()
    in_flight = bench.in_flight()
    peak = bench.peak()
    medians = {key: statistics.median(times) for key, times in bench.times.items()}
    times: dict[tuple[str, int, bool], float] = {}
    for rank_medians in bench.gathered(medians):
        for key, seconds in rank_medians.items():
            times[key] = max(seconds, times.get(key, 0.0))
    others = {
        name: max(bench.gathered(statistics.median(bench.rest[name]) if name in bench.rest else 0.0))
        for name in ("step", "optimizer", "deal", "transfer")
    }

    def cost(action: Action) -> ActionCost:
        at_end = action.microbatch == (0 if action.kind == "F" else case.microbatches - 1)
        return ActionCost(times[action.kind, action.stage, at_end])

    forecast = simulate_step(
        layout, cost, microbatches=case.microbatches, overlap=case.overlap,
        transfer_seconds=others["transfer"], after=others["optimizer"] + others["deal"],
    )  # fmt: skip
    memory = estimate_memory(
        bench.engine.config, bench.engine.options, compute_bytes=bench.engine.compute_dtype.itemsize,
        device=case.device, microbatches=case.microbatches,
    )  # fmt: skip
    forecast_peak = max(rank_medians.total for rank_medians in memory)
    return {
        "case": case.name,
        "layout": case.layout,
        "step_s": others["step"],
        "forecast_s": forecast.seconds,
        "time_ratio": forecast.seconds / others["step"],
        "in_flight": in_flight,
        "forecast_in_flight": list(forecast.timeline.peak_in_flight),
        "peak_bytes": peak,
        "forecast_peak_bytes": forecast_peak,
        "memory_ratio": forecast_peak / peak,
        "bubble": forecast.bubble,
        "parts": [asdict(rank_medians) for rank_medians in memory],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--rounds", type=int, default=9, help="steps to take the median of")
    options = parser.parse_args()
    results = []
    for case in H200 if options.device == "cuda" else CPU:
        if options.only not in case.name:
            continue
        result = run_on_ranks(
            check, case, options.rounds, nproc=Layout.parse(case.layout).world_size, device=case.device
        )
        results.append(result)
        exact = "exact" if result["in_flight"] == result["forecast_in_flight"] else "WRONG"
        print(
            f"{case.name:34} step {result['step_s']:.3f} s, forecast {result['time_ratio']:.2f} of it; in flight "
            f"{result['in_flight']} {exact}; peak {result['peak_bytes'] / MIB:,.0f} MiB, forecast "
            f"{result['memory_ratio']:.2f} of it",
            flush=True,
        )
        if options.json:  # after every case, so that what was measured is not lost
            device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
            report = {"device": device, "torch": str(torch.__version__), "results": results}
            options.json.write_text(json.dumps(report, indent=2) + "\n")
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
