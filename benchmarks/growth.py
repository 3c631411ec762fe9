"""Growth of time and memory of an update and of log-probs with tokens, sequence length, vocabulary and experts.

    PYTHONPATH=src python benchmarks/growth.py --json benchmarks/results/growth_h200.json
    PYTHONPATH=src python benchmarks/growth.py --axes length --most 131072
    PYTHONPATH=src python benchmarks/growth.py --draw benchmarks/results/growth_h200.json docs/images/growth_h200.svg
    PYTHONPATH=src python benchmarks/growth.py --smoke              # tiny, on any machine

An axis has an exponent: the slope of log time, or log memory, over the upper half of its points. Attention is quadratic
in the length of a sequence, so it is also measured alone, and the exponent of the rest is reported, too.
Memory is the step's peak above weights and optimizer state. Growth by more than a power of 1.1 is reported.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PretrainedConfig
from workloads import GIB, SHAPES, Clock, Results, Sample, changed, free_memory, result_or_failure

from postlude import AdamW, Batch, Engine, ranks
from postlude.objectives import PolicyGradient
from postlude.ops.attention import ScoreConfig, attend
from postlude.ops.packing import Packing
from postlude.options import Recompute

Pass = Literal["update", "logprobs"]
LONG = 2.0  # seconds from which on one step is enough
STEEP = 1.1  # a power above which a growth is called superlinear


@dataclass(frozen=True)
class Point:
    """One engine and one batch."""

    size: int
    config: PretrainedConfig
    lengths: list[int]
    budget: int
    recompute: Recompute = "none"


@dataclass(frozen=True)
class Axis:
    """A size that grows, and the points at which it is measured."""

    description: str
    passes: tuple[Pass, ...]
    points: Callable[[Pass], Iterator[Point]]
    attention: bool = False
    """Whether attention grows by another power than the rest, so that it is measured alone."""


def powers(smallest: int, largest: int) -> list[int]:
    return [2**power for power in range(int(math.log2(smallest)), int(math.log2(largest)) + 1)]


def axes(smoke: bool, shape: str, smallest: int | None, largest: int | None) -> dict[str, Axis]:
    """A model of a real shape, or a tiny one."""
    dense, mixed = ("smoke", "smoke-moe") if smoke else (shape, "30b-a3b")
    tokens = powers(64, 128) if smoke else powers(16384, 262144)
    vocabulary = powers(128, 256) if smoke else powers(16384, 262144)
    experts = powers(4, 8) if smoke else powers(16, 256)
    fixed, budget = (64, 64) if smoke else (16384, 16384)

    def lengths(which: Pass) -> list[int]:
        longest = 64 if smoke else {"update": 131072, "logprobs": 262144}[which]
        return powers(smallest or (16 if smoke else 8192), min(largest or longest, longest))

    few = [budget // 16] * (fixed * 16 // budget)
    return {
        "tokens": Axis(
            f"tokens of the batch, in sequences of {budget // 16} and microbatches of {budget}",
            ("update", "logprobs"),
            lambda _: (Point(n, changed(dense), [budget // 16] * (n * 16 // budget), budget) for n in tokens),
        ),
        "length": Axis(
            "length of the one sequence of the batch; an update recomputes its layers (recompute=full)",
            ("update", "logprobs"),
            lambda which: (Point(n, changed(dense), [n], n, "full") for n in lengths(which)),
            attention=True,
        ),
        "vocabulary": Axis(
            f"vocabulary, with 4 layers and {fixed} tokens",
            ("update", "logprobs"),
            lambda _: (Point(n, changed(dense, vocab_size=n, num_hidden_layers=4), few, budget) for n in vocabulary),
        ),
        "experts": Axis(
            f"experts, of which a token goes to as many, with 2 layers and {fixed} tokens",
            ("update", "logprobs"),
            lambda _: (Point(n, changed(mixed, num_experts=n, num_hidden_layers=2), few, budget) for n in experts),
        ),
    }


def measured(point: Point, which: Pass, clock: Clock) -> dict[str, Any]:
    """Seconds of one pass, and the peak of memory above what is there between steps."""
    engine = Engine(
        point.config, device=clock.device, budget=point.budget, recompute=point.recompute, optimizer=AdamW(lr=1e-6)
    )
    sample = Sample.of(point.lengths, point.config.vocab_size)
    count = len(sample.sequences)
    columns = {
        "response_mask": [1.0] * count, "advantages": sample.advantages, "old_logprobs": [sample.old_logprob] * count,
    }  # fmt: skip
    batch = Batch(sample.sequences, columns)
    short = Batch([sample.sequences[0][:16]], {name: values[:1] for name, values in columns.items()})

    def step(data: Batch = batch) -> None:
        if which == "update":
            engine.forward_backward(data, PolicyGradient())
            engine.optimizer_step()
        else:
            engine.logprobs(Batch(data.sequences), entropy=True)

    step(short)  # the optimizer's state is there from now on
    there = torch.cuda.memory_allocated() if clock.device == "cuda" else 0
    free_memory(clock.device)
    seconds = clock.once(step)
    result: dict[str, Any] = {"tokens": sum(point.lengths)}
    if clock.device == "cuda":
        peak = torch.cuda.max_memory_allocated()
        result |= {"peak_gib": round(peak / GIB, 2), "extra_gib": round((peak - there) / GIB, 3)}
    if seconds < LONG:  # what a first step takes besides, to get its memory, does not count
        seconds = clock(step)
    return {"seconds": round(seconds, 4), **result}


def attention_alone(point: Point, which: Pass, clock: Clock) -> float:
    """Seconds that attention takes by itself in all layers of the pass: twice forward where layers are recomputed."""
    config, dtype = point.config, torch.bfloat16 if clock.device == "cuda" else torch.float32
    packing = Packing.from_lengths(point.lengths, clock.device)

    def random_heads(heads: int) -> torch.Tensor:
        return torch.randn(packing.total, heads, config.head_dim, device=clock.device, dtype=dtype)

    query, key, value = (
        random_heads(config.num_attention_heads),
        *(random_heads(config.num_key_value_heads) for _ in range(2)),
    )
    learns = which == "update"
    for tensor in (query, key, value):
        tensor.requires_grad_(learns)
    scores = ScoreConfig(scale=config.head_dim**-0.5)

    def forward() -> torch.Tensor:
        return attend(query, key, value, packing, packing, scores)

    arriving = torch.randn_like(query)  # a gradient as a layer gets it: what a sum hands back has no memory of its own

    def both() -> None:
        torch.autograd.grad(forward(), (query, key, value), arriving)

    clock.once(forward)
    seconds = clock(both if learns else forward)
    if learns and point.recompute == "full":
        with torch.no_grad():
            seconds += clock(forward)
    return seconds * config.num_hidden_layers


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float | None:
    """The slope of log value over log size, by least squares over the upper half of the points."""
    pairs = [(math.log(size), math.log(value)) for size, value in zip(sizes, values, strict=True) if value > 0]
    pairs = pairs[len(pairs) // 2 if len(pairs) > 3 else 0 :]
    if len(pairs) < 2:
        return None
    middle = [sum(coordinates) / len(pairs) for coordinates in zip(*pairs, strict=True)]
    rise = sum((x - middle[0]) * (y - middle[1]) for x, y in pairs)
    return round(rise / sum((x - middle[0]) ** 2 for x, _ in pairs), 2)


def fitted(axis: Axis, points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Exponents of an axis, and which of them are steep."""
    ran = [point for point in points if "seconds" in point]
    sizes = [point["size"] for point in ran]
    fit = {"time": exponent(sizes, [point["seconds"] for point in ran])}
    if axis.attention:
        fit["time without attention"] = exponent(sizes, [p["seconds"] - p["attention_s"] for p in ran])
    if ran and "extra_gib" in ran[0]:
        fit["memory"] = exponent(sizes, [point["extra_gib"] for point in ran])
    steep = [name for name, power in fit.items() if power is not None and power > STEEP]
    return {"exponents": fit, "superlinear": steep}


