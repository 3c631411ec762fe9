"""The time of small Triton kernels beside the same operation by PyTorch, as it is and through torch.compile.

    PYTHONPATH=src python benchmarks/small_kernels.py --json benchmarks/results/small_kernels_h200.json
    PYTHONPATH=src python benchmarks/small_kernels.py --smoke --device cpu       # tiny, PyTorch only: does it run?

Operations of training run forward and backward, called one after another and once on an idle GPU, with the time of the
host. Operations of decoding run in a CUDA graph of 20 calls, as the generator runs them. `bytes` are those that the
operation must read and write at least once, and `bandwidth` is that over the time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from workloads import Results, free_memory, result_or_failure

from postlude.generate.decode_rows import COUNT, LENGTH, LIMIT, TEMPERATURE, TOP_K, TOP_P, DecodeRows, sample_next
from postlude.ops.activation import gated_activation
from postlude.ops.adamw import adamw_step, bias_corrections
from postlude.ops.adamw_storage import AdamWHyperparameters, QuantizedMoment
from postlude.ops.attention_scores import ScoreConfig
from postlude.ops.decode_linear import COUNTERS, linear_add, norm_linear
from postlude.ops.experts import expert_order, merge_rows, replicate_rows
from postlude.ops.fp8 import quantize_columns, quantize_rows
from postlude.ops.linear import embed, set_main_grad
from postlude.ops.linear_logprobs import linear_logprobs
from postlude.ops.norm import Norm, rms_norm_with_residual
from postlude.ops.paged_attention import PAGE_SIZE, attend_pages, new_page_store
from postlude.ops.rotary import HeadNorms, RotaryConfig, rotary_table, rotate_heads

EPS = 1e-6
CALLS, REPEATS = 20, 5
OURS = "postlude"
Run = Callable[[], Any]


@dataclass(frozen=True)
class Sizes:
    """Of a Qwen3-8B layer, Qwen3-30B-A3B's experts and Qwen3's vocabulary, unless for a smoke test."""

    tokens: int = 16384
    hidden: int = 4096
    intermediate: int = 12288
    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    experts: int = 128
    top_k: int = 8
    expert_hidden: int = 2048
    vocabulary: int = 151936
    rows: int = 128
    few_rows: int = 16
    keys: int = 1024


SMOKE = Sizes(64, 128, 192, 4, 2, 64, 4, 2, 64, 512, 4, 2, 64)


@dataclass(frozen=True)
class Case:
    """An operation by several implementations, Postlude's first."""

    name: str
    runs: dict[str, Run]
    bytes: int
    decoding: bool = False


