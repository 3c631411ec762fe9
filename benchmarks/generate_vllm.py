"""The native generator and vLLM in one run, for `generate.py --device cuda --vllm PYTHON`: whole calls, in turns.

Both have random weights of the same shape, the same prompts and the same numbers of new tokens, sampled from all
tokens. In a round each engine makes one call of each workload. All engines of a shape stay in the GPU's memory and one
of them works at a time. Shapes whose engines fit into the memory together start together, since vLLM compiles for a
minute before it can generate; nothing is measured until all of them are ready. With `--seconds` the shapes share that
time, and workloads get fewer rounds, at least one, where it is short.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import decode
from decode_bytes import DecodeBytes
from decode_workloads import Workload, workloads
from transformers import PretrainedConfig
from vllm_process import VLLM, VLLMFailed, vllm_cache_bytes
from workloads import GIB, SHAPES, Clock, Results, free_memory, result_or_failure

NATIVE, PLAIN, LOGPROBS = "postlude", "vllm", "vllm, log-probs"
CASES = (NATIVE, PLAIN, LOGPROBS)
MEMORY = 125 * GIB  # of an H200, less what allocators and contexts take
BESIDE = 6 * GIB  # of an engine: its graphs and activations
Seconds = Callable[[Workload], float]
"""Runs a workload once. Returns the seconds of the call."""


class Shape:
    """A shape, its workloads and its vLLM."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.name = name
        self.config: PretrainedConfig = SHAPES[name]()
        self.cases = list(
            workloads(
                arguments.workloads, self.config.vocab_size, arguments.completions, arguments.length,
                prompt_length=arguments.prompt,
            )
        )  # fmt: skip
        self.vllm: VLLM | None = None
        self.vllm_failure = "vLLM was not asked for"

    @property
    def weight_bytes(self) -> int:
        """All weights that a step could read."""
        needed = DecodeBytes.of(self.config)
        return needed.dense_weights + sum(needed.expert_weights.values())

    @property
    def native_bytes(self) -> int:
        """The memory of the native generator."""
        needed = DecodeBytes.of(self.config)
        return BESIDE + self.weight_bytes + max(needed.cache(case.rows, case.cache_tokens) for case in self.cases)

    @property
    def vllm_bytes(self) -> int:
        """The memory of vLLM."""
        return BESIDE + self.weight_bytes + vllm_cache_bytes(self.config, self.cases)

    def start_vllm(self, python: str, stack: contextlib.ExitStack) -> None:
        try:
            self.vllm = stack.enter_context(VLLM(python, self.config, self.cases))
        except VLLMFailed as error:
            self.vllm_failure = str(error)

    def wait_for_vllm(self) -> None:
        if self.vllm is None:
            return
        try:
            self.vllm.wait()
            print(f"{self.name}: vLLM {self.vllm.version} is ready after {self.vllm.start_seconds} s", flush=True)
        except VLLMFailed as error:
            print(f"{self.name}: {error}\n{self.vllm.log_tail()}", flush=True)
            self.vllm, self.vllm_failure = None, str(error)

    def native(self, device: str) -> Seconds:
        """Returns a new native generator."""
        budget, rows = max(case.cache_tokens for case in self.cases), max(case.rows for case in self.cases)
        run, clock = decode.postlude(self.config, device, budget, rows), Clock(device)
        return lambda case: clock.once(lambda: run(case))

    def vllm_engines(self) -> dict[str, Seconds]:
        """Returns vLLM, if it is ready, without log-probs and with those of the sampled tokens."""
        if (vllm := self.vllm) is None:
            return {}
        return {PLAIN: lambda case: vllm.generate(case, None), LOGPROBS: lambda case: vllm.generate(case, 0)}


