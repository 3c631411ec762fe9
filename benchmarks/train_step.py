"""Measures a training step on one GPU: real tokens per second, MFU and peak memory, compared with alternatives.

    PYTHONPATH=src python benchmarks/train_step.py --shape 0.6b --json benchmarks/results/train_step_h200.json
    PYTHONPATH=src python benchmarks/train_step.py --shape 8b --cases update trl --profile
    PYTHONPATH=src python benchmarks/train_step.py --shape 8b --cases update update-fp8
    PYTHONPATH=src python benchmarks/train_step.py --smoke          # tiny, on any machine

Every case trains once on the same sequences and steps its optimizer. workloads.py says how FLOPs are counted. If memory
runs out, that is the result; with padded rows, half as many at a time are tried then.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig
from workloads import (
    MIXES,
    OUT_OF_MEMORY,
    PEAK_FLOPS,
    SHAPES,
    Clock,
    Results,
    Sample,
    forward_flops,
    free_memory,
    peak_gib,
    profile,
    result_or_failure,
)

import peers
from postlude import AdamW, Batch, Engine, ranks
from postlude.lora import LoRA
from postlude.objectives import SFT, Objective, PolicyGradient

ROWS = 8
OWN_SCRIPT = "transformers, padded rows, full logits (own script)"


@dataclass(frozen=True)
class CaseInputs:
    """The arguments of every case."""

    config: PretrainedConfig
    sample: Sample
    device: str
    budget: int
    rows: int
    options: dict[str, Any]
    """Of the engine."""
    moments: str = "fp32"
    offload: bool = False


@dataclass(frozen=True)
class Case:
    """One line of the table. `make` returns the step to time; a `passes` of 1 is forward alone."""

    description: str
    make: Callable[[CaseInputs], Callable[[], Any]]
    passes: int = 3
    padded: bool = False
    """Whether it runs rows at a time, of which fewer take less memory."""
    alone: bool = False
    """Whether it changes transformers' classes, so that it needs a process of its own."""


def batch(sample: Sample) -> Batch:
    """All tokens are learned, as if completions were all there is."""
    columns = {
        "response_mask": [1.0] * len(sample.sequences),
        "advantages": sample.advantages,
        "old_logprobs": [sample.old_logprob] * len(sample.sequences),
    }
    return Batch(sample.sequences, columns)


def padded_batch(sample: Sample, rows: int, *, to_longest: bool = False) -> tuple[Batch, int]:
    """The same, each sequence padded to the longest of its rows, which stay together; and the tokens of the largest.

    With `to_longest`, to the longest of all.
    """
    sequences, masks, groups, max_tokens = [], [], [], 0
    for first in range(0, len(sample.sequences), rows):
        chunk = sample.sequences[first : first + rows]
        width = max(map(len, sample.sequences if to_longest else chunk))
        max_tokens = max(max_tokens, width * len(chunk))
        for sequence in chunk:
            sequences.append(torch.cat((sequence, sequence.new_zeros(width - len(sequence)))))
            masks.append((torch.arange(width) < len(sequence)).float())
            groups.append(first)
    old = [sample.old_logprob] * len(sequences)
    columns = {"response_mask": masks, "advantages": sample.advantages, "old_logprobs": old}
    return Batch(sequences, columns, groups), max_tokens


def engine(inputs: CaseInputs, budget: int) -> Engine:
    optimizer = AdamW(lr=1e-6, moments=inputs.moments, offload=inputs.offload)
    return Engine(inputs.config, device=inputs.device, budget=budget, optimizer=optimizer, **inputs.options)


def update(trained: Engine, rows: Batch, objective: Objective) -> Callable[[], None]:
    def step() -> None:
        trained.forward_backward(rows, objective)
        trained.optimizer_step()

    return step


def postlude(objective: Objective, **options: Any) -> Callable[[CaseInputs], Callable[[], Any]]:
    def make(inputs: CaseInputs) -> Callable[[], Any]:
        changed_inputs = replace(inputs, options=inputs.options | options)
        return update(engine(changed_inputs, inputs.budget), batch(inputs.sample), objective)

    return make


def postlude_padded(*, to_longest: bool) -> Callable[[CaseInputs], Callable[[], Any]]:
    def make(inputs: CaseInputs) -> Callable[[], Any]:
        rows, max_tokens = padded_batch(inputs.sample, inputs.rows, to_longest=to_longest)
        return update(engine(inputs, max_tokens), rows, PolicyGradient())

    return make


def postlude_logprobs(**options: Any) -> Callable[[CaseInputs], Callable[[], Any]]:
    def make(inputs: CaseInputs) -> Callable[[], Any]:
        scored = engine(replace(inputs, options=inputs.options | options), inputs.budget)
        return lambda: scored.logprobs(batch(inputs.sample), entropy=True)

    return make


