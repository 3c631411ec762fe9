"""Measures the gain of a trainer that does not wait for the longest completion, by max_staleness.

    PYTHONPATH=src python benchmarks/asynchrony.py --json benchmarks/results/asynchrony_cpu.json
    PYTHONPATH=src python benchmarks/asynchrony.py --device cuda --shape 0.6b --prompts 32 --tokens 512 --median 0 \
        --json benchmarks/results/asynchrony_h200.json
    PYTHONPATH=src python benchmarks/asynchrony.py --smoke          # tiny, on any machine

GRPO on one rank with one generator in another process, on the same device: random weights of a published model's
`--shape`, or the built-in tiny one. After its tokens are sampled a completion waits as for a tool:
a time from a log-normal distribution of median `--median` seconds and shape `--tail`, the same in every case.
A case runs several steps with one `max_staleness`. "Idle" is the share of time in which the trainer waited for
completions. The first steps, in which processes warm up, are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM
from workloads import SHAPES, Results

from postlude.cli import main as postlude
from postlude.hf.load import byte_tokenizer
from postlude.recipes.report.metrics import TIME
from postlude.recipes.run.files import read_metrics
from postlude.rollout.episode import AssistantTurn

UNCOUNTED = 3  # steps at the beginning
PHASES = {"rollout": "rollout", "reward": "reward", "weights": "weight_sync", "train": "train"}  # of the results, a run


class SlowEpisode:
    """An episode of one turn with a slow reward function."""

    def __init__(self, example: Mapping[str, Any], median: float, tail: float) -> None:
        self.example, self.median, self.tail = example, median, tail

    async def step(self, turn: AssistantTurn) -> float:
        noise = random.Random(str((self.example["prompt"], list(turn.tokens))))
        await asyncio.sleep(self.median * noise.lognormvariate(0.0, self.tail))
        return len(set(turn.tokens)) / max(1, len(turn.tokens))


def config(arguments: argparse.Namespace, directory: Path, staleness: int) -> dict[str, Any]:
    """A run with one `max_staleness`."""
    rows = directory / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"Say {number}."}) for number in range(4096)))
    waits = {"median": arguments.median, "tail": arguments.tail}
    return {
        "model": model_of(arguments, directory),
        "run": str(directory / f"run-{staleness}"),
        "budget": arguments.budget,
        "environment": {
            "kind": "episodes",
            "path": str(rows),
            "episode": f"{Path(__file__).resolve()}:SlowEpisode",
            "settings": waits,
            "max_turns": 1,
            "timeout": 600.0,
        },
        "rollout": {"kind": "generators", "device": arguments.device},
        "asynchrony": {"max_staleness": staleness},
        "steps": arguments.steps + UNCOUNTED,
        "prompts_per_step": arguments.prompts,
        "samples_per_prompt": 8,
        "sampling": {"max_new_tokens": arguments.tokens},
        "evaluation": {"every": 0},
        "optimizer": {"lr": 1e-6},
        "save_every": 0,
        "export": False,
    }


def model_of(arguments: argparse.Namespace, directory: Path) -> str:
    """The model's name, or where one of its shape was written."""
    if arguments.shape is None:
        return "tiny-dense"
    path = directory / arguments.shape
    if not path.exists():
        torch.manual_seed(0)
        with torch.device(arguments.device):
            model = AutoModelForCausalLM.from_config(SHAPES[arguments.shape](), dtype=torch.bfloat16)
        model.save_pretrained(path)
        byte_tokenizer().save_pretrained(path)
    return str(path)


def case(arguments: argparse.Namespace, directory: Path, staleness: int) -> dict[str, Any]:
    """Run it, and read what its metrics say."""
    file = directory / f"{staleness}.yaml"
    file.write_text(yaml.safe_dump(config(arguments, directory, staleness)))
    if postlude(["grpo", str(file), "--device", arguments.device]):
        raise SystemExit(f"the run with max_staleness {staleness} failed")
    rows = read_metrics(directory / f"run-{staleness}")[UNCOUNTED:]
    phases = {name: mean(row.get(f"{TIME}{phase}", 0.0) for row in rows) for name, phase in PHASES.items()}
    step = mean(sum(value for name, value in row.items() if name.startswith(TIME)) for row in rows)
    waited = phases["rollout"] + phases["reward"]
    return {
        "max_staleness": staleness,
        "steps": len(rows),
        "seconds_a_step": round(step, 4),
        "completions_per_second": round(arguments.prompts * 8 / step, 2),
        "idle": round(waited / step, 4),
        "phases": {name: round(seconds, 4) for name, seconds in phases.items()},
        "staleness_mean": round(mean(row.get("staleness_mean", 0.0) for row in rows), 3),
        "staleness_max": max(row.get("staleness_max", 0.0) for row in rows),
        "settings": {name: getattr(arguments, name) for name in ("shape", "prompts", "tokens", "median", "tail")},
    }


def options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), help="of the model (default: the built-in tiny-dense)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=12, help="that are counted")
    parser.add_argument("--prompts", type=int, default=16, help="a step, with 8 completions each")
    parser.add_argument("--tokens", type=int, default=16, help="of a completion, at most")
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--median", type=float, default=0.4, help="seconds that a completion takes besides its tokens")
    parser.add_argument("--tail", type=float, default=0.8, help="the shape of these: 0 has none")
    parser.add_argument("--json", type=Path, help="written after each case")
    parser.add_argument("--smoke", action="store_true", help="two steps of almost nothing")
    arguments = parser.parse_args(words)
    if arguments.smoke:
        arguments.staleness, arguments.steps, arguments.prompts, arguments.tokens, arguments.median = (
            [0, 1],
            2,
            2,
            2,
            0.01,
        )
    return arguments


def main(words: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measure each staleness; returns the cases."""
    arguments = options(words)
    results = Results(" ".join(sys.argv), arguments.device, arguments.json)
    with tempfile.TemporaryDirectory() as directory:
        for staleness in arguments.staleness:
            result = case(arguments, Path(directory), staleness)
            first = (results.cases or [result])[0]
            result["gain"] = round(first["seconds_a_step"] / result["seconds_a_step"], 3)
            results.add(result)
            print(json.dumps(result), flush=True)
    return results.cases


if __name__ == "__main__":
    main()