def main(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    results = Results(" ".join(sys.argv), arguments.device, arguments.json)
    names = [name for name in CASES if name in arguments.cases]
    began, pending = time.monotonic(), len(arguments.shape)
    for together in fitting([Shape(name, arguments) for name in arguments.shape]):
        with contextlib.ExitStack() as stack:
            for shape in together:
                if {PLAIN, LOGPROBS} & set(names):
                    shape.start_vllm(arguments.vllm, stack)
            if NATIVE in names and arguments.device == "cuda":  # meanwhile
                process = multiprocessing.get_context("spawn").Process(
                    target=compile_kernels, args=([shape.name for shape in together], arguments)
                )
                process.start()
                process.join()
            for shape in together:
                shape.wait_for_vllm()
            for shape in together:
                pending -= 1
                share = (began + arguments.seconds - time.monotonic()) / (pending + 1)
                compare(shape, names, arguments, results, time.monotonic() + share)
                if shape.vllm is not None:
                    results.versions["vllm"] = shape.vllm.version
                    results.write()
                    shape.vllm.close()
    return results.cases


def fitting(shapes: Iterable[Shape]) -> Iterator[list[Shape]]:
    """Yields the shapes in groups whose vLLMs fit into the memory together, beside one native generator at a time."""
    group: list[Shape] = []
    for shape in shapes:
        more = [*group, shape]
        if group and sum(s.vllm_bytes for s in more) + max(s.native_bytes for s in more) > MEMORY:
            yield group
            more = [shape]
        group = more
    if group:
        yield group


def compile_kernels(names: Sequence[str], arguments: argparse.Namespace) -> None:
    """Runs a few tokens of each workload, so that Triton's cache on disk has what the native generator needs.

    In a process of its own: it frees all memory at the end, and a kernel that fails there spoils nothing else.
    """
    for name in names:
        shape, began = Shape(name, arguments), time.perf_counter()
        result_or_failure(lambda shape=shape: run_briefly(shape, arguments.device))
        free_memory(arguments.device)
        print(f"{name}: native kernels compiled in {time.perf_counter() - began:.1f} s", flush=True)


def run_briefly(shape: Shape, device: str) -> dict[str, Any]:
    """Runs two tokens of each completion with a native generator that is not kept."""
    run = shape.native(device)
    return {case.name: run(case.first_tokens(2)) for case in shape.cases}


def compare(
    shape: Shape, names: Sequence[str], arguments: argparse.Namespace, results: Results, deadline: float
) -> None:
    """Times each engine in turns, after a call that is not counted. Adds the results by workload."""
    began = time.monotonic()
    engines = {name: run for name, run in shape.vllm_engines().items() if name in names}
    failures = {name: shape.vllm_failure for name in names if name != NATIVE and name not in engines}
    if NATIVE in names:
        made = result_or_failure(lambda: {"run": shape.native(arguments.device)})
        if "failed" in made:
            failures[NATIVE] = made["failed"]
        else:
            engines[NATIVE] = made.pop("run")
    for number, case in enumerate(shape.cases, start=1):
        end = began + (deadline - began) * number / len(shape.cases)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        failed = dict(failures)
        for turn in range(arguments.repeat + 1):
            if turn > 1 and time.monotonic() > end:
                break
            for name, run in engines.items():
                if name in failed:
                    continue
                answer = result_or_failure(lambda run=run, case=case: {"seconds": run(case)})
                if "failed" in answer:
                    failed[name] = answer["failed"]
                elif turn:
                    seconds[name].append(answer["seconds"])
        add(shape, case, seconds, failed, results)
    engines.clear()
    free_memory(arguments.device)


def add(
    shape: Shape, case: Workload, seconds: dict[str, list[float]], failed: dict[str, str], results: Results
) -> None:
    """Adds what each engine needed for one workload, and how many times as fast as the plain vLLM it is."""
    rates = {
        name: [case.tokens / number for number in numbers] for name, numbers in seconds.items() if name not in failed
    }
    for name, numbers in seconds.items():
        result: dict[str, Any] = {"shape": shape.name, "case": case.name, "engine": name, "tokens": case.tokens}
        if name in failed:
            result["failed"] = failed[name]
        else:
            median = statistics.median(rates[name])
            result |= {
                "seconds": [round(number, 4) for number in numbers],
                "tokens_per_second": round(median),
                "best": round(max(rates[name])),
            }
            if PLAIN in rates:
                result["times_vllm"] = round(median / statistics.median(rates[PLAIN]), 3)
        results.add(result)
        print(f"{shape.name:<16} {case.name:<44} {name:<16} {result.get('failed') or result}", flush=True)
