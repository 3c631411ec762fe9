"""Tokens per second of the generator on a GPU, for `generate.py --device cuda`: many sampled completions, in bf16.

Weights are random, and every completion has the requested length; no request waits for a free row. See
`decode_workloads.py` for the cases. `tokens_per_second` includes prompts. `decoded_per_second` and the share of the
roofline leave out the time of the first tokens, which is measured in a call of its own.
transformers samples the same number of tokens with a static cache and a compiled step, from prompts of equal
length. In the uneven case each of its rows ends at its own length, and all run until the last has ended.
With `--fp8 kv weights both` it also samples with keys and values, weights, or both in FP8.
With `--lora 32` the generator also samples with an adapter of rank 32 on all linear layers, which is not merged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from decode_workloads import Workload, workloads
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from workloads import SHAPES, Clock, Results, free_memory, peak_gib, profile, result_or_failure

import peers
from postlude import LanguageModel, load_model
from postlude.generate.generator import Generator
from postlude.generate.sampling_params import SamplingParams
from postlude.hf.families import FAMILIES
from postlude.hf.linear_layers import adapter_configs
from postlude.lora import LoRA

Run = Callable[[Workload], None]


def main(arguments: argparse.Namespace) -> None:
    results = Results(" ".join(sys.argv), arguments.device, arguments.json)
    for shape in arguments.shape:
        measure(shape, arguments, results)


def measure(shape: str, arguments: argparse.Namespace, results: Results) -> None:
    """Adds the results of all engines for one shape."""
    config, device = SHAPES[shape](), arguments.device
    cases = list(
        workloads(
            arguments.workloads, config.vocab_size, arguments.completions, arguments.length,
            prompt_length=arguments.prompt,
        )
    )  # fmt: skip
    budget, max_rows = max(case.cache_tokens for case in cases), max(case.rows for case in cases)
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
        run = make(config, device, budget, max_rows)
        for case in cases:
            result = result_or_failure(lambda case=case, run=run: timed(run, case, config, clock, device))
            results.add({"shape": shape, "engine": name, "case": case.name, **result})
            print(f"{shape:<16} {name:<28} {case.name:<46} {result}", flush=True)
        if arguments.profile and name.startswith("postlude"):
            profile_step(run, cases[0], device)
        del run
        free_memory(device)


def timed(run: Run, case: Workload, config: Any, clock: Clock, device: str) -> dict[str, Any]:
    """Times the workload, its first call, and its first tokens alone, which are what prompts cost."""
    free_memory(device)
    first_call = clock.once(lambda: run(case))
    seconds = clock(lambda: run(case))
    prompts = clock(lambda: run(case.first_tokens()))
    decoding = max(seconds - prompts, 1e-9)
    return {
        "tokens": case.tokens,
        "seconds": round(seconds, 3),
        "first_call_seconds": round(first_call, 3),
        "prompts_seconds": round(prompts, 3),
        "tokens_per_second": round(case.tokens / seconds),
        "decoded_per_second": round((case.tokens - case.rows) / decoding),
        "roofline_share": round(case.roofline_seconds(config) / decoding, 3),
        "peak_gib": peak_gib(device),
    }


def profile_step(run: Run, case: Workload, device: str) -> None:
    """Returns the kernels of a few steps of the first case."""
    profile(lambda: run(replace(case, lengths=[9] * len(case.prompts))), device)


def postlude(config: Any, device: str, budget: int, max_rows: int, rank: int = 0, **fp8: str) -> Run:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = load_model(config, dtype=dtype, device=device)
    generator = Generator(model, max_batch_tokens=budget, max_sequences=max_rows, **fp8)
    adapter = load_adapter(generator, rank) if rank else None

    def run(case: Workload) -> None:
        groups = generator.generate(
            case.prompts,
            [
                SamplingParams(max_new_tokens=length, seed=place, **case.filters)
                for place, length in enumerate(case.lengths)
            ],
            n=case.group,
            adapter=adapter,
        )
        assert [len(completion.tokens) for group in groups for completion in group] == [
            length for length in case.lengths for _ in range(case.group)
        ]

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


class StopAtLengths(StoppingCriteria):
    """Stops each row at its own length."""

    def __init__(self, stops: Tensor) -> None:
        self.stops = stops

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids.shape[1] >= self.stops


def transformers(config: Any, device: str, budget: int, max_rows: int) -> Run:
    model: PreTrainedModel = peers.build_model(
        config, device, torch.bfloat16 if device == "cuda" else torch.float32
    ).eval()
    model.generation_config.eos_token_id = None

    @torch.no_grad()
    def run(case: Workload) -> None:
        width = len(case.prompts[0])
        if any(len(prompt) != width for prompt in case.prompts):
            raise ValueError(f"{case.name}: prompts of different lengths are not measured with transformers.")
        prompts = [prompt for prompt in case.prompts for _ in range(case.group)]
        lengths = [length for length in case.lengths for _ in range(case.group)]
        stops = torch.tensor(lengths, device=device) + width
        model.generate(
            torch.tensor(prompts, device=device),
            attention_mask=torch.ones(len(prompts), width, dtype=torch.int64, device=device),
            do_sample=True,
            **{"top_k": 0, **case.filters},
            max_new_tokens=max(lengths),
            pad_token_id=0,
            cache_implementation="static",
            stopping_criteria=StoppingCriteriaList([StopAtLengths(stops)]),
        )

    return run


FP8: dict[str, dict[str, str]] = {"kv": {"kv_cache_dtype": "fp8"}, "weights": {"quantization": "fp8"}}
FP8["both"] = FP8["kv"] | FP8["weights"]
MAKERS = {"postlude": postlude, "transformers": transformers}
