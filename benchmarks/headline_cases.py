"""The cases of `headline.py`, in groups that share a process, the most important first.

A group measures its cases one after the other with the functions of the other benchmarks, and yields each one's name
and figures. It builds its models anew in every round and frees them, as all of them do not fit on one GPU together.
`seconds` is what a round of it takes on an H200 once its kernels are compiled: one step or call to warm up, then two
training steps, one `generate` call or three passes of a head.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import batch_invariant
import decode
import linear_logprobs
import train_step
from decode_workloads import Workload, workloads
from transformers import PretrainedConfig
from workloads import MIXES, SHAPES, Clock, Sample, changed, free_memory, result_or_failure

from postlude import ranks
from postlude.lora import LoRA

Case = tuple[str, dict[str, Any]]
"""A name and figures, or `failed` and why."""
HEAD_SHAPES = ("8192x2048x62080", "8192x4096x131072", "3000x5120x151936")
ROWS = (16, 128, 512)
CONTEXTS: dict[str, Any] = {"contexts": (1024, 4096), "context_rows": 64}


@dataclass(frozen=True)
class Scale:
    """The size of a case: `tiny` on any machine; `layers` of a model are enough to compile its kernels."""

    device: str
    tiny: bool = False
    layers: int | None = None

    def config(self, shape: str) -> PretrainedConfig:
        if self.tiny:
            return SHAPES["smoke-moe" if shape == "30b-a3b" else "smoke"]()
        return SHAPES[shape]() if self.layers is None else changed(shape, num_hidden_layers=self.layers)

    def mix(self, *, compiles: bool = True) -> list[int]:
        """Returns the lengths to train on. Where nothing is compiled by shape, few are enough to warm up."""
        return MIXES["smoke" if self.tiny or (self.layers and not compiles) else "log-normal"]()

    @property
    def rows(self) -> tuple[int, ...]:
        """Returns the numbers of completions at once."""
        return (2,) if self.tiny else ROWS

    def length(self, tokens: int) -> int:
        """Returns the tokens of a completion."""
        return 4 if self.tiny else tokens


@dataclass(frozen=True)
class Cases:
    """Measures cases, and names those that it measures at full size."""

    run: Callable[[Scale], Iterator[Case]]
    names: Callable[[], Sequence[str]]


@dataclass(frozen=True)
class Group:
    """Cases of one process. One that is `fresh` gets a new process in each round, and is not warmed up."""

    name: str
    seconds: float
    cases: Cases
    is_rank: bool = False
    fresh: bool = False

    def context(self, device: str) -> AbstractContextManager[Any]:
        """Returns what must be entered once before `run`."""
        return ranks(device=device) if self.is_rank else nullcontext()


def train(shape: str, *cases: str, repeats: int = 2, **options: Any) -> Cases:
    """Returns the training steps of `train_step.py`. `options` are the engine's."""

    def run(scale: Scale) -> Iterator[Case]:
        config, clock = scale.config(shape), Clock(scale.device, repeats=1 if scale.tiny or scale.layers else repeats)
        for name in cases:
            lengths = scale.mix(compiles=not train_step.CASES[name].padded)
            sample = Sample.of(lengths, config.vocab_size)
            budget = max(64 if scale.tiny else 16384, *lengths)
            inputs = train_step.CaseInputs(
                config, sample, scale.device, budget, 2 if scale.tiny else train_step.ROWS, options
            )
            yield name, train_step.measured(name, inputs, clock)

    return Cases(run, lambda: cases)


def generate(shape: str, *names: str, rows: Sequence[int] = ROWS, tokens: int = 256, **options: Any) -> Cases:
    """Returns workloads of `decode.py`. `options` are those of its generator."""

    def workloads_at(scale: Scale) -> list[Workload]:
        sizes = {"contexts": (16,), "context_rows": 2, "mixed": (3, 2, 8)} if scale.tiny else CONTEXTS
        row_counts = scale.rows if scale.tiny else rows
        return list(workloads(names, scale.config(shape).vocab_size, row_counts, scale.length(tokens), **sizes))

    def run(scale: Scale) -> Iterator[Case]:
        config, cases = scale.config(shape), workloads_at(scale)
        budget, max_rows = max(case.cache_tokens for case in cases), max(case.rows for case in cases)
        sampler = decode.postlude(config, scale.device, budget, max_rows, **options)
        clock = Clock(scale.device, repeats=1, warm_up=0)  # the first call is the warm-up
        for case in cases:
            yield (
                case.name,
                result_or_failure(lambda case=case: decode.timed(sampler, case, config, clock, scale.device)),
            )

    return Cases(run, lambda: [case.name for case in workloads_at(Scale("cpu"))])


