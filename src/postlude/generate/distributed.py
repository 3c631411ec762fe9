"""The native generator on several ranks: every rank has the full model, and requests are divided among the ranks."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from postlude.checks import USER_ERRORS
from postlude.data.chat_tokenizer import AnyTokenizer
from postlude.engine import Engine
from postlude.engine.base_weights import adapter_matrices, copy_base
from postlude.generate.draft_switch import DraftSwitch
from postlude.generate.generator import Generator
from postlude.generate.probe import Probe, ProbeResult, WeightProbe, WeightsDiffer
from postlude.generate.protocol import AsyncRolloutEngine, Completion, FinishedCompletion, Request
from postlude.generate.sampling_params import SamplingParams, sampling_per_prompt
from postlude.generate.session import Session
from postlude.hf.read_model import end_tokens
from postlude.model import LanguageModel
from postlude.world.agreement import Rank0Controller, gather_and_decide, on_rank0

FP8_LIMIT = 0.5
"""The largest log-prob difference in FP8, in nats: four units of e4m3's precision. Whether the weights are right
does not depend on it."""
POLL_SECONDS = 0.1  # how long the ranks sample before rank 0 gets what has finished
POLICY = "policy"  # the name of the engine's adapter in a synced generator
Item = TypeVar("Item")


class DistributedEngine(AsyncRolloutEngine, Protocol):
    """A rollout engine on all ranks. Rank 0 submits and polls; the others wait in `controller` for its calls."""

    controller: Rank0Controller[Any, Any]

    def sync_weights(self) -> None:
        """Loads the newest weights. Every rank calls it before completions are requested."""

    def wake(self) -> None:
        """Takes memory that the trainer has freed. Every rank calls it after `sync_weights`."""

    def sleep(self) -> None:
        """Gives the memory back to the trainer. Every rank calls it."""

    def check_health(self) -> None:
        """Checks that generation can continue. Rank 0 calls it repeatedly while it waits for completions."""

    def take_metrics(self) -> dict[str, float]:
        """Returns the metrics since the last call, on rank 0."""

    def close(self) -> None:
        """Releases memory, connections and threads."""


class ReplicatedGenerator:
    """The full model on every rank. Each rank samples the completions of some of the requests.

    The same seeds give the same completions on any number of ranks. If every rank makes the same call of `generate`,
    every rank gets all completions. With `submit` and `poll`, which only rank 0 calls, only rank 0 gets them. On a CPU
    they are sampled in `fixed_order`; else requests join those that run.
    """

    def __init__(self, model: LanguageModel, tokenizer: AnyTokenizer | None, **limits: Any) -> None:
        self.model = model
        self.generator = Generator(model, tokenizer, **limits)
        self.fixed_order = model.embedding.weight.device.type == "cpu"
        self.adapter: str | None = None
        """The generator's adapter that all completions are sampled with."""
        self.controller: Rank0Controller[_RequestsByRank, list[FinishedCompletion]] = Rank0Controller(self._sample)
        self.draft_switch: DraftSwitch | None = None
        """Turns drafting off while it does not pay; None where that would change the bits of repeatable results."""
        if self.generator.drafting and (model.batch_invariant or not self.fixed_order):
            self.draft_switch = DraftSwitch()
        self._session = Session(self.generator, grows=False)
        self._request_ids: dict[int, int] = {}  # by id in this rank's session
        self._next_id = itertools.count()
        self._submitted: dict[int, Request] = {}  # on rank 0; no rank has them yet
        self._cancelled: list[int] = []  # on rank 0; no rank knows it yet
        self._unfinished: dict[int, tuple[int, int]] = {}  # on rank 0; the rank and the number of completions

    def sync_weights(self) -> None:
        """Does nothing to the weights, which do not change. Requests that an error left unfinished are dropped.

        Cached prefixes too, so that the bits of completions do not depend on what was sampled before a run resumed.
        """
        self._drop_requests()
        self.generator.forget_prefixes()
        if self.draft_switch is not None:  # by rank 0's measurements
            self.generator.set_drafting(on_rank0(self.draft_switch.next_round, self.controller.group))

    def wake(self) -> None:
        """Does nothing: `generate` takes memory when it is called."""

    def sleep(self) -> None:
        """Does nothing: what a large call needs is freed at its end."""

    def check_health(self) -> None:
        """Does nothing."""

    def take_metrics(self) -> dict[str, float]:
        """Returns how much faster drafts are than no drafts, where `draft_switch` has measured it."""
        speedup = None if self.draft_switch is None else self.draft_switch.speedup
        return {} if speedup is None else {"draft_speedup": speedup}

    def close(self) -> None:
        """Frees the KV cache."""
        self.generator.release()
        self.controller.close()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        n: int = 1,
        *,
        first_index: int = 0,
    ) -> list[list[Completion]]:
        """Calls `Generator.generate`, with the prompts divided among all ranks. Give each prompt its own seed."""
        self._prepare()
        rank, size, samplings = dist.get_rank(), dist.get_world_size(), sampling_per_prompt(sampling, len(prompts))
        by_rank: list[list[list[Completion]]] = [[] for _ in range(size)]
        local = prompts[rank::size]
        completions = (
            self.generator.generate(local, samplings[rank::size], n, first_index=first_index, adapter=self.adapter)
            if local
            else []
        )
        self.generator.release(only_if_large=True)
        dist.all_gather_object(by_rank, completions)
        return interleave(by_rank, len(prompts))

    def submit(self, request: Request) -> int:
        """Queues a request for the next `poll`. Returns its id."""
        if request.adapter is not None:
            raise ValueError(f"the request names the adapter {request.adapter!r}, but this engine chooses its own.")
        request_id = next(self._next_id)
        self._submitted[request_id] = request
        return request_id

    def poll(self, timeout: float | None = 0.0) -> list[FinishedCompletion]:
        """Lets all ranks sample for about `POLL_SECONDS`, without a timeout until a completion finishes."""
        finished: list[FinishedCompletion] = []
        while not finished and (self._submitted or self._unfinished):
            for results in self.controller.call_all(self._divide_requests()):
                finished += results
            for result in finished:
                rank, count = self._unfinished.pop(result.request_id)
                if count > 1 and result.completion is not None:  # of a request that fails, there is one result
                    self._unfinished[result.request_id] = rank, count - 1
            if timeout is not None:
                break
        return finished

    def cancel(self, request_id: int) -> None:
        """Ends a request with the next `poll`."""
        if self._submitted.pop(request_id, None) is None and request_id in self._unfinished:
            self._cancelled.append(request_id)

    def _divide_requests(self) -> _RequestsByRank:
        """Returns the requests to begin. Each goes to the rank with the fewest unfinished completions."""
        by_rank: _RequestsByRank = [{} for _ in range(dist.get_world_size())]
        for request_id in self._cancelled:
            if request_id in self._unfinished:
                rank, _ = self._unfinished.pop(request_id)
                by_rank[rank][request_id] = None
        self._cancelled = []
        if self.fixed_order and self._unfinished:
            return by_rank
        counts = Counter(dict.fromkeys(range(len(by_rank)), 0))
        for rank, count in self._unfinished.values():
            counts[rank] += count
        for request_id, request in self._submitted.items():
            rank = min(counts, key=lambda rank: counts[rank])
            by_rank[rank][request_id] = request
            self._unfinished[request_id] = rank, request.n
            counts[rank] += request.n
        self._submitted = {}
        return by_rank

    def _sample(self, requests: _RequestsByRank) -> list[FinishedCompletion]:
        """Begins this rank's requests, and samples for a while. Returns the completions that finished."""
        self._prepare()
        start, finished = time.monotonic(), list[FinishedCompletion]()
        refused: list[FinishedCompletion] = []
        for request_id, request in requests[dist.get_rank()].items():
            if request is None:
                self._abort(request_id)
                continue
            try:
                self._request_ids[self._session.add(replace(request, adapter=self.adapter))] = request_id
            except USER_ERRORS as error:
                refused.append(FinishedCompletion(request_id, 0, None, error))
        unfinished, tokens = self._session.count_unfinished()
        while self._session.busy:
            finished += self._session.step()
            if time.monotonic() >= start + POLL_SECONDS:
                break
        if self.draft_switch is not None and unfinished:
            ended = [result.completion.tokens for result in finished if result.completion is not None]
            sampled = self._session.count_unfinished()[1] + sum(map(len, ended)) - tokens
            self.draft_switch.add(unfinished, sampled, time.monotonic() - start)
        if not self._session.busy:
            self.generator.release(only_if_large=True)
        return refused + [replace(result, request_id=self._request_ids[result.request_id]) for result in finished]

    def _abort(self, request_id: int) -> None:
        """Ends a request of this rank."""
        for session_id in [key for key, value in self._request_ids.items() if value == request_id]:
            self._session.abort(session_id)

    def _prepare(self) -> None:
        """Gets ready to sample, on every rank."""

    def _drop_requests(self) -> None:
        if self._session.busy:
            self._session = Session(self.generator, grows=False)
        self._request_ids, self._submitted, self._unfinished, self._cancelled = {}, {}, {}, []


