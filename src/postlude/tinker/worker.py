"""The ranks of one base model. Rank 0 gets calls from the HTTP process and makes all ranks run them.

A call is checked on rank 0, so that a client's mistake is found before any rank begins. Sampling runs step by step
between training calls: while both wait, they get equal time.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from postlude.engine.result import PassResult
from postlude.generate.protocol import SamplingUsage
from postlude.hf.load import load_tokenizer
from postlude.hf.peft import CONFIG as PEFT_CONFIG
from postlude.hf.peft import read_adapter
from postlude.hf.read_model import context_length, read_model
from postlude.hf.read_peft import from_peft
from postlude.objectives.summed import SUMMED_LOSSES
from postlude.tinker.backend import (
    BaseModelInfo,
    CloseSampler,
    ForwardBackward,
    ForwardBackwardResult,
    OpenSampler,
    PassRequest,
    SampleCommand,
    SaveForSampler,
    SnapshotSampler,
    TinkerCommand,
    TrainingCommand,
)
from postlude.tinker.datums import EXTRA_TOKENS, Pass, read_pass, to_result
from postlude.tinker.limits import check_prompt
from postlude.tinker.messages import (
    ERROR,
    PROGRESS,
    RAN,
    READY,
    RESULT,
    USAGE,
    Call,
    Cancel,
)
from postlude.tinker.model_sampler import ModelSampler
from postlude.tinker.prompt_scores import check_prompt_scores
from postlude.tinker.rank_connection import RankConnection, StagedPasses
from postlude.tinker.rank_models import RankModels
from postlude.tinker.rank_sampler import RankSampler, SampleCall, SampleEvents, SamplerWeights
from postlude.tinker.settings import WorkerSettings
from postlude.world.agreement import Rank0Controller, if_picklable

USAGE_SECONDS = 1.0  # between two reports of how busy sampling is
STEP_SECONDS = 0.05
"""How long several ranks sample before rank 0 looks for new calls, since each call of all ranks costs time."""
BURST_SECONDS, MAX_BURST_SECONDS = 0.01, 0.05
"""How long idle ranks wait for more sample calls, after the newest and after the first: a burst then has one prefill.

A streamed sample, which somebody watches, does not wait.
"""
LOG = logging.getLogger("postlude")
Result = TypeVar("Result")


class RankWorker:
    """What one rank does: `run` is called on all ranks together."""

    def __init__(self, settings: WorkerSettings, tokenizer: Any) -> None:
        self.index = dist.get_rank()
        self.models = RankModels(settings, tokenizer)
        engine = self.models.engine
        self.sampler = RankSampler(engine, tokenizer, settings)
        engine.copy_weights(self.sampler.generator.model)
        self.model_sampler = ModelSampler(lambda: RankSampler(engine, tokenizer, settings))

    def run(self, command: Callable[[RankWorker], Result]) -> Result:
        """Runs a command. Of all commands but `sample`, only rank 0's result is used."""
        return command(self)

    def run_pass(self, model_id: str, request: Pass) -> PassResult:
        return self.models.run_pass(model_id, request)

    def train(self, command: TrainingCommand[Any]) -> dict[str, float] | None:
        return self.models.run(command)

    def snapshot(self, model_id: str, adapter: str) -> None:
        """Gives the sampler a copy of a model's adapter."""
        self.sampler.load(adapter, *self.models.adapter(model_id))

    def load_adapter(self, adapter: str, directory: Path) -> None:
        """Gives the sampler the adapter of a directory."""
        engine = self.models.engine
        self.sampler.load(
            adapter, *from_peft(*read_adapter(directory), engine.config, engine.family, engine.block_types)
        )

    def load_model(self, name: str, directory: Path) -> None:
        """Makes a sampler of a directory with all weights."""
        self.model_sampler.load(name, directory)

    def remove_weights(self, weights: SamplerWeights) -> None:
        if weights.adapter is not None:
            self.sampler.remove(weights.adapter)
        if weights.model is not None:
            self.model_sampler.remove(weights.model)

    def sample(self, calls: Sequence[SampleCall], cancelled: Sequence[int], seconds: float) -> SampleEvents:
        """Adds this rank's share of new calls, and samples for about `seconds`, one step at least."""
        finished: dict[int, Any] = {}
        progress: list[Any] = []
        if cancelled:
            for sampler in (self.sampler, self.model_sampler):
                sampler.cancel(cancelled)
        if calls:
            local_calls = [call for call in calls if call.rank == self.index]
            self.model_sampler.add([call for call in local_calls if call.weights.model is not None])
            self.sampler.add([call for call in local_calls if call.weights.model is None])
        end = time.monotonic() + seconds
        while True:
            busy, usage = False, SamplingUsage()
            for sampler in (self.sampler, self.model_sampler):
                events = _step(sampler)
                finished |= events.finished
                progress += events.progress
                busy = busy or events.busy
                usage += events.usage
            if not busy or time.monotonic() >= end:
                return SampleEvents(finished, progress, busy, usage)


