"""The native generator on several ranks: a whole model on every rank, and the prompts shared out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from postlude.engine import Engine
from postlude.model import LanguageModel
from postlude.rollout.generator import Generator
from postlude.rollout.protocol import Completion, RolloutEngine
from postlude.rollout.sampling import Sampling, one_each
from postlude.rollout.stops import Decoder


class RankedEngine(RolloutEngine, Protocol):
    """An engine of all ranks of a run. Every rank makes the same calls, and all get all answers."""

    def refresh(self) -> None:
        """Have the newest weights, before answers are asked for."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """What happened since the last time."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


class SharedGenerator:
    """A whole model on every rank that answers prompts. Every rank makes the same calls.

    Each rank answers its share and all get all answers. Which rank answers makes no difference to what it says, so the
    same seeds give the same answers on any number of ranks.
    """

    def __init__(self, model: LanguageModel, tokenizer: Decoder, **limits: Any) -> None:
        self.model = model
        self.generator = Generator(model, tokenizer, **limits)

    def refresh(self) -> None:
        """It has the weights that it was given."""

    def take_metrics(self) -> dict[str, float]:
        """Nothing happens to it."""
        return {}

    def close(self) -> None:
        """It holds nothing but memory."""
        self.generator.release()

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling], n: int = 1
    ) -> list[list[Completion]]:
        """As `Generator.generate`, the prompts shared out over all ranks. Give each prompt a seed of its own."""
        samplings = one_each(sampling, len(prompts))
        rank, size = dist.get_rank(), dist.get_world_size()
        own = self.generator.generate(prompts[rank::size], samplings[rank::size], n) if prompts[rank::size] else []
        everyone: list[list[list[Completion]]] = [[] for _ in range(size)]
        dist.all_gather_object(everyone, own)
        return [everyone[place % size][place // size] for place in range(len(prompts))]


class GatheredGenerator(SharedGenerator):
    """A copy of an engine's model, brought up to date before it answers. It works in every layout of the engine."""

    def __init__(self, engine: Engine, tokenizer: Decoder, **limits: Any) -> None:
        self.engine = engine
        with torch.device("meta"):
            model = LanguageModel(engine.config, dtype=engine.compute_dtype, blocks=engine.block_types)
        super().__init__(model.to_empty(device=engine.device).eval(), tokenizer, **limits)
        self.updated_at = -1

    def refresh(self) -> None:
        """Copy the engine's weights, if a step was made since the last time."""
        if self.updated_at != self.engine.step:
            self.engine.copy_weights(self.model)
            self.updated_at = self.engine.step

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling], n: int = 1
    ) -> list[list[Completion]]:
        """Answer with the engine's weights as they are now. A large cache is not kept from training."""
        self.refresh()
        answers = super().generate(prompts, sampling, n)
        self.generator.release(small=False)
        return answers
