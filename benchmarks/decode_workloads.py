"""The workloads of `decode.py`: prompts, lengths of completions, and the least time in which a GPU could decode them.

A decode step must read all weights once, and the keys and values of every running completion. Completions of one prompt
need its keys once. The roofline is these bytes over 4.8 TB/s, the memory bandwidth of an H200. It has no time for
prompts, products or sampling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

BANDWIDTH = 4.8e12
PROMPT = 64  # tokens
BYTES = 2  # of a weight or a number of the cache


@dataclass(frozen=True)
class Workload:
    """`group` completions of each prompt, of `lengths` tokens: one length for each prompt.

    `filters` are the `top_k` and `top_p` of their sampling, if any.
    """

    name: str
    prompts: list[list[int]]
    lengths: list[int]
    group: int = 1
    filters: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """The number of sampled tokens."""
        return self.group * sum(self.lengths)

    @property
    def rows(self) -> int:
        """The number of completions."""
        return self.group * len(self.prompts)

    @property
    def cache_tokens(self) -> int:
        """An upper bound of the tokens in the cache, with a page to spare for each completion."""
        return self.group * sum(
            len(prompt) + length + 64 for prompt, length in zip(self.prompts, self.lengths, strict=True)
        )

    def first_tokens(self) -> Workload:
        """Returns the same prompts with completions of one token."""
        return replace(self, lengths=[1] * len(self.prompts))

    def roofline_seconds(self, config: Any) -> float:
        """Returns the least time of the steps after the first, if all completions run from the beginning."""
        # A token of step t attends to its prompt and to t tokens of its completion.
        completion_keys = sum(self.group * (length - 1) * length / 2 for length in self.lengths)
        prompts = sum((length - 1) * len(prompt) for prompt, length in zip(self.prompts, self.lengths, strict=True))
        steps = max(self.lengths) - 1
        return (steps * weight_bytes(config) + (completion_keys + prompts) * token_bytes(config)) / BANDWIDTH


def weight_bytes(config: Any) -> float:
    """Returns the bytes of the weights that a step reads: all layers of a dense model and the head."""
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    layer = config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)
    return BYTES * (config.num_hidden_layers * layer + config.vocab_size * config.hidden_size)


def token_bytes(config: Any) -> float:
    """Returns the bytes of a token's keys and values in all layers."""
    return BYTES * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def workloads(
    names: Sequence[str],
    vocab: int,
    completions: Sequence[int],
    length: int,
    *,
    contexts: Sequence[int] = (1024, 2048, 4096),
    context_rows: int = 128,
    mixed: tuple[int, int, int] = (256, 100, 1024),
) -> Iterator[Workload]:
    """Yields the workloads of these names. `mixed` is how many requests, of how many tokens at least and at most."""
    generator = torch.Generator().manual_seed(0)
    max_completions = max(completions)

    def prompts(count: int, tokens: int = PROMPT) -> list[list[int]]:
        drawn: list[list[int]] = torch.randint(vocab, (count, tokens), generator=generator).tolist()
        return drawn

    def uniform(count: int, shortest: int, longest: int) -> list[int]:
        drawn: list[int] = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
        return drawn

    if "even" in names:
        for count in completions:
            yield Workload(f"{count} completions", prompts(count), [length] * count)
    if "uneven" in names:  # half of them shorter than a quarter of the longest
        shares = torch.rand(max_completions, generator=generator).square()
        yield Workload(
            f"{max_completions} uneven completions",
            prompts(max_completions),
            (4 + shares * (length - 4)).long().tolist(),
        )
    if "grpo" in names:
        for count in completions:
            mixed_prompts = prompts(max(1, count // 16), 512)
            yield Workload(
                f"{count} completions, 16 of each prompt of 512", mixed_prompts, [length] * len(mixed_prompts), 16
            )
    if "contexts" in names:
        for context in contexts:
            mixed_prompts = prompts(context_rows, context)
            yield Workload(
                f"{context_rows} completions of prompts of {context}", mixed_prompts, [length] * context_rows
            )
    if "filtered" in names:  # random weights make most tokens as likely as others: with top-p alone, the slowest case
        for filters in ({"top_k": 20, "top_p": 0.95}, {"top_p": 0.95}):
            text = ", ".join(f"{name.replace('_', '-')} {number}" for name, number in filters.items())
            for count in completions:
                yield Workload(f"{count} completions, {text}", prompts(count), [length] * count, filters=filters)
    if "mixed" in names:  # the load that Mini-SGLang publishes for this model
        requests, shortest, longest = mixed
        mixed_prompts = [prompts(1, tokens)[0] for tokens in uniform(requests, shortest, longest)]
        name = f"{requests} requests, {shortest:,} to {longest:,} tokens in and out"
        yield Workload(name, mixed_prompts, uniform(requests, shortest, longest))


NAMES = ("even", "uneven", "grpo", "contexts", "filtered", "mixed")