# One line of a panel: a name, a colour, and (size, value) pairs.
Line = tuple[str, str, list[tuple[float, float]]]
COLOURS = {"update": "#2f6fde", "logprobs": "#e0702d"}


def panel(title: str, lines: Sequence[Line], x_start: float, top: float, width: float, height: float) -> list[str]:
    """A plot of logarithms in a rectangle: a straight line is a power, and a grey one of slope 1 shows linear."""
    pairs = [pair for _, _, points in lines for pair in points if pair[1] > 0]
    if not pairs:
        return []
    x0, x1 = (math.log2(bound(x for x, _ in pairs)) for bound in (min, max))
    y0, y1 = (math.log2(bound(y for _, y in pairs)) for bound in (min, max))
    y0, y1 = min(y0, y1 - (x1 - x0)) - 0.2, y1 + 0.2

    def at(x: float, y: float) -> tuple[float, float]:
        return x_start + (math.log2(x) - x0) / (x1 - x0 or 1) * width, top + (y1 - math.log2(y)) / (y1 - y0) * height

    drawn = [
        f'<rect x="{x_start}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#c8ccd2"/>',
        f'<text x="{x_start}" y="{top - 6}" font-weight="bold" fill="#222222">{title}</text>',
    ]
    for power in range(math.ceil(x0), math.floor(x1) + 1):
        x, _ = at(2**power, 2**y0)
        name = f"{2**power // 1024}k" if power >= 10 else str(2**power)
        drawn.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + height}" stroke="#eef0f3"/>')
        drawn.append(f'<text x="{x:.1f}" y="{top + height + 13}" text-anchor="middle" fill="#555555">{name}</text>')
    step = max(1, round((y1 - y0) / 5))
    for power in range(math.ceil(y0), math.floor(y1) + 1, step):
        _, y = at(2**x0, 2**power)
        drawn.append(f'<line x1="{x_start}" x2="{x_start + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eef0f3"/>')
        drawn.append(f'<text x="{x_start - 5}" y="{y + 4:.1f}" text-anchor="end" fill="#555555">{2.0**power:g}</text>')
    end = 2 ** (y1 - 0.2)
    ends = [at(2**x0, end / 2 ** (x1 - x0)), at(2**x1, end)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in ends)
    drawn.append(f'<polyline points="{points}" fill="none" stroke="#b8bcc4" stroke-dasharray="4 3"/>')
    for place, (name, colour, values) in enumerate(lines):
        dash = ' stroke-dasharray="2 2"' if name.endswith("attention") else ""
        points = " ".join("{:.1f},{:.1f}".format(*at(*pair)) for pair in values if pair[1] > 0)
        drawn.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>')
        drawn.append(f'<text x="{x_start + 8}" y="{top + 14 + 13 * place}" fill="{colour}">{name}</text>')
    return drawn


