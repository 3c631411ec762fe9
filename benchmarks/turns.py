"""Seconds to sample conversations of several turns, with the generator's prefix cache and without.

    PYTHONPATH=src python benchmarks/turns.py                                  # tiny-dense
    PYTHONPATH=src python benchmarks/turns.py --model smollm2 --groups 2
    PYTHONPATH=src python benchmarks/turns.py --model smollm2 --device cuda --dtype bfloat16 --groups 32
    PYTHONPATH=src python benchmarks/turns.py --smoke                          # a few tokens, on any machine

Each group has a prompt of its own. After every turn a conversation reads an observation of random tokens, and all
begin the next turn together, as in a rollout. Without the cache each turn prefills its whole conversation; with it the
first turn prefills the prompts, and later ones about the observations. The tokens of both are compared. On a CPU the
seconds are those of the processor, whatever else runs: use one thread.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch

from postlude import LanguageModel, load_model
from postlude.generate.generator import Generator
from postlude.generate.protocol import Completion, Request
from postlude.generate.sampling_params import SamplingParams
from postlude.generate.session import Session


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-dense")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4, help="conversations of a group")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--completion", type=int, default=32, help="tokens of a turn")
    parser.add_argument("--observation", type=int, default=64, help="tokens of a turn")
    parser.add_argument("--repeat", type=int, default=3, help="the median counts")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.groups, arguments.samples, arguments.turns, arguments.repeat = 1, 2, 2, 1
        arguments.prompt, arguments.completion, arguments.observation = 40, 4, 8
    return arguments


def run(session: Session, requests: list[Request]) -> list[Completion]:
    """Returns the completions of requests that begin together, in their order."""
    finished, order = {}, [session.add(request) for request in requests]
    while session.busy:
        for done in session.step():
            assert done.completion is not None, done.error
            finished[done.request_id, done.index] = done.completion
    return [
        finished[number, index] for number, request in zip(order, requests, strict=True) for index in range(request.n)
    ]


def sample(model: LanguageModel, arguments: argparse.Namespace, *, cached: bool) -> tuple[list[Completion], float]:
    """Returns the completions of all turns, and the seconds that they took."""
    generator, source = Generator(model, prefix_cache=cached, context_length=4096), random.Random(0)
    session, vocabulary = Session(generator), model.config.vocab_size

    def text(length: int) -> list[int]:
        return [source.randrange(vocabulary) for _ in range(length)]

    def sampling(seed: int) -> SamplingParams:
        return SamplingParams(max_new_tokens=arguments.completion, seed=seed, ignore_eos=True)

    prompts = [text(arguments.prompt) for _ in range(arguments.groups)]
    conversations = [list(prompt) for prompt in prompts for _ in range(arguments.samples)]
    clock = time.process_time if arguments.device == "cpu" else time.perf_counter
    completions, began = list[Completion](), clock()
    for turn in range(arguments.turns):
        if turn == 0:
            requests = [Request(tuple(prompt), sampling(0), n=arguments.samples) for prompt in prompts]
        else:
            requests = [Request(tuple(tokens), sampling(index)) for index, tokens in enumerate(conversations)]
        for tokens, completion in zip(conversations, completed := run(session, requests), strict=True):
            tokens.extend(completion.tokens + text(arguments.observation))
        completions += completed
    return completions, clock() - began


def main() -> None:
    arguments = options()
    model = load_model(arguments.model, dtype=getattr(torch, arguments.dtype), device=arguments.device).eval()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    results = {}
    for _ in range(arguments.repeat):
        for cached, times in seconds.items():
            results[cached], took = sample(model, arguments, cached=cached)
            times.append(took)
    plain, cached = (statistics.median(times) for times in seconds.values())
    same = sum(one.tokens == other.tokens for one, other in zip(results[False], results[True], strict=True))
    reused = [sum(completion.reused_prompt_tokens for completion in results[way]) for way in (False, True)]
    print(
        f"{arguments.model}: {len(results[True])} completions of {arguments.turns} turns, {same} with the same tokens"
    )
    print(f"without the cache {plain:.2f} s, with it {cached:.2f} s: {plain / cached:.2f} times as fast")
    print(f"prompt tokens that were not prefilled: {reused[0]:,} without (those of a group), {reused[1]:,} with it")


if __name__ == "__main__":
    main()
