"""Messages between the HTTP process and rank 0 of a base model's ranks. No torch here.

Both send lists: all messages that wait at once, so that a burst of small ones is one write and one read.
"""

from __future__ import annotations

import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from postlude.tinker.backend import (
    AdamParams,
    ForwardBackwardResult,
    ModelSpec,
    PassRequest,
    SampleRequest,
    SampleResult,
)

if TYPE_CHECKING:
    from postlude.tinker.rank_models import RankModels

READY, RAN, RESULT, ERROR, PROGRESS = "ready", "ran", "result", "error", "progress"
"""What rank 0 sends: (kind, id of the call, value). RAN comes before the result of a pass, which is large."""
Message = TypeVar("Message")
Result = TypeVar("Result")


class ModelRank(Protocol):
    """One rank, as commands see it."""

    @property
    def models(self) -> RankModels:
        """The models that it trains."""


class AllRanks(Protocol):
    """All ranks, as commands see them from rank 0."""

    def on_ranks(self, command: Callable[[ModelRank], Result]) -> Result:
        """Runs a command on all ranks. Returns rank 0's result."""

    def forward_backward(self, model_id: str, request: PassRequest | int) -> ForwardBackwardResult:
        """Runs a pass."""

    def open_sampler(self, sampler_id: str, directory: Path | None) -> None:
        """Opens a sampler."""

    def snapshot_sampler(self, model_id: str, sampler_id: str) -> None:
        """Opens a sampler of a model's weights as they are now."""

    def close_sampler(self, sampler_id: str) -> None:
        """Closes a sampler."""


class TinkerCommand(Generic[Result]):
    """What the HTTP process asks of the ranks, and the type of what they return."""


class TrainingCommand(TinkerCommand[Result], ABC):
    """A command that runs alone, in the order in which it was sent. Commands that only load or free are among them."""

    @abstractmethod
    def run(self, ranks: AllRanks) -> Result:
        """Runs it, on rank 0."""


class RankCommand(TrainingCommand[Result]):
    """A command that all ranks run alike."""

    def run(self, ranks: AllRanks) -> Result:
        """Runs it on all ranks."""
        return ranks.on_ranks(self.run_on)

    @abstractmethod
    def run_on(self, rank: ModelRank) -> Result:
        """Runs it on one rank."""


@dataclass(frozen=True)
class CreateModel(RankCommand[None]):
    """Makes a model."""

    model_id: str
    spec: ModelSpec

    def run_on(self, rank: ModelRank) -> None:
        rank.models.create_model(self.model_id, self.spec)


@dataclass(frozen=True)
class RemoveModel(RankCommand[None]):
    """Frees a model."""

    model_id: str

    def run_on(self, rank: ModelRank) -> None:
        rank.models.remove_model(self.model_id)


@dataclass(frozen=True)
class ForwardBackward(TrainingCommand[ForwardBackwardResult]):
    """Runs a pass: a request, or the number of a pass that was staged."""

    model_id: str
    request: PassRequest | int

    def run(self, ranks: AllRanks) -> ForwardBackwardResult:
        return ranks.forward_backward(self.model_id, self.request)


@dataclass(frozen=True)
class OptimStep(RankCommand[Mapping[str, float]]):
    """Updates the weights."""

    model_id: str
    adam: AdamParams

    def run_on(self, rank: ModelRank) -> Mapping[str, float]:
        return rank.models.optim_step(self.model_id, self.adam)


@dataclass(frozen=True)
class DiscardGradients(RankCommand[None]):
    """Sets the gradients to zero."""

    model_id: str

    def run_on(self, rank: ModelRank) -> None:
        rank.models.discard_gradients(self.model_id)


@dataclass(frozen=True)
class SaveState(RankCommand[None]):
    """Writes weights and optimizer state."""

    model_id: str
    directory: Path

    def run_on(self, rank: ModelRank) -> None:
        rank.models.save_state(self.model_id, self.directory)


@dataclass(frozen=True)
class LoadState(RankCommand[None]):
    """Reads weights and, if asked, the optimizer state."""

    model_id: str
    directory: Path
    optimizer: bool

    def run_on(self, rank: ModelRank) -> None:
        rank.models.load_state(self.model_id, self.directory, self.optimizer)


@dataclass(frozen=True)
class SaveForSampler(RankCommand[None]):
    """Writes the weights for sampling."""

    model_id: str
    directory: Path

    def run_on(self, rank: ModelRank) -> None:
        rank.models.save_for_sampler(self.model_id, self.directory)


@dataclass(frozen=True)
class OpenSampler(TrainingCommand[None]):
    """Opens a sampler of a directory, or of the base."""

    sampler_id: str
    directory: Path | None

    def run(self, ranks: AllRanks) -> None:
        ranks.open_sampler(self.sampler_id, self.directory)


@dataclass(frozen=True)
class SnapshotSampler(TrainingCommand[None]):
    """Opens a sampler of a model's weights as they are now."""

    model_id: str
    sampler_id: str

    def run(self, ranks: AllRanks) -> None:
        ranks.snapshot_sampler(self.model_id, self.sampler_id)


@dataclass(frozen=True)
class CloseSampler(TrainingCommand[None]):
    """Frees a sampler."""

    sampler_id: str

    def run(self, ranks: AllRanks) -> None:
        ranks.close_sampler(self.sampler_id)


@dataclass(frozen=True)
class SampleCommand(TinkerCommand[SampleResult]):
    """Samples, at the same time as others."""

    sampler_id: str
    request: SampleRequest
    streamed: bool


@dataclass(frozen=True)
class Call:
    """A command of the HTTP process, with its number."""

    call_id: int
    command: TrainingCommand[Any] | SampleCommand


@dataclass(frozen=True)
class Cancel:
    """Ends a sample call."""

    call_id: int


@dataclass(frozen=True)
class StagePass:
    """A pass, sent before its turn; a `ForwardBackward` with its number runs it."""

    number: int
    request: PassRequest


@dataclass(frozen=True)
class UnstagePass:
    """Drops a staged pass."""

    number: int


def take_all(messages: queue.SimpleQueue[Message]) -> list[Message]:
    """Waits for a message. Returns all that are there."""
    received = [messages.get()]
    while not messages.empty():
        received.append(messages.get())
    return received
