"""The cost of the batch-invariant mode on one GPU, and what it is for: tokens that depend on their batch without it.

    PYTHONPATH=src python benchmarks/batch_invariant.py --json benchmarks/results/batch_invariant_h200.json
    PYTHONPATH=src python benchmarks/batch_invariant.py --smoke          # tiny, on any machine

A model of a published shape with random weights, in bf16. Both ways sample the same completions (tokens/s, prompts
included), score them and train on them (`workloads.py`: MFU). "divergence" samples completions alone and among others,
and counts the tokens from the first that differs on, and log-probs that differ before it. It is repeated with weights
of other widths, relative to the shape's: the wider, the more some tokens stand out, and the more rounding adds up.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from train_step import batch, update
from transformers import PretrainedConfig
from workloads import MIXES, PEAK_FLOPS, SHAPES, Clock, Results, Sample, forward_flops, free_memory, peak_gib

from postlude import AdamW, Batch, Engine, ranks
from postlude.generate.distributed import SyncedGenerator
from postlude.generate.protocol import Completion
from postlude.generate.sampling_params import SamplingParams
from postlude.objectives import PolicyGradient

PROMPT = 64  # tokens


def options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6b")
    parser.add_argument("--mix", choices=list(MIXES), default="log-normal", help="the trained sequences' lengths")
    parser.add_argument("--completions", type=int, nargs="+", default=[1, 16, 128, 512], help="at once")
    parser.add_argument("--length", type=int, default=256, help="tokens of a completion")
    parser.add_argument("--others", type=int, default=200, help="completions beside the 8 that are compared")
    parser.add_argument("--widths", type=float, nargs="+", default=[1.0, 2.0], help="of weights; the first is timed")
    parser.add_argument("--budget", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=3, help="the median counts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smoke", action="store_true", help="tiny, on any machine")
    parser.add_argument("--json", type=Path, help="written after each case")
    arguments = parser.parse_args(words)
    if arguments.smoke:
        arguments.shape, arguments.mix, arguments.budget = "smoke", "smoke", 128
        arguments.completions, arguments.length, arguments.others, arguments.repeats = [2], 4, 3, 1
    return arguments


def main(words: Sequence[str] | None = None) -> list[dict[str, Any]]:
    arguments = options(words)
    results = Results(" ".join(sys.argv), arguments.device, arguments.json)
    with ranks(device=arguments.device):
        for batch_invariant in (False, True):
            for width in arguments.widths:
                measure(width, batch_invariant, arguments, results)
                free_memory(arguments.device)
    return results.cases


def measure(width: float, batch_invariant: bool, arguments: argparse.Namespace, results: Results) -> None:
    """All cases of one mode, or divergence alone for another than the first width."""
    device, clock = arguments.device, Clock(arguments.device, arguments.repeats)
    config, timed = SHAPES[arguments.shape](), width == arguments.widths[0]
    config.initializer_range *= width
    engine = engine_of(config, device, max(arguments.budget, *MIXES[arguments.mix]()), batch_invariant)

    def add(case: str, result: dict[str, Any]) -> None:
        labels = {"shape": arguments.shape, "case": case, "batch_invariant": batch_invariant, "width": width}
        results.add(labels | result)
        print(f"{'batch-invariant' if batch_invariant else 'ordinary':<16} {width:g} {case:<24} {result}", flush=True)

    max_completions = max(*arguments.completions, arguments.others + 8)
    generator = generator_of(engine, max_completions, arguments.length)
    prompts, samplings = requests(max_completions, config.vocab_size, arguments.length)
    for count in arguments.completions if timed else ():
        add(f"{count} completions", sampled(generator, config, count, arguments.length, clock))
    alone = [generator.generate([prompts[row]], [samplings[row]])[0][0] for row in range(8)]
    among = [
        group[0] for group in generator.generate(prompts[: arguments.others + 8], samplings[: arguments.others + 8])
    ]
    add(f"divergence among {arguments.others}", divergence(among[:8], alone))
    add("trainer and generator", mismatch(engine, prompts, samplings, among))
    del generator
    for name in ("logprobs", "update") if timed else ():
        add(name, trained(name, engine, config, Sample.of(MIXES[arguments.mix](), config.vocab_size), clock))


def engine_of(config: PretrainedConfig, device: str, budget: int, batch_invariant: bool) -> Engine:
    return Engine(
        config,
        device=device,
        budget=budget,
        compute_dtype=torch.bfloat16,
        optimizer=AdamW(lr=0.0),
        batch_invariant=batch_invariant,
    )


def generator_of(engine: Engine, max_completions: int, length: int) -> SyncedGenerator:
    """Returns a generator for at most so many completions of this length at once."""
    return SyncedGenerator(
        engine, None, max_batch_tokens=max_completions * (PROMPT + length + 64), max_sequences=max_completions
    )


def sampled(
    generator: SyncedGenerator, config: PretrainedConfig, count: int, length: int, clock: Clock
) -> dict[str, Any]:
    """Returns the time of so many completions of this length."""
    prompts = [[token % config.vocab_size for token in range(row, row + PROMPT)] for row in range(count)]
    sampling = SamplingParams(max_new_tokens=length, ignore_eos=True)
    free_memory(clock.device)
    seconds = clock(partial(generator.generate, prompts, sampling))
    return {"seconds": round(seconds, 4), "tokens_per_second": round(count * length / seconds)}


def requests(count: int, vocab_size: int, longest: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of uneven lengths, and completions of uneven lengths but the first eight, each with its own seed."""
    source = random.Random(0)
    prompts = [[source.randrange(vocab_size) for _ in range(source.randrange(1, PROMPT + 1))] for _ in range(count)]
    lengths = [longest if row < 8 else source.randrange(1, longest + 1) for row in range(count)]
    return prompts, [
        SamplingParams(max_new_tokens=length, seed=row, ignore_eos=True) for row, length in enumerate(lengths)
    ]


