"""Sampling on one rank: a whole copy of a model, adapters by name, and requests that join while others run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.engine import Engine
from postlude.generate.generator import Generator
from postlude.generate.protocol import Completion, Progress, Request, SamplingUsage
from postlude.generate.session import Session, SessionTask, in_turns
from postlude.hf.read_model import end_tokens
from postlude.lora import AdapterConfig
from postlude.model import LanguageModel
from postlude.tinker.backend import PromptScores, SampleRequest, SampleResult, TopK
from postlude.tinker.prompt_scores import has_prompt_scores, score_completions, score_prompts
from postlude.tinker.settings import WorkerSettings


@dataclass(frozen=True)
class SamplerWeights:
    """What a sampler samples: the base, the base with an `adapter`, or the `model` of this name, with all weights."""

    adapter: str | None = None
    model: str | None = None


@dataclass(frozen=True)
class SampleCall:
    """A request as all ranks get it. `rank` runs it."""

    call_id: int
    weights: SamplerWeights
    request: SampleRequest
    streamed: bool
    rank: int


@dataclass(frozen=True)
class SampleEvents:
    """What happened to the requests of a rank since the last step."""

    finished: Mapping[int, SampleResult | Exception]
    """By call."""
    progress: Sequence[tuple[int, Progress]]
    busy: bool
    usage: SamplingUsage = field(default_factory=SamplingUsage)


@dataclass(eq=False)
class _Running:
    call: SampleCall
    scores: PromptScores = field(default_factory=PromptScores)
    request_id: int | None = None
    """In the session; None while its prompt is to be scored, and when its completions are finished."""
    completions: dict[int, Completion] = field(default_factory=dict)
    reported: dict[int, int] = field(default_factory=dict)
    """Tokens of each completion that were reported."""

    @property
    def client(self) -> tuple[str, ...]:
        """Who asked."""
        return self.call.request.client


class RankSampler:
    """Samples one model, whose weights the caller sets, and named adapters.

    Requests of the same adapter run as one batch. Prompts are scored between two steps, a microbatch at a time, with
    clients in turns.
    """

    def __init__(self, engine: Engine, tokenizer: ChatTokenizer, settings: WorkerSettings) -> None:
        with torch.device("meta"):
            model = LanguageModel(engine.config, dtype=engine.compute_dtype, blocks=engine.block_types)
        model = model.to_empty(device=engine.device).eval()
        self.generator = Generator(
            model,
            tokenizer,
            max_batch_tokens=settings.max_batch_tokens,
            max_sequences=settings.max_sequences,
            eos_tokens=end_tokens(engine.generation_config, tokenizer),
        )
        self.budget = settings.budget
        self._session = Session(self.generator)
        self._running: dict[int, _Running] = {}  # by call
        self._requests: dict[int, _Running] = {}  # by request id of the session
        self._to_score: dict[str | None, list[_Running]] = {}  # by adapter
        self._finished: dict[int, SampleResult | Exception] = {}  # by call, since the last step

    @property
    def busy(self) -> bool:
        return bool(self._running or self._finished)

    def load(self, name: str, configs: Mapping[str, AdapterConfig], pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        self.generator.load_adapter(name, configs, pairs)

    def remove(self, name: str) -> None:
        """Removes an adapter. Its running requests fail."""
        if name in self.generator.adapters.names:
            self.generator.remove_adapter(name)

    def add(self, calls: Sequence[SampleCall]) -> None:
        for call in calls:
            running = self._running[call.call_id] = _Running(call)
            if not has_prompt_scores(call.request):
                self._start(running)
                continue
            adapter = call.weights.adapter
            if adapter not in self._to_score:
                self._to_score[adapter] = []
                self._add_task(running, self._score_prompts, self._fail_prompts)
            self._to_score[adapter].append(running)

    def cancel(self, call_ids: Sequence[int]) -> None:
        """Ends requests without a result."""
        for call_id in call_ids:
            self._finished.pop(call_id, None)
            running = self._running.pop(call_id, None)
            if running is not None and running.request_id is not None:
                self._session.abort(running.request_id)
                del self._requests[running.request_id]

    def step(self) -> SampleEvents:
        """Samples a token of every running completion, and scores some prompts."""
        for result in self._session.step() if self._session.busy else ():
            running = self._requests[result.request_id]
            if result.completion is None:
                assert result.error is not None
                self._end(running, result.error)
                continue
            running.completions[result.index] = result.completion
            if len(running.completions) == running.call.request.num_samples:
                del self._requests[result.request_id]
                running.request_id = None
                if running.call.request.topk_sample_logprobs:
                    self._add_task(running, self._score_completions, self._end)
                else:
                    self._end(running, self._result(running, ()))
        finished, self._finished = self._finished, {}
        return SampleEvents(finished, self._progress(), self.busy, self._session.usage())

    def _start(self, running: _Running) -> None:
        request, adapter = running.call.request, running.call.weights.adapter
        prompt = tuple(request.prompt.tolist())
        try:
            running.request_id = self._session.add(
                Request(prompt, request.sampling, request.num_samples, adapter=adapter, client=request.client)
            )
        except (ValueError, TypeError) as error:
            self._end(running, error)
        else:
            self._requests[running.request_id] = running

    def _end(self, running: _Running, result: SampleResult | Exception) -> None:
        if running.request_id is not None:
            del self._requests[running.request_id]
        if self._running.pop(running.call.call_id, None) is not None:  # else it was cancelled
            self._finished[running.call.call_id] = result

    def _add_task(
        self, running: _Running, run: Callable[[_Running], None], fail: Callable[[_Running, Exception], None]
    ) -> None:
        adapter = running.call.weights.adapter
        self._session.add_task(SessionTask(adapter, running.client, partial(run, running), partial(fail, running)))

    def _score_prompts(self, first: _Running) -> None:
        """Scores prompts of an adapter, as many as a microbatch holds, and starts their requests."""
        adapter = first.call.weights.adapter
        waiting = [running for running in self._to_score.pop(adapter) if running.call.call_id in self._running]
        waiting = list(in_turns(waiting))
        lengths = itertools.accumulate(len(running.call.request.prompt) for running in waiting)
        count = max(1, sum(length <= self.budget for length in lengths))
        batch, rest = waiting[:count], waiting[count:]
        if rest:
            self._to_score[adapter] = rest
            self._add_task(rest[0], self._score_prompts, self._fail_prompts)
        scores = score_prompts(self.generator.model, [running.call.request for running in batch], self.budget)
        for running, prompt_scores in zip(batch, scores, strict=True):
            running.scores = prompt_scores
            self._start(running)

    def _fail_prompts(self, first: _Running, error: Exception) -> None:
        for running in self._to_score.pop(first.call.weights.adapter):
            self._end(running, error)

    def _score_completions(self, running: _Running) -> None:
        if running.call.call_id not in self._running:
            return
        completions = [running.completions[index] for index in range(running.call.request.num_samples)]
        tops = score_completions(self.generator.model, running.call.request, completions, self.budget)
        self._end(running, self._result(running, tops))

    def fail_all(self) -> list[int]:
        """Drops all requests after a step that failed. Returns their calls."""
        calls = [*self._running, *self._finished]
        for requests in (self._running, self._requests, self._to_score, self._finished):
            requests.clear()
        self.generator.release()
        self._session = Session(self.generator)
        return calls

    def _progress(self) -> list[tuple[int, Progress]]:
        events = []
        for request_id, running in self._requests.items():
            if running.call.streamed:
                for index, state in self._session.unfinished(request_id).items():
                    done = running.reported.get(index, 0)
                    if len(state.tokens) > done:
                        running.reported[index] = len(state.tokens)
                        new = Progress(0, index, list(state.tokens[done:]), list(state.logprobs[done:]), None)
                        events.append((running.call.call_id, new))
        return events

    def _result(self, running: _Running, tops: Sequence[TopK]) -> SampleResult:
        completions = [completion for _, completion in sorted(running.completions.items())]
        return SampleResult(completions, tops, running.scores)