class Maker:
    """Makes the cases, one at a time, with tensors on the device."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        self.sizes, self.device = sizes, device

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype)

    def training(
        self, name: str, ours: Callable[..., Any], theirs: Callable[..., Any], inputs: Sequence[Tensor], numbers: int
    ) -> Case:
        """An operation with its backward. `numbers` are the bf16 numbers that both read and write at least."""
        leaves = [tensor.requires_grad_() for tensor in inputs]

        def run(function: Callable[..., Any]) -> Run:
            def both() -> None:
                outputs = function(*leaves)
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                torch.autograd.grad(outputs, leaves, [output.detach() for output in outputs])

            return both

        runs = {OURS: run(ours), "torch": run(theirs)}
        if self.device == "cuda":
            runs["torch.compile"] = run(torch.compile(theirs))
        return Case(name, runs, 2 * numbers)

    def norm(self) -> Case:
        size = self.sizes
        hidden, weight = self.random(size.tokens, size.hidden), self.random(size.hidden)

        def theirs(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            return hidden * 1, F.rms_norm(hidden, (size.hidden,), weight, EPS)

        def ours(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            return rms_norm_with_residual(hidden, weight, EPS)

        return self.training("norm", ours, theirs, (hidden, weight), 6 * hidden.numel())

    def activation(self) -> Case:
        gate, up = (self.random(self.sizes.tokens, self.sizes.intermediate) for _ in range(2))
        return self.training(
            "activation",
            lambda gate, up: gated_activation(gate, up, "silu"),
            lambda gate, up: F.silu(gate) * up,
            (gate, up),
            8 * gate.numel(),
        )

    def rotary(self) -> Case:
        size = self.sizes
        query, key = (self.random(size.tokens, heads, size.width) for heads in (size.heads, size.kv_heads))
        weights = self.random(size.width), self.random(size.width)
        table = rotary_table(RotaryConfig(), torch.arange(size.tokens, device=self.device), size.width)
        cos, sin = (part[..., : size.width // 2] for part in table)

        def rotated(heads: Tensor, weight: Tensor) -> Tensor:
            first, second = F.rms_norm(heads, (size.width,), weight, EPS).float().chunk(2, -1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(heads.dtype)

        def ours(query: Tensor, key: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
            return rotate_heads(query, key, table, HeadNorms(first, second, EPS))

        def theirs(query: Tensor, key: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
            return rotated(query, first), rotated(key, second)

        return self.training("rotary", ours, theirs, (query, key, *weights), 5 * (query.numel() + key.numel()))

    def experts(self) -> Case:
        size = self.sizes
        tokens = self.random(size.tokens, size.expert_hidden)
        weights, choice = self.random(size.tokens, size.experts, dtype=torch.float32).softmax(-1).topk(size.top_k)
        order, inverse, _ = expert_order(choice, size.experts)

        def ours(tokens: Tensor, weights: Tensor) -> Tensor:
            return merge_rows(replicate_rows(tokens, order, inverse, size.top_k), weights, order, inverse)

        def theirs(tokens: Tensor, weights: Tensor) -> Tensor:
            rows = tokens.index_select(0, order // size.top_k)
            scaled = rows * weights.flatten()[order][:, None].to(rows.dtype)
            return torch.zeros_like(tokens).index_add(0, order // size.top_k, scaled)

        return self.training("experts", ours, theirs, (tokens, weights), (4 + 5 * size.top_k) * tokens.numel())

    def head_rows(self) -> Case:
        """The head in fp32, whose epilogue is a kernel of one program a row."""
        size = self.sizes
        tokens, vocabulary = size.tokens // 8, size.vocabulary // 4
        hidden = self.random(tokens, size.expert_hidden, dtype=torch.float32).requires_grad_()
        weight = (self.random(vocabulary, size.expert_hidden, dtype=torch.float32) / 50).requires_grad_()
        targets = torch.randint(vocabulary, (tokens,), device=self.device)

        def run(backend: Any) -> Run:
            def both() -> None:
                logprob = linear_logprobs(hidden, weight, targets, entropy=True, backend=backend).logprob
                torch.autograd.grad(logprob.sum(), (hidden, weight))

            return both

        return Case("linear_logprobs_rows", {OURS: run("auto"), "torch": run("torch")}, 12 * tokens * vocabulary)

    def embedding(self) -> Case:
        size = self.sizes
        table = self.random(size.vocabulary, size.hidden).requires_grad_()
        total = torch.zeros(table.shape, device=self.device)
        tokens = torch.randint(size.vocabulary, (size.tokens,), device=self.device)
        upstream = self.random(size.tokens, size.hidden)

        def ours() -> None:
            set_main_grad(table, total)
            embed(tokens, table).backward(upstream)

        def theirs() -> None:
            (gradient,) = torch.autograd.grad(F.embedding(tokens, table), table, upstream)
            total.add_(gradient)

        return Case("embedding", {OURS: ours, "torch": theirs}, 14 * upstream.numel())

    def adamw(self) -> Case:
        shape = self.sizes.intermediate, self.sizes.hidden
        weight, gradient = (self.random(*shape, dtype=torch.float32) for _ in range(2))
        hyperparameters = AdamWHyperparameters(1e-5, (0.9, 0.95), 1e-8, 0.1)
        first, second = QuantizedMoment.zeros_like(weight), QuantizedMoment.zeros_like(weight)
        (correction,) = bias_corrections(torch.ones(1, device=self.device), hyperparameters)

        def run(backend: Any) -> Run:
            return lambda: adamw_step(weight, gradient, first, second, correction, hyperparameters, backend=backend)

        parameter = weight.clone().requires_grad_()
        parameter.grad = gradient
        fused = torch.optim.AdamW([parameter], fused=self.device == "cuda")
        runs = {OURS: run("auto"), "torch": run("torch"), "torch's fused AdamW, fp32 moments": fused.step}
        return Case("adamw, 8-bit moments", runs, 16 * weight.numel())

    def fp8_rows(self) -> Case:
        matrix = self.random(self.sizes.tokens, self.sizes.hidden)
        runs: dict[str, Run] = {
            OURS: lambda: (quantize_rows([matrix]), quantize_columns([matrix])),
            "torch": lambda: (quantize_rows([matrix], backend="torch"), quantize_columns([matrix], backend="torch")),
        }
        return Case("fp8, rows and columns", runs, 8 * matrix.numel())

    def decode_linear(self) -> Case:
        """The MLP of a layer for a few rows."""
        size = self.sizes
        hidden, norm = self.random(size.few_rows, size.hidden), Norm(self.random(size.hidden), EPS, 0.0)
        first = self.random(2 * size.intermediate, size.hidden) / size.hidden**0.5
        second = self.random(size.hidden, size.intermediate) / size.intermediate**0.5
        counters = torch.zeros(COUNTERS, dtype=torch.int32, device=self.device)

        @torch.no_grad()
        def ours() -> None:
            rows = norm_linear(hidden, norm, first, activation="silu", counters=counters)
            linear_add(hidden.clone(), rows, second, counters=counters)

        @torch.no_grad()
        def theirs() -> None:
            gate, up = F.linear(F.rms_norm(hidden, (size.hidden,), norm.weight, EPS), first).chunk(2, -1)
            hidden.clone().addmm_(F.silu(gate) * up, second.t())

        return Case("decode_linear", {OURS: ours, "torch": theirs}, 2 * (first.numel() + second.numel()), decoding=True)

    def paged_attention(self) -> Case:
        """Beside flash attention over keys that lie together, without the write of the new key."""
        size = self.sizes
        pages = size.rows * size.keys // PAGE_SIZE
        stores = [
            new_page_store(pages, size.kv_heads, size.width, torch.bfloat16, torch.device(self.device))
            for _ in range(2)
        ]
        for store in stores:
            store.normal_()
        table = torch.randperm(pages, device=self.device).int().view(size.rows, -1)
        lengths = torch.full((size.rows,), size.keys, device=self.device)
        query = self.random(size.rows, size.heads, size.width)
        new = self.random(size.rows, size.kv_heads, size.width)
        dense = [self.random(size.rows, size.kv_heads, size.keys, size.width) for _ in range(2)]
        score = ScoreConfig(scale=size.width**-0.5)

        @torch.no_grad()
        def ours() -> None:
            attend_pages(query, new, new, stores[0], stores[1], table, lengths, score)

        @torch.no_grad()
        def theirs() -> None:
            F.scaled_dot_product_attention(query[:, :, None], dense[0], dense[1], enable_gqa=True)

        return Case("paged_attention", {OURS: ours, "torch": theirs}, 4 * dense[0].numel(), decoding=True)

    def sample(self, *, filtered: bool) -> Case:
        """All tokens, or the likeliest by top-k and top-p, which PyTorch finds by sorting."""
        size = self.sizes
        logits = self.random(size.rows, size.vocabulary) * 3
        state = DecodeRows(size.rows, 8, torch.device(self.device))
        state.numbers[LENGTH], state.numbers[COUNT], state.numbers[LIMIT] = 100, 1, 2**40
        state.numbers[TOP_K], state.settings[TEMPERATURE], state.settings[TOP_P] = 50, 0.7, 0.9

        def theirs() -> None:
            scaled = logits.float() / 0.7
            if filtered:
                ranked, tokens = scaled.sort(-1, descending=True)
                probabilities = ranked.softmax(-1)
                excluded = probabilities.cumsum(-1) - probabilities >= 0.9
                excluded[:, 50:] = True
                scaled = torch.full_like(scaled, -torch.inf).scatter(
                    1, tokens, ranked.masked_fill(excluded, -torch.inf)
                )
            logprobs = scaled.log_softmax(-1)
            token = (logprobs + -torch.empty_like(scaled).exponential_().log()).argmax(-1, keepdim=True)
            logprobs.gather(1, token)

        runs: dict[str, Run] = {
            OURS: lambda: sample_next(logits, state.all, state, filtered=filtered),
            "torch": theirs,
        }
        name = "sample_threshold" if filtered else "sample"
        return Case(name, runs, 2 * logits.numel(), decoding=self.device == "cuda")

    def all(self) -> Iterator[Callable[[], Case]]:
        yield from (self.norm, self.activation, self.rotary, self.experts, self.embedding, self.adamw)
        yield from (self.fp8_rows, self.head_rows, self.decode_linear, self.paged_attention)
        yield lambda: self.sample(filtered=False)
        yield lambda: self.sample(filtered=True)


class Timer:
    """Times a call in microseconds."""

    def __init__(self, device: str) -> None:
        self.device = device

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def wall(self, run: Run, calls: int) -> float:
        """Returns the time of one of so many calls, the host's included, after all before have ended."""
        self.wait()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        self.wait()
        return (time.perf_counter() - start) / calls * 1e6

    def graph(self, run: Run) -> Run:
        """Returns a replay of a CUDA graph of `CALLS` calls."""
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            run()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(CALLS):
                    run()
        return graph.replay

    def measure(self, run: Run, *, decoding: bool) -> dict[str, Any]:
        for _ in range(3):
            run()
        if decoding and self.device == "cuda":
            replay = self.graph(run)
            times = [self.wall(replay, 1) / CALLS for _ in range(REPEATS + 1)][1:]
            return {"us": round(statistics.median(times), 2), "spread": [round(min(times), 2), round(max(times), 2)]}
        times = [self.wall(run, CALLS) for _ in range(REPEATS)]
        once = statistics.median(self.wall(run, 1) for _ in range(REPEATS))
        return {
            "us": round(statistics.median(times), 2),
            "spread": [round(min(times), 2), round(max(times), 2)],
            "once_us": round(once, 2),
        }