def transformers_update(loss: Any, *, autocast: bool = False, liger: bool = False) -> Callable[[CaseInputs], Any]:
    def make(inputs: CaseInputs) -> Callable[[], Any]:
        if liger:
            peers.liger(inputs.config)
        dtype = torch.float32 if autocast or inputs.device == "cpu" else torch.bfloat16
        model = peers.build_model(inputs.config, inputs.device, dtype)
        rows = list(peers.padded(inputs.sample, inputs.rows, inputs.device))
        return peers.Update(model, rows, loss(inputs.sample), autocast=autocast and inputs.device == "cuda")

    return make


def transformers_logprobs(inputs: CaseInputs) -> Callable[[], Any]:
    model = peers.build_model(inputs.config, inputs.device, torch.float32 if inputs.device == "cpu" else torch.bfloat16)
    rows = list(peers.padded(inputs.sample, inputs.rows, inputs.device))
    return lambda: peers.logprobs_alone(model, rows)


def packed_flex(*, liger: bool) -> Callable[[CaseInputs], Callable[[], Any]]:
    def make(inputs: CaseInputs) -> Callable[[], Any]:
        if liger:
            peers.liger(inputs.config)
        dtype = torch.float32 if inputs.device == "cpu" else torch.bfloat16
        model = peers.build_model(inputs.config, inputs.device, dtype, "flex_attention")
        rows = peers.packed(inputs.sample, max(8192, *inputs.sample.lengths), inputs.device)
        return peers.Update(model, rows, peers.packed_sft(inputs.sample), autocast=False)

    return make


CASES = {
    "update": Case("Postlude, packed: policy gradient, entropy reported", postlude(PolicyGradient())),
    "update-fp8": Case("Postlude, packed: policy gradient, FP8 products", postlude(PolicyGradient(), fp8=True)),
    "sft": Case("Postlude, packed: SFT", postlude(SFT())),
    "logprobs": Case("Postlude, packed: log-probs and entropy, no gradient", postlude_logprobs(), passes=1),
    "logprobs-fp8": Case("Postlude, packed: log-probs, FP8 products", postlude_logprobs(fp8=True), passes=1),
    "padded": Case("Postlude, rows padded as for the own script below", postlude_padded(to_longest=False), padded=True),
    "padded-all": Case(
        "Postlude, all rows padded to the longest of all", postlude_padded(to_longest=True), padded=True
    ),
    "trl": Case(
        f"{OWN_SCRIPT}: GRPO, bf16 weights",
        transformers_update(peers.grpo),
        padded=True,
    ),
    "trl-autocast": Case(
        f"{OWN_SCRIPT}: GRPO, fp32 weights, bf16 autocast",
        transformers_update(peers.grpo, autocast=True),
        padded=True,
    ),
    "trl-logprobs": Case(
        f"{OWN_SCRIPT}: log-probs, no gradient",
        transformers_logprobs,
        1,
        padded=True,
    ),
    "liger": Case(
        "transformers + Liger, its GRPO loss, bf16 weights",
        transformers_update(peers.liger_grpo, liger=True),
        padded=True,
        alone=True,
    ),
    "liger-sft": Case(
        "transformers + Liger, SFT, bf16 weights", transformers_update(peers.sft, liger=True), padded=True, alone=True
    ),
    "flex-sft": Case(
        "transformers, packed with flex attention: SFT, bf16 weights", packed_flex(liger=False), alone=True
    ),
    "flex-liger-sft": Case(
        "transformers + Liger, packed with flex attention: SFT, bf16 weights", packed_flex(liger=True), alone=True
    ),
}


def run(case: Case, inputs: CaseInputs, clock: Clock, profiled: bool) -> dict[str, Any]:
    """Make it, time it, and let go of it."""
    lengths = inputs.sample.lengths
    try:
        step = case.make(inputs)
        seconds = clock(step)
        result = {
            "tokens_per_second": round(sum(lengths) / seconds),
            "mfu": round(case.passes * forward_flops(inputs.config, lengths) / seconds / PEAK_FLOPS, 4),
            "peak_gib": peak_gib(inputs.device),
            "seconds": [round(duration, 4) for duration in clock.seconds],
        }
        return result | (profile(step, inputs.device) if profiled else {})
    finally:
        step = None
        free_memory(inputs.device)


def with_fewer_rows(case: Case, inputs: CaseInputs, clock: Clock, profiled: bool) -> dict[str, Any]:
    """As `run`; where rows at a time take too much memory, with half as many, until it fits."""
    rows = inputs.rows
    while True:
        tried = replace(inputs, rows=rows)
        result = result_or_failure(lambda tried=tried: run(case, tried, clock, profiled))
        result["rows"] = rows
        if result.get("failed") != OUT_OF_MEMORY or rows == 1:
            return result if rows == inputs.rows else {**result, "out_of_memory_at_rows": inputs.rows}
        free_memory(inputs.device)
        rows //= 2


