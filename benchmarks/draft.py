"""Tokens a second of the generator with drafts and without, for a model whose depth was trained briefly on a text.

    PYTHONPATH=src python benchmarks/draft.py                 # 200 steps on this repository's pages, then completions
    PYTHONPATH=src python benchmarks/draft.py --device cuda --layers 24 --hidden 1024 --completions 1 16 128   # in bf16
    PYTHONPATH=src python benchmarks/draft.py --smoke         # a few steps and tokens, on any machine

On a GPU both are also timed without CUDA graphs. The completions of both are compared token by token: drafts change
none, except where bf16 rounds two logits to a tie. How often a draft is right depends on the model and the text. The
gain depends on the cost of a second token per row: small if reading the weights is most of a step, as with few
completions at once.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from pathlib import Path

import torch

from postlude import LanguageModel, ModelConfig, Pattern, pack
from postlude.engine.normalizer import LossNormalizer
from postlude.generate.draft_switch import DraftSwitch
from postlude.generate.generator import Generator
from postlude.generate.protocol import Completion
from postlude.generate.sampling_params import SamplingParams
from postlude.hf.read_model import read_model
from postlude.model.blocks import AttentionConfig, MLPConfig
from postlude.objectives import MTP, SFT

PAGES = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--steps", type=int, default=200, help="of training")
    parser.add_argument("--completions", type=int, nargs="+", default=[1, 8], help="how many at once")
    parser.add_argument("--tokens", type=int, default=128, help="of a completion")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--repeat", type=int, default=3, help="the median counts")
    parser.add_argument("--rounds", type=int, default=8, help="in which the switch of a run chooses to draft or not")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.steps, arguments.completions, arguments.tokens, arguments.repeat = 2, [4], 8, 1
        arguments.layers, arguments.hidden, arguments.rounds = 2, 64, 4
    return arguments


def trained(arguments: argparse.Namespace, text: torch.Tensor) -> LanguageModel:
    """A transformer over bytes, and one depth, both trained on random windows of the text."""
    heads = arguments.hidden // 64
    config = ModelConfig(
        pattern=Pattern.parse(f"[*-]{{{arguments.layers}}}/[*-]"),
        hidden_size=arguments.hidden,
        vocab_size=read_model("tiny-dense")[1].vocab_size,
        blocks={
            "*": AttentionConfig(heads=heads, kv_heads=heads, head_dim=64),
            "-": MLPConfig(intermediate_size=3 * arguments.hidden),
        },
    )
    model = LanguageModel(config).to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    objective = MTP(objective=SFT(), weight=0.5)
    generator = torch.Generator().manual_seed(0)
    for _ in range(arguments.steps):
        starts = torch.randint(len(text) - 129, (8,), generator=generator).tolist()
        (microbatch,) = pack([text[start : start + 129] for start in starts], budget=2048, depths=1)
        microbatch = microbatch.to(arguments.device)
        loss = LossNormalizer([microbatch]).loss(
            model(microbatch, output_processor=lambda i, _: objective(i)), microbatch
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(f"{config.pattern}, hidden {arguments.hidden}: loss {float(loss.detach()):.2f} after {arguments.steps} steps")
    return (model.bfloat16() if arguments.device == "cuda" else model).eval()


class EagerGenerator(Generator):
    """Launches every kernel from the host."""

    def why_no_cuda_graph(self) -> str | None:
        return "for comparison"


def read_text() -> torch.Tensor:
    """The bytes of this repository's pages."""
    return torch.tensor(list("\n".join(page.read_text() for page in PAGES).encode()))


def main() -> None:
    arguments, text = options(), read_text()
    model = trained(arguments, text)
    compare(arguments, model, text)
    switch(arguments, model, text)


def windows(text: torch.Tensor, count: int) -> list[list[int]]:
    return [text[start : start + 32].tolist() for start in range(0, 997 * count, 997)]


def switch(arguments: argparse.Namespace, model: LanguageModel, text: torch.Tensor) -> None:
    """Prints in which rounds a run's switch drafts, and the speed-up that it measures."""
    generator = Generator(model, draft="mtp")
    for temperature, completions in itertools.product(arguments.temperatures, arguments.completions):
        draft_switch, drafted = DraftSwitch(), ""
        for number in range(arguments.rounds):
            generator.set_drafting(draft_switch.next_round())
            drafted += "D" if draft_switch.drafting else "-"
            sampling = SamplingParams(max_new_tokens=arguments.tokens, temperature=temperature, seed=number)
            start = time.perf_counter()
            generator.generate(windows(text, completions), sampling)
            draft_switch.add(completions, completions * arguments.tokens, time.perf_counter() - start)
        speedup = draft_switch.speedup or float("nan")
        print(f"{completions} at once, temperature {temperature}: rounds {drafted}, {speedup:.2f}x", flush=True)


def compare(arguments: argparse.Namespace, model: LanguageModel, text: torch.Tensor) -> None:
    """Prints the speed of completions of windows of the text in each way, and whether they are the same."""
    ways = {"plain": Generator(model), "drafted": Generator(model, draft="mtp")}
    if arguments.device == "cuda":
        ways |= {"plain, eager": EagerGenerator(model), "drafted, eager": EagerGenerator(model, draft="mtp")}
    for temperature, completions in itertools.product(arguments.temperatures, arguments.completions):
        prompts = windows(text, completions)
        sampling = SamplingParams(max_new_tokens=arguments.tokens, temperature=temperature)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        completions_by_name: dict[str, list[Completion]] = {}
        for turn, (name, generator) in itertools.product(range(arguments.repeat + 1), ways.items()):
            start = time.perf_counter()
            groups = generator.generate(prompts, sampling)
            if turn:  # the first warms up
                seconds[name].append(time.perf_counter() - start)
            completions_by_name[name] = [completion for group in groups for completion in group]
        speeds = {name: completions * arguments.tokens / statistics.median(times) for name, times in seconds.items()}
        drafted = completions_by_name["drafted"]
        right = sum(completion.accepted for completion in drafted) / sum(completion.drafted for completion in drafted)
        equal_count = sum(
            plain_completion.tokens == completion.tokens
            for plain_completion, completion in zip(completions_by_name["plain"], drafted, strict=True)
        )
        print(
            f"{completions} at once, temperature {temperature}: "
            + ", ".join(f"{name} {speed:.0f}" for name, speed in speeds.items())
            + f" tokens/s ({speeds['drafted'] / speeds['plain']:.2f}x), {right:.0%} of drafts right, "
            f"{equal_count} of {completions} completions equal",
            flush=True,
        )


if __name__ == "__main__":
    main()