def generate_each(shape: str, rows: int, tokens: int, **variants: dict[str, Any]) -> Cases:
    """Returns one workload with each of several generators."""

    def run(scale: Scale) -> Iterator[Case]:
        for name, options in variants.items():
            for _, result in generate(shape, "even", rows=(rows,), tokens=tokens, **options).run(scale):
                yield name, result
            free_memory(scale.device)

    return Cases(run, lambda: list(variants))


def head(scale: Scale) -> Iterator[Case]:
    """Runs `linear_logprobs`, `linear_objective` and Liger's cross-entropy, relative to plain products."""
    methods = [method for method in linear_logprobs.postlude_methods("auto", None) if "ignored" not in method.name]
    methods += linear_logprobs.peers("Liger")
    for shape in ("64x32x512",) if scale.tiny else HEAD_SHAPES:
        for result in linear_logprobs.compare(shape, methods, scale.device, 1 if scale.layers or scale.tiny else 3):
            figures = {key: value for key, value in asdict(result).items() if value is not None}
            failed = {"failed": result.note} if result.total_ms is None else {}
            yield f"{shape} {result.method}", figures | failed
        free_memory(scale.device)


def invariant(scale: Scale) -> Iterator[Case]:
    """Samples and trains with the batch-invariant mode and without it."""
    config, length = scale.config("0.6b"), scale.length(128)
    sample = Sample.of(scale.mix(), config.vocab_size)
    budget, clock = max(128 if scale.tiny else 16384, *sample.lengths), Clock(scale.device, repeats=1)
    for mode in (False, True):
        name = "batch-invariant" if mode else "ordinary"
        engine = batch_invariant.engine_of(config, scale.device, budget, mode)
        generator = batch_invariant.generator_of(engine, max(scale.rows), length)
        for count in scale.rows:
            sampled = partial(batch_invariant.sampled, generator, config, count, length, clock)
            yield f"{name}, {count} completions", result_or_failure(sampled)
            del sampled
        del generator
        trained = partial(batch_invariant.trained, "update", engine, config, sample, clock)
        yield f"{name}, update", result_or_failure(trained)
        del engine, trained
        free_memory(scale.device)


def first_call(*, compiled: bool) -> Cases:
    """Returns the first call after the start, with kernels that are on disk or without any."""
    calls = generate("0.6b", "even", rows=(16,), tokens=256)

    def run(scale: Scale) -> Iterator[Case]:
        with tempfile.TemporaryDirectory() as directory:
            if not compiled:
                os.environ["TRITON_CACHE_DIR"] = directory
            yield from calls.run(scale)

    return Cases(run, calls.names)


def head_names() -> list[str]:
    methods = (linear_logprobs.FLOOR, "postlude linear_logprobs", "postlude linear_objective", "Liger fused linear CE")
    return [f"{shape} {method}" for shape in HEAD_SHAPES for method in methods]


def invariant_names() -> list[str]:
    cases = (*(f"{count} completions" for count in ROWS), "update")
    return [f"{mode}, {case}" for mode in ("ordinary", "batch-invariant") for case in cases]


LORA = {"lora": LoRA(rank=32)}
GROUPS = (
    Group("train 0.6b", 5, train("0.6b", "update", "sft"), is_rank=True),
    Group("train 8b", 12, train("8b", "update", "update-fp8"), is_rank=True),
    Group("train 30b-a3b", 9, train("30b-a3b", "update", "update-fp8"), is_rank=True),
    Group("train 8b lora", 6, train("8b", "update", **LORA), is_rank=True),
    Group("peer liger 0.6b", 6, train("0.6b", "flex-liger-sft")),
    Group("generate 0.6b", 8, generate("0.6b", "even", "uneven")),
    Group("head", 10, Cases(head, head_names)),
    Group("peer liger 8b", 10, train("8b", "flex-liger-sft")),
    Group("peer padded 0.6b", 10, train("0.6b", "trl", repeats=1)),
    Group("generate 0.6b adapter", 8, generate("0.6b", "even", rank=32)),
    Group("batch-invariant 0.6b", 10, Cases(invariant, invariant_names), is_rank=True),
    Group("generate 0.6b groups", 8, generate("0.6b", "grpo")),
    Group("generate 8b", 7, generate_each("8b", 128, 128, bf16={}, weights=decode.FP8["weights"], kv=decode.FP8["kv"])),
    Group("first call, compiled", 6, first_call(compiled=True), fresh=True),
    Group("generate 0.6b mixed", 10, generate("0.6b", "mixed")),
    Group("generate 0.6b contexts", 9, generate("0.6b", "contexts", tokens=128)),
    Group("train 0.6b fp8", 3, train("0.6b", "update-fp8"), is_rank=True),
    Group("peer flex 0.6b", 6, train("0.6b", "flex-sft")),
    Group("first call, not compiled", 15, first_call(compiled=False), fresh=True),
)
BY_NAME = {group.name: group for group in GROUPS}
