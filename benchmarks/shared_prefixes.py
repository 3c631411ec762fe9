"""Measures what sharing prefixes saves: groups of completions of one prompt, and an agent's turns, on one GPU.

    PYTHONPATH=src python benchmarks/shared_prefixes.py --json benchmarks/results/shared_prefixes_h200.json
    PYTHONPATH=src python benchmarks/shared_prefixes.py --shapes smoke --cases smoke "smoke, unshared"

Every case runs the same sequences without and with sharing: a policy-gradient update that learns from the
completions alone, and log-probs of all tokens. Tokens per second are those of the whole sequences in both. `flops` is
the FLOPs without sharing over those with it, as workloads.py counts them. In an update the head computes the learned
tokens in both. "unshared" begin all differently: there "auto" only looks for what they share.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from workloads import MIXES, SHAPES, Clock, Results, forward_flops, free_memory, peak_gib, profile, result_or_failure

from postlude import AdamW, Batch, Engine, ranks
from postlude.data.prefix_tree import PrefixOrder
from postlude.objectives import PolicyGradient


@dataclass(frozen=True)
class Workload:
    """Prompts with completions each; or with `turns`, conversations whose history was rewritten twice."""

    prompts: int
    prompt: int
    completions: int
    completion: int
    turns: int = 1

    def sequences(self, vocabulary: int) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the sequences, and masks that are 1 at the last turn's completion."""
        generator = torch.Generator().manual_seed(0)

        def tokens(count: int) -> Tensor:
            return torch.randint(vocabulary, (count,), generator=generator)

        sequences, learned = [], []
        for _ in range(self.prompts):
            prompt = tokens(self.prompt)
            for _ in range(self.completions):
                history, turns = prompt, []
                for turn in range(self.turns):
                    if turn and turn % max(1, self.turns // 3) == 0:
                        turns.append(history)
                        history = torch.cat((prompt, tokens(self.completion)))  # the history, summarised
                    history = torch.cat((history, tokens(self.completion)))
                for sequence in (*turns, history):
                    sequences.append(sequence)
                    learned.append((torch.arange(len(sequence)) >= len(prompt)).float())
        return sequences, learned


@dataclass(frozen=True)
class Unshared:
    """Sequences that begin differently, with the lengths of a mix."""

    mix: str

    def sequences(self, vocabulary: int) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the sequences, and masks that are 1 everywhere."""
        generator = torch.Generator().manual_seed(0)
        sequences = [torch.randint(vocabulary, (length,), generator=generator) for length in MIXES[self.mix]()]
        return sequences, [torch.ones(len(sequence)) for sequence in sequences]


WORKLOADS = {
    "8192 + 16 × 1024": Workload(2, 8192, 16, 1024),
    "2048 + 8 × 512": Workload(8, 2048, 8, 512),
    "256 + 8 × 2048": Workload(4, 256, 8, 2048),
    "agent, 10 turns, 8 samples": Workload(1, 4096, 8, 512, turns=10),
    "unshared": Unshared("log-normal"),
    "smoke": Workload(2, 100, 3, 10),
    "smoke, unshared": Unshared("smoke"),
}


def batch(workload: Workload | Unshared, vocabulary: int) -> Batch:
    sequences, learned = workload.sequences(vocabulary)
    advantages = torch.randn(len(sequences), generator=torch.Generator().manual_seed(1)).tolist()
    columns = {"response_mask": learned, "advantages": advantages, "old_logprobs": [-10.0] * len(sequences)}
    return Batch(sequences, columns)


def saved_flops(config: PretrainedConfig, rows: Batch, case: str) -> float:
    """Returns the FLOPs without sharing over those where every shared token is computed once."""
    order = PrefixOrder.of(rows.sequences)
    alone, computed = sum(rows.lengths), order.computed_tokens(rows.lengths)
    head = 2.0 * config.hidden_size * config.vocab_size
    learned = sum(float(mask.sum()) for mask in rows.columns["response_mask"])
    projected = (learned, learned) if case == "update" else (alone, computed)
    layers = forward_flops(config, rows.lengths) - head * alone
    saved = forward_flops(config, order.common) - head * sum(order.common)
    return (layers + head * projected[0]) / (layers - saved + head * projected[1])


def measure(
    shape: str, workloads: Sequence[str], budget: int, device: str, results: Results, *, profiled: bool = False
) -> None:
    """Times every workload with one engine after another, since two do not fit in memory."""
    config = SHAPES[shape]()
    cases: dict[tuple[str, str], dict[str, Any]] = {}
    for share in ("off", "auto"):
        free_memory(device)
        engine = Engine(config, device=device, budget=budget, optimizer=AdamW(lr=1e-6), share_prefixes=share)
        for workload in workloads:
            rows = batch(WORKLOADS[workload], config.vocab_size)
            for name, step in steps(engine, rows).items():
                free_memory(device)
                case = cases.setdefault((workload, name), {"shape": shape, "workload": workload, "case": name})
                measured = result_or_failure(lambda step=step, rows=rows: timed(step, rows, device))
                case |= {f"{key}_{share}": value for key, value in measured.items()}
                if profiled and share == "auto" and "failed" not in measured:
                    print(f"{shape}, {workload}, {name}")
                    case["profile"] = profile(step, device)
            del step
        del engine
    for (workload, name), case in cases.items():
        rows = batch(WORKLOADS[workload], config.vocab_size)
        case["tokens"], case["computed"] = (
            sum(rows.lengths),
            PrefixOrder.of(rows.sequences).computed_tokens(rows.lengths),
        )
        if {"tokens_per_second_off", "tokens_per_second_auto"} <= case.keys():
            case["speedup"] = round(case["tokens_per_second_auto"] / case["tokens_per_second_off"], 2)
        case["flops"] = round(saved_flops(config, rows, name), 2)
        print({key: value for key, value in case.items() if key != "profile"}, flush=True)
        results.add(case)


def timed(step: Callable[[], Any], rows: Batch, device: str) -> dict[str, Any]:
    """Returns the speed of a step in tokens of whole sequences, and its memory."""
    clock = Clock(device, enough=5.0)
    median = clock(step)
    return {
        "tokens_per_second": round(sum(rows.lengths) / median),
        "seconds": [round(seconds, 4) for seconds in clock.seconds],
        "peak_gib": peak_gib(device),
    }


def steps(engine: Engine, rows: Batch) -> dict[str, Callable[[], Any]]:
    def update() -> None:
        engine.forward_backward(rows, PolicyGradient())
        engine.optimizer_step()

    return {"update": update, "logprobs": lambda: engine.logprobs(rows)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["0.6b", "8b"], choices=SHAPES)
    parser.add_argument(
        "--cases", nargs="+", default=[name for name in WORKLOADS if "smoke" not in name], choices=WORKLOADS
    )
    parser.add_argument("--budget", type=int, default=32768)
    parser.add_argument("--profile", action="store_true", help="print the kernels that take longest")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = Results(" ".join(["benchmarks/shared_prefixes.py", *sys.argv[1:]]), device, options.json)
    with ranks():
        for shape in options.shapes:
            measure(shape, options.cases, options.budget, device, results, profiled=options.profile)


if __name__ == "__main__":
    main()
