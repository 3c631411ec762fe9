"""Compares the fused LM head with the GEMM floor and with its peers: time and peak memory, forward and backward.

    PYTHONPATH=src python benchmarks/linear_logprobs.py --json result.json --plot result.png
    PYTHONPATH=src python benchmarks/linear_logprobs.py --growth --json growth.json     # more tokens, more vocabulary
    PYTHONPATH=src python benchmarks/linear_logprobs.py --smoke          # tiny, on any machine

The floor is the work of every recomputing head: four plain GEMMs (logits, logits again, dX, dW: 8·N·H·V operations),
timed in the same run. "Once" is one forward and backward on an idle device, from before the call until the
device is idle again, by the host's clock, divided by the four GEMMs measured the same way. All other times are by the
device's clock. "Extra" is peak allocation above the inputs, the two gradients included. Peers are used if they can be
imported; most compute less (see the `computes` column), and none of them skips ignored positions.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.ops.linear_logprobs import linear_logprobs
from postlude.ops.linear_objective import linear_objective

SHAPES = "8192x4096x131072,8192x2048x62080,12000x3072x100352,3000x5120x151936,65536x2048x62080,32768x2048x248320"
LONGEST = "262144x2048x248320"
GROWTH = ",".join(
    [f"{1024 << step}x1024x65536" for step in range(9)] + [f"16384x1024x{32768 << step}" for step in range(4)]
)
PAUSE = 0.05  # seconds
FLOOR = "floor: plain GEMMs"
Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One shape's tensors: bf16 (fp32 on CPU) operands that want gradients, random upstream gradients."""

    tokens: int
    features: int
    vocabulary: int
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    half_ignored: Tensor  # the same targets, every second one ignored
    logprob_gradient: Tensor
    entropy_gradient: Tensor

    @staticmethod
    def make(shape: str, device: str) -> Case:
        n, h, v = (int(part) for part in shape.split("x"))
        generator = torch.Generator(device).manual_seed(0)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=dtype)

        # Logits of about unit spread times 3: neither uniform nor certain, like a trained model's.
        hidden, weight = normal(n, h).requires_grad_(), (normal(v, h) * (3 / h**0.5)).requires_grad_()
        targets = torch.randint(v, (n,), generator=generator, device=device)
        half_ignored = targets.clone()
        half_ignored[::2] = -100
        return Case(n, h, v, hidden, weight, targets, half_ignored, normal(n).float(), normal(n).float())


@dataclass
class Result:
    shape: str
    method: str
    computes: str
    forward_ms: float | None = None
    total_ms: float | None = None
    forward_ratio: float | None = None  # to one GEMM
    total_ratio: float | None = None  # to the four GEMMs of the floor
    once_ms: float | None = None  # forward and backward on an idle device, by the host's clock
    once_ratio: float | None = None
    forward_extra_gib: float | None = None
    extra_gib: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Method:
    """`loss(case)` builds a scalar to differentiate. `forward(case)`, if given, is the forward pass to time alone."""

    name: str
    computes: str
    loss: Callable[[Case], Tensor]
    forward: Callable[[Case], object] | None = None