def drawn(results: dict[str, Any]) -> str:
    """Time above, memory below, an axis a column."""
    names = list(dict.fromkeys(case["axis"] for case in results["cases"]))
    width, height, gap = 190, 170, 60
    total_width, total_height = 50 + len(names) * (width + gap), 60 + 2 * (height + gap)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total_width}" height="{total_height}" '
        'font-family="sans-serif" font-size="10">',
        f'<rect width="{total_width}" height="{total_height}" fill="#ffffff"/>',
    ]
    for column, name in enumerate(names):
        cases = [case for case in results["cases"] if case["axis"] == name]
        for row, (title, key) in enumerate((("seconds", "seconds"), ("GiB above the state", "extra_gib"))):
            panel_lines: list[Line] = []
            for case in cases:
                ran = [point for point in case["points"] if key in point]
                power = case["exponents"].get("time" if key == "seconds" else "memory")
                label = f"{case['pass']}, ∝ n^{power}"
                panel_lines.append(
                    (
                        label,
                        COLOURS[case["pass"]],
                        [(measured_point["size"], measured_point[key]) for measured_point in ran],
                    )
                )
                if key == "seconds" and ran and "attention_s" in ran[0]:
                    attention_points = [
                        (measured_point["size"], measured_point["attention_s"]) for measured_point in ran
                    ]
                    panel_lines.append((f"{case['pass']}: attention", COLOURS[case["pass"]], attention_points))
            x_start, top = 50 + column * (width + gap), 40 + row * (height + gap)
            lines += panel(f"{title} by {name}", panel_lines, x_start, top, width, height)
    return "\n".join([*lines, "</svg>", ""])


def options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", nargs="+", choices=["tokens", "length", "vocabulary", "experts"])
    parser.add_argument("--passes", nargs="+", choices=["update", "logprobs"], default=["update", "logprobs"])
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6b")
    parser.add_argument("--least", type=int, help="the shortest sequence")
    parser.add_argument("--most", type=int, help="the longest sequence; by default 131072, or 262144 for log-probs")
    parser.add_argument("--repeats", type=int, default=2, help="the median counts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smoke", action="store_true", help="tiny, on any machine")
    parser.add_argument("--json", type=Path, help="written after each axis")
    parser.add_argument("--draw", type=Path, nargs=2, metavar=("JSON", "SVG"), help="draw an earlier result instead")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> list[dict[str, Any]]:
    arguments = options(words)
    if arguments.draw:
        arguments.draw[1].write_text(drawn(json.loads(arguments.draw[0].read_text())))
        return []
    results = Results(" ".join(sys.argv), arguments.device, arguments.json)
    every = axes(arguments.smoke, arguments.shape, arguments.least, arguments.most)
    clock = Clock(arguments.device, arguments.repeats, enough=1.0, warm_up=0)
    with ranks(device=arguments.device):
        for name in arguments.axes or list(every):
            axis = every[name]
            for which in (pass_name for pass_name in axis.passes if pass_name in arguments.passes):
                print(f"{which} by {axis.description}")
                points = []
                for point in axis.points(which):
                    free_memory(arguments.device)
                    point_result = {"size": point.size} | result_or_failure(
                        lambda p=point, w=which: measured(p, w, clock)
                    )
                    print("  " + ", ".join(f"{key} {value}" for key, value in point_result.items()), flush=True)
                    free_memory(arguments.device)
                    if axis.attention and "seconds" in point_result:
                        point_result["attention_s"] = round(attention_alone(point, which, clock), 4)
                        print(f"    of which attention {point_result['attention_s']} s", flush=True)
                    points.append(point_result)
                case = {"axis": name, "pass": which, "description": axis.description, "points": points} | fitted(
                    axis, points
                )
                results.add(case)
                powers_found = ", ".join(f"{key} ∝ n^{power}" for key, power in case["exponents"].items())
                print(f"  {powers_found}; superlinear: {', '.join(case['superlinear']) or 'nothing'}", flush=True)
    return results.cases


if __name__ == "__main__":
    main()
