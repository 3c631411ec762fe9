"""Trains SmolLM2 with GRPO twice, all weights and LoRA, and compares accuracy, time and memory.

    PYTHONPATH=src python benchmarks/smollm2_lora.py --json benchmarks/results/smollm2_lora_h200.json
    PYTHONPATH=src python benchmarks/smollm2_lora.py --draw RESULT.json docs/images/smollm2_lora.svg

Both are `postlude grpo smollm2`; with LoRA the adapters are also what its three supervised steps train.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

RECIPE = "smollm2"
TEN_TIMES = ["--optimizer.lr", "1.5e-4", "--warm_start.optimizer.lr", "5e-4"]
RUNS = {
    "all weights": [],
    "LoRA, rank 32": ["--lora.rank", "32", *TEN_TIMES],
    "LoRA, rank 1": ["--lora.rank", "1", "--lora.alpha", "32", *TEN_TIMES],
}
PARTS = ("weight_sync", "rollout", "reward", "logprobs", "train")  # of the time of a step
COLOURS = ("#b8bcc4", "#2f6fde", "#d9822b")
WIDTH, HEIGHT, MARGIN = 640, 300, 48


def train(name: str, words: Sequence[str], arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Runs one training, and returns what it measured."""
    run = directory / name.replace(" ", "-").replace(",", "")
    command = [sys.executable, "-m", "postlude", "grpo", RECIPE, "--run", str(run), "--device", arguments.device]
    command += [*words, *arguments.also]
    began = time.perf_counter()
    code = subprocess.run(command, check=False).returncode
    seconds = time.perf_counter() - began
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["phase"] == "grpo"]
    later = steps[len(steps) // 4 :] or steps  # the first load kernels

    def mean(key: str) -> float:
        values = [row[key] for row in later if key in row]
        return round(sum(values) / max(1, len(values)), 3)

    return {
        "name": name,
        "command": " ".join(["postlude", "grpo", RECIPE, "--device", arguments.device, *words]),
        "exit_code": code,
        "held_out": [
            {"step": row["step"], "reward_mean": row["eval/reward_mean"], "accuracy": row["eval/pass@1"]}
            for row in rows
            if "eval/pass@1" in row
        ],
        "reward_mean": [round(row["reward_mean"], 4) for row in steps],
        "seconds_a_step": round(sum(mean(f"time/{part}") for part in PARTS), 3),
        "seconds_of_rollout": mean("time/rollout"),
        "seconds_of_training": mean("time/train"),
        "gpu_memory_gib": max((row.get("gpu_memory_gib", 0.0) for row in steps), default=0.0),
        "sync_gap": mean("sync/logprob_diff"),
        "seconds_of_the_run": round(seconds),
    }


def drawn(result: Mapping[str, Any]) -> str:
    """An SVG of held-out accuracy over steps."""
    runs = result["runs"]
    last = max(point["step"] for run in runs for point in run["held_out"])

    def at(step: float, accuracy: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * step / last
        return f"{x:.1f},{HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * accuracy:.1f}"

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{MARGIN}" y="20">Held-out accuracy of SmolLM2-135M over GRPO steps, {result["device"]}</text>',
    ]
    for tenth in range(0, 11, 2):
        (x1, y1), (x2, y2) = at(0, tenth / 10).split(","), at(last, tenth / 10).split(",")
        lines.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#e4e6ea"/>')
        lines.append(f'<text x="{MARGIN - 8}" y="{float(y1) + 4:.1f}" text-anchor="end">{tenth * 10} %</text>')
    for step in sorted({point["step"] for run in runs for point in run["held_out"]}):
        x = at(step, 0).split(",")[0]
        lines.append(f'<text x="{x}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{step}</text>')
    for index, (run, colour) in enumerate(zip(runs, COLOURS, strict=False)):
        points = " ".join(at(point["step"], point["accuracy"]) for point in run["held_out"])
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        lines.append(f'<text x="{MARGIN + 12 + 150 * index}" y="{MARGIN}" fill="{colour}">{run["name"]}</text>')
    return "\n".join([*lines, "</svg>", ""])


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--json", type=Path, help="written after each run")
    parser.add_argument("--keep", type=Path, help="directory of the runs; by default one that is removed")
    parser.add_argument("--draw", nargs=2, type=Path, metavar=("JSON", "SVG"), help="draw a result and train nothing")
    parser.add_argument("also", nargs="*", help="after --: more options of each run")
    arguments = parser.parse_args(words)
    if arguments.draw:
        source, target = arguments.draw
        target.write_text(drawn(json.loads(source.read_text())))
        return 0
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    result: dict[str, Any] = {"device": device, "torch": str(torch.__version__), "date": str(date.today()), "runs": []}
    with tempfile.TemporaryDirectory() as temporary:
        for name in arguments.runs:
            result["runs"].append(train(name, RUNS[name], arguments, arguments.keep or Path(temporary)))
            print(json.dumps(result["runs"][-1]), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return max(run["exit_code"] for run in result["runs"])


if __name__ == "__main__":
    sys.exit(main())
