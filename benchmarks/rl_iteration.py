"""An iteration of GRPO by phase (rollout, log-probs, update): Postlude, and transformers with padded rows.

    PYTHONPATH=src python benchmarks/rl_iteration.py --shape smollm2 --json benchmarks/results/rl_smollm2_h200.json
    PYTHONPATH=src python benchmarks/rl_iteration.py --shape 0.6b --cases postlude transformers static
    PYTHONPATH=src python benchmarks/rl_iteration.py --smoke          # tiny, on any machine

Every prompt gets a group of sampled completions. Their lengths are fixed beforehand, equal for all cases: weights
are random, and no completion would end by itself. transformers generates all as one batch padded on the left, each
row until its own length, with a dynamic cache or ("static") a static one under torch.compile, then computes log-probs
without a gradient, and updates on rows padded to the longest of those run together. Postlude copies its weights to the
generator after every update, which counts as rollout. Advantages are random.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, StoppingCriteria, StoppingCriteriaList
from workloads import SHAPES, Clock, Results, free_memory, log_normal, peak_gib, result_or_failure

import peers
from postlude import AdamW, Batch, Engine, ranks
from postlude.generate.distributed import SyncedGenerator
from postlude.generate.sampling_params import SamplingParams
from postlude.objectives import PolicyGradient

PHASES = ("rollout", "logprobs", "update")


@dataclass(frozen=True)
class Tasks:
    """Prompts, one per completion, and the length and advantage of each completion."""

    prompts: list[list[int]]
    lengths: list[int]
    advantages: list[float]

    @classmethod
    def drawn(cls, config: PretrainedConfig, prompts: int, group: int, median: int, longest: int) -> Tasks:
        generator = torch.Generator().manual_seed(0)
        sizes = torch.randint(longest // 8 + 1, longest // 2 + 2, (prompts,), generator=generator).tolist()
        drawn_prompts = [torch.randint(config.vocab_size, (size,), generator=generator).tolist() for size in sizes]
        count = prompts * group
        advantages = torch.randn(count, generator=generator).tolist()
        return cls(
            [prompt for prompt in drawn_prompts for _ in range(group)],
            log_normal(count, median, 0.8, longest),
            advantages,
        )

    def shortened(self, longest: int) -> Tasks:
        return Tasks(self.prompts, [min(length, longest) for length in self.lengths], self.advantages)


class Framework(Protocol):
    """Runs the phases of an iteration. Each phase starts from the state that the previous one left."""

    def rollout(self, tasks: Tasks) -> None: ...

    def logprobs(self, tasks: Tasks) -> None: ...

    def update(self, tasks: Tasks) -> None: ...


class Postlude:
    def __init__(self, config: PretrainedConfig, device: str, budget: int, rows: int) -> None:
        self.engine = Engine(config, device=device, budget=budget, optimizer=AdamW(lr=1e-6))
        self.generator = SyncedGenerator(self.engine, None, max_sequences=512)

    def rollout(self, tasks: Tasks) -> None:
        samplings = [
            SamplingParams(max_new_tokens=length, seed=seed, ignore_eos=True)
            for seed, length in enumerate(tasks.lengths)
        ]
        completions = [group[0].tokens for group in self.generator.generate(tasks.prompts, samplings)]
        assert [len(group) for group in completions] == tasks.lengths
        self.sequences = [
            torch.tensor(prompt + completion) for prompt, completion in zip(tasks.prompts, completions, strict=True)
        ]

    def logprobs(self, tasks: Tasks) -> None:
        self.old = self.engine.logprobs(Batch(self.sequences)).logprob

    def update(self, tasks: Tasks) -> None:
        masks = [
            (torch.arange(len(sequence)) >= len(prompt)).float()
            for sequence, prompt in zip(self.sequences, tasks.prompts, strict=True)
        ]
        columns = {"response_mask": masks, "advantages": tasks.advantages, "old_logprobs": self.old}
        self.engine.forward_backward(Batch(self.sequences, columns), PolicyGradient())
        self.engine.optimizer_step()


class StopAtLengths(StoppingCriteria):
    """Stops each row at its own length."""

    def __init__(self, stops: Tensor) -> None:
        self.stops = stops

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids.shape[1] >= self.stops


class Transformers:
    static = False

    def __init__(self, config: PretrainedConfig, device: str, budget: int, rows: int) -> None:
        self.device, self.rows = device, rows
        self.model = peers.build_model(config, device, torch.float32 if device == "cpu" else torch.bfloat16)
        self.model.generation_config.eos_token_id = None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)

    @torch.no_grad()
    def rollout(self, tasks: Tasks) -> None:
        self.model.eval()
        width = max(map(len, tasks.prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in tasks.prompts], device=self.device)
        spaces = torch.tensor([width - len(prompt) for prompt in tasks.prompts], device=self.device)
        lengths = torch.tensor(tasks.lengths, device=self.device)
        output = self.model.generate(
            ids,
            attention_mask=(torch.arange(width, device=self.device) >= spaces[:, None]).long(),
            do_sample=True,
            top_k=0,
            max_new_tokens=max(tasks.lengths),
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([StopAtLengths(width + lengths)]),
            **({"cache_implementation": "static"} if self.static else {}),
        )
        self.model.train()
        place = torch.arange(output.shape[1], device=self.device)
        self.ids = output
        self.mask = ((place >= spaces[:, None]) & (place < (width + lengths)[:, None])).long()
        self.width = width

    def batches(self, tasks: Tasks) -> list[dict[str, Tensor]]:
        """Rows that are run together, without the columns that are padding in all of them."""
        batches = []
        for first in range(0, len(self.ids), self.rows):
            chunk = slice(first, first + self.rows)
            begin = self.width - max(map(len, tasks.prompts[chunk]))
            end = self.width + max(tasks.lengths[chunk])
            advantages = torch.tensor(tasks.advantages[chunk], device=self.device)
            longest = max(tasks.lengths[chunk])
            batches.append(
                {"ids": self.ids[chunk, begin:end], "mask": self.mask[chunk, begin:end], "advantages": advantages}
                | {"kept": torch.tensor(longest)}
            )
        return batches

    def completions(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the completions' positions, the tokens there, and which of them are real."""
        longest = int(batch["kept"])
        logits = self.model(
            input_ids=batch["ids"], attention_mask=batch["mask"], use_cache=False, logits_to_keep=longest + 1
        ).logits[:, :-1]
        return logits / 1.0, batch["ids"][:, -longest:], batch["mask"][:, -longest:]

    @torch.no_grad()
    def logprobs(self, tasks: Tasks) -> None:
        self.old = [peers.token_logprobs(*self.completions(batch)[:2]) for batch in self.batches(tasks)]

    def update(self, tasks: Tasks) -> None:
        tokens = sum(tasks.lengths)
        for batch, old in zip(self.batches(tasks), self.old, strict=True):
            logits, targets, mask = self.completions(batch)
            logprobs = peers.token_logprobs(logits, targets)
            peers.entropies(logits)
            peers.clipped_loss(logprobs, old, batch["advantages"], mask, tokens).backward()
            del logits
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


