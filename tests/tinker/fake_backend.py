"""Fake backend with one number per model. Records its calls, so tests can check what ran, when and how often."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from postlude.generate.protocol import Completion, Progress, SamplingUsage
from postlude.tinker.backend import (
    AdamParams,
    BaseModelInfo,
    DiscardGradients,
    ForwardBackward,
    ForwardBackwardResult,
    LoadState,
    ModelSpec,
    OptimStep,
    PassRequest,
    PromptScores,
    SampleRequest,
    SampleResult,
    SaveForSampler,
    SaveState,
    SnapshotSampler,
    TopK,
    TrainingCommand,
)

BASE, OTHER = "fake/base", "fake/other"
VOCAB, CONTEXT = 300, 64


class FakeBackend:
    """A model is one weight. A pass adds the sum of its `weights` to the gradient; a step adds lr · gradient."""

    def __init__(self, tokenizer: str = "fake") -> None:
        losses = ("cross_entropy", "importance_sampling")
        self.base_models = [BaseModelInfo(name, tokenizer, VOCAB, CONTEXT, losses) for name in (BASE, OTHER)]
        self.calls: list[tuple[Any, ...]] = []
        self.weights: dict[str, float] = {}
        self.gradients: dict[str, float] = {}
        self.samplers: dict[str, float] = {}
        self.staged: set[PassRequest] = set()
        self.failure: Exception | None = None
        """Raised by the next call that trains or saves."""
        self.gate = asyncio.Event()
        self.gate.set()
        """Passes and samples wait while it is not set."""
        self.results: asyncio.Event | None = None
        """If there is one, passes say that they ran, and their results wait while it is not set."""
        self.cancelled = 0

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def usage(self) -> SamplingUsage:
        return SamplingUsage(running=2, waiting=1, used_tokens=10, cache_tokens=100)

    def _record_call(self, *call: Any) -> None:
        self.calls.append(call)
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    async def create_model(self, model_id: str, spec: ModelSpec) -> None:
        self._record_call("create", model_id, spec)
        self.weights[model_id], self.gradients[model_id] = 0.0, 0.0

    def stage(self, model_id: str, request: PassRequest) -> None:
        self.staged.add(request)

    def unstage(self, request: PassRequest) -> None:
        self.staged.remove(request)

    async def forward_backward(
        self, model_id: str, request: PassRequest, ran: Callable[[], None] | None = None
    ) -> ForwardBackwardResult:
        self.staged.discard(request)
        data = request.data
        total = float(sum(datum.loss_fn_inputs["weights"].sum() for datum in data))
        self._record_call("forward" if request.forward_only else "pass", model_id, total, dict(request.config))
        await self.gate.wait()
        await asyncio.sleep(0)
        if not request.forward_only:
            self.gradients[model_id] += total
        outputs = [
            {"logprobs": np.full(datum.loss_fn_inputs["target_tokens"].shape, -self.weights[model_id], np.float32)}
            for datum in data
        ]
        if self.results is not None and ran is not None:
            ran()
            await self.results.wait()
            self._record_call("result")
        return ForwardBackwardResult(outputs, {"loss:sum": total})

    async def train(self, command: TrainingCommand[Any], ran: Callable[[], None] | None = None) -> Any:
        name = command.model_id
        match command:
            case ForwardBackward(request=request):
                result: Any = self.forward_backward(name, request, ran)
            case OptimStep(adam=adam):
                result = self.optim_step(name, adam)
            case DiscardGradients():
                result = self.discard_gradients(name)
            case SaveState(directory=directory):
                result = self.save_state(name, directory)
            case LoadState(directory=directory, optimizer=optimizer):
                result = self.load_state(name, directory, optimizer=optimizer)
            case SaveForSampler(directory=directory):
                result = self.save_for_sampler(name, directory)
            case SnapshotSampler(sampler_id=sampler_id):
                result = self.snapshot_sampler(name, sampler_id)
        return await result

    async def optim_step(self, model_id: str, adam: AdamParams) -> Mapping[str, float]:
        self._record_call("step", model_id, adam)
        await asyncio.sleep(0)
        self.weights[model_id] += adam.learning_rate * self.gradients[model_id]
        self.gradients[model_id] = 0.0
        return {"weight": self.weights[model_id]}

    async def discard_gradients(self, model_id: str) -> None:
        self._record_call("discard", model_id)
        self.gradients[model_id] = 0.0

    async def save_state(self, model_id: str, directory: Path) -> None:
        (directory / "state.json").write_text(json.dumps(self.weights[model_id]))
        self._record_call("save_state", model_id)

    async def load_state(self, model_id: str, directory: Path, *, optimizer: bool) -> None:
        self._record_call("load_state", model_id, optimizer)
        self.weights[model_id] = json.loads((directory / "state.json").read_text())

    async def save_for_sampler(self, model_id: str, directory: Path) -> None:
        (directory / "adapter_model.safetensors").write_text(json.dumps(self.weights[model_id]))
        self._record_call("save_for_sampler", model_id)

    async def remove_model(self, model_id: str) -> None:
        self._record_call("remove", model_id)
        self.weights.pop(model_id, None)

    async def open_sampler(self, sampler_id: str, base_model: str, directory: Path | None) -> None:
        self._record_call("open_sampler", sampler_id, base_model)
        file = directory / "adapter_model.safetensors" if directory is not None else None
        self.samplers[sampler_id] = json.loads(file.read_text()) if file is not None else 0.0

    async def snapshot_sampler(self, model_id: str, sampler_id: str) -> None:
        self._record_call("snapshot", model_id, sampler_id)
        self.samplers[sampler_id] = self.weights[model_id]

    async def close_sampler(self, sampler_id: str) -> None:
        self._record_call("close_sampler", sampler_id)
        self.samplers.pop(sampler_id, None)

    async def sample(
        self, sampler_id: str, request: SampleRequest, progress: Callable[[Progress], None] | None = None
    ) -> SampleResult:
        self._record_call("sample", sampler_id, request)
        weight = self.samplers[sampler_id]
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        prompt, length = request.prompt, min(request.sampling.max_new_tokens, 4)
        tokens = (prompt[-1] + 1 + np.arange(length, dtype=np.int32)) % VOCAB
        logprobs = [-weight] * length
        for number in range(request.num_samples if progress is not None else 0):
            for token in tokens.tolist():
                progress(Progress(0, number, [token], [-weight], None))
                await asyncio.sleep(0)
        scores = np.concatenate([[np.nan], np.full(len(prompt) - 1, -weight)]).astype(np.float32)
        if request.prompt_logprobs_last_n is not None:
            scores[: len(prompt) - request.prompt_logprobs_last_n] = np.nan
        k = request.topk_prompt_logprobs
        topk = TopK(np.tile(np.arange(k, dtype=np.int32), (len(prompt), 1)), np.zeros((len(prompt), k), np.float32))
        text = "".join(map(chr, tokens.tolist()))
        return SampleResult(
            [Completion(tokens.tolist(), logprobs, logprobs, "length", text=text)] * request.num_samples,
            prompt=PromptScores(scores if request.prompt_logprobs else None, topk if k else None),
        )