def _step(sampler: RankSampler | ModelSampler) -> SampleEvents:
    """Samples one token of each completion. If that fails, all requests of the sampler do."""
    try:
        return sampler.step()
    except Exception as error:
        if isinstance(error, torch.AcceleratorError) and not isinstance(error, torch.OutOfMemoryError):
            raise  # the device is unusable in this process
        LOG.exception("a step of sampling failed")
        failure = RuntimeError(f"sampling failed: {error}")
        return SampleEvents(dict.fromkeys(sampler.fail_all(), failure), [], busy=False)


_TrainingCalls: TypeAlias = deque[tuple[int, TinkerCommand[Any]]]


class Worker:
    """Rank 0: what commands do besides running on all ranks, and the loop that serves them.

    Snapshots of all weights of a model are kept in `directory`.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        rank: RankWorker,
        controller: Rank0Controller[Callable[[RankWorker], Any], Any],
        directory: Path,
    ) -> None:
        self.settings, self.rank, self.controller = settings, rank, controller
        self.vocab_size = rank.models.engine.config.vocab_size
        self.max_context_length = _max_context_length(settings)
        self.directory = directory
        self.staged = StagedPasses(self._read_pass)
        self.samplers: dict[str, SamplerWeights] = {}
        """What each sampler samples."""
        self._new: list[SampleCall] = []
        self._cancelled: list[int] = []
        self._sampling: set[int] = set()
        """The unfinished sample calls."""
        self._next_rank = 0
        self._sent_usage = 0.0
        self._send_ran: Callable[[], None] = lambda: None
        """Tells the HTTP process that the pass of the current call has run, before its result, which is large."""

    def describe(self, tokenizer: Any) -> BaseModelInfo:
        """Returns what clients are told of the base. A tokenizer that is in no directory is written to one."""
        source = Path(self.settings.source)
        files = source
        if not source.is_dir():
            files = self.directory / "tokenizer" / self.settings.source.replace("/", "-")
            tokenizer.save_pretrained(files)
        return BaseModelInfo(
            name=self.settings.name,
            tokenizer=str(files.absolute()),
            vocab_size=self.vocab_size,
            max_context_length=self.max_context_length,
            losses=tuple(SUMMED_LOSSES),
        )

    # --- training

    def forward_backward(self, model_id: str, request: PassRequest | int) -> ForwardBackwardResult:
        """Runs a pass: a request, or the number of one that was sent before its turn."""
        checked = self.staged.take(request) if isinstance(request, int) else self._read_pass(request)
        result = self.on_ranks(partial(RankWorker.run_pass, model_id=model_id, request=checked))
        self._send_ran()  # so the next call comes meanwhile
        return to_result(checked, result)

    def _read_pass(self, request: PassRequest) -> Pass:
        return read_pass(request, vocab_size=self.vocab_size, max_context_length=self.max_context_length)

    # --- sampling

    def open_sampler(self, sampler_id: str, directory: Path | None) -> None:
        """Opens a sampler of a directory, which has an adapter or all weights; without one, of the base."""
        weights = SamplerWeights()
        if directory is not None and (directory / PEFT_CONFIG).is_file():
            weights = SamplerWeights(adapter=sampler_id)
            self.on_ranks(partial(RankWorker.load_adapter, adapter=sampler_id, directory=directory))
        elif directory is not None:
            weights = SamplerWeights(model=sampler_id)
            self.on_ranks(partial(RankWorker.load_model, name=sampler_id, directory=directory))
        self.samplers[sampler_id] = weights

    def snapshot_sampler(self, model_id: str, sampler_id: str) -> None:
        if not self.rank.models.is_full(model_id):
            self.on_ranks(partial(RankWorker.snapshot, model_id=model_id, adapter=sampler_id))
            self.samplers[sampler_id] = SamplerWeights(adapter=sampler_id)
            return
        directory = self._snapshot_directory(sampler_id)
        try:
            directory.mkdir(parents=True)
            self.on_ranks(partial(RankWorker.train, command=SaveForSampler(model_id, directory)))
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self.on_ranks(partial(RankWorker.load_model, name=sampler_id, directory=directory))
        self.samplers[sampler_id] = SamplerWeights(model=sampler_id)

    def close_sampler(self, sampler_id: str) -> None:
        weights = self.samplers.pop(sampler_id, SamplerWeights())
        if weights != SamplerWeights():
            self.on_ranks(partial(RankWorker.remove_weights, weights=weights))
        if weights.model is not None:
            shutil.rmtree(self._snapshot_directory(sampler_id), ignore_errors=True)

    def _snapshot_directory(self, sampler_id: str) -> Path:
        return self.directory / "snapshots" / sampler_id

    def on_ranks(self, command: Callable[[RankWorker], Result]) -> Result:
        """Runs a command on all ranks. Returns rank 0's result."""
        result: Result = self.controller.call_all(command)[0]
        return result

    def _read_sample(self, call_id: int, sample: SampleCommand) -> SampleCall:
        """Returns a checked sample call. Raises ValueError or TypeError with a sentence for the client."""
        sampler_id, request = sample.sampler_id, sample.request
        if sampler_id not in self.samplers:
            raise ValueError(f"there is no sampler {sampler_id!r}: open it first.")
        check_prompt(request.prompt, request.sampling.max_new_tokens, self.max_context_length, self.vocab_size)
        check_prompt_scores(request, self.vocab_size)
        if request.num_samples < 1:
            raise ValueError(f"num_samples is {request.num_samples}, but the minimum is 1.")
        self._next_rank = (self._next_rank + 1) % (dist.get_world_size() if dist.is_initialized() else 1)
        weights = self.samplers[sampler_id]
        return SampleCall(call_id, weights, request, sample.streamed, self._next_rank)

    # --- the loop

    def serve(self, connection: RankConnection) -> None:
        """Runs calls until the HTTP process closes the connection."""
        training: _TrainingCalls = deque()
        sampling_due = 0.0  # seconds of sampling before the next training call
        while True:
            if not self._receive_all(training, connection):
                return
            if training and (not self._sampling or sampling_due <= 0):
                began = time.monotonic()
                self._run(*training.popleft(), connection)
                sampling_due = time.monotonic() - began
            elif self._sampling:
                began = time.monotonic()
                self._sample(connection)
                sampling_due -= time.monotonic() - began

    def _receive_all(self, training: _TrainingCalls, connection: RankConnection) -> bool:
        """Receives the calls that are there; if there is nothing to do, waits for some. Returns False at the end."""
        idle, burst_end, seconds = not training and not self._sampling, 0.0, 0.0
        while idle or connection.poll(seconds):
            message = connection.recv()
            if message is None:
                return False
            self._receive(message, training, connection)
            if idle:
                idle, burst_end = False, time.monotonic() + MAX_BURST_SECONDS
            may_wait = self._new and not training and not any(call.streamed for call in self._new)
            in_burst = may_wait and time.monotonic() < burst_end
            seconds = BURST_SECONDS if in_burst else 0.0
        return True

    def _receive(self, message: Call | Cancel, training: _TrainingCalls, connection: RankConnection) -> None:
        if isinstance(message, Cancel):
            if message.call_id in self._sampling:
                self._sampling.remove(message.call_id)
                self._new = [call for call in self._new if call.call_id != message.call_id]
                self._cancelled.append(message.call_id)
        elif not isinstance(message.command, SampleCommand):
            training.append((message.call_id, message.command))
        else:
            try:
                call = self._read_sample(message.call_id, message.command)
            except (ValueError, TypeError) as error:
                connection.send((ERROR, message.call_id, error))
            else:
                self._new.append(call)
                self._sampling.add(call.call_id)

    def run(self, command: TinkerCommand[Any]) -> Any:
        """Returns the result of a command. Only those whose checks or results are rank 0's have methods here."""
        match command:
            case ForwardBackward():
                return self.forward_backward(command.model_id, command.request)
            case OpenSampler():
                return self.open_sampler(command.sampler_id, command.directory)
            case SnapshotSampler():
                return self.snapshot_sampler(command.model_id, command.sampler_id)
            case CloseSampler():
                return self.close_sampler(command.sampler_id)
            case TrainingCommand():
                return self.on_ranks(partial(RankWorker.train, command=command))
            case _:
                raise TypeError(f"{type(command).__name__} is not run between steps of sampling.")

    def _run(self, call_id: int, command: TinkerCommand[Any], connection: RankConnection) -> None:
        self._send_ran = lambda: connection.send_at_once((RAN, call_id, None))
        try:
            result = self.run(command)
        except (ValueError, TypeError, LookupError, OSError, RuntimeError, ArithmeticError) as error:
            if not isinstance(error, (ValueError, TypeError)):
                LOG.exception("%s failed", type(command).__name__)
            if self.rank.models.refusal is not None:
                raise  # all models of these ranks are lost: they end, and the reason is reported
            connection.send((ERROR, call_id, _sendable(error)))
        else:
            connection.send((RESULT, call_id, result))

    def _sample(self, connection: RankConnection) -> None:
        calls, self._new = self._new, []
        cancelled, self._cancelled = self._cancelled, []
        seconds = 0.0 if self.controller.group is None else STEP_SECONDS
        usage = SamplingUsage()
        for events in self.controller.call_all(
            partial(RankWorker.sample, calls=calls, cancelled=cancelled, seconds=seconds)
        ):
            usage += events.usage
            for call_id, progress in events.progress:
                connection.send((PROGRESS, call_id, progress))
            for call_id, result in events.finished.items():
                self._sampling.discard(call_id)
                kind = ERROR if isinstance(result, Exception) else RESULT
                connection.send((kind, call_id, _sendable(result) if isinstance(result, Exception) else result))
        if not self._sampling or time.monotonic() - self._sent_usage >= USAGE_SECONDS:
            self._sent_usage = time.monotonic()
            connection.send((USAGE, 0, usage))