_RequestsByRank: TypeAlias = list[dict[int, Request | None]]
"""Requests to begin, by their ids; None for one to end."""


def interleave(by_rank: Sequence[Sequence[Item]], count: int) -> list[Item]:
    """Returns `count` items in order, of which rank r of n has the items r, r + n, r + 2n, …"""
    return [by_rank[index % len(by_rank)][index // len(by_rank)] for index in range(count)]


class SyncedGenerator(ReplicatedGenerator):
    """A generator with a copy of an engine's weights, updated at every call. The engine may have any layout.

    If the engine has adapters, the frozen model is copied once, and then only the active adapter, which is not merged.
    With a `probe`, every rank's log-probs are compared with the engine's before the first completions of each copy.
    Weights in FP8 are quantised again from each copy. With FP8 the probe checks three things: the log-probs without it,
    within the usual limit; that every FP8 number is the rounded weight; and the log-probs in FP8, within `FP8_LIMIT`.
    """

    def __init__(
        self, engine: Engine, tokenizer: AnyTokenizer | None, *, probe: WeightProbe | None = None, **limits: Any
    ) -> None:
        self.engine, self.probe = engine, probe
        self.logprob_diff: float | None = None
        """The largest log-prob difference of a rank at the last comparison: see `ProbeResult`."""
        self.fp8_logprob_diff: float | None = None
        """The same in FP8."""
        self._probe_result: ProbeResult | None = None
        self._pending_probe: Probe | None = None
        with torch.device("meta"):
            model = LanguageModel(
                engine.config,
                dtype=engine.compute_dtype,
                blocks=engine.block_types,
                batch_invariant=engine.options.batch_invariant,
            )
        limits.setdefault("eos_tokens", end_tokens(engine.generation_config, tokenizer))
        super().__init__(model.to_empty(device=engine.device).eval(), tokenizer, **limits)
        self.copied_step = -1
        self._copied_adapter: str | None = None

    def sync_weights(self) -> None:
        """Copies the engine's weights, if they changed since the last copy."""
        super().sync_weights()
        self._copy_if_changed()

    def _copy_if_changed(self) -> None:
        if (self.copied_step, self._copied_adapter) != (self.engine.step, self.engine.adapters.active):
            self._copy()
            self.generator.weights_changed()
            self.copied_step, self._copied_adapter = self.engine.step, self.engine.adapters.active
            self._pending_probe = None if self.probe is None else self.probe.score()

    def _copy(self) -> None:
        if not self.engine.adapters.enabled:
            self.engine.copy_weights(self.model)
            return
        if self.copied_step < 0:
            copy_base(self.engine, self.model)
        if self.engine.adapters.active is None:  # the model alone
            self.adapter = None
            return
        self.generator.load_adapter(POLICY, *adapter_matrices(self.engine))
        self.adapter = POLICY

    def take_metrics(self) -> dict[str, float]:
        """Returns the log-prob differences of the last comparison too."""
        differences = {"sync/logprob_diff": self.logprob_diff, "sync/fp8_logprob_diff": self.fp8_logprob_diff}
        known = {name: difference for name, difference in differences.items() if difference is not None}
        return super().take_metrics() | known

    def _prepare(self) -> None:
        """Copies the engine's weights, if they changed, and compares those that were copied."""
        self._copy_if_changed()
        if self._pending_probe is not None:
            self._compare(self._pending_probe)
            self._pending_probe = None

    def _compare(self, probe: Probe) -> None:
        """Compares the log-probs of all ranks with the engine's. Every rank raises `WeightsDiffer` if one differs."""

        generator, prompts = self.generator, [list(request.prompt) for request in probe.requests]
        samplings = [request.sampling for request in probe.requests]

        def complete() -> list[Completion]:
            return [completion for (completion,) in generator.generate(prompts, samplings, adapter=self.adapter)]

        def compare() -> tuple[ProbeResult, float]:
            with generator.without_fp8():
                result = probe.compare(complete(), self._probe_result)
            if not result.problem:
                self._probe_result = result
            if not generator.uses_fp8 or result.problem:
                return result, 0.0
            difference = probe.logprob_diff(complete())
            problem = "" if generator.fp8_weights is None else generator.fp8_weights.problem()
            if not problem and not difference <= FP8_LIMIT:
                problem = (
                    f"computes something else in FP8: its log-probs differ by {difference:.2g} from the trainer's, "
                    f"and rounding explains {FP8_LIMIT:g}"
                )
            return replace(result, problem=problem), difference

        def largest_differences(results: list[tuple[ProbeResult, float]]) -> tuple[float, float]:
            for rank, (result, _) in enumerate(results):
                if result.problem:
                    raise WeightsDiffer(f"the native generator of rank {rank} {result.problem}.")
            return max(result.logprob_diff for result, _ in results), max(difference for _, difference in results)

        self.logprob_diff, fp8_diff = gather_and_decide(
            compare, largest_differences, self.controller.group, raise_cause=True
        )
        self.fp8_logprob_diff = fp8_diff if generator.uses_fp8 else None