def measured(case: Case, device: str) -> dict[str, Any]:
    """Returns the times of all implementations, and how many times as long as Postlude's each takes."""
    timer = Timer(device)
    found = {
        name: result_or_failure(partial(timer.measure, run, decoding=case.decoding)) for name, run in case.runs.items()
    }
    ours = found[OURS].get("us")
    for times in found.values():
        if ours and "us" in times:
            times["times_ours"] = round(times["us"] / ours, 2)
    bandwidth = {} if not ours else {"bandwidth_tb_s": round(case.bytes / ours / 1e6, 2)}
    return {"case": case.name, "bytes": case.bytes, **bandwidth, "implementations": found}


def main(words: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smoke", action="store_true", help="tiny, on any machine")
    parser.add_argument("--commit", help="the commit of a copy of the tree without its repository")
    parser.add_argument("--json", type=Path, help="written after each case")
    arguments = parser.parse_args(words)
    command = f"benchmarks/small_kernels.py {' '.join(sys.argv[1:] if words is None else words)}"
    results = Results(command, arguments.device, arguments.json, commit=arguments.commit)
    torch.manual_seed(0)
    for make in Maker(SMOKE if arguments.smoke else Sizes(), arguments.device).all():
        result = measured(make(), arguments.device)
        results.add(result)
        print(f"{result['case']}, {result.get('bandwidth_tb_s', 0)} TB/s", flush=True)
        for name, times in result["implementations"].items():
            print(f"  {name:36} {times}", flush=True)
        free_memory(arguments.device)
    return results.cases


if __name__ == "__main__":
    main()