def run_worker(settings: WorkerSettings, address: str | tuple[str, int], key: bytes) -> None:
    """Runs on every rank until the HTTP process closes the connection at `address`."""
    tokenizer = load_tokenizer(settings.source, trust_remote_code=settings.trust_remote_code)
    rank = RankWorker(settings, tokenizer)
    controller: Rank0Controller[Callable[[RankWorker], Any], Any] = Rank0Controller(rank.run)

    def serve() -> None:
        with tempfile.TemporaryDirectory(prefix="postlude-", dir=settings.scratch) as directory:
            worker = Worker(settings, rank, controller, Path(directory))
            with (
                Client(address, authkey=key) as connection,
                RankConnection(connection, worker.staged) as rank_connection,
            ):
                rank_connection.send((READY, None, worker.describe(tokenizer)))
                worker.serve(rank_connection)

    controller.on_rank0(serve)
    controller.close()


def _max_context_length(settings: WorkerSettings) -> int:
    """Returns the longest sequence that the model, a microbatch and the KV cache can hold."""
    stated = context_length(read_model(settings.source)[1])
    limits = [settings.budget - EXTRA_TOKENS, settings.max_batch_tokens]
    return min(limits if stated is None else [*limits, stated])


def _sendable(error: Exception) -> Exception:
    return if_picklable(error) or RuntimeError(f"{type(error).__name__}: {error}")
