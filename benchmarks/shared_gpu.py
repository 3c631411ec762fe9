"""Times GRPO with vLLM on the trainer's GPU beside the native generator, step by step and phase by phase.

    PYTHONPATH=src python benchmarks/shared_gpu.py --vllm PYTHON --json benchmarks/results/shared_gpu_h200.json
    PYTHONPATH=src python benchmarks/shared_gpu.py --smoke          # the native generator alone, tiny, on the CPU
    PYTHONPATH=src python benchmarks/shared_gpu.py --smoke --steps 8 --tokens 64 --vllm PYTHON    # and vLLM's CPU build

Both runs have the same model of random weights, tasks, seeds and learning rate; on a GPU `rollout.share_gpu` is true.
The reward is the share of even characters, so that it can be learned from random weights. PYTHON is an interpreter that
has vLLM. `--model` takes a model of yours instead.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from tempfile import mkdtemp
from typing import Any

from postlude.recipes.report.metrics import TIME

JUDGE = """
def judge(prompt, completion, example):
    return sum(ord(character) % 2 == 0 for character in completion) / max(1, len(completion))
"""
SHAPES = {
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "moe": {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
}
MOE = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True}
SHOWN = ("reward_mean", "rollout_kl", "sync/logprob_diff", "moe/routing_changed", "entropy", "loss")


def write_model(directory: Path, shape: str) -> Path:
    """Writes a Qwen3 model of random weights, with the built-in tokenizer of bytes."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    from postlude import export_hf, load_model, load_tokenizer

    tokens = {"vocab_size": 264, "bos_token_id": None, "eos_token_id": 257, "pad_token_id": 256}
    sizes = {**SHAPES[shape], **tokens, "max_position_embeddings": 4096, "tie_word_embeddings": False}
    config = Qwen3MoeConfig(**sizes, **MOE) if shape == "moe" else Qwen3Config(**sizes)
    export_hf(load_model(config, seed=0), directory)
    load_tokenizer("tiny-dense").save_pretrained(directory)
    return directory


def run(name: str, work: Path, arguments: argparse.Namespace, *options: str) -> list[dict[str, Any]]:
    """Runs GRPO in a process of its own. Returns its metrics of each step."""
    directory = work / name
    command = [
        sys.executable,
        "-m",
        "postlude",
        "grpo",
        f"--model={arguments.model or work / 'model'}",
        f"--run={directory}",
        f"--device={arguments.device}",
        "--environment.kind=dataset",
        f"--environment.path={work}/rows.jsonl",
        f"--environment.reward={work}/judge.py:judge",
        "--environment.workers=0",
        "--warm_start.steps=0",
        "--evaluation.every=0",
        "--save_every=0",
        "--export=false",
        "--loggers=[]",
        f"--steps={arguments.steps}",
        f"--prompts_per_step={arguments.prompts}",
        f"--samples_per_prompt={arguments.samples}",
        f"--sampling.max_new_tokens={arguments.tokens}",
        f"--budget={arguments.budget}",
        f"--optimizer.lr={arguments.lr}",
        f"--rollout.share_gpu={'false' if arguments.device == 'cpu' else 'true'}",
        f"--seed={arguments.seed}",
        *options,
    ]
    start = time.perf_counter()
    done = subprocess.run(command, timeout=arguments.limit, check=False)
    print(f"{name}: code {done.returncode} after {time.perf_counter() - start:.1f} s", flush=True)
    metrics = directory / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    for row in rows:
        times = {key: round(value, 3) for key, value in row.items() if key.startswith(("time/", "servers/"))}
        print(name, row.get("step"), {key: row[key] for key in SHOWN if key in row}, times, flush=True)
    return rows


def phase_table(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Returns the mean seconds of each phase of a step, a run in each column, as a table in Markdown.

    The first step, which also compiles and starts, is left out if there are others.
    """
    steps = {name: rows[1:] or rows for name, rows in runs.items() if rows}
    phases = dict.fromkeys(key for rows in steps.values() for row in rows for key in row if key.startswith(TIME))
    means = {
        name: {phase: mean(row.get(phase, 0.0) for row in rows) for phase in phases} for name, rows in steps.items()
    }
    lines = [["seconds of a step", *means], ["---"] * (1 + len(means))]
    lines += [[phase.removeprefix(TIME), *(f"{means[name][phase]:.3f}" for name in means)] for phase in phases]
    lines += [["all", *(f"{sum(seconds.values()):.3f}" for seconds in means.values())]]
    lines += [["reward, last step", *(f"{rows[-1].get('reward_mean', float('nan')):.3f}" for rows in steps.values())]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Runs both, and writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", help="an interpreter that has vLLM; without it only the native generator runs")
    parser.add_argument("--vllm-arguments", default="[]", help="more arguments of vLLM, as YAML")
    parser.add_argument("--vllm-env", default="{}", help="variables of vLLM's environment, as YAML")
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--model", help="a model's directory, instead of random weights of the shape")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--samples", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--budget", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", default="1e-5")
    parser.add_argument("--limit", type=float, default=500.0, help="seconds of a run")
    parser.add_argument("--only", choices=("vllm", "native", "none"), help="one of them, or only write the model")
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="small defaults, on the CPU")
    arguments = parser.parse_args()
    sizes = {"steps": 6, "prompts": 16, "samples": 8, "tokens": 256, "budget": 16384}
    arguments.device = "cuda"
    if arguments.smoke:
        sizes = {"steps": 2, "prompts": 2, "samples": 2, "tokens": 4, "budget": 256}
        arguments.device, arguments.shape = "cpu", "tiny"
    for name, value in sizes.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    work = arguments.directory or Path(mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    rows = [
        {"prompt": f"{first} + {second} = ", "answer": str(first + second)}
        for first in range(32)
        for second in range(32)
    ]
    (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (work / "judge.py").write_text(JUDGE)
    if not arguments.model and not (work / "model" / "config.json").exists():
        write_model(work / "model", arguments.shape)
    found: dict[str, Any] = {}
    if arguments.vllm and arguments.only in (None, "vllm"):
        options = (
            "--rollout.kind=vllm",
            f"--rollout.python={arguments.vllm}",
            f"--rollout.arguments={arguments.vllm_arguments}",
            f"--rollout.env={arguments.vllm_env}",
            *(("--rollout.gpus=0",) if arguments.device == "cpu" else ()),
        )
        found["vllm"] = run("vllm", work, arguments, *options)
    if arguments.only in (None, "native"):
        found["native"] = run("native", work, arguments, "--rollout.kind=native")
    print(phase_table(found), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
