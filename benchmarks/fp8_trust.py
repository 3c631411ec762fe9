"""The effect of FP8 on a model: SmolLM2-135M-Instruct with keys and values, weights, or both in FP8, on any machine.

    PYTHONPATH=src python benchmarks/fp8_trust.py --json benchmarks/results/fp8_trust_cpu.json

The model samples completions at temperature 1 without FP8. Each variant then gives the distribution of every sampled
token, as the generator computes it. KL is KL(variant ‖ model), as of a sampler and a trainer, over the whole
vocabulary. The other numbers are of the sampled tokens: the metrics of a run (docs/metrics.md). A CPU computes what a
GPU does: rounding is the same, only sums differ in their last bits. bf16 without FP8 is beside them for comparison.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from postlude import LanguageModel, load_model, load_tokenizer
from postlude.generate.forward import Microbatches, all_logits_and_hidden
from postlude.generate.generator import Generator
from postlude.generate.row_cache import RowCache
from postlude.generate.sampling_params import SamplingParams
from postlude.model.fp8 import FP8Weights

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "A train goes 60 km in 45 minutes. How fast is it in km/h? Think step by step.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in two sentences why the sky is blue.",
    "Give three tips for learning a new language.",
    "What is 17 * 23? Show the steps.",
)
CASES = {"kv fp8": (True, False), "weights fp8": (False, True), "both fp8": (True, True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=96, help="tokens of a completion")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model, tokenizer = load_model("smollm2", dtype=torch.float32).eval(), load_tokenizer("smollm2")
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
        for text in QUESTIONS[: arguments.questions]
    ]
    sampled = Generator(model, tokenizer).generate(prompts, SamplingParams(max_new_tokens=arguments.length, seed=1))
    sequences = [[*prompt, *completion.tokens] for prompt, (completion,) in zip(prompts, sampled, strict=True)]
    starts = [len(prompt) for prompt in prompts]
    exact = logits_of(model, sequences, starts)
    chosen = torch.tensor([token for (completion,) in sampled for token in completion.tokens])
    rows = {}
    for name, (fp8_kv, fp8_weights) in CASES.items():
        rows[name] = compare(logits_of(model, sequences, starts, fp8_kv=fp8_kv, fp8_weights=fp8_weights), exact, chosen)
        print(f"{name:<14} {rows[name]}", flush=True)
    rows["bf16"] = compare(logits_of(model.bfloat16(), sequences, starts), exact, chosen)
    print(f"{'bf16':<14} {rows['bf16']}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"model": "SmolLM2-135M-Instruct", "tokens": len(chosen), "cases": rows}))


@torch.no_grad()
def logits_of(
    model: LanguageModel,
    sequences: list[list[int]],
    starts: list[int],
    *,
    fp8_kv: bool = False,
    fp8_weights: bool = False,
) -> Tensor:
    """The logits of every sampled token, [tokens, vocab] fp32, from prefills of whole sequences."""
    copies = FP8Weights(model) if fp8_weights else None
    if copies is not None:
        copies.write()
    logits, nothing = [], torch.empty(0, dtype=torch.int64)
    with nullcontext() if copies is None else copies.attached():
        for sequence, start in zip(sequences, starts, strict=True):
            cache = RowCache(torch.device("cpu"), fp8=fp8_kv)
            cache.resize(1, len(sequence))
            microbatch = Microbatches(cache, 1)(nothing[:, None], nothing, [sequence], [[0]])
            all_rows: Tensor = model(microbatch, output_processor=all_logits_and_hidden, decode_state=cache)[0]
            logits.append(all_rows[start - 1 : -1].float())
    return torch.cat(logits)


def compare(logits: Tensor, exact: Tensor, chosen: Tensor) -> dict[str, Any]:
    """The difference of a variant from the model at each sampled token."""
    logprobs, exact_logprobs = logits.log_softmax(-1), exact.log_softmax(-1)
    divergence = (logprobs.exp() * (logprobs - exact_logprobs)).sum(-1)
    gap = (exact_logprobs - logprobs).gather(-1, chosen[:, None])[:, 0]
    ratio = gap.exp()
    return {
        "kl_mean": round(divergence.mean().item(), 6),
        "kl_max": round(divergence.max().item(), 4),
        "top1_agreement": round((logprobs.argmax(-1) == exact_logprobs.argmax(-1)).float().mean().item(), 4),
        "logprob_diff_mean": round(gap.abs().mean().item(), 4),
        "logprob_diff_max": round(gap.abs().max().item(), 3),
        "ratio_tail": round(((ratio < 0.5) | (ratio > 2.0)).float().mean().item(), 5),
        "ratio_max": round(ratio.max().item(), 3),
    }


if __name__ == "__main__":
    main()