def postlude_methods(backend: str, memory_budget: int | None) -> Iterator[Method]:
    options = {"backend": backend, "memory_budget": memory_budget}

    # The host knows how many targets there are, as in training: `Microbatch.target_count`.
    def stats(case: Case, targets: Tensor, count: int) -> Tensor:
        token_stats = linear_logprobs(case.hidden, case.weight, targets, entropy=True, target_count=count, **options)
        assert token_stats.entropy is not None
        return (token_stats.logprob * case.logprob_gradient).sum() + (token_stats.entropy * case.entropy_gradient).sum()

    def objective(case: Case) -> Tensor:
        columns = (case.logprob_gradient, case.entropy_gradient)
        return linear_objective(
            case.hidden,
            case.weight,
            case.targets,
            lambda logprob, entropy, c: logprob * c[0] + entropy * c[1],
            columns,
            entropy=True,
            target_count=len(case.targets),
            **options,
        ).loss

    def all_targets(case: Case) -> Tensor:
        return stats(case, case.targets, len(case.targets))

    yield Method("postlude linear_logprobs", "log-prob, entropy", all_targets, all_targets)
    yield Method("postlude, 50 % ignored", "log-prob, entropy", lambda c: stats(c, c.half_ignored, len(c.targets) // 2))
    yield Method("postlude linear_objective", "any token loss", objective)


def full_logits(case: Case) -> Tensor:
    logits = F.linear(case.hidden, case.weight).float()
    logprob = logits.log_softmax(-1)
    entropy = -(logprob.exp() * logprob).sum(-1)
    chosen = logprob.gather(1, case.targets[:, None])[:, 0]
    return (chosen * case.logprob_gradient).sum() + (entropy * case.entropy_gradient).sum()


def peers(only: str | None) -> Iterator[Method]:
    """Whatever is installed. Each import may fail in its own way, which only means that the peer is not here."""
    builders = {
        "full logits": _full_logits,
        "F.linear": _torch,
        "Liger": _liger,
        "Apple": _cut_cross_entropy,
        "verl": _verl,
        "SkyRL": _skyrl,
    }
    for name, build in builders.items():
        if only and not any(part in name for part in only.split(",")):
            continue
        try:
            yield from build()
        except Exception as error:
            print(f"skipped {name}: {type(error).__name__}: {error}")


def _full_logits() -> Iterator[Method]:
    compiled = torch.compile(full_logits)
    yield Method("full logits, torch.compile", "log-prob, entropy", compiled, compiled)


def _torch() -> Iterator[Method]:
    function, options = F.linear_cross_entropy, torch.nn.LinearCrossEntropyOptions()
    yield Method(
        "F.linear_cross_entropy, chunked",
        "mean loss",
        lambda c: function(c.hidden, c.weight, c.targets, options=options),
    )


def _liger() -> Iterator[Method]:
    from liger_kernel.ops import (
        LigerFusedLinearCrossEntropyFunction,
    )  # without transformers, which takes long to import

    loss = LigerFusedLinearCrossEntropyFunction.apply
    yield Method("Liger fused linear CE", "mean loss", lambda c: loss(c.hidden, c.weight, c.targets)[0])


def _cut_cross_entropy() -> Iterator[Method]:
    from cut_cross_entropy import linear_cross_entropy

    for impl, computes in (("cce", "log-prob, small gradients dropped"), ("cce_exact", "log-prob")):
        yield Method(
            f"Apple {impl}",
            computes,
            lambda c, impl=impl: (
                linear_cross_entropy(c.hidden, c.weight, c.targets, reduction="none", impl=impl) * c.logprob_gradient
            ).sum(),
        )


def _verl() -> Iterator[Method]:
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    def loss(case: Case) -> Tensor:
        logprob, entropy = linear_cross_entropy(case.hidden, case.weight, case.targets, 1.0, "none")
        return (logprob * case.logprob_gradient).sum() + (entropy * case.entropy_gradient).sum()

    yield Method("verl Triton", "log-prob, entropy", loss, loss)


def _skyrl() -> Iterator[Method]:
    import torch.distributed as dist
    from skyrl.backends.skyrl_train.distributed.megatron.fused_linear_logprob_triton import FusedLinearLogprobTriton

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def loss(case: Case) -> Tensor:
        arguments = (case.targets[None], 0, case.vocabulary, 1024, dist.group.WORLD, False)
        logprob = FusedLinearLogprobTriton.apply(case.hidden[None], case.weight, *arguments)
        return (logprob[0] * case.logprob_gradient).sum()

    yield Method("SkyRL Triton", "log-prob", loss, loss)


def timed(step: Step, device: str, repeats: int) -> float:
    """Median milliseconds of `step` after warm-up: `repeats` readings, or as many as fit in a tenth of a second."""
    readings: list[float] = []
    while len(readings) < repeats + 2 or (repeats > 1 and sum(readings) < 100):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step()
            end.record()
            torch.cuda.synchronize()
            reading = start.elapsed_time(end)
        else:
            began = time.perf_counter()
            step()
            reading = (time.perf_counter() - began) * 1e3
        readings.append(reading)
    return statistics.median(readings[2:])


def once(step: Step, device: str, repeats: int) -> float:
    """Median milliseconds from an idle device to an idle device: one call by itself, the host's share included.

    Each comes after a pause: a card that has just worked hard runs at a lower clock for a while.
    """
    readings = []
    for _ in range(repeats):
        _settle(device)
        if device == "cuda":
            time.sleep(PAUSE)
        began = time.perf_counter()
        step()
        _settle(device)
        readings.append((time.perf_counter() - began) * 1e3)
    return statistics.median(readings)


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak_gib(step: Step, device: str) -> float | None:
    """Peak allocation of one `step` above what was there before it."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def floor(case: Case, device: str, repeats: int) -> tuple[float, float, float]:
    """Milliseconds of one logits GEMM, of all four, and of all four `once`, as plain `torch.mm` (of a part, if it is
    too large)."""
    hidden, weight = case.hidden.detach(), case.weight.detach()
    part = min(case.tokens, max(1, 16 * 2**30 // (case.vocabulary * hidden.element_size())))
    hidden = hidden[:part]
    logits = torch.empty(part, case.vocabulary, dtype=hidden.dtype, device=hidden.device)
    d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)
    gemm_ms = timed(lambda: torch.mm(hidden, weight.t(), out=logits), device, repeats)
    two = timed(lambda: torch.mm(logits, weight, out=d_hidden), device, repeats)
    three = timed(lambda: torch.mm(logits.t(), hidden, out=d_weight), device, repeats)

    def four() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight, out=d_hidden)
        torch.mm(logits.t(), hidden, out=d_weight)

    scale = case.tokens / part
    return gemm_ms * scale, (2 * gemm_ms + two + three) * scale, once(four, device, repeats) * scale


def measure(method: Method, case: Case, shape: str, device: str, repeats: int) -> Result:
    result = Result(shape, method.name, method.computes)

    def forward() -> None:
        assert method.forward is not None
        with torch.no_grad():
            method.forward(case)

    def step() -> None:
        case.hidden.grad = case.weight.grad = None
        method.loss(case).backward()

    try:
        if method.forward is not None:
            result.forward_ms = timed(forward, device, repeats)
            result.forward_extra_gib = peak_gib(forward, device)
        result.total_ms = timed(step, device, repeats)
        result.once_ms = once(step, device, repeats)
        case.hidden.grad = case.weight.grad = None
        result.extra_gib = peak_gib(step, device)
    except torch.OutOfMemoryError:
        result.note = "out of memory"
    except Exception as error:
        result.note = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    case.hidden.grad = case.weight.grad = None
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return result


def run(arguments: argparse.Namespace, device: str) -> list[Result]:
    results = []
    methods = [
        *postlude_methods(arguments.backend, arguments.memory_budget),
        *(peers(arguments.only) if arguments.peers else ()),
    ]
    if arguments.only:
        methods = [method for method in methods if any(name in method.name for name in arguments.only.split(","))]
    for shape in arguments.shapes.split(","):
        longest = shape == LONGEST  # here the question is whether it runs at all
        repeats = 1 if longest else arguments.repeats
        results.extend(compare(shape, methods[:1] if longest else methods, device, repeats))
        save(results, arguments.json, device)
    return results


def compare(shape: str, methods: list[Method], device: str, repeats: int) -> list[Result]:
    """Returns the floor of a shape and each method's times relative to it."""
    case = Case.make(shape, device)
    before = floor(case, device, repeats)
    measured = [measure(method, case, shape, device, repeats) for method in methods]
    # The clock of a GPU wanders by a tenth over minutes: a ratio is to the mean of the floor before and after.
    one_gemm, four_gemms, alone = (
        statistics.mean(pair) for pair in zip(before, floor(case, device, repeats), strict=True)
    )
    for result in measured:
        result.forward_ratio = result.forward_ms and result.forward_ms / one_gemm
        result.total_ratio = result.total_ms and result.total_ms / four_gemms
        result.once_ratio = result.once_ms and result.once_ms / alone
        total_ms = measured[0].total_ms
        if result.method.endswith("ignored") and result.total_ms and total_ms:
            result.note = f"{result.total_ms / total_ms:.2f}x of none ignored"
        print(f"{shape} {result.method}: {_line(result)}", flush=True)
    return [Result(shape, FLOOR, "nothing", one_gemm, four_gemms, 1.0, 1.0, alone, 1.0), *measured]


def grow(arguments: argparse.Namespace, device: str) -> list[Result]:
    """Time and memory of the two operations alone, for more and more tokens and vocabulary."""
    results = []
    for shape in GROWTH.split(","):
        case = Case.make(shape, device)
        for method in postlude_methods(arguments.backend, arguments.memory_budget):
            if "ignored" in method.name:
                continue

            def step(method: Method = method, case: Case = case) -> None:
                case.hidden.grad = case.weight.grad = None
                method.loss(case).backward()

            result = Result(shape, method.name, method.computes, total_ms=timed(step, device, 1))
            case.hidden.grad = case.weight.grad = None
            result.extra_gib = peak_gib(step, device)
            logits = case.tokens * case.vocabulary
            result.note = f"{1e6 * (result.total_ms or 0) / logits:.4f} ns a logit"
            print(f"{shape} {result.method}: {_line(result)}", flush=True)
            results.append(result)
    save(results, arguments.json, device)
    return results


def save(results: list[Result], path: str | None, device: str) -> None:
    """Write what there is."""
    if path:
        with open(path, "w") as file:
            json.dump({**machine(device), "results": [asdict(result) for result in results]}, file, indent=1)


def _line(result: Result) -> str:
    def show(value: float | None, unit: str, digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}{unit}"

    return (
        f"forward {show(result.forward_ms, ' ms')} ({show(result.forward_ratio, 'x')}), "
        f"forward+backward {show(result.total_ms, ' ms')} ({show(result.total_ratio, 'x')}), "
        f"once {show(result.once_ms, ' ms')} ({show(result.once_ratio, 'x')}), "
        f"extra {show(result.forward_extra_gib, ' GiB')} / {show(result.extra_gib, ' GiB')} {result.note}"
    )


def show_table(results: list[Result]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:  # the lines printed on the way say the same
        return
    headers = (
        "N x H x V",
        "method",
        "computes",
        "forward ms",
        "x GEMM",
        "fwd+bwd ms",
        "x floor",
        "once",
        "extra GiB",
        "",
    )
    table = Table(*headers, title="Fused LM head")
    for index, r in enumerate(results):
        numbers = (r.forward_ms, r.forward_ratio, r.total_ms, r.total_ratio, r.once_ratio, r.extra_gib)
        cells = ["-" if number is None else f"{number:.2f}" for number in numbers]
        last = index + 1 == len(results) or results[index + 1].shape != r.shape
        table.add_row(r.shape, r.method, r.computes, *cells, r.note, end_section=last)
    Console(width=160).print(table)


def markdown(results: list[Result]) -> str:
    """The table of docs/benchmarks.md."""

    def show(value: float | None, unit: str = "", digits: int = 1) -> str:
        return "–" if value is None else f"{value:.{digits}f}{unit}"

    lines = [
        "| tokens × hidden × vocabulary | method | computes | forward ms | × GEMM | forward + backward ms | × floor "
        "| once, × floor | extra GiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        times = (show(r.forward_ms), show(r.forward_ratio, "×", 2), show(r.total_ms), show(r.total_ratio, "×", 2))
        cells = (r.shape.replace("x", " × "), r.method, r.computes, *times, show(r.once_ratio, "×", 2))
        lines.append("| " + " | ".join((*cells, show(r.extra_gib, "", 2))) + " |")
    return "\n".join(lines)


def save_plot(results: list[Result], path: str) -> None:
    """Bars of time over the floor, one panel a shape, with each method's extra memory behind its bar."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [r for r in results if r.total_ratio and r.extra_gib and r.shape != LONGEST and "ignored" not in r.method]
    shapes = list(dict.fromkeys(result.shape for result in drawn))
    figure, axes = pyplot.subplots(-(-len(shapes) // 2), 2, figsize=(12, 2.9 * -(-len(shapes) // 2)), squeeze=False)
    for axis, shape in zip(axes.flat, shapes, strict=False):
        rows = [result for result in reversed(drawn) if result.shape == shape]
        colours = ["#c2410c" if row.method.startswith("postlude") else "#94a3b8" for row in rows]
        bars = axis.barh(
            [f"{row.method} ({row.computes})" for row in rows], [row.total_ratio for row in rows], color=colours
        )
        axis.bar_label(bars, [f" {row.total_ratio:.2f}×, {row.extra_gib:.2f} GiB" for row in rows], fontsize=8)
        axis.axvline(1.0, linestyle=":", color="black", linewidth=1)
        axis.set_title("tokens {}, hidden {}, vocabulary {}".format(*shape.split("x")), fontsize=10)
        axis.set_xlim(0, 1.5 * max(row.total_ratio for row in rows))
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("forward + backward, in multiples of the GEMM floor; extra memory, gradients included", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def machine(device: str) -> dict[str, object]:
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"device": name, "torch": torch.__version__, "triton": triton_version, "date": date}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=f"{SHAPES},{LONGEST}", help="tokens x features x vocabulary, comma between")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--only", metavar="NAMES", help="only methods with one of these in their name, comma between")
    parser.add_argument("--backend", default="auto", choices=("auto", "torch", "triton"))
    parser.add_argument("--memory-budget", type=int, help="bytes, see linear_logprobs")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE")
    parser.add_argument("--redraw", metavar="FILE", help="of an earlier --json, print docs' table and draw --plot")
    parser.add_argument("--growth", action="store_true", help="1k to 262k tokens, 32k to 262k entries; no peers")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, no peers: does it run?")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.shapes, arguments.peers, arguments.repeats = "64x32x512,128x16x300", False, 1
    if arguments.redraw:
        with open(arguments.redraw) as file:
            drawn = json.load(file)
        rows = drawn["results"] + drawn.get("earlier", {}).get("results", [])  # peers that were read another day
        results = [Result(**row) for row in rows]
        print(markdown(results))
        if arguments.plot:
            save_plot(results, arguments.plot)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = grow(arguments, device) if arguments.growth else run(arguments, device)
    show_table(results)
    if arguments.plot:
        save_plot(results, arguments.plot)


if __name__ == "__main__":
    main()
