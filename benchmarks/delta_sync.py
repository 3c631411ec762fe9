"""Measures `rollout.sync: delta` in a GRPO run: the share of weights that change in a step, bytes and seconds.

    PYTHONPATH=src python benchmarks/delta_sync.py --json benchmarks/results/delta_sync_cpu.json

It starts `postlude serve` with SmolLM2-135M on this machine, and `postlude grpo smollm2` with few short completions, at
each of `--lrs`. The trained weights are fp32; the server gets them in bf16.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

KEY = "POSTLUDE_API_KEY"  # the variable that `postlude serve` reads
NAMES = (
    "servers/changed",
    "servers/sync_bytes",
    "servers/delta_seconds",
    "servers/write_seconds",
    "servers/sync_seconds",
)
SMALL = (
    "--prompts_per_step=4",
    "--samples_per_prompt=4",
    "--sampling.max_new_tokens=32",
    "--warm_start.steps=0",
    "--optimizer.schedule.warmup=0",
)
QUIET = ("--save_every=0", "--export=false", "--evaluation.every=0", "--evaluation.at_start=false")


def measure(lr: float, arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Runs one training beside a server of its own."""
    serve = [sys.executable, "-m", "postlude", "serve", "smollm2", "--threads", "1", "--dtype", "bfloat16"]
    run = directory / f"lr-{lr:g}"
    os.environ[KEY] = secrets.token_hex()
    with subprocess.Popen([*serve, "--device", arguments.device], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = next(word for line in server.stdout for word in line.split() if word.startswith("http://"))
            words = [
                f"--rollout={url}",
                f"--rollout.api_key={KEY}",
                "--rollout.sync=delta",
                f"--optimizer.lr={lr}",
                f"--steps={arguments.steps}",
            ]
            words += [
                f"--run={run}",
                f"--device={arguments.device}",
                "--dtype=bfloat16",
                *SMALL,
                *QUIET,
                *arguments.also,
            ]
            subprocess.run([sys.executable, "-m", "postlude", "grpo", "smollm2", *words], check=True)
        finally:
            server.terminate()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    print(rows, flush=True)
    changes = [row for row in rows if NAMES[0] in row]
    result: dict[str, Any] = {"lr": lr, "first_bytes": rows[0].get("servers/sync_bytes"), "syncs": len(changes)}
    for name in NAMES:
        result[name] = [row[name] for row in changes]
        result[f"{name} median"] = statistics.median(result[name])
    return result


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lrs", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--also", nargs="*", default=[], help="more options of the run")
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as directory:
        runs = [measure(lr, arguments, Path(directory)) for lr in arguments.lrs]
    result = {"date": date.today().isoformat(), "device": arguments.device, "model": "SmolLM2-135M", "runs": runs}
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