class StaticTransformers(Transformers):
    """The generator with a static cache, which transformers then compiles."""

    static = True


CASES: dict[str, tuple[type[Any], str]] = {
    "postlude": (Postlude, "Postlude: Generator, Engine"),
    "transformers": (
        Transformers,
        "transformers: generate with a dynamic cache; padded rows, full logits (own script)",
    ),
    "static": (StaticTransformers, "transformers: generate with a static cache and torch.compile, the same otherwise"),
}


def measured(kind: type[Any], config: PretrainedConfig, tasks: Tasks, clock: Clock, arguments: Any) -> dict[str, Any]:
    """Seconds of each phase, the median of `repeats` iterations after one to warm up, and their peaks of memory."""
    side: Framework = kind(config, clock.device, arguments.budget, arguments.rows)
    for phase in PHASES:  # what is compiled or allocated once is no part of an iteration
        getattr(side, phase)(tasks.shortened(4) if kind is Transformers else tasks)
    seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
    peaks: dict[str, float] = {}
    for _ in range(arguments.repeats):
        for phase in PHASES:
            free_memory(clock.device)
            seconds[phase].append(clock.once(lambda phase=phase: getattr(side, phase)(tasks)))
            peaks[phase] = peak_gib(clock.device) or 0.0
    medians = {phase: statistics.median(durations) for phase, durations in seconds.items()}
    return {
        "seconds": {phase: round(durations, 4) for phase, durations in medians.items()},
        "in_all": round(sum(medians.values()), 4),
        "rollout_tokens_per_second": round(sum(tasks.lengths) / medians["rollout"]),
        "peak_gib": peaks,
    }


