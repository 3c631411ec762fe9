"""SFT: learn the answers that were written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from postlude.data import Batch
from postlude.data.chat import Encoded, sft_batch
from postlude.recipes.config.configs import SFTConfig
from postlude.recipes.config.settings import built
from postlude.recipes.encodings import Encodings
from postlude.recipes.preflight import Check, Subject, of_rows, of_training
from postlude.recipes.run.beginning import NEWEST, Beginning
from postlude.recipes.run.ending import Ending
from postlude.recipes.supervised import SupervisedTrainer
from postlude.recipes.trainer import train
from postlude.recipes.trial import ANSWERS
from postlude.recipes.where import HERE, Where


class SFTTrainer(SupervisedTrainer[Encoded]):
    """A run of SFT."""

    name = "sft"
    learned = "loss_mask"

    def __init__(self, config: SFTConfig, device: str, where: Where = HERE) -> None:
        self.config = config
        super().__init__(config, device, built(config.objective), where)

    def read(self) -> Encodings[Encoded]:
        """The rows to learn from."""
        return self.encoded(self.config.data)

    def batch_of(self, rows: Sequence[Encoded], *, held_out: bool = False) -> tuple[Batch, dict[str, Any]]:
        """Sequences, and which of their tokens are learned."""
        return sft_batch(rows), {}


def checks(subject: Subject) -> list[Check]:
    """What must hold before a run begins."""
    return [*of_training(subject, sft_batch(ANSWERS)), *of_rows(subject, subject.config.data)]


def run(config: SFTConfig, device: str = "cpu", beginning: Beginning = NEWEST, where: Where = HERE) -> Ending:
    """Run or continue `config` on the ranks that are started."""
    return train(SFTTrainer(config, device, where), beginning)
