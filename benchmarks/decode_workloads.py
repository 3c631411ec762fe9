"""The workloads of `decode.py`: prompts, lengths of completions, and the least time in which a GPU could decode them.

A decode step must read its weights once, and the keys, values and states of every running completion. Completions of
one prompt need its keys once. The roofline is these bytes (`decode_bytes.py`) over 4.8 TB/s, the memory bandwidth of an
H200. It has no time for prompts, products or sampling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from decode_bytes import DecodeBytes

BANDWIDTH = 4.8e12
PROMPT = 64  # tokens


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

    def first_tokens(self, count: int = 1) -> Workload:
        """Returns the same prompts with completions of so many tokens."""
        return replace(self, lengths=[count] * len(self.prompts))

    def roofline_seconds(self, config: Any) -> float:
        """Returns the least time of the steps after the first, if all completions run from the beginning."""
        needed = DecodeBytes.of(config)
        ends = Counter(length - 1 for length in self.lengths)
        running, total, step = len(self.lengths), 0.0, 0
        for end in sorted(ends):  # between two ends the same completions run
            total += (end - step) * needed.weights(self.group * running)
            running, step = running - ends[end], end
        # A token of step t attends to its prompt and to t tokens of its completion.
        same = Counter((len(prompt), length) for prompt, length in zip(self.prompts, self.lengths, strict=True))
        for (prompt, length), count in same.items():
            total += count * needed.completion(torch.arange(1, length), prompt, self.group).sum().item()
        return total / BANDWIDTH


def workloads(
    names: Sequence[str],
    vocab: int,
    completions: Sequence[int],
    length: int,
    *,
    prompt_length: int = PROMPT,
    contexts: Sequence[int] = (1024, 2048, 4096),
    context_rows: int = 128,
    mixed: tuple[int, int, int] = (256, 100, 1024),
) -> Iterator[Workload]:
    """Yields the workloads of these names. `mixed` is how many requests, of how many tokens at least and at most."""
    generator = torch.Generator().manual_seed(0)
    max_completions = max(completions)

    def prompts(count: int, tokens: int = prompt_length) -> list[list[int]]:
        drawn: list[list[int]] = torch.randint(vocab, (count, tokens), generator=generator).tolist()
        return drawn

    def uniform(count: int, shortest: int, longest: int) -> list[int]:
        drawn: list[int] = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
        return drawn

    for count in completions if "even" in names else ():
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
    if "long" in names:
        yield Workload("64 completions of prompts of 16,384", prompts(64, 16_384), [length] * 64)
    # "mixed" is the load that Mini-SGLang publishes for the 0.6B model.
    sizes = [size for name, size in (("mixed", mixed), ("requests", (512, 16, 512))) if name in names]
    for requests, shortest, longest in sizes:
        mixed_prompts = [prompts(1, tokens)[0] for tokens in uniform(requests, shortest, longest)]
        name = f"{requests} requests, {shortest:,} to {longest:,} tokens in and out"
        yield Workload(name, mixed_prompts, uniform(requests, shortest, longest))


NAMES = ("even", "uneven", "grpo", "contexts", "long", "filtered", "mixed", "requests")
