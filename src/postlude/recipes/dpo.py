"""DPO and its kin: learn from pairs of answers, one of them preferred."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from postlude.data import Batch
from postlude.data.chat import Encoded, preference_batch
from postlude.engine.reference import Reference
from postlude.recipes.config.configs import DPOConfig
from postlude.recipes.config.settings import built
from postlude.recipes.encodings import Encodings
from postlude.recipes.preflight import Check, Subject, of_rows, of_training
from postlude.recipes.run.beginning import NEWEST, Beginning
from postlude.recipes.run.ending import Ending
from postlude.recipes.supervised import SupervisedTrainer
from postlude.recipes.trainer import train
from postlude.recipes.trial import ANSWERS
from postlude.recipes.where import HERE, Where


class DPOTrainer(SupervisedTrainer[tuple[Encoded, Encoded]]):
    """A run of preference training. The reference is the model that the run started from."""

    name = "dpo"

    def __init__(self, config: DPOConfig, device: str, where: Where = HERE) -> None:
        self.config = config
        super().__init__(config, device, built(config.objective), where)
        self.reference: Reference | None = self.engine.reference() if config.has_reference else None

    def read(self) -> Encodings[tuple[Encoded, Encoded]]:
        """The pairs to learn from."""
        return self.encoded(self.config.data)

    def batch_of(
        self, rows: Sequence[tuple[Encoded, Encoded]], *, held_out: bool = False
    ) -> tuple[Batch, dict[str, Any]]:
        """The two of each pair side by side, with what the reference says of them."""
        batch = preference_batch(rows)
        if self.reference is None:
            return batch, {}
        with self.timed("reference"):
            logprobs = self.reference.logprobs(batch).logprob
        return _with_reference(batch, logprobs), {}


def _with_reference(batch: Batch, logprobs: list[Tensor]) -> Batch:
    return replace(batch, columns={**batch.columns, "reference_logprobs": logprobs})


def checks(subject: Subject) -> list[Check]:
    """What must hold before a run begins."""
    subject.others += [subject.config.model] if subject.config.has_reference else []
    trial = preference_batch([(ANSWERS[0], ANSWERS[1]), (ANSWERS[2], ANSWERS[3])])
    if subject.config.has_reference:
        trial = _with_reference(trial, [torch.full((length,), -1.0) for length in trial.lengths])
    return [*of_training(subject, trial), *of_rows(subject, subject.config.data)]


def run(config: DPOConfig, device: str = "cpu", beginning: Beginning = NEWEST, where: Where = HERE) -> Ending:
    """Run or continue `config` on the ranks that are started."""
    return train(DPOTrainer(config, device, where), beginning)