def measured(name: str, inputs: CaseInputs, clock: Clock, profiled: bool = False) -> dict[str, Any]:
    """Returns what a case takes in this process, or why it did not run."""
    case = CASES[name]
    free_memory(inputs.device)
    if case.padded:
        return with_fewer_rows(case, inputs, clock, profiled)
    return result_or_failure(lambda: run(case, inputs, clock, profiled))


def in_a_process(name: str, shape: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The case in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "found.json"
        words = [sys.executable, __file__, "--shape", shape, "--mix", arguments.mix, "--cases", name]
        words += ["--budget", str(arguments.budget), "--repeats", str(arguments.repeats), "--inside"]
        words += ["--json", str(path), "--device", arguments.device, "--rows", str(arguments.rows)]
        subprocess.run([*words, *(["--profile"] if arguments.profile else [])], check=False)
        if not path.exists():
            return {"failed": "its process ended without a result"}
        result: dict[str, Any] = json.loads(path.read_text())["cases"][0]
        return result


def result_line(name: str, result: dict[str, Any]) -> str:
    if "failed" in result:
        return f"  {name:<14} {result['failed']}"
    rows = f"  {result['rows']} rows" if "rows" in result else ""
    memory = "" if result["peak_gib"] is None else f"{result['peak_gib']:7.1f} GiB"
    return f"  {name:<14} {result['tokens_per_second']:>9,} tokens/s  MFU {result['mfu']:6.1%} {memory}{rows}"


def options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["0.6b"])
    parser.add_argument("--mix", choices=list(MIXES), default="log-normal", help="the sequences' lengths")
    parser.add_argument("--budget", type=int, default=16384, help="most tokens of one of Postlude's microbatches")
    parser.add_argument("--rows", type=int, default=ROWS, help="rows at a time where they are padded")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--recompute", choices=["none", "selective", "full"], default="none", help="Postlude's")
    parser.add_argument(
        "--weights", choices=["fp32", "split", "rounded"], default="fp32", help="how Postlude stores them"
    )
    parser.add_argument("--moments", choices=["fp32", "8bit"], default="fp32", help="of Postlude's AdamW")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train Postlude's adapters of this rank, alpha 32")
    parser.add_argument("--offload", action="store_true", help="keep the state of Postlude's AdamW in host memory")
    parser.add_argument("--repeats", type=int, default=3, help="the median counts")
    parser.add_argument("--profile", action="store_true", help="print the kernels that take longest")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smoke", action="store_true", help="tiny, on any machine")
    parser.add_argument("--json", type=Path, help="written after each case")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.smoke:
        arguments.shape, arguments.mix, arguments.budget, arguments.rows, arguments.repeats = (
            ["smoke"],
            "smoke",
            64,
            2,
            1,
        )
    return arguments


def main(words: Sequence[str] | None = None) -> list[dict[str, Any]]:
    arguments = options(words)
    results = Results(" ".join(sys.argv), arguments.device, arguments.json)
    with ranks(device=arguments.device):
        for shape in arguments.shape:
            compare(shape, arguments, results)
    return results.cases


def compare(shape: str, arguments: argparse.Namespace, results: Results) -> None:
    """All cases of one shape."""
    config = SHAPES[shape]()
    sample = Sample.of(MIXES[arguments.mix](), config.vocab_size)
    if not arguments.inside:
        print(f"{shape}, {arguments.mix}: {len(sample.lengths)} sequences, {sum(sample.lengths):,} tokens")
    chosen = {"recompute": arguments.recompute, "weights": arguments.weights}
    stepped = {"moments": arguments.moments, "offload": arguments.offload}
    budget = max(arguments.budget, *sample.lengths)
    adapted = {} if arguments.lora is None else {"lora": LoRA(rank=arguments.lora)}
    inputs = CaseInputs(config, sample, arguments.device, budget, arguments.rows, chosen | adapted, **stepped)
    clock = Clock(arguments.device, arguments.repeats)
    for name in arguments.cases:
        case = CASES[name]
        apart = case.alone and not arguments.inside
        result = in_a_process(name, shape, arguments) if apart else measured(name, inputs, clock, arguments.profile)
        labels = {"case": name, "description": case.description, "shape": shape, "mix": arguments.mix}
        results.add(labels | {"budget": budget, "lora": arguments.lora, **chosen, **stepped} | result)
        if not apart:
            print(result_line(name, result), flush=True)


if __name__ == "__main__":
    main()