def divergence(actual: list[Completion], expected: list[Completion]) -> dict[str, Any]:
    """The share of tokens from the first other one on, and of other log-probs before it."""
    tokens = diverged = shared = other = completions = 0
    for completion, reference in zip(actual, expected, strict=True):
        pairs = list(zip(completion.tokens, reference.tokens, strict=True))
        first_difference = next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs))
        tokens, diverged, shared = (
            tokens + len(pairs),
            diverged + len(pairs) - first_difference,
            shared + first_difference,
        )
        completions += first_difference < len(pairs)
        other += sum(
            a != b
            for a, b in zip(completion.logprobs[:first_difference], reference.logprobs[:first_difference], strict=True)
        )
    return {
        "tokens": tokens,
        "diverged_completions": completions / len(actual),
        "diverged_tokens": diverged / tokens,
        "first_differences_per_token": completions / (shared + completions),
        "other_logprobs": other / max(shared, 1),
    }


def mismatch(
    engine: Engine, prompts: list[list[int]], samplings: list[SamplingParams], completions: list[Completion]
) -> dict[str, Any]:
    """Returns the difference between the trainer's and the generator's log-probs of the sampled tokens."""
    wholes = [[*prompts[row], *completion.tokens] for row, completion in enumerate(completions)]
    scored = engine.logprobs(Batch(wholes, {})).logprob
    gaps = torch.cat(
        [
            row[len(prompt) :].double() - torch.tensor(completion.logprobs, dtype=torch.float64)
            for row, prompt, completion in zip(scored, prompts, completions, strict=False)
        ]
    )
    return {
        "tokens": len(gaps),
        "other_logprobs": float((gaps != 0).double().mean()),
        "largest_gap": float(gaps.abs().max()),
        "rollout_kl": float((gaps.exp() - 1 - gaps).mean()),
    }


def trained(name: str, engine: Engine, config: PretrainedConfig, sample: Sample, clock: Clock) -> dict[str, Any]:
    """Returns the time of the sample's log-probs, or of an update with it."""
    passes, step = {
        "logprobs": (1, lambda: engine.logprobs(batch(sample), entropy=True)),
        "update": (3, update(engine, batch(sample), PolicyGradient())),
    }[name]
    free_memory(clock.device)
    seconds = clock(step)
    return {
        "seconds": round(seconds, 4),
        "tokens_per_second": round(sum(sample.lengths) / seconds),
        "mfu": round(passes * forward_flops(config, sample.lengths) / seconds / PEAK_FLOPS, 4),
        "peak_gib": peak_gib(clock.device),
    }


if __name__ == "__main__":
    main()
