"""Tokens per second of the generator on a GPU, for `generate.py --device cuda`: many sampled completions, in bf16.

Weights are random, and every completion has the requested length. In the uneven case lengths are distributed as in
`generate.py`, half of them shorter than a quarter of the longest, and no request waits for a free row.
The time of every case includes prompts; completions of one token show their cost.
transformers samples the same number of tokens with a static cache and a compiled step, from prompts of equal
length. In the uneven case each of its rows ends at its own length, and all run until the last has ended.
With `--fp8 kv weights both` it also samples with keys and values, weights, or both in FP8.
With `--lora 32` the generator also samples with an adapter of rank 32 on all linear layers, which is not merged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from workloads import SHAPES, Clock, Results, attempt, forget, peak_gib, profile

import peers
from postlude import LanguageModel, load_model
from postlude.generate.generator import Generator
from postlude.generate.sampling_params import SamplingParams
from postlude.hf.families import FAMILIES
from postlude.hf.lora_targets import adapter_configs
from postlude.lora import LoRA

PROMPT = 64  # tokens
Case = tuple[str, list[list[int]], list[int]]
"""A name, prompts, and the length of each completion."""


def main(arguments: argparse.Namespace) -> None:
    config, device = SHAPES[arguments.shape](), arguments.device
    generator = torch.Generator().manual_seed(0)

    def prompts(count: int) -> list[list[int]]:
        drawn: list[list[int]] = torch.randint(config.vocab_size, (count, PROMPT), generator=generator).tolist()
        return drawn

    cases: list[Case] = [
        (f"{count} completions", prompts(count), [arguments.length] * count) for count in arguments.completions
    ]
    most = max(arguments.completions)
    shares = torch.rand(most, generator=generator).square()
    cases.append((f"{most} uneven completions", prompts(most), (4 + shares * (arguments.length - 4)).long().tolist()))
    cases.append((f"{most} first tokens", prompts(most), [1] * most))
    results = Results(" ".join(sys.argv), device, arguments.json)
    clock = Clock(device, repeats=arguments.repeat)
    makers = dict(MAKERS)
    if arguments.lora:
        makers = {
            "postlude": postlude,
            f"postlude, rank {arguments.lora}": partial(postlude, rank=arguments.lora),
        } | makers
    for name in arguments.fp8:
        makers[f"postlude, fp8 {name}"] = partial(postlude, **FP8[name])
    for name, make in makers.items():
        if name.partition(",")[0] not in arguments.cases:
            continue
        run = make(config, device, most * (PROMPT + arguments.length + 64), most)
        for case, asked, lengths in cases:
            found = attempt(lambda asked=asked, lengths=lengths, run=run: timed(run, asked, lengths, clock, device))
            results.add({"shape": arguments.shape, "engine": name, "case": case, **found})
            print(f"{name:<28} {case:<22} {found}", flush=True)
        if arguments.profile and name.startswith("postlude"):
            profile_step(run, cases[0], device)
        del run
        forget(device)


def timed(
    run: Callable[..., None], asked: list[list[int]], lengths: list[int], clock: Clock, device: str
) -> dict[str, Any]:
    forget(device)
    seconds = clock(lambda: run(asked, lengths))
    tokens = sum(lengths)
    return {"tokens": tokens, "seconds": round(seconds, 3), "tokens_per_second": round(tokens / seconds)} | {
        "peak_gib": peak_gib(device)
    }


def profile_step(run: Callable[..., None], case: Case, device: str) -> None:
    """What a few steps of the first case are made of."""
    _, asked, _ = case
    profile(lambda: run(asked, [9] * len(asked)), device)


def postlude(config: Any, device: str, budget: int, most: int, rank: int = 0, **fp8: str) -> Callable[..., None]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = load_model(config, dtype=dtype, device=device)
    generator = Generator(model, max_batch_tokens=budget, max_sequences=most, **fp8)
    adapter = load_adapter(generator, rank) if rank else None

    def run(asked: list[list[int]], lengths: list[int]) -> None:
        found = generator.generate(
            asked,
            [SamplingParams(max_new_tokens=length, seed=place) for place, length in enumerate(lengths)],
            adapter=adapter,
        )
        assert [len(one.tokens) for (one,) in found] == lengths

    return run


def load_adapter(generator: Generator, rank: int) -> str:
    """Gives a generator an adapter of random numbers on all linear layers. Returns its name."""
    config = generator.model.config
    configs = adapter_configs(LoRA(rank=rank), config, FAMILIES[config.family] if config.family else None)
    with torch.device("meta"):
        shapes = LanguageModel(config, adapters=configs).state_dict()

    def drawn(name: str) -> Tensor:
        return torch.randn(shapes[name].shape, device=generator.model.embedding.weight.device) * 0.01

    pairs = {layer: (drawn(f"{layer}.adapter.a"), drawn(f"{layer}.adapter.b")) for layer in configs}
    generator.load_adapter("random", configs, pairs)
    return "random"


class AtLengths(StoppingCriteria):
    """Each row ends at its own length."""

    def __init__(self, stops: Tensor) -> None:
        self.stops = stops

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids.shape[1] >= self.stops


def transformers(config: Any, device: str, budget: int, most: int) -> Callable[..., None]:
    model: PreTrainedModel = peers.made(config, device, torch.bfloat16 if device == "cuda" else torch.float32).eval()
    model.generation_config.eos_token_id = None

    @torch.no_grad()
    def run(asked: list[list[int]], lengths: list[int]) -> None:
        stops = torch.tensor(lengths, device=device) + PROMPT
        model.generate(
            torch.tensor(asked, device=device),
            attention_mask=torch.ones(len(asked), PROMPT, dtype=torch.int64, device=device),
            do_sample=True,
            top_k=0,
            max_new_tokens=max(lengths),
            pad_token_id=0,
            cache_implementation="static",
            stopping_criteria=StoppingCriteriaList([AtLengths(stops)]),
        )

    return run


FP8: dict[str, dict[str, str]] = {"kv": {"kv_cache_dtype": "fp8"}, "weights": {"quantization": "fp8"}}
FP8["both"] = FP8["kv"] | FP8["weights"]
MAKERS = {"postlude": postlude, "transformers": transformers}
