"""One layer of 16,384 packed tokens: Mamba-2, gated delta net, and attention of the same width, forward and backward.

    PYTHONPATH=src python benchmarks/scans.py --json benchmarks/results/scans_h200.json

Sizes are Nemotron-H-8B's and Qwen3-Next's. Layers are whole ones, projections and norms included; their scans, and the
convolution before them, are also measured alone. Compared are our kernels, plain torch (for a layer: its scan; the
convolution stays ours), and flash-linear-attention's if installed. Its backward refuses Triton 3.4 to
3.7.0 on Hopper, where it is wrong; then only its forward is measured. Times are medians: single calls on an idle GPU,
and CUDA events in a loop.

Cheap cases come first, and each is written as soon as it is read. Before fla's are, as many processes as there are
cores compile the configurations among which it chooses: one alone takes minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from postlude import LanguageModel, ModelConfig, Pattern, pack
from postlude.model.blocks import AttentionConfig, BlockConfig, GatedDeltaConfig, MambaConfig
from postlude.model.context import ForwardContext
from postlude.ops import fla
from postlude.ops.convolution import convolve
from postlude.ops.gated_delta import gated_delta
from postlude.ops.packing import Packing
from postlude.ops.ssd import ssd

LENGTHS = (3000, 1, 700, 5000, 129, 2000, 1554, 4000)  # 16,384 together
OWN, TORCH, FLA = "postlude", "torch", "fla"
Result = Callable[[], Tensor]


@dataclass(frozen=True)
class Case:
    """A measurement: a whole layer, a scan or a convolution, and whose kernels run it."""

    what: str
    kernels: str
    make: Callable[[Packing, str], tuple[Result, list[Tensor]]] = field(repr=False)
    """Of the packing and the kernels: the forward, and the tensors that its backward is for."""


def backend(kernels: str) -> Any:
    return "auto" if kernels == OWN else kernels


def layer(symbol: str, hidden_size: int, block: BlockConfig) -> Callable[[Packing, str], tuple[Result, list[Tensor]]]:
    def make(packing: Packing, kernels: str) -> tuple[Result, list[Tensor]]:
        device = packing.cu_seqlens.device
        config = ModelConfig(
            pattern=Pattern.parse(symbol), hidden_size=hidden_size, vocab_size=256, blocks={symbol: block}
        )
        with device:
            model = LanguageModel(config, dtype=torch.bfloat16)
        built_layer = next(iter(model.layers.values()))
        sequences = [torch.zeros(length, dtype=torch.int64) for length in packing.lengths]
        microbatch = pack(sequences, budget=packing.total)[0].to(device)
        hidden = normal(packing, hidden_size)

        def forward() -> Tensor:
            return built_layer(hidden, ForwardContext(microbatch, scan_backend=backend(kernels)))

        return forward, [hidden, *built_layer.parameters()]

    return make


def mamba_scan(config: MambaConfig) -> Callable[[Packing, str], tuple[Result, list[Tensor]]]:
    def make(packing: Packing, kernels: str) -> tuple[Result, list[Tensor]]:
        x = normal(packing, config.heads, config.head_dim)
        B, C = (normal(packing, config.groups, config.state_size) for _ in "BC")
        dt = (torch.rand_like(x[:, :, 0], dtype=torch.float32) / 10).detach().requires_grad_()
        A, D = (torch.linspace(first, last, config.heads, device=x.device) for first, last in ((-1, -16), (1, 1)))
        inputs = [x, dt, A.requires_grad_(), B, C, D.requires_grad_()]
        return lambda: ssd(*inputs, packing, chunk=config.chunk, backend=backend(kernels))[0], inputs

    return make


def delta_scan(config: GatedDeltaConfig) -> Callable[[Packing, str], tuple[Result, list[Tensor]]]:
    def make(packing: Packing, kernels: str) -> tuple[Result, list[Tensor]]:
        query, key = (normal(packing, config.key_heads, config.key_dim) for _ in "qk")
        value = normal(packing, config.value_heads, config.value_dim)
        log_decay = (-torch.rand_like(value[:, :, 0], dtype=torch.float32)).detach().requires_grad_()
        beta = torch.rand_like(log_decay).requires_grad_()
        inputs = [query, key, value, log_decay, beta]
        return lambda: gated_delta(*inputs, packing, normalise=True, backend=backend(kernels))[0], inputs

    return make


def convolution(channels: int, taps: int) -> Callable[[Packing, str], tuple[Result, list[Tensor]]]:
    def make(packing: Packing, kernels: str) -> tuple[Result, list[Tensor]]:
        inputs = normal(packing, channels)
        kernel, bias = (torch.randn(shape).to(inputs).requires_grad_() for shape in ((channels, taps), (channels,)))
        run = lambda: convolve(inputs, kernel, bias, packing, silu=True, backend=backend(kernels))  # noqa: E731
        return run, [inputs, kernel, bias]

    return make


def normal(packing: Packing, *shape: int) -> Tensor:
    device = packing.cu_seqlens.device
    return torch.randn(packing.total, *shape, device=device, dtype=torch.bfloat16).requires_grad_()


def cases(part: int) -> list[Case]:
    """Cheapest first. Of the heads, groups and features of the real models one in `part`."""

    def share(size: int) -> int:
        return max(1, size // part)

    mamba = MambaConfig(heads=share(128), head_dim=64, state_size=128, groups=share(8), norm_groups=share(8))
    delta = GatedDeltaConfig(key_heads=share(16), value_heads=share(32), key_dim=128, value_dim=128)
    attention = AttentionConfig(heads=share(32), kv_heads=share(8), head_dim=128, rotary=None)
    wide_attention = AttentionConfig(heads=share(16), kv_heads=share(2), head_dim=256)
    plain = {
        "attention layer (Nemotron-H-8B)": layer("*", share(4096), attention),
        "attention layer (Qwen3-Next)": layer("*", share(2048), wide_attention),
    }
    recurrent = {
        "gated delta scan (Qwen3-Next)": delta_scan(delta),
        "gated delta layer (Qwen3-Next)": layer("G", share(2048), delta),
        "Mamba-2 scan (Nemotron-H-8B)": mamba_scan(mamba),
        "Mamba-2 layer (Nemotron-H-8B)": layer("M", share(4096), mamba),
    }
    convolved = {"convolution, silu (Nemotron-H-8B)": convolution(mamba.inner + 2 * mamba.shared, 4)}
    return [
        Case(name, kernels, make)
        for kernels, makers in ((OWN, plain | recurrent | convolved), (TORCH, convolved | recurrent), (FLA, recurrent))
        for name, make in makers.items()
    ]


def lengths(tokens: int) -> list[int]:
    """As in LENGTHS, for so many tokens in all."""
    sizes = [max(1, length * tokens // sum(LENGTHS)) for length in LENGTHS]
    sizes[-1] += tokens - sum(sizes)
    return sizes


def timed(run: Callable[[], Any], device: torch.device, count: int) -> dict[str, float]:
    """Milliseconds: the median in a loop, and of single calls on an idle GPU, the host's part included."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(3 if count > 1 else 1):  # what is compiled is compiled here
        run()
    wait()
    alone = []
    for _ in range(max(1, count // 2)):
        began = time.perf_counter()
        run()
        wait()
        alone.append((time.perf_counter() - began) * 1e3)
    if device.type != "cuda":
        return {"alone_ms": statistics.median(alone)}
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    wait()
    loop = [start.elapsed_time(end) for start, end in itertools.pairwise(events)]
    return {"loop_ms": statistics.median(loop), "alone_ms": statistics.median(alone)}


def read(case: Case, packing: Packing, count: int, line: dict[str, Any], written: Callable[[], None]) -> None:
    """Fill `line`, bit by bit, each `written`."""
    device = packing.cu_seqlens.device
    torch.manual_seed(0)
    forward, leaves = case.make(packing, case.kernels)
    with torch.no_grad():
        line["forward"] = timed(forward, device, count)
        written()
        if case.kernels != OWN and "layer" not in case.what:
            torch.manual_seed(0)
            expected, actual = case.make(packing, OWN)[0]().float(), forward().float()
            line["off_ours"] = float((actual - expected).norm() / expected.norm())
            del expected, actual
    if case.kernels == FLA and (reason := fla.refusal(normal(packing, 1), width=1, gradient=True)):
        line["both"] = reason
        return
    upstream = torch.randn_like(forward())

    def both() -> None:
        torch.autograd.grad(forward(), leaves, upstream)

    line["both"] = timed(both, device, count)
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        both()
        line["extra_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"over {seconds:.0f} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def compile_fla(arguments: argparse.Namespace, seconds: float) -> str:
    """Fill Triton's cache with all that fla will choose among, each of several processes its share."""
    count, began = max(1, min(12, (os.cpu_count() or 1) - 2)), time.perf_counter()
    command = [sys.executable, __file__, "--device", arguments.device, "--tokens", str(arguments.tokens)]
    command += ["--only", arguments.only]
    started = [
        subprocess.Popen([*command, "--compile", f"{index}/{count}"], stdout=subprocess.DEVNULL)
        for index in range(count)
    ]
    try:
        for process in started:
            process.wait(max(1.0, seconds - (time.perf_counter() - began)))
    except (subprocess.TimeoutExpired, TimeoutError):
        pass  # what is compiled by now helps all the same
    finally:
        for process in started:
            process.kill()
            process.wait()
    codes = [process.returncode for process in started]
    return f"{count} processes compiled fla's kernels in {time.perf_counter() - began:.0f} s, and left {codes}"


def compile_share(index: int, count: int, packing: Packing, cases: Sequence[Case]) -> None:
    """Runs in one of those processes: fla's scans with every `count`-th configuration alone."""
    from triton.runtime.autotuner import Autotuner

    every, shift = Autotuner.prune_configs, index

    def some(self: Any, *arguments: Any) -> list[Any]:
        configurations = every(self, *arguments)
        return configurations[shift % count :: count] or configurations[:1]

    Autotuner.prune_configs = some
    for case in cases:
        # Where all of a share need more memory than there is, another's.
        for shift in range(index, index + 3):  # noqa: B007, it is read above
            try:
                read(case, packing, 1, {}, lambda: None)
                break
            except Exception as error:
                print(f"process {index}: {case.what}: {type(error).__name__}", file=sys.stderr)


class Report:
    """Lines in a file that is whole at any moment. What it had of other cases stays."""

    def __init__(self, path: Path | None, machine: dict[str, Any], cases: Sequence[Case]) -> None:
        self.path, self.machine = path, machine
        earlier_lines = json.loads(path.read_text())["lines"] if path is not None and path.exists() else []
        repeated = {(case.what, case.kernels) for case in cases}
        self.lines = [line for line in earlier_lines if (line["what"], line["kernels"]) not in repeated]

    def begin(self, case: Case) -> dict[str, Any]:
        self.lines.append({"what": case.what, "kernels": case.kernels})
        return self.lines[-1]

    def write(self) -> None:
        if self.path is not None:
            aside = self.path.with_suffix(".part")
            aside.write_text(json.dumps({"machine": self.machine, "lines": self.lines}, indent=2) + "\n")
            aside.replace(self.path)


def measure(case: Case, packing: Packing, limit: float, line: dict[str, Any], written: Callable[[], None]) -> None:
    on_gpu = packing.cu_seqlens.is_cuda
    try:
        if limit < 1:
            raise TimeoutError("no time was left")
        if case.kernels == FLA and (reason := fla.refusal(normal(packing, 1), width=1, gradient=False)):
            raise RuntimeError(reason)
        with at_most(limit):
            read(case, packing, 10 if on_gpu else 1, line, written)
    except Exception as error:  # what a peer cannot do is a line in the table
        line["failed"] = f"{type(error).__name__}: {(str(error).splitlines() or ['?'])[0][:200]}"
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the numbers go; lines that are there for other cases stay")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with small layers, to see that all runs")
    parser.add_argument("--tokens", type=int, default=sum(LENGTHS), help="of all sequences together")
    parser.add_argument("--only", default="", help="cases whose name, kernels included, has this in it")
    parser.add_argument("--limit", type=float, default=60, help="seconds for a case; fla's have four times as many")
    parser.add_argument("--total", type=float, default=540, help="seconds for all; what is left then is not read")
    parser.add_argument("--compile", help=argparse.SUPPRESS)  # "3/12": be one of the processes that compile
    arguments = parser.parse_args()
    began = time.perf_counter()
    on_gpu = arguments.device == "cuda"
    packing = Packing.from_lengths(lengths(arguments.tokens), arguments.device)
    selected = [case for case in cases(1 if on_gpu else 16) if arguments.only in f"{case.what}, {case.kernels}"]
    of_fla = [case for case in selected if case.kernels == FLA]
    if arguments.compile:
        index, count = map(int, arguments.compile.split("/"))
        compile_share(index, count, packing, [case for case in of_fla if "scan" in case.what] or of_fla)
        return
    machine = {"torch": torch.__version__, "tokens": arguments.tokens, "sequences": packing.count}
    if on_gpu:
        machine |= {"gpu": torch.cuda.get_device_name(), "triton": importlib.import_module("triton").__version__}
    report = Report(arguments.json, machine, selected)
    for case in selected:
        if case in of_fla[:1] and not fla.refusal(normal(packing, 1), width=1, gradient=False):
            machine["fla"] = importlib.import_module("fla").__version__
            print(compile_fla(arguments, (arguments.total - (time.perf_counter() - began)) / 2), flush=True)
        seconds_left = arguments.total - (time.perf_counter() - began)
        line = report.begin(case)
        measure(case, packing, min(seconds_left, arguments.limit * (4 if case in of_fla else 1)), line, report.write)
        report.write()
        print(f"{time.perf_counter() - began:5.0f} s  {json.dumps(line)}", flush=True)


if __name__ == "__main__":
    main()
