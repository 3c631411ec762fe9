"""GRPO with rollouts in FP8, with and without the correction for it, beside rollouts in fp32, five seeds each.

    PYTHONPATH=src python benchmarks/fp8_grpo.py --json benchmarks/results/fp8_grpo_cpu.json
    PYTHONPATH=src python benchmarks/fp8_grpo.py --draw benchmarks/results/fp8_grpo_cpu.json docs/images/fp8_grpo.svg

All are `postlude demo` with fewer prompts, on a CPU, where FP8 rounds as on a GPU. In FP8 are the weights of the
generator's linear layers and its keys and values. The correction is truncated importance sampling. A result is
written after each run, and a run that is there already is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

COMMON = ("--prompts_per_step", "24", "--minibatches", "4", "--steps", "40", "--evaluation.every", "0")
COMMON += ("--warm_start.steps", "110", "--warm_start.batch_size", "40")
COMMON += ("--save_every", "0", "--export", "false", "--old_logprobs", "recompute", "--loggers", "[]")
FP8 = ("--rollout.quantization", "fp8", "--rollout.kv_cache_dtype", "fp8")
RUNS: dict[str, tuple[str, ...]] = {
    "fp32 rollouts": (),
    "FP8 rollouts, corrected": (*FP8, "--objective.correction.truncate", "[0, 2]"),
    "FP8 rollouts, not corrected": FP8,
}
KEPT = (
    "reward_mean",
    "rollout_kl",
    "rollout_chi2",
    "rollout_ratio_max",
    "rollout_ratio_tail",
    "rollout_logprob_diff_mean",
)
COLOURS = ("#b8bcc4", "#2f6fde", "#d9822b")
WIDTH, HEIGHT, MARGIN, SMOOTHED = 640, 300, 48, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--draw", type=Path, nargs=2, metavar=("RESULT", "SVG"))
    arguments = parser.parse_args()
    if arguments.draw:
        arguments.draw[1].write_text(draw(json.loads(arguments.draw[0].read_text())["runs"]))
        return
    runs = json.loads(arguments.json.read_text())["runs"] if arguments.json and arguments.json.exists() else []
    for seed in range(arguments.seeds):
        for name, words in RUNS.items():
            if any(run["name"] == name and run["seed"] == seed for run in runs):
                continue
            runs.append({"name": name, "seed": seed, **train((*words, *COMMON, "--seed", str(seed)))})
            if arguments.json:
                arguments.json.write_text(json.dumps({"command": " ".join(sys.argv), "runs": runs}, indent=1))
            print(f"{name:<28} seed {seed}: reward {mean(runs[-1]['reward_mean'][-10:]):.3f}", flush=True)
    for name in RUNS:
        print(f"{name:<28} {summary([run for run in runs if run['name'] == name])}")


def train(words: Sequence[str]) -> dict[str, Any]:
    """Runs one training, and returns its metrics by step."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        command = [sys.executable, "-m", "postlude", "demo", "--run", str(run), *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["phase"] == "grpo"]
    return {"words": " ".join(words)} | {name: [round(row[name], 7) for row in steps] for name in KEPT}


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The reward of the last ten steps over seeds, and the mismatch over all steps."""
    last = [mean(run["reward_mean"][-10:]) for run in runs]
    return {
        "reward": round(mean(last), 3),
        "std": round(stdev(last), 3) if len(last) > 1 else 0.0,
        "kl": round(mean(mean(run["rollout_kl"]) for run in runs), 6),
        "chi2": round(mean(mean(run["rollout_chi2"]) for run in runs), 5),
        "ratio_max": max(max(run["rollout_ratio_max"]) for run in runs),
        "tail": round(mean(mean(run["rollout_ratio_tail"]) for run in runs), 6),
    }


def draw(runs: Sequence[dict[str, Any]]) -> str:
    """The mean reward of each kind over seeds, between its least and its largest, averaged over five steps."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    steps = len(runs[0]["reward_mean"])
    tops = [value for run in runs for value in smoothed(run["reward_mean"])]
    low, high = min(tops), max(tops)

    def at(step: int, value: float) -> str:
        across = MARGIN + (WIDTH - 2 * MARGIN) * step / (steps - 1)
        return f"{across:.1f},{HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (value - low) / (high - low):.1f}"

    for number, (name, colour) in enumerate(zip(RUNS, COLOURS, strict=True)):
        curves = [smoothed(run["reward_mean"]) for run in runs if run["name"] == name]
        by_step = list(zip(*curves, strict=True))
        band = [at(step, max(values)) for step, values in enumerate(by_step)]
        band += [at(step, min(by_step[step])) for step in reversed(range(steps))]
        middle = " ".join(at(step, mean(values)) for step, values in enumerate(by_step))
        lines += [
            f'<polygon points="{" ".join(band)}" fill="{colour}" opacity="0.15"/>',
            f'<polyline points="{middle}" fill="none" stroke="{colour}" stroke-width="2"/>',
            f'<text x="{WIDTH - MARGIN - 190}" y="{HEIGHT - MARGIN - 44 + 16 * number}" fill="{colour}">{name}</text>',
        ]
    for value in (low, high):
        x, y = at(0, value).split(",")
        lines.append(f'<text x="{float(x) - 8:.0f}" y="{y}" text-anchor="end">{value:.2f}</text>')
    lines.append(f'<text x="{WIDTH / 2:.0f}" y="{HEIGHT - 16}" text-anchor="middle">GRPO step, 1 to {steps}</text>')
    lines.append(
        f'<text x="{MARGIN}" y="24">mean reward, {len(runs) // len(RUNS)} seeds: mean, least and largest</text>'
    )
    return "\n".join([*lines, "</svg>", ""])


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and the four before it."""
    return [mean(values[max(0, index + 1 - SMOOTHED) : index + 1]) for index in range(len(values))]


if __name__ == "__main__":
    main()