def options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="smollm2")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8, help="completions per prompt")
    parser.add_argument("--median", type=int, default=96, help="of the completions' lengths, which are log-normal")
    parser.add_argument(
        "--longest", type=int, default=256, help="the longest completion; prompts have up to half of it"
    )
    parser.add_argument("--budget", type=int, default=16384, help="most tokens of one of Postlude's microbatches")
    parser.add_argument("--rows", type=int, default=8, help="rows that transformers runs at a time")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=["postlude", "transformers"])
    parser.add_argument("--repeats", type=int, default=1, help="the median counts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smoke", action="store_true", help="tiny, on any machine")
    parser.add_argument("--json", type=Path, help="written after each case")
    arguments = parser.parse_args(words)
    if arguments.smoke:
        arguments.shape, arguments.prompts, arguments.group, arguments.median = "smoke", 2, 2, 4
        arguments.longest, arguments.budget, arguments.rows = 8, 64, 2
    return arguments


def main(words: Sequence[str] | None = None) -> list[dict[str, Any]]:
    arguments = options(words)
    config = SHAPES[arguments.shape]()
    tasks = Tasks.drawn(config, arguments.prompts, arguments.group, arguments.median, arguments.longest)
    count, tokens, prompts = len(tasks.lengths), sum(tasks.lengths), sum(map(len, tasks.prompts))
    print(
        f"{arguments.shape}: {count} completions of {tokens:,} tokens, longest {max(tasks.lengths)}, "
        f"to {prompts:,} tokens of prompts"
    )
    results = Results(" ".join(sys.argv), arguments.device, arguments.json)
    clock = Clock(arguments.device)
    with ranks(device=arguments.device):
        for name in arguments.cases:
            kind, description = CASES[name]
            free_memory(arguments.device)
            result = result_or_failure(lambda kind=kind: measured(kind, config, tasks, clock, arguments))
            sizes = {"completions": count, "completion_tokens": tokens, "prompt_tokens": prompts}
            results.add({"case": name, "description": description, "shape": arguments.shape, **sizes} | result)
            phases = "  ".join(
                f"{phase} {phase_seconds:.3f} s" for phase, phase_seconds in result.get("seconds", {}).items()
            )
            print(
                f"  {name:<14} {phases}  in all {result['in_all']:.3f} s" if phases else f"  {name} {result['failed']}"
            )
    first, *others = results.cases
    for other in others:
        if "seconds" in first and "seconds" in other:
            ratios = [f"{phase} {other['seconds'][phase] / first['seconds'][phase]:.2f}x" for phase in PHASES]
            print(
                f"  {first['case']} beside {other['case']}: {', '.join(ratios)}, in all "
                f"{other['in_all'] / first['in_all']:.2f}x"
            )
    return results.cases


if __name__ == "__main__":
    main()
