"""Sampling on one rank: a whole copy of a model, adapters by name, and requests that join while others run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.engine import Engine
from postlude.generate.generator import Generator
from postlude.generate.protocol import Completion, Request
from postlude.generate.session import Session
from postlude.hf.read_model import end_tokens
from postlude.lora import AdapterConfig
from postlude.model import LanguageModel
from postlude.tinker.backend import SampledSequence, SampleProgress, SampleRequest, SampleResult, TopK
from postlude.tinker.prompt_scores import PromptScores, score_completions, score_prompts
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
    progress: Sequence[tuple[int, SampleProgress]]
    busy: bool


@dataclass(eq=False)
class _Running:
    call: SampleCall
    scores: PromptScores
    completions: dict[int, Completion] = field(default_factory=dict)
    reported: dict[int, int] = field(default_factory=dict)
    """Tokens of each completion that were reported."""


class RankSampler:
    """Samples one model, whose weights the caller sets, and named adapters.

    Requests of the same adapter run as one batch.
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
        self._running: dict[int, _Running] = {}  # by request id of the session

    @property
    def busy(self) -> bool:
        """Whether requests are left."""
        return bool(self._running)

    def load(self, name: str, configs: Mapping[str, AdapterConfig], pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Loads an adapter under a name."""
        self.generator.load_adapter(name, configs, pairs)

    def remove(self, name: str) -> None:
        """Removes an adapter. Its running requests fail."""
        if name in self.generator.adapters.names:
            self.generator.remove_adapter(name)

    def add(self, calls: Sequence[SampleCall]) -> dict[int, Exception]:
        """Adds requests, and scores their prompts. Returns the errors of those that cannot be run, by call."""
        errors: dict[int, Exception] = {}
        for adapter in dict.fromkeys(call.weights.adapter for call in calls):
            adapter_calls = [call for call in calls if call.weights.adapter == adapter]
            with self.generator.generation_mode(adapter):
                scores = score_prompts(self.generator.model, [call.request for call in adapter_calls], self.budget)
            for call, call_scores in zip(adapter_calls, scores, strict=True):
                request = call.request
                prompt = tuple(request.prompt.tolist())
                try:
                    request_id = self._session.add(
                        Request(prompt, request.sampling, request.num_samples, adapter=adapter)
                    )
                except (ValueError, TypeError) as error:
                    errors[call.call_id] = error
                else:
                    self._running[request_id] = _Running(call, call_scores)
        return errors

    def cancel(self, call_ids: Sequence[int]) -> None:
        """Ends requests without a result."""
        for request_id, running in list(self._running.items()):
            if running.call.call_id in call_ids:
                self._session.abort(request_id)
                del self._running[request_id]

    def step(self) -> SampleEvents:
        """Samples a token of every running completion."""
        finished: dict[int, SampleResult | Exception] = {}
        for result in self._session.step() if self._running else ():
            running = self._running.get(result.request_id)
            if running is None:
                continue  # another completion of the request has failed
            if result.completion is None:
                assert result.error is not None
                self.cancel([running.call.call_id])
                finished[running.call.call_id] = result.error
                continue
            running.completions[result.index] = result.completion
            if len(running.completions) == running.call.request.num_samples:
                del self._running[result.request_id]
                finished[running.call.call_id] = self._result(running)
        return SampleEvents(finished, self._progress(), self.busy)

    def fail_all(self) -> list[int]:
        """Drops all requests after a step that failed. Returns their calls."""
        calls = [running.call.call_id for running in self._running.values()]
        self._running.clear()
        self.generator.release()
        self._session = Session(self.generator)
        return calls

    def _progress(self) -> list[tuple[int, SampleProgress]]:
        events = []
        for request_id, running in self._running.items():
            if running.call.streamed:
                for index, state in self._session.unfinished(request_id).items():
                    done = running.reported.get(index, 0)
                    if len(state.tokens) > done:
                        running.reported[index] = len(state.tokens)
                        new = SampleProgress(index, list(state.tokens[done:]), list(state.logprobs[done:]))
                        events.append((running.call.call_id, new))
        return events

    def _result(self, running: _Running) -> SampleResult:
        request = running.call.request
        completions = [running.completions[index] for index in range(request.num_samples)]
        tops: Sequence[TopK | None] = [None] * len(completions)
        if request.topk_sample_logprobs:
            with self.generator.generation_mode(running.call.weights.adapter):
                tops = score_completions(self.generator.model, request, completions, self.budget)
        return SampleResult(
            [
                SampledSequence(
                    completion.finish_reason,
                    np.asarray(completion.tokens, dtype=np.int32),
                    np.asarray(completion.logprobs, dtype=np.float32),
                    top,
                    completion.text,
                )
                for completion, top in zip(completions, tops, strict=True)
            ],
            running.scores.logprobs,
            running.scores.top,
            running.scores.targets,
        )
