"""SFT: learn the answers that were written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from postlude.data import Batch
from postlude.data.chat import Encoded, sft_batch
from postlude.objectives import SFT
from postlude.recipes.examples import Encodings, Examples
from postlude.recipes.preflight import Check, Subject, of_rows, of_training
from postlude.recipes.schema import Kind
from postlude.recipes.settings import ObjectiveFile, built
from postlude.recipes.supervised import Supervised, SupervisedTrainer
from postlude.recipes.trainer import train

SFTObjective: TypeAlias = Annotated[SFT, Kind("sft")] | Annotated[ObjectiveFile, Kind("file")]


@dataclass(frozen=True, kw_only=True)
class SFTConfig(Supervised):
    """Everything that decides an SFT run."""

    data: Examples
    """The rows to learn from."""
    objective: SFTObjective = field(default_factory=lambda: SFT(over="loss_mask"))
    """What is minimised. One of yours finds the column "loss_mask": 1 for tokens to learn."""


class SFTTrainer(SupervisedTrainer[Encoded]):
    """A run of SFT."""

    name = "sft"

    def __init__(self, config: SFTConfig, device: str) -> None:
        self.config = config
        super().__init__(config, device, built(config.objective))

    def read(self) -> Encodings[Encoded]:
        """The rows to learn from."""
        return self.config.data.read(self.tokenizer, self.config.budget)

    def batch_of(self, rows: Sequence[Encoded], *, held_out: bool = False) -> tuple[Batch, dict[str, Any]]:
        """Sequences, and which of their tokens are learned."""
        return sft_batch(rows), {}


def checks(subject: Subject) -> list[Check]:
    """What must hold before a run begins."""
    return [*of_training(subject), *of_rows(subject, subject.config.data)]


def run(config: SFTConfig, device: str = "cpu") -> Path:
    """Run or continue `config` on the ranks that are started. Returns the report's path."""
    return train(SFTTrainer(config, device))
